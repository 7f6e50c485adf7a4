"""Each batch on its way to the training loop: checked, counted, given its form and its record (step K).

Of a record nothing is computed, and nothing goes to the device, before it is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from streamload.errors import OptionError
from streamload.extension import CellSize, Yielded
from streamload.loader.checks import EpochSum
from streamload.loader.options import MODEL_INPUTS, LoaderOptions
from streamload.loader.position import Position
from streamload.loader.rank_process import LoopClock
from streamload.loader.rank_run import RankParts, RankRun
from streamload.worker.messages import SEAT, Batch, Ended

if TYPE_CHECKING:
    from streamload.loader.registered import RunObserver

_ORIGINS = ("__key__", "__url__")
_NESTED_LOOKED_AT = 8
"""Elements of a value in which a batch's first tensor is looked for."""


class Collector:
    """Takes the batches of a loader's epochs from the workers.

    Args:
        run: of the loader.
        observer: of this rank.

    Attributes:
        options: of the loader.
        observer: the same.
        outputs: the form of batches.
        waited_ns: duration of the last `waiting` block.
    """

    def __init__(self, run: RankRun, observer: RunObserver):
        self.options, self.observer = run.options, observer
        self.outputs = Outputs(run.options, run.parts)
        self.waited_ns = 0
        self._schedule, self._process, self._parts = run.schedule, run.process, run.parts
        self._step = -1  # of the epoch, of the batch that was yielded last
        self._epoch = 0  # that was started last
        self.release()

    def release(self) -> None:
        """Let go of the epoch's workers."""
        self._shards = 0  # that this rank reads in a pass
        self._lost: Callable[[int], int] = lambda given_up: 0

    def start_epoch(self, position: Position, shards: int, lost: Callable[[int], int]) -> None:
        """Start an epoch.

        Args:
            position: of its start.
            shards: how many this rank reads in a pass.
            lost: returns how many of these are lost, of so many that were given up.
        """
        self._epoch, self._step = position.epoch, self._schedule.step_of(position) - 1
        topology = self._schedule.topology
        self._sum = EpochSum(self.options.train, position.position, topology.rank, topology.world_size)
        self._shards, self._lost = shards, lost

    @property
    def clock(self) -> LoopClock:
        """Of the training loop, for the epoch."""
        return self._process.clock

    def before_batch(self) -> None:
        """A batch is asked for, and not yet waited for: extensions decide."""
        if self._parts.by_name:
            self._parts.before_batch()
            self.observer.reported = list(self._parts.reported)

    @contextlib.contextmanager
    def waiting(self, since: float) -> Iterator[None]:
        """Count the time since `since` as data wait, and signal the wait to the workers."""
        clock = self._process.clock
        clock.wait_began(since)
        try:
            yield
        finally:
            self.waited_ns = clock.wait_ended(since)
            self.observer.waited(self.waited_ns)

    def received(self, count: int) -> None:
        """So many batches of the epoch have come from the workers, which may begin as many more."""
        self._process.control.take(count)

    def accept(self, batch: Batch, values: dict[str, Any], waited_ns: int) -> Any:
        """Advance the state by a batch, and give the batch its output form.

        Args:
            batch: as the worker made it.
            values: its values on the device.
            waited_ns: the data wait for it.

        Returns:
            The batch in its output form; None if none of its samples could be used.
        """
        process = self._process
        process.checks.check_order(batch)
        process.clock.took(batch, waited_ns)
        self.observer.took(batch)
        if batch.blocked:
            process.waits.add(batch.blocked, waited_ns, process.counts.value("data_wait_ns"))
        if self._parts.by_name:
            self._parts.taken(batch)
        self._schedule.tracker.advance(batch.step.stop, batch.step.groups)
        self._step += 1
        self._sum.count(batch)
        process.count(batch)
        if not batch.rows.samples:
            return None
        return self.outputs.form(batch, values, self._step)

    def finish_epoch(self, end: Ended | None) -> None:
        """The last batch of the epoch was accepted.

        Args:
            end: as a worker found it; None: the epoch has had the planned number of steps.

        Raises:
            PassMismatch: see checks.EpochSum.check.
            TooManyBadSamples, TooManyBadShards, NoValidSamples: see checks.PassEnd.check.
        """
        self._sum.check(self._epoch, end, self._process.given_up)
        self._parts.end_epoch()
        self.observer.end_epoch(self._epoch)
        self._schedule.tracker.finish({} if end is None else end.left_out)
        self._process.check_shards()
        self._check_pass()

    def _check_pass(self) -> None:
        """Compare the shares of all ranks with the limits, as an epoch has ended."""
        schedule, process = self._schedule, self._process
        lost = shards = 0
        if schedule.reports_shards:
            lost, shards = self._lost(process.given_up), self._shards
        order, world_size = schedule.order, schedule.topology.world_size
        totals = process.pass_end.agree(
            f"epoch {self._epoch} of {order.seed} {order.train}",
            process.pass_end.totals(lost, shards, schedule.epochs_are_passes),
            world_size,
            schedule.least_of_pass,
        )
        is_first = not self.options.train or schedule.topology.rank == 0
        process.pass_end.check(self._epoch, totals, world_size, logs=is_first)


class Outputs:
    """The batches of a loader as the training loop gets them.

    Args:
        options: of the loader.
        parts: of its extensions.

    Attributes:
        last: what is known of the last batch; None before the first.
    """

    def __init__(self, options: LoaderOptions, parts: RankParts):
        self._options, self._parts = options, parts
        self._sources = tuple(source.name for source in options.sources)
        self._known = YieldedBatches()
        self.last: BatchInfo | None = None

    def form(self, batch: Batch, values: dict[str, Any], step: int) -> Any:
        """Give a batch its form, which `microbatches` knows from then on.

        Args:
            batch: as the worker made it.
            values: its values on the device.
            step: its number in the epoch.
        """
        keys = values.get("__key__", ())
        extra = {name: values.pop(name) for name in _ORIGINS if name in values}
        has_parts = bool(self._parts.by_name)
        fields = self._parts.yielded(batch.extras, values) if has_parts else {}
        widths, cells = fields.pop("widths", None), fields.get("cells")
        shapes: dict[str, tuple[int, ...]] = {}
        device: torch.device | None = None
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                shapes[name], device = tuple(value.shape), device or value.device
        rows = None if cells is None else [cell.rows for cell in cells]
        yielded = Yielded(step, batch.rows.samples, (), widths, keys, rows)
        self.last = BatchInfo(yielded, self._sources, batch.rows.seats, shapes, device, **fields)
        if has_parts:
            values = self._parts.shaped(values | self._parts.values(self.last))
        if "image" not in values and self._options.workers.map_sample is None:
            from streamload.batches.collate import joined_parts

            values = joined_parts(values)
        yielded.names = tuple(values)
        output = self._shaped(values, extra if self._options.batches.with_keys else {})
        self._known.add(output, self.last)
        return output

    def info_of(self, batch: Any) -> BatchInfo:
        """Record of a batch that `form` returned.

        Raises:
            OptionError: it is another one, or one without tensors.
        """
        info = self._known.find(batch)
        if info is None:
            raise OptionError(
                "expected a batch as this loader yielded it, with tensors: to have it on a device, give "
                "make_loader device=, or copy each part there"
            )
        return info

    def _shaped(self, values: dict[str, Any], extra: dict[str, Any]) -> Any:
        """A batch's values in the form of `output`."""
        options = self._options
        if options.workers.map_sample is not None:
            from streamload.batches.collate import cells_of, unnamed

            if options.workers.collate is not None and self.last is not None and self.last.cells is not None:
                return cells_of(values, extra, [cell.rows for cell in self.last.cells])
            return unnamed(values, extra)
        if options.output == "hf":
            return {MODEL_INPUTS.get(name, name): value for name, value in values.items()} | extra
        if options.output == "dict":
            return {**values, **extra}
        return (*values.values(), extra) if extra else tuple(values.values())


class BatchInfo:
    """Record of a batch.

    Args:
        yielded: its rows, and the columns that each needs.
        sources: the names of all sources.
        seats: SEAT[N] as bytes: the source of each row; empty: there is one source.
        shapes: of its tensors, by the names that they have in `output="dict"`.
        device: of its tensors.
        source_weights: of the rows of each source; None: 1.
        row_weights: float32[N], of each row; None: 1.
        run_step: its number in the run; None: steps of the run aren't counted.
        importance: of the rows of each source; None: 1.
        loss_weight: the same.
        cells, planned: as the attributes.

    Attributes:
        step: its number in the epoch, from 0.
        rows: its number of rows.
        sources: the names of all sources; `source` has their indexes.
        shapes: of its tensors, padding included, by name.
        source_weights: the weight that rows have by their source; None: 1.
        row_weights: float32[N], the weight of each row by `sample_weight=`, in host memory; None: 1.
        run_step: its number in the run, from 0; None without mixing= and Order(decisions=…, objective=…).
        importance: of each source, the share by its own weight ÷ its share of this step, by which rows stand
            for samples at the shares that make_loader was given; None: 1 for all, or as for `run_step`.
        loss_weight: of each source, the weight in the loss that mixing= decided; part of `weight`. None: 1.
        cells: what each of this rank's cells has, with `cost=` and `max_tokens=`; None: rows
            aren't in cells.
        planned: all cells of the step as they are planned, in one, of the groups (by default nodes) that this
            rank reads; None as for `cells`.
        seat_bytes: as `seats` was given.
        device: of its tensors.
        yielded: its rows, by which microbatches are cut.
    """

    def __init__(
        self,
        yielded: Yielded,
        sources: tuple[str, ...] = (),
        seats: bytes = b"",
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        device: torch.device | None = None,
        source_weights: Sequence[float] | None = None,
        row_weights: npt.NDArray[np.float32] | None = None,
        run_step: int | None = None,
        importance: tuple[float, ...] | None = None,
        loss_weight: tuple[float, ...] | None = None,
        cells: Sequence[CellSize] | None = None,
        planned: CellSize | None = None,
    ):
        self.cells, self.planned = cells, planned
        self.step, self.rows, self.sources = yielded.step, yielded.samples, sources
        self.shapes, self.source_weights, self.row_weights = shapes or {}, source_weights, row_weights
        self.run_step, self.importance, self.seat_bytes = run_step, importance, seats
        self.yielded, self.device, self.loss_weight = yielded, device, loss_weight

    def __repr__(self) -> str:
        return f"<BatchInfo step {self.step}, {self.rows} rows, {self.tokens or self.shapes}>"

    @property
    def seats(self) -> npt.NDArray[np.int32]:
        """The source of each row, in host memory: int32[N]."""
        return np.frombuffer(self.seat_bytes, SEAT) if self.seat_bytes else np.zeros(self.rows, SEAT)

    @cached_property
    def source(self) -> torch.Tensor:
        """The source of each row, as its index in `sources`: int64[N], on the batch's device."""
        return self._on_device(torch.from_numpy(self.seats.astype(np.int64)))

    @cached_property
    def weight(self) -> torch.Tensor:
        """The weight of each row in the loss: float32[N], on the batch's device; 1 by default.

        It is the product of what its source and `sample_weight=` give it.
        """
        weights = np.ones(self.rows, np.float32) if self.row_weights is None else self.row_weights
        if self.source_weights is not None:
            weights = weights * np.asarray(self.source_weights, np.float32)[self.seats]
        return self._on_device(torch.from_numpy(weights))

    @property
    def keys(self) -> Sequence[str]:
        """The `__key__` of each row.

        Raises:
            OptionError: they weren't asked for; then workers don't send them.
        """
        if len(self.yielded.keys) != self.rows:
            raise OptionError("the keys of a batch's rows come with it with Batches(with_keys=True)")
        return self.yielded.keys

    @property
    def tokens(self) -> dict[str, int]:
        """Lengths of rows without padding: ids as "text", patches as "image"; what isn't known is left out.

        With bucketing, the room that a row has on all ranks. Captions of a fixed length count in full.
        """
        if self.cells is not None:
            sums = {name: sum(getattr(cell, name) for cell in self.cells) for name in ("text", "image")}
            return {name: count for name, count in sums.items() if count}
        widths, counts = self.yielded.widths, {}
        if widths is None:
            shape = self.shapes.get("text", ())
            return {"text": shape[0] * shape[1]} if len(shape) == 2 else {}
        for name, column, full in zip(("text", "image"), widths.bounds.T, widths.full, strict=True):
            if full:
                counts[name] = int(column.sum())
        return counts

    def _on_device(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the batch's device, for which the processor doesn't wait."""
        if self.device is None or self.device.type == "cpu":
            return values
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)


class YieldedBatches:
    """Records of the batches that the training loop still holds, found by their tensors."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], BatchInfo]] = {}

    def add(self, batch: Any, info: BatchInfo) -> None:
        """Remember a batch as long as its first tensor lives; one without tensors isn't remembered."""
        tensor = _first_tensor(batch)
        if tensor is not None:
            gone = functools.partial(_forget, self._known, id(tensor))
            self._known[id(tensor)] = weakref.ref(tensor, gone), info

    def find(self, batch: Any) -> BatchInfo | None:
        """Record of a batch; None if it isn't one that was added."""
        tensor = _first_tensor(batch)
        entry = None if tensor is None else self._known.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None


def _forget(by_tensor: dict[int, Any], place: int, _: object) -> None:
    by_tensor.pop(place, None)


def _first_tensor(batch: Any, most: int | None = None) -> torch.Tensor | None:
    """The first tensor of a batch; None if there is none, or none among the first elements of its values.

    Each batch is looked at as it is yielded: lists of Python numbers must not be walked to their ends.
    """
    for value in itertools.islice(batch.values() if isinstance(batch, Mapping) else batch, most):
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, Mapping | tuple | list):
            tensor = _first_tensor(value, _NESTED_LOOKED_AT)
            if tensor is not None:
                return tensor
    return None
