"""Loader: yields batches to the training loop, epoch after epoch, and saves and loads its state (step K)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from streamload.device import Feed, feed_for
from streamload.errors import OptionError, OrderDiverged, as_failure
from streamload.loader import registered
from streamload.loader.dataloader import (
    AccelerateEpoch,
    DataLoaderInterface,
    accelerate_device,
    silence_doubts_of_length,
)
from streamload.loader.destination import Destination
from streamload.loader.epoch import Epoch, StepCount, is_worker_death
from streamload.loader.options import LoaderOptions
from streamload.loader.output import BatchInfo, Collector
from streamload.loader.rank_run import RankRun
from streamload.metrics import Counters, Snapshot
from streamload.metrics.findings import OnAlert, Requests, Verdict
from streamload.options import DEFAULT_METRICS_LISTEN
from streamload.options.values import at_least
from streamload.ranks.distributed import gather, ranks_of
from streamload.worker.messages import EpochStart, SkippedSample
from streamload.worker.stages import nothing_ready

if TYPE_CHECKING:
    from streamload.loader.pool import WorkerPool
    from streamload.ranks.loaders import Comparison
    from streamload.ranks.monitor import Ranks

logger = logging.getLogger("streamload")


class Loader(DataLoaderInterface):
    """Batches for one rank, epoch after epoch; iterate it, or use it as a context manager.

    Not thread-safe. One iterator at a time: a new one closes the one before it.

    Attributes:
        options: as they were given.
    """

    def __init__(
        self, options: LoaderOptions, sampler: None = None, batch_sampler: None = None, shuffle: bool = False
    ):
        """Lightning creates a second loader for prediction; its last three arguments change nothing."""
        self.options = options
        self._run = RankRun(options, _counted_samples, _check_room, registered.reports_of)
        self._microbatching: registered.Microbatching | None = None
        if options.batches.microbatch == "auto":
            from streamload.loader.methods import microbatching_of

            self._microbatching = microbatching_of(self._run)
        self._collector = Collector(self._run, self._new_observer(Requests()))
        self._destination = Destination(options.device, options.order)
        self._is_accelerated = False
        self._pool: WorkerPool | None = None
        self._feed: Feed | None = None
        self._comparison: Comparison | None = None  # with the loaders of the other ranks

    def __repr__(self) -> str:
        options = self.options
        return (
            f"<Loader {len(options.urls)} shards, batch_size={options.batch_size}, "
            f"num_workers={options.num_workers}, epoch {self._run.schedule.tracker.epoch}>"
        )

    def _repr_html_(self) -> str:
        from streamload.metrics.display import card_of_loader

        return card_of_loader(repr(self), self.stats(), self.verdict())

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._microbatching is not None:
            self._microbatching.explain(error)
        self.close()

    def __reduce__(self) -> Any:
        """Pickle or copy an unused loader as its options: the other one finds its own rank and device.

        Raises:
            OptionError: it was iterated or holds a state, or one of its options can't be pickled.
        """
        if not self._run.schedule.tracker.is_unused:
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
        return type(self), (self.options,), (self._run.schedule.tracker.epoch, self.observer.requests)

    def __setstate__(self, called: tuple[int, Requests]) -> None:
        """Take over what `set_epoch`, `on_alert` and `record` were called with."""
        self._run.schedule.tracker.epoch, requests = called
        self.observer.requests.listeners += requests.listeners
        self.observer.requests.record_in = requests.record_in

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
        return self._run.schedule.rows

    @property
    def device(self) -> torch.device:
        """The device that batches are on, as far as it is known: for `model.to(loader.device)`."""
        return self._destination.expected()

    @property
    def observer(self) -> registered.RunObserver:
        """Of this rank."""
        return self._collector.observer

    @property
    def skipped(self) -> list[SkippedSample]:
        """The first thousand samples that could not be used."""
        return self._run.process.checks.skipped

    @property
    def world_size(self) -> int:
        """The number of ranks that share the samples."""
        return self._run.schedule.topology.world_size

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in an epoch; None while unknown, or if there is no end.

        Known from num_batches, num_samples or a sizes.json; for one pass over the data also from the indexes
        in the cache, once it has the indexes of all shards.
        """
        return self._run.schedule.batches()

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; None while unknown, or if there is no end."""
        return self._run.schedule.samples()

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
                "shards are in the cache (after one epoch, or `streamload warm`), and one of cells, as of "
                "max_tokens= with cost=, at its end"
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
        self._run.schedule.tracker.set_epoch(epoch)

    def place_on(self, device: str | torch.device) -> None:
        """Put batches on a device from the next epoch on, unless `device` names one. For frameworks."""
        self._destination.place(device)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that this rank yielded, or before the first of an epoch.

        JSON-able; without I/O or communication. On several nodes see `gather_state`.
        """
        return self._run.state()

    def _identify_functions(self) -> Mapping[str, str]:
        """Take the fingerprint before functions run in this process: they may change what they hold."""
        options = self.options
        runs_here = options.num_workers == 0 and (options.preprocess or options.workers.map_sample)
        return self._run.fingerprint if runs_here else {}

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
        exactly, too. batch_size may differ: the same samples come, in other batches. Where another
        preprocess or tokenizer, or other versions of their libraries, make other pixels or ids of them, that
        is logged.

        Args:
            state: what `state_dict` or `gather_state` returned, or a list of several ranks' states.
            moved: old → new prefix of the URLs, or of the store's endpoint, of shards that were moved since.
                Their indexes prove that they are the same.

        Raises:
            StateMismatch: the state is damaged, or belongs to other shards or options; or rows are made
                otherwise, with Order(strict=True).
        """
        from streamload.loader.fingerprint import compared_rows, has_other_plan
        from streamload.loader.methods import refuse_left_out, warn_of_decoder
        from streamload.loader.state import counts_in, joined_state

        self._run.end_epoch("load_state_dict() was called")
        joined = joined_state(state, registered.by_rank())
        refuse_left_out(joined, self.options)
        difference = compared_rows(joined, self._run.fingerprint, self.options.order.strict)
        other_plan = has_other_plan(self.options, joined, self._run.fingerprint)
        self._run.schedule.load(joined, moved or {}, other_plan)
        if difference and self._run.schedule.topology.local_rank == 0:
            logger.warning("%s", difference)
        self._comparison = None
        self._run.parts.load(joined)
        warn_of_decoder(joined, self.options)
        position = self._run.schedule.tracker.now()
        samples = position.position - position.start
        if self.options.has_cells:  # of which each has a sample at least
            samples = max(samples, position.references)
        self._run.process.restore(counts_in(joined), samples)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start the next epoch; the same one again if it yielded no batch.

        Closes an iterator that is still in use: its `next` raises LoaderClosed.

        Raises:
            OptionError: the process has another rank than its length, state or order was computed by.
            CacheError: the cache directory can't be used.
        """
        self._run.schedule.check_rank()
        self._run.end_epoch("a new iteration of the loader began")
        if self._run.schedule.tracker.is_over:
            self._run.schedule.tracker.pass_over()
            return iter(())
        self._settle_device()
        started = time.monotonic()
        self._identify_functions()
        try:
            return self._start_epoch(started)
        except BaseException as exc:
            self.close()  # torch's iterator is in an undefined state between two epochs
            if isinstance(exc, StopIteration):
                raise as_failure(exc) from exc
            if not is_worker_death(exc):
                raise
        return self._start_epoch(started)  # a worker was killed between two epochs: with new workers

    def at(self, step: int, *, segment: str | None = None) -> Iterator[Any]:
        """Iterate over this rank's batches from a past step of the run on, by its journal.

        They are made in this process, in host memory; the loader's own place stays as it is. They may have
        been made on other ranks and workers, with the same batch_size × ranks. They end with the journal.

        Args:
            step: of the run, from 0, as `loader.info.run_step` has it.
            segment: of a run that was restarted, as `streamload runs show` names it; None: the last one, and
                those that led to it.

        Raises:
            JournalError: the step isn't recorded, or it would have other samples than it had.
            StateMismatch, DatasetChanged: rows would be made otherwise, or of another version of a shard.
        """
        from streamload.loader.methods import steps_of_journal

        return (past.batch for past in steps_of_journal(self._run, Loader, step, segment))

    def microbatches(self, batch: Any) -> registered.Microbatches:
        """Iterate over a step's batch in parts of `Batches(microbatch=…)` consecutive rows.

        A part has the batch's form: a dict, or a tuple to unpack. Its tensors are views; captions and patches
        are cut to the part's longest row. `part.fraction` is its share of the batch's rows (multiply a mean
        loss by it), `part.rows` the slice of them, and `part.is_last` is True for the last part (for DDP's
        `no_sync`). Features aren't in parts: call their modules with the batch, and take `part.rows`.

        Args:
            batch: as this loader yielded it.

        Returns:
            An iterable for one `for` loop, which has to reach its end. As a context manager it adds the step,
            shape and keys of the current part to an out-of-memory error; so does `with loader:`. With "auto",
            its `attempts(zero_grad)` begin the step again, once, in smaller parts if memory runs out.

        Raises:
            OptionError: another batch, or one with tensors that haven't a row for each sample.
        """
        info = self._collector.outputs.info_of(batch)
        if self._microbatching is None:
            from streamload.loader.methods import microbatching_of

            self._microbatching = microbatching_of(self._run)
        return self._microbatching.parts(batch, info)

    @property
    def info(self) -> BatchInfo:
        """Record of the batch that was yielded last: its rows' sources, weights, keys, its size.

        Raises:
            OptionError: no batch was yielded yet.
        """
        if self._collector.outputs.last is None:
            raise OptionError("loader.info is that of the last batch, and none was yielded yet")
        return self._collector.outputs.last

    def info_of(self, batch: Any) -> BatchInfo:
        """Record of a batch that the training loop still holds.

        Args:
            batch: as this loader yielded it.

        Raises:
            OptionError: it is another one, or one without tensors.
        """
        return self._collector.outputs.info_of(batch)

    def report(
        self,
        loss: Any = None,
        alignment: Any = None,
        *,
        tokens: Any = None,
        rows: registered.Rows | None = None,
        batch: Any = None,
    ) -> None:
        """Report what the training found for rows of a batch, for the policy given as mixing=.

        Costs one copy on the values' device, and never waits for it. Ranks may report at other times than
        others, other rows, or nothing. Values that aren't finite are counted and left out. Without mixing=
        nothing is decided: the means by source of each 200 steps are shown by `metrics()`, `streamload top`
        and reports of the run.

        Args:
            loss: float[N], a loss for each row before its weight, on any device; or one number for all rows.
            alignment: the same for how well image and text fit, such as the cosine of their embeddings.
            tokens: the same for what a row has without padding, patches and ids; for `TokenShares`.
            rows: which rows of the batch these are: a slice such as a part's `rows`, numbers, or bool[N].
                None: all.
            batch: as this loader yielded it, or its info; None: the last one.

        Raises:
            OptionError: not one number for each of the rows; another batch.
        """
        batch = self.info if batch is None else batch
        info = batch if isinstance(batch, BatchInfo) else self.info_of(batch)
        self._run.parts.report({"loss": loss, "alignment": alignment, "tokens": tokens}, info, rows)

    def report_eval(self, values: Mapping[str, Any]) -> None:
        """Report a loss on held-out data of each source, for the policy given as mixing=.

        Until the next decision the last one counts; of several ranks' values their mean.

        Args:
            values: by the sources' names, numbers or tensors of one; a source may be missing.

        Raises:
            OptionError: an unknown source.
        """
        names = [source.name for source in self.options.sources]
        unknown = sorted(values.keys() - set(names))
        if unknown:
            raise OptionError(f"no source is named {', '.join(unknown)}; they are {', '.join(names)}")
        self._run.parts.report_eval(values)

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """Change the sources' weights, from the first step that no worker of any rank can have started.

        With torch.distributed all ranks have to call it after the same step; the weights of rank 0 count.
        Without, every rank has to be given the same. The change is part of the state.

        Args:
            weights: by the sources' names; the other sources keep their weights.

        Returns:
            The step, counted from the start of the current epoch, or of the next one between two epochs; if
            the epoch ends before it, the change takes effect in the next.

        Raises:
            OptionError: an unknown source, a negative weight, or all weights are zero.
        """
        return self._run.set_weights(weights)

    def set_batch_size(self, rows: int) -> int:
        """Change the samples of each rank's batch, from the first step that no worker can have started.

        With torch.distributed all ranks have to call it after the same step; the number of rank 0 counts.
        Without, every rank has to be given the same. With bucketing=, cost= or sizes= it waits for the next
        block. It is part of the state: a resumed run goes on with it as long as batch_size × ranks stays.
        Epochs of num_batches keep this number, those of num_samples or of all samples have more or fewer
        batches, and `len()` is that of an epoch of this size.

        Args:
            rows: samples in a batch of one rank, or its cells where `batch_size` counts these.

        Returns:
            The step, counted from the start of the current epoch, or of the next one between two epochs; if
            the epoch ends before it, the change takes effect in the next.

        Raises:
            OptionError: fewer than one, an evaluation, steps of Patches(steps=…), a step that isn't equal
                parts of several groups, or more than Workers(memory=…) has room for.
        """
        return self._run.set_batch_size(rows, {"reason": "set_batch_size"})

    def leave_out(self, keys: Iterable[str | tuple[str, str]], why: str = "") -> int:
        """Leave samples out of the training, from the first step that no worker of any rank can have started.

        Others take their places, as those of images that can't be decoded; all other rows stay where they
        are. They are appended to `left_out.jsonl` of Order(journal=…), or to Shards(leave_out=FILE), and are
        part of the state. With torch.distributed as `set_weights`.

        Args:
            keys: as in `__key__`; or pairs of a shard's URL, as in `__url__`, and a key.
            why: for the log and the file.

        Returns:
            The step, as `set_weights`.

        Raises:
            OptionError: other values; nothing says where; an evaluation; the file can't be written.
        """
        from streamload.loader.methods import leave_out

        return leave_out(self._run, keys, why)

    def stats(self) -> Snapshot:
        """The counters of all processes of this rank so far. Cheap; at any time."""
        return replace(self._run.process.stats(), samples_left_out=self._run.schedule.left_out)

    def verdict(self, seconds: float = 60.0) -> Verdict:
        """Verdict on what has limited the training over the last seconds: data, or the training itself.

        `print` it for a sentence. Cheap; at any time. The log has the same every five minutes, and after each
        epoch, if the training has waited more than 5 % of that time for data.

        Args:
            seconds: at most 600; less if the first batch came later.

        Raises:
            OptionError: another number of seconds.
        """
        return self.observer.verdict(seconds)

    def on_alert(self, call: OnAlert) -> None:
        """Call a function with each Alert that is raised or cleared, from now on (docs/guides/metrics.md).

        The training waits for data, its origin is slow or fails, the cache thrashes, a source starves, memory
        is tight, another rank is late, or nothing moves. An alert is raised after half a minute, and cleared
        after half a minute below half of its limit.

        Args:
            call: called by `next`, or in a thread of this process where the training stands still. What it
                raises is logged once, and changes nothing.

        Raises:
            OptionError: it can't be called.
        """
        self.observer.on_alert(call)

    def trace(self, steps: int = 20) -> registered.Trace:
        """Record what the workers and the fills of this rank do, from now on for a number of steps.

        `Trace.merge` adds it to the trace that torch.profiler's `export_chrome_trace` wrote, as rows of their
        own: batches, waits for bytes and fills of each worker, and the data waits of the training.

        Args:
            steps: batches that the training loop takes until the recording ends.
        """
        at_least(1, steps=steps)
        return self.observer.trace(steps)

    def metrics(self) -> dict[str, float]:
        """The numbers of this rank since the last call, as one flat dict for a tracker; {} before `iter()`.

        Rates, shares and levels: samples per second, the share of waiting for data, that of each stage in the
        workers' time, cache hits, and by source its share, weight and loss. Cheap; one caller at a time.
        """
        return self.observer.metrics()

    def record(self, folder: str | Path) -> None:
        """Record this rank's numbers for `streamload report`, from the next second on.

        The file stays below a megabyte. STREAMLOAD_RECORD does this for every loader.

        Args:
            folder: is made if it is missing; ranks and runs have files of their own in it.
        """
        self.observer.record(Path(folder))

    def serve_metrics(self, listen: str = DEFAULT_METRICS_LISTEN) -> str | None:
        """Serve the metrics of this node's runs to Prometheus, from this process, until the loader is closed.

        STREAMLOAD_METRICS does this on the first rank of a node. `streamload metrics serve` needs no port in
        the training.

        Args:
            listen: address and port; port 0: any.

        Returns:
            Its URL; None if it is taken, which is logged, or if this process serves there already.

        Raises:
            OptionError: it isn't an address and port.
        """
        return self.observer.serve_metrics(listen)

    def close(self) -> None:
        """End the workers and release the cache. Idempotent; the loader can be iterated again.

        The iterator of an unfinished epoch raises LoaderClosed. The state stays that of the last batch.
        """
        self._run.end_epoch("the loader was closed")
        self._run.parts.close()
        self.observer.close()
        if self._pool is not None:
            self._pool.close()
        if self._feed is not None:
            self._feed.close()
        self._feed = self._pool = None
        self._collector.release()

    def _new_observer(self, requests: Requests) -> registered.RunObserver:
        """An observer of this rank, in this process."""
        return registered.observer_of(self, self._run, requests)

    def _start_epoch(self, started: float) -> Epoch:
        """Write the workers' EpochStart before the first batch is requested."""
        if self._run.process.is_forked:
            self.close()
            self._run.process.reset()
            self._collector.observer = self._new_observer(self.observer.requests)
        ranks = self._joined_ranks()
        pool, run, observer = self._ready_pool(), self._run, self.observer
        schedule, process = run.schedule, run.process
        position = schedule.tracker.next()
        start = EpochStart(
            position.step_start,
            schedule.steps(position),
            [*position.events, *run.parts.start_epoch(position.position)],
            dict(position.groups),
            changes_generation=process.control.changes.generation,
        )
        nothing_ready(process.counts)  # before any worker starts on this epoch
        process.control.take(0)
        process.control.order.write(start.to_json())
        process.checks.start_epoch(process.control.order.generation)
        batches = pool.start_epoch()
        if self._feed is None:  # made after the workers: forked ones must not inherit a device context
            device, images = self._destination.device, pool.images
            self._feed = feed_for(
                device,
                pool.statistics,
                is_pinned=self._destination.is_pinned,
                make_images=None if images is None else images.in_rank(device),
            )
        schedule.tracker.start()
        is_start = position.position == (position.start if schedule.epochs_are_passes else 0)
        process.pass_end.start_epoch(is_start)
        self._collector.start_epoch(position, pool.shards, pool.lost)
        count = StepCount(start.steps, schedule.expected(position))
        monitor = None
        if ranks is not None:
            monitor = ranks.monitor(process.control, observer.compare_waits, observer.tick, self._comparison)
        epoch = Epoch(
            self._collector,
            self.close,
            batches,
            self._feed,
            started,
            count,
            AccelerateEpoch(self) if self._is_accelerated else None,
            monitor,
        )
        run.start_epoch(epoch)
        process.clock.start_epoch()
        observer.start_epoch(lambda: run.epoch is not None)
        return epoch

    def _joined_ranks(self) -> Ranks | None:
        """The ranks of the run, which compare their loaders; None: nothing joins them.

        Ranks that were placed by `Order(rank=…)` don't compare: one process may have several.
        """
        topology, schedule = self._run.schedule.topology, self._run.schedule
        ranks = ranks_of(topology.world_size) if topology.world_size > 1 else None
        if ranks is None:
            return None
        if topology.nodes > 1:
            ranks.be_on(topology.node)
        is_new = self._comparison is None or self._comparison.loaders is not ranks.loaders
        if self.options.order.rank is None and is_new:
            from streamload.loader.description import described

            order = schedule.settle()
            self._comparison = ranks.loaders.add(described(self.options, order, schedule.tracker.next()))
        return ranks

    def _settle_device(self) -> None:
        """Return this epoch's destination; ends workers that made images for another kind of place."""
        if self._destination.settle():
            self.close()
        device = self.observer.device = self._destination.device
        if device != self.options.device:
            self.options = self._run.options = replace(self.options, device=device)

    def _ready_pool(self) -> WorkerPool:
        """The workers, made at the first call, and again when the order has changed."""
        order = self._run.schedule.settle()
        if self._pool is not None and order != self._pool.order:
            self.close()
        if self._pool is None:
            from streamload.loader.pool import WorkerPool

            pool = self._pool = WorkerPool(self, self._run)
            self._run.parts.add(pool.extensions, self._run.part_states() if pool.extensions else None)
            self.observer.open(pool.tier, pool.run, pool.functions, are_local=pool.are_local)
        return self._pool


def _check_room(options: LoaderOptions, rows: int) -> None:
    """See worker_config.check_room, which makes the recipes of workers."""
    from streamload.loader.worker_config import check_room

    check_room(options, rows)


def _counted_samples(options: LoaderOptions, counts: Counters, epoch: int) -> int | None:
    """See counting.counted_samples, which opens the cache."""
    from streamload.loader.counting import counted_samples

    return counted_samples(options, counts, epoch)


def gather_state(loader: Loader) -> dict[str, Any]:
    """The state of all ranks; a collective, to be called after the same step on every rank.

    A rank knows only the state of its own node's groups. On one node `state_dict()` is enough.

    Raises:
        OrderDiverged: the ranks have not had the same number of batches.
    """
    from streamload.loader.state import (
        FINGERPRINT,
        attempt_in,
        counts_in,
        joined_state,
        order_and_position,
        to_state,
    )

    states = gather(loader.state_dict(), loader.world_size)
    positions = [state["position"] for state in states]
    if len(set(positions)) > 1:
        raise OrderDiverged(
            f"the ranks are not at the same step: by rank, {positions[:16]} samples were yielded. Call "
            f"gather_state() on all of them after the same step"
        )
    joined = joined_state(states, registered.by_rank())
    order, position = order_and_position(joined)
    parts = {
        FINGERPRINT: joined[FINGERPRINT],
        **loader._run.parts.gathered(joined, position.position),
    }
    return to_state(order, position, counts_in(joined), parts, attempt_in(joined))
