"""Loader: epochs, and batches to the training loop (step K)."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from streamload.dataset import Batch, StreamDataset, Trouble
from streamload.device import to_device
from streamload.errors import (
    LoaderBusy,
    OptionError,
    OrderDiverged,
    StreamloadError,
    TooManyBadSamples,
    WorkerDied,
)
from streamload.handoff import Board, slots_for
from streamload.loader.options import LoaderOptions, at_least
from streamload.loader.recipe import recipe_for
from streamload.loader.sizes import listed_sizes
from streamload.metrics import Counters, Snapshot
from streamload.origins.origin import import_origins
from streamload.topology import Topology, read_topology

logger = logging.getLogger("streamload")

_BAD_SHARE = 0.01
_BAD_FREE = 16
"""So many bad samples are never too many: a share says nothing of a few."""
_TROUBLES_KEPT = 1000
_BATCHES_HELD = 3
"""How many batches of one worker a training loop has at a time, at most, as a rule."""


class Loader:
    """Batches for one rank, epoch after epoch; iterate it, or use it as a context manager.

    Not thread-safe. One iterator at a time.
    """

    def __init__(self, options: LoaderOptions):
        self.options = options
        self._epoch = 0
        self._place: _Place | None = None
        self._digests: dict[str, int] = {}
        self._current: weakref.ref[_Epoch] | None = None
        self._sizes: list[int] | None = None
        self._sizes_read = False
        self._board = Board(1 + options.num_workers)
        self._counts = Counters(self._board.counters[0])
        self._dataset: StreamDataset | None = None
        self._batches: DataLoader[Batch] | None = None
        self._finalizer: weakref.finalize[..., Loader] | None = None
        self._leave_tier: weakref.finalize[..., Loader] | None = None
        self._bad = 0
        self.troubles: list[Trouble] = []
        """The first thousand samples that could not be used."""

    def __repr__(self) -> str:
        options = self.options
        return (
            f"<Loader {len(options.urls)} shards, batch_size={options.batch_size}, "
            f"num_workers={options.num_workers}, epoch {self._epoch}>"
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in an epoch; None where the data alone knows."""
        options = self.options
        if options.num_batches is not None:
            return options.num_batches
        number = options.num_samples if options.num_samples is not None else self._listed_samples()
        if number is None:
            return None
        in_a_step = options.batch_size * self._topology().world_size
        return max(1, number // in_a_step) if options.train else -(-number // in_a_step)

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; None where the data alone knows."""
        options = self.options
        if not options.train:
            return options.num_samples if options.num_samples is not None else self._listed_samples()
        batches = self.num_batches
        return None if batches is None else batches * options.batch_size * self._topology().world_size

    def __len__(self) -> int:
        """Batches of this rank in an epoch.

        Raises:
            TypeError: nothing says how many there are: no num_samples, no num_batches, no sizes.json.
        """
        batches = self.num_batches
        if batches is None:
            raise TypeError(
                "this loader's length is not known: give num_samples or num_batches, or put a sizes.json "
                "({shard name: samples}) beside the shards"
            )
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next `iter()` begins; without it each begins the one after the last.

        Args:
            epoch: from 0. The one after the last goes on as if nothing had been said.
        """
        at_least(0, epoch=epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch.

        Raises:
            LoaderBusy: another iterator of this loader is in use.
            CacheError: the cache directory can't be used.
        """
        current = self._current() if self._current is not None else None
        if current is not None and not current.done:
            raise LoaderBusy("this loader is being iterated: finish that epoch, or drop its iterator, first")
        began = time.monotonic()
        source = self._start()
        place, steps = self._where(self._epoch)
        order = {"epoch": place.sequence, "step": place.step, "steps": steps, "cursors": place.cursors}
        self._board.give_order(order)
        self._place = place
        self._digests = {}
        self._epoch += 1
        try:
            epoch = _Epoch(self, source, began)
        except RuntimeError as exc:
            if not _is_a_death(exc):
                raise
            self.close()  # a worker was killed while no batch was asked for: begin with new ones
            source = self._start()
            self._board.give_order(order)
            epoch = _Epoch(self, source, began)
        self._current = weakref.ref(epoch)
        return epoch

    def stats(self) -> Snapshot:
        """What has happened so far, over all processes of this rank; cheap, at any time."""
        return Snapshot.of(self._board.counters)

    def close(self) -> None:
        """End the workers and let go of the cache; the loader can be iterated again. Once is enough."""
        self._current = None
        if self._finalizer is not None:
            self._finalizer()
        if self._leave_tier is not None:
            self._leave_tier()
        self._dataset = self._batches = self._finalizer = self._leave_tier = None

    def took(self, batch: Batch) -> Any:
        """Step K: take up a batch's place in the order, and give it the shape that was asked for."""
        assert self._place is not None
        self._check_order(batch)
        self._place = self._place.after(batch)
        self._heed(batch)
        values = to_device(batch.values, self.options.device)
        self._counts.add("batches_yielded")
        self._counts.add("samples_yielded", batch.samples)
        return self._shape(values)

    @contextlib.contextmanager
    def waiting(self, began: float) -> Iterator[None]:
        """Count the time since `began` as waiting for data, and let the workers know that one waits."""
        self._board.want(True)
        try:
            yield
        finally:
            self._board.want(False)
            waited_ns = int((time.monotonic() - began) * 1e9)
            self._counts.add("data_wait_ns", waited_ns)
        if not self.stats().batches_yielded:
            self._counts.add("first_batch_ns", waited_ns)

    def _start(self) -> DataLoader[Batch]:
        """The workers, started at the first call."""
        if self._batches is None:
            options = self.options
            groups = self._groups()
            sizes = self._listed_sizes() if groups > 1 and options.train else None
            recipe, placed = recipe_for(options, self._topology(), groups, sizes)
            self._leave_tier = weakref.finalize(self, placed.close)
            if groups > 1 and options.train and self.num_batches is None:
                raise OptionError(
                    f"a run on {groups} nodes has to know how long an epoch is: give "
                    f"num_samples or num_batches, or put a sizes.json beside the shards"
                )
            import_origins(options.urls)
            slots = slots_for(options.num_workers, options.prefetch_factor + _BATCHES_HELD)
            self._dataset = StreamDataset(recipe, self._board, slots)
            several = options.num_workers > 0
            self._batches = DataLoader(
                self._dataset,
                batch_size=None,
                num_workers=options.num_workers,
                collate_fn=_as_it_is,
                persistent_workers=several,
                prefetch_factor=options.prefetch_factor if several else None,
                pin_memory=options.device is not None and options.device.type == "cuda",
                multiprocessing_context=options.multiprocessing_context if several else None,
            )
            self._finalizer = weakref.finalize(self, _stop, self._board, self._batches, self._dataset)
        return self._batches

    def _where(self, epoch: int) -> tuple[_Place, int | None]:
        """Where an epoch begins and how many steps it has."""
        last = self._place
        steps = (
            self.num_batches if self.options.train and (self.options.is_sized or self._groups() > 1) else None
        )
        if self.options.is_sized and last is not None and last.epoch + 1 == epoch:
            return _Place(epoch, last.sequence, last.step, last.cursors), steps
        return _Place(epoch, epoch, 0, {}), steps

    def _topology(self) -> Topology:
        """This rank among those that share the data out."""
        options = self.options
        if not options.train and options.rank is None:
            return Topology()
        return read_topology(options.rank, options.world_size)

    def _groups(self) -> int:
        """How many sequences the samples are dealt into: one a node, in evaluation one a rank."""
        here = self._topology()
        return here.nodes if self.options.train else here.world_size

    def _listed_samples(self) -> int | None:
        sizes = self._listed_sizes()
        return None if sizes is None else sum(sizes)

    def _listed_sizes(self) -> list[int] | None:
        """The samples of each shard by sizes.json, read once."""
        if not self._sizes_read:
            storage = dict(self.options.storage_options or {}) or None
            self._sizes, self._sizes_read = listed_sizes(self.options.urls, storage), True
        return self._sizes

    def _check_order(self, batch: Batch) -> None:
        """Compare what this batch's worker takes for the past with what the last one's did.

        Raises:
            OrderDiverged: they differ.
        """
        for group, span in batch.digests.items():
            last = self._digests.get(group, span.before)
            if last != span.before:
                raise OrderDiverged(
                    f"the workers disagree on the order before step {batch.step}: they don't find the same "
                    f"samples usable. keep= must depend on the entry alone; and files in the cache at "
                    f"{self.options.cache_dir or 'its default place'} must not be changed by others"
                )
            self._digests[group] = span.behind

    def _heed(self, batch: Batch) -> None:
        """Count and report the samples of a batch that could not be used."""
        what = "replaced" if self.options.train else "skipped"
        for trouble in batch.troubles:
            self._counts.add(f"samples_{what}_{trouble.cause}")
            if len(self.troubles) < _TROUBLES_KEPT:
                self.troubles.append(trouble)
                logger.warning("sample %s of %s is %s: %s", trouble.key, trouble.url, what, trouble.message)
        self._bad += len(batch.troubles)
        taken = self.stats().samples_yielded
        if batch.troubles and self._bad > max(_BAD_FREE, _BAD_SHARE * taken):
            raise TooManyBadSamples(
                f"{self._bad} of {taken} samples could not be used, more than {_BAD_SHARE:.0%}: that is no "
                f"accident. The last: {batch.troubles[-1]}"
            )

    def _shape(self, values: dict[str, Any]) -> Any:
        """A batch's values in the form that was asked for."""
        options = self.options
        keys = {name: values.pop(name) for name in ("__key__", "__url__")}
        extra = keys if options.with_keys else {}
        if options.map_sample is not None:
            return {**values, **extra}
        if options.output == "dict":
            return {"image": values["image"], "text": values["text"], **extra}
        if options.output == "hf":
            named = {"pixel_values": values["image"], "input_ids": values["text"]}
            return {**named, "attention_mask": values["attention_mask"], **extra}
        return (values["image"], values["text"], extra) if extra else (values["image"], values["text"])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the next step is: the epoch of the training loop, and the place in the sequence."""

    epoch: int
    sequence: int
    """The epoch in which the sequence began; others may go on in it."""
    step: int
    cursors: dict[str, Any]

    def after(self, batch: Batch) -> _Place:
        return _Place(self.epoch, self.sequence, batch.step + 1, batch.cursors)


class _Epoch:
    """The batches of one epoch."""

    def __init__(self, loader: Loader, source: DataLoader[Batch], began: float):
        self.done = False
        self._loader = loader
        self._taken = 0
        self._began = began
        self._source = iter(source)

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StreamloadError: of the data, the origin or the cache; the loader is closed then.
            WorkerDied: a worker process was killed.
        """
        if self.done:
            raise StopIteration
        began = self._began if self._taken == 0 else time.monotonic()
        try:
            with self._loader.waiting(began):
                batch = next(self._source)
            self._taken += 1
            return self._loader.took(batch)
        except StopIteration:
            self.done = True
            raise
        except BaseException as exc:
            self.done = True
            self._loader.close()
            if _is_a_death(exc):
                raise WorkerDied(f"{exc}; what it had fetched is kept: iterate again") from exc
            raise


def _stop(board: Board, batches: DataLoader[Batch], dataset: StreamDataset) -> None:
    """End a loader's workers, and what runs in this process."""
    board.withdraw_order()
    workers = getattr(batches, "_iterator", None)
    if workers is not None and hasattr(workers, "_shutdown_workers"):
        # torch reports a dead worker from a signal handler, wherever that comes; the others end all the same.
        with contextlib.suppress(RuntimeError):
            workers._shutdown_workers()
    dataset.close()


def _as_it_is(batch: Any) -> Any:
    """Batches come whole from the workers."""
    return batch


def _is_a_death(error: BaseException) -> bool:
    """Whether it is the DataLoader's word that a worker was killed."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, StreamloadError)
        and "DataLoader worker" in str(error)
        and "Caught" not in str(error)
    )
