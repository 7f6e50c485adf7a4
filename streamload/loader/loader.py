"""Loader: yields batches to the training loop, epoch after epoch, and saves and loads its state (step K)."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from streamload import limits
from streamload.device import Feed, feed_for
from streamload.errors import OptionError, OrderDiverged
from streamload.extension import Event, RankPart
from streamload.ipc import ControlBlock
from streamload.loader.batch_sizing import BatchSizing, merged_sizing
from streamload.loader.checks import BatchChecks, ShardChecks, ShardWaits
from streamload.loader.dataloader import (
    AccelerateEpoch,
    DataLoaderInterface,
    accelerate_device,
    silence_doubts_of_length,
)
from streamload.loader.destination import Destination
from streamload.loader.distributed import RankMonitor, gather, ranks_of
from streamload.loader.epoch import Epoch, is_worker_death
from streamload.loader.features import end_epoch, take_features
from streamload.loader.lengths import EpochLengths
from streamload.loader.meter import Meter, OnAlert
from streamload.loader.microbatches import Microbatches
from streamload.loader.observed import Observed
from streamload.loader.options import LoaderOptions
from streamload.loader.output import Outputs
from streamload.loader.pass_end import PassEnd
from streamload.loader.pool import WorkerPool
from streamload.loader.rank_run import RankRun
from streamload.loader.schedule import Schedule
from streamload.loader.state import (
    BAD_IN_PASS,
    BAD_SAMPLES,
    BAD_SHARDS,
    attempt_in,
    counts_in,
    from_state,
    steering_in,
    to_state,
)
from streamload.loader.steerable import Steerable
from streamload.loader.steering import Steering
from streamload.loader.trace import Trace
from streamload.metrics import Counters, total
from streamload.options.values import at_least
from streamload.worker import Batch, EpochStart, SkippedSample, nothing_ready


class Loader(Steerable, Observed, DataLoaderInterface):
    """Batches for one rank, epoch after epoch; iterate it, or use it as a context manager.

    Not thread-safe. One iterator at a time: a new one closes the one before it.

    Attributes:
        options: as they were given.
        meter: of what the training loop does, for the epoch.
    """

    def __init__(
        self, options: LoaderOptions, sampler: None = None, batch_sampler: None = None, shuffle: bool = False
    ):
        """Lightning creates a second loader for prediction; its last three arguments change nothing."""
        self.options = options
        self._schedule = Schedule(options)
        self._lengths = EpochLengths(options, self._schedule)
        self._current: weakref.ref[Epoch] | None = None
        self._is_accelerated = False
        self._destination = Destination(options.device, options.order)
        self._step = -1  # of the epoch, of the batch that was yielded last
        self._epoch = 0  # that was started last
        self._pool: WorkerPool | None = None
        self._feed: Feed | None = None
        self._extensions: dict[str, RankPart] = {}
        for extension in options.extensions:
            part = extension.in_rank(RankRun(self._schedule, _sender(self, extension.name)))
            if part is not None:
                self._extensions[extension.name] = part
        self._outputs = Outputs(options, self._schedule, self._extensions)
        self._steering = Steering(options, self._schedule)
        self._sizing = BatchSizing(options, self._schedule)
        self._trace: Trace | None = None  # while one runs
        self._on_alert: list[OnAlert] = []
        self.meter: Meter
        self._reset_process()

    def __repr__(self) -> str:
        options = self.options
        return (
            f"<Loader {len(options.urls)} shards, batch_size={options.batch_size}, "
            f"num_workers={options.num_workers}, epoch {self._schedule.tracker.epoch}>"
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._outputs.explain(error)
        self.close()

    def __reduce__(self) -> Any:
        """Pickle or copy an unused loader as its options: the other one finds its own rank and device.

        Raises:
            OptionError: it was iterated or holds a state, or one of its options can't be pickled.
        """
        if not self._schedule.tracker.is_unused:
            raise OptionError(
                "a loader that was iterated, or that holds a state, can't be pickled or copied: its workers "
                "and its position belong to this process. Call make_loader() where the other one is to be "
                "iterated, and give it this one's state_dict() by load_state_dict() to continue"
            )
        for name, exc in self.options.unpicklable():
            raise OptionError(
                f"{name}= can't be pickled, and so neither can the loader: {exc}. Define its functions and "
                f"classes at the top level of a module, or call make_loader() in the process that iterates "
                f"it (with Lightning in train_dataloader() of a DataModule, or take strategy='ddp')"
            ) from exc
        return type(self), (self.options,), (self._schedule.tracker.epoch, self._on_alert, self._record_in)

    def __setstate__(self, called: tuple[int, list[OnAlert], Path | None]) -> None:
        """Take over what `set_epoch`, `on_alert` and `record` were called with."""
        self._schedule.tracker.epoch, listeners, self._record_in = called
        self._on_alert += listeners

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read only by `Accelerator.prepare`: True makes it leave the loader as it is.

        From then on batches go to the Accelerator's device, unless `device` was given, and its GradientState
        is told when an epoch ends.
        """
        self._is_accelerated = True
        self.place_on(accelerate_device())
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """Set by `Accelerator.prepare`; ignored."""

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Samples in a batch of this rank: as set last."""
        return self._schedule.rows

    @property
    def device(self) -> torch.device:
        """The device that batches are on, as far as it is known: for `model.to(loader.device)`."""
        return self._destination.expected()

    @property
    def skipped(self) -> list[SkippedSample]:
        """The first thousand samples that could not be used."""
        return self._checks.skipped

    @property
    def world_size(self) -> int:
        """The number of ranks that share the samples."""
        return self._schedule.topology.world_size

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in an epoch; None while unknown, or if there is no end.

        Known from num_batches, num_samples or a sizes.json; for one pass over the data also from the indexes
        in the cache, once it has the indexes of all shards.
        """
        return self._lengths.batches(self._counts)

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; None while unknown, or if there is no end."""
        return self._lengths.samples(self._counts)

    def __len__(self) -> int:
        """Batches of this rank in an epoch.

        Raises:
            TypeError: nothing says how many there are; or there is no end.
        """
        batches = self.num_batches
        if batches is None:
            raise TypeError(
                "this loader's length is not known yet: give num_samples or num_batches, or put a sizes.json "
                "({shard name: samples}) beside the shards; one pass over the data is counted once all its "
                "shards are in the cache (after one epoch, or `streamload warm`)"
            )
        silence_doubts_of_length()
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next `iter()` starts. By default each `iter()` starts the next epoch.

        After `load_state_dict` see there.

        Args:
            epoch: from 0.
        """
        at_least(0, epoch=epoch)
        self._schedule.tracker.set_epoch(epoch)

    def place_on(self, device: str | torch.device) -> None:
        """Put batches on a device from the next epoch on, unless `device` names one. For frameworks."""
        self._destination.place(device)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that this rank yielded, or before the first of an epoch.

        JSON-able; without I/O or communication. On several nodes see `gather_state`.
        """
        topology, lost = self._schedule.topology, self._given_up()
        counts = {
            BAD_SAMPLES: self._checks.counts(),
            BAD_SHARDS: self._shard_checks.counts(),
            BAD_IN_PASS: self._pass_end.counts(lost, topology.rank, topology.world_size),
        }
        parts = {**self._steering.state(), **self._sizing.state(), **self._extension_state()}
        return self._schedule.state(counts, parts)

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        moved: Mapping[str, str] | None = None,
    ) -> None:
        """Resume exactly after a saved state at the next `iter()`, on any number of workers and ranks.

        That iteration yields the rest of the state's epoch, and `set_epoch` with this epoch changes nothing.
        A state after the last batch of an epoch is at the start of the next one: `set_epoch` with the epoch
        that it has finished yields nothing, as nothing is left of it. With any other epoch the next iteration
        is that one, from its first batch; an earlier one is logged as a warning. Augmentation continues
        exactly, too. batch_size may differ: the same samples come, in other batches.

        Args:
            state: what `state_dict` or `gather_state` returned, or a list of several ranks' states.
            moved: old → new prefix of the URLs, or of the store's endpoint, of shards that were moved since.
                Their indexes prove that they are the same.

        Raises:
            StateMismatch: the state is damaged, or belongs to other shards or options.
        """
        self._end_epoch("load_state_dict() was called")
        self._schedule.load(state, moved or {})
        self._steering.load(steering_in(state))
        states = [state] if isinstance(state, Mapping) else state
        self._sizing.load(states)
        for part in self._extensions.values():
            part.load(states[0])
        counts = counts_in(state)
        self._checks.restore(counts[BAD_SAMPLES])
        self._shard_checks.restore(counts[BAD_SHARDS])
        position = self._schedule.tracker.now()
        self._pass_end.restore(counts[BAD_IN_PASS], position.position - position.start)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start the next epoch; the same one again if it yielded no batch.

        Closes an iterator that is still in use: its `next` raises LoaderClosed.

        Raises:
            OptionError: the process has another rank than its length, state or order was computed by.
            CacheError: the cache directory can't be used.
        """
        self._schedule.check_rank()
        self._end_epoch("a new iteration of the loader began")
        if self._schedule.tracker.is_over:
            self._schedule.tracker.pass_over()
            return iter(())
        self._settle_device()
        started = time.monotonic()
        try:
            return self._start_epoch(started)
        except BaseException as exc:
            self.close()  # torch's iterator is in an undefined state between two epochs
            if not is_worker_death(exc):
                raise
        return self._start_epoch(started)  # a worker was killed between two epochs: with new workers

    def microbatches(self, batch: Any) -> Microbatches:
        """Iterate over a step's batch in parts of `Batches(microbatch=…)` consecutive rows.

        A part has the batch's form: a dict, or a tuple to unpack. Its tensors are views; captions and patches
        are cut to the part's longest row. `part.fraction` is its share of the batch's rows (multiply a mean
        loss by it), `part.rows` the slice of them, and `part.is_last` is True for the last part (for DDP's
        `no_sync`). Features aren't in parts: call their modules with the batch, and take `part.rows`.

        Args:
            batch: as this loader yielded it.

        Returns:
            An iterable for one `for` loop, which has to reach its end. As a context manager it adds the step,
            shape and keys of the current part to an out-of-memory error; so does `with loader:`.

        Raises:
            OptionError: another batch, or one with tensors that haven't a row for each sample.
        """
        return self._outputs.microbatches(batch)

    def close(self) -> None:
        """End the workers and release the cache. Idempotent; the loader can be iterated again.

        The iterator of an unfinished epoch raises LoaderClosed. The state stays that of the last batch.
        """
        self._end_epoch("the loader was closed")
        self._close_exports()
        if self._pool is not None:
            self._pool.close()
        if self._feed is not None:
            self._feed.close()
        self._feed = self._pool = None

    def received(self, count: int) -> None:
        """So many batches of the epoch have come from the workers, which may begin as many more."""
        self._control.take(count)

    def accept(self, batch: Batch, values: dict[str, Any], waited_ns: int) -> Any:
        """Step K: advance the state by a batch, and give the batch its output form.

        Args:
            batch: as the worker made it.
            values: its values on the device.
            waited_ns: the data wait for it.

        Returns:
            The batch in its output form; None if none of its samples could be used.
        """
        self._checks.check_order(batch)
        self.meter.took(batch, waited_ns)
        if batch.blocked:
            self._waits.add(batch.blocked, waited_ns, self._counts.value("data_wait_ns"))
        steered = self._steering.advance(batch)
        self._sizing.took(batch.stop - batch.position, self._counts.value("data_wait_ns"))
        self._schedule.tracker.advance(batch.stop, batch.groups)
        self._step += 1
        if self._trace is not None and self._trace.took():
            self._trace = None
        self._checks.count_skipped(batch)
        self._pass_end.count(batch)
        self._check_shards()
        if not batch.samples:
            return None
        self._counts.add("batches_yielded")
        self._counts.add("samples_yielded", batch.samples)
        self._control.by_source[0, :, 0] += batch.source_samples
        features = {} if self._pool is None else take_features(values, self._pool.features, self._counts)
        return self._outputs.form(batch, values, features, self._step, steered)

    def finish_epoch(self) -> None:
        """The last batch of the epoch was accepted.

        Raises:
            TooManyBadSamples, TooManyBadShards, NoValidSamples: see pass_end.PassEnd.check.
        """
        if self._pool is not None:
            end_epoch(self._pool.features, self._counts)
        self.meter.end_epoch(self._epoch)
        self._schedule.tracker.finish()
        self._check_shards()
        self._check_pass()

    @contextlib.contextmanager
    def waiting(self, since: float) -> Iterator[None]:
        """Count the time since `since` as data wait, and signal the wait to the workers."""
        self.meter.wait_began(since)
        try:
            yield
        finally:
            self.waited_ns = self.meter.wait_ended(since)
            if self._trace is not None:
                self._trace.waited(self.waited_ns)

    def _reset_process(self) -> None:
        """Start without workers in this process; those of the process it was forked from aren't its own."""
        self._pid = os.getpid()
        limits.allow_many_files()
        self._control = ControlBlock(1 + self.options.num_workers, len(self.options.sources))
        self._counts = Counters(self._control.counters[0])
        self._checks = BatchChecks(self._counts, self.options.train, self.options.shards.max_bad_samples)
        self._waits, self.waited_ns = ShardWaits(self.options.urls.__getitem__), 0
        self._shard_checks = ShardChecks(self.options.shards.max_bad_shards)
        self._pass_end = PassEnd(
            self.options.train, self.options.shards.max_bad_samples, self.options.shards.max_bad_shards
        )
        self.meter = Meter(
            self.options, self._schedule, self._control, self._counts, self._on_alert, self._waits
        )
        if not self.options.num_workers:  # the worker's waits for bytes are in this process
            self._control.while_waiting = self.meter.tick
        self._reset_exports()

    def _extension_state(self) -> dict[str, Any]:
        """The extensions' keys of a state."""
        if not self._extensions:
            return {}
        self._schedule.settle()
        position = self._schedule.tracker.saved().position
        parts = [part.state(position) for part in self._extensions.values()]
        return {key: value for part in parts for key, value in part.items()}

    def _given_up(self) -> int:
        return total(self._control.counters, "shards_given_up")

    def _check_shards(self) -> None:
        if given_up := self._given_up():
            complete = total(self._control.counters, "shards_complete")
            self._shard_checks.check(given_up, complete, len(self.options.urls))

    def _check_pass(self) -> None:
        """Compare the shares of all ranks with the limits, as an epoch has ended."""
        schedule, world_size = self._schedule, self.world_size
        lost = shards = 0
        if schedule.reports_shards and self._pool is not None:
            lost, shards = self._pool.lost(self._given_up()), self._pool.shards
        counted = self._pass_end.totals(lost, shards, schedule.epochs_are_passes)
        order = schedule.order
        totals = self._pass_end.agree(
            f"epoch {self._epoch} of {order.data} {order.seed} {order.train}",
            counted,
            world_size,
            lambda: self._lengths.least_of_pass(self._counts),
        )
        is_first = not self.options.train or schedule.topology.rank == 0
        self._pass_end.check(self._epoch, totals, world_size, logs=is_first)

    def _start_epoch(self, started: float) -> Epoch:
        """Write the workers' EpochStart before the first batch is requested."""
        if self._pid != os.getpid():  # forked from the process that made the loader
            self.close()
            self._reset_process()
        pool, schedule = self._ready_pool(), self._schedule
        position = schedule.tracker.next()
        events = {name: part.start_epoch(position.position) for name, part in self._extensions.items()}
        start = EpochStart(
            position.sequence,
            position.position,
            schedule.steps(position),
            list(position.changes),
            dict(position.groups),
            changes_generation=self._control.changes.generation,
            features={name: feature.start() for name, feature in pool.features.items()},
            resizes=() if position.sizes is None else position.sizes.resizes,
            blocks_from=position.blocks_from,
            table_from=(position.epoch, position.position - position.start),
            decisions=self._steering.start_epoch(position, self._control),
            events=events,
        )
        nothing_ready(self._counts)  # before any worker starts on this epoch
        self._control.take(0)
        self._control.order.write(start.to_json())
        self._checks.start_epoch(self._control.order.generation)
        batches = pool.start_epoch()
        if self._feed is None:  # made after the workers: forked ones must not inherit a device context
            self._feed = feed_for(
                self._destination.device, pool.statistics, is_pinned=self._destination.is_pinned
            )
        schedule.tracker.start()
        is_start = position.position == (position.start if schedule.epochs_are_passes else 0)
        self._pass_end.start_epoch(is_start)
        self._sizing.start_epoch(self._in_flight)
        self._epoch = position.epoch
        self._step = schedule.step_of(position) - 1
        expected = self._lengths.expected(position)
        accelerate = AccelerateEpoch(self) if self._is_accelerated else None
        ranks = ranks_of(self.world_size)
        if ranks is not None and schedule.topology.nodes > 1:
            ranks.be_on(schedule.topology.node)
        monitor = None if ranks is None else RankMonitor(ranks, self._control, self.meter)
        epoch = Epoch(self, batches, self._feed, started, start.steps, expected, accelerate, monitor)
        current = self._current = weakref.ref(epoch)
        self.meter.start_epoch(lambda: (epoch := current()) is not None and not epoch.done)
        self._open_exports()
        return epoch

    def _settle_device(self) -> None:
        """Where this epoch's batches go; workers that made images for another kind of place are ended."""
        if self._destination.settle():
            self.close()
        device = self.meter.publisher.device = self._destination.device
        self.options = replace(self.options, device=device)

    def _end_epoch(self, why: str) -> None:
        epoch = self._current_epoch()
        if epoch is not None:
            epoch.close(why)
        self._current = None

    def _ready_pool(self) -> WorkerPool:
        """The workers, made at the first call, and again when the order has changed."""
        order = self._schedule.settle()
        if self._pool is not None and order != self._pool.order:
            self.close()
        if self._pool is None:
            self._pool = WorkerPool(self, self.options, self._schedule, self._control)
            self.meter.publisher.open(self._pool.page, self._pool.tier, self._pool.run)
            self.meter.functions = self._pool.functions
        return self._pool


def _sender(loader: Loader, extension: str) -> Callable[[Any], Event]:
    """Return a function that sends an extension's events; it doesn't keep the loader alive."""
    reference = weakref.ref(loader)

    def send(value: Any) -> Event:
        sending = reference()
        assert sending is not None
        return sending.send_event(extension, value)

    return send


def gather_state(loader: Loader) -> dict[str, Any]:
    """The state of all ranks; a collective, to be called after the same step on every rank.

    A rank knows only the state of its own node's groups. On one node `state_dict()` is enough.

    Raises:
        OrderDiverged: the ranks have not had the same number of batches.
    """
    states = gather(loader.state_dict(), loader.world_size)
    positions = [state["position"] for state in states]
    if len(set(positions)) > 1:
        raise OrderDiverged(
            f"the ranks are not at the same step: by rank, {positions[:16]} samples were yielded. Call "
            f"gather_state() on all of them after the same step"
        )
    steering = steering_in(states)
    collapsed = {} if steering is None else steering.collapsed().to_json()
    collapsed |= {**merged_sizing(states), **loader._extension_state()}
    return to_state(*from_state(states), counts_in(states), collapsed, attempt_in(states))
