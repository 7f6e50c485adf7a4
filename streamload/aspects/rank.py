"""`Images(sizes=…)`: each batch, or part of one, has images of one size, by their aspects: an extension."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamload.aspects.cells import sized_cells
from streamload.aspects.images import CONDITIONS, SizedPlan, sized_plan
from streamload.aspects.sizes import FACTS, Sizes, losses, ratios
from streamload.batches.collate import Cells
from streamload.batches.in_progress import Bounds
from streamload.batching.copies import Origins
from streamload.batching.steps import (
    BlockPlan,
    Costs,
    PlannedSampler,
    PlannedStep,
    Rows,
    refuse_unequal_parts,
)
from streamload.errors import OptionError
from streamload.extension import Extension, RankPart, WorkerPart
from streamload.order.steps import Split
from streamload.worker.messages import EpochStart
from streamload.worker.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamload.extension import BatchAssembly, BatchRows, LoaderOptions, Run, WorkerProcess

_CELLS, _MOST_STEPS, _MOST_SAMPLES = 1024, 256, 1 << 16
"""A block has so many cells, or fewer if it were longer than that. In shorter ones more rows are off size."""
_COUNTERS = ("samples_off_size", "samples_of_unknown_size")


@dataclass(frozen=True, slots=True)
class SizedImages(Extension):
    """The extension of a loader whose images have several sizes.

    Attributes:
        sizes: of images.
        microbatch: rows of a cell; None: those of a rank, or of a step.
        batch_rows: of a rank in a step, by the options.
        by_step: whether all images of a step have one size.
    """

    sizes: Sizes
    microbatch: int | None
    batch_rows: int
    by_step: bool

    name = "sizes"
    takes_preprocess = True

    @property
    def facts(self) -> Collection[str]:
        """The names of the built-in facts that it needs."""
        return FACTS

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse it where the order is fixed, and what needs images of one size or plans steps by itself."""
        if not options.train:
            raise OptionError("sizes= is for training: evaluation has the samples in the order as listed")
        images, batches = options.images, options.batches
        refused = {
            "bucketing=": batches.bucketing is not None,
            "cost=": batches.cost is not None,
            "patches=": images.patches is not None,
            f"sources={batches.sources!r}": batches.sources != "mixed",
            "sources of one modality": options.has_modalities,
            "map_sample=": options.workers.map_sample is not None,
            "features=": bool(options.features),
            f"output={options.output!r}": options.output == "hf",
            f"decode={images.decode!r}": images.decode != "host",
            f"prepare={images.prepare!r}": images.prepare not in (None, "raw"),
            "compile=False": not images.compile,
        }
        if used := [name for name, is_given in refused.items() if is_given]:
            raise OptionError(
                f"sizes= plans which rows a cell has, and makes its images by a compiled transform: it can't "
                f"be combined with {', '.join(used)}"
            )
        self.image_maker(options, None)
        self.refuse_rows(options.batch_size, options)

    def refuse_rows(
        self, rows: int, options: LoaderOptions, assembly: Callable[[], BatchAssembly] | None = None
    ) -> None:
        """Refuse batches of other than whole cells."""
        if self.microbatch is not None and rows % self.microbatch:
            raise OptionError(
                f"sizes= needs cells of equal rows: microbatch={self.microbatch} doesn't divide the {rows} "
                f"rows of a batch"
            )

    def refuse_split(self, split: Split) -> None:
        """Refuse steps to which a group gives other than whole cells, or where groups can't have one size."""
        refuse_unequal_parts(split, "sizes=")
        if self.by_step:
            if split.groups > 1:
                raise OptionError(
                    f"sizes_by='step' needs one plan for all ranks, and each of {split.groups} groups has "
                    f"its own: give order=Order(groups=1), or sizes_by='cell'"
                )
            return
        rows = self.microbatch or split.batch // split.ranks
        parts = {part for group in range(split.groups) for part in split.sizes(0, group)}
        if any(part % rows for part in parts):
            raise OptionError(
                f"sizes= has cells of {rows} rows, and ranks get {sorted(parts - {0})} rows of a group: give "
                f"Batches(microbatch=…), a number that divides these, or Order(groups=…)"
            )

    def planned_by(self, options: LoaderOptions) -> Sequence[str]:
        """The sizes, and which rows share one."""
        cell = "step" if self.by_step else f"cell of {self.microbatch or self.batch_rows} rows"
        return [f"images of {[*self.sizes]}, one size for each {cell}"]

    def block_steps(self, batch: int) -> int:
        """The steps of a block, of so many samples each."""
        cells = 1 if self.by_step else max(1, batch // (self.microbatch or self.batch_rows))
        return max(1, min(-(-_CELLS // cells), _MOST_STEPS, _MOST_SAMPLES // batch))

    def image_maker(self, options: LoaderOptions, plan: Any) -> SizedPlan:
        """The transform to the sizes."""
        return sized_plan(options.preprocess, self.sizes, self.microbatch)

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """Its part in a worker process; None: it has none there."""
        assert isinstance(process.reader, Reader)
        return WorkerSizes(self, process.reader)

    def in_rank(self, run: Run) -> RankPart:
        """Its part in the rank; None: it has none."""
        return RankSizes(run)


def sized_images(options: LoaderOptions) -> SizedImages:
    """The extension of a loader, by its options, `LoaderOptions`, with sizes."""
    images, microbatch = options.images, options.batches.microbatch
    assert images.sizes is not None
    by_step = images.sizes_by == "step"
    rows = None if microbatch == "auto" or by_step else microbatch
    return SizedImages(tuple(images.sizes), rows, options.batch_size, by_step)


class WorkerSizes(WorkerPart):
    """The worker's part, by which blocks are planned so that cells have one size; see `PlanRule`.

    Args:
        options: the sizes, and which rows share one.
        reader: of the process.
    """

    def __init__(self, options: SizedImages, reader: Reader):
        self._options, self._reader, self._split = options, reader, reader.config.split

    def sampler(self, start: EpochStart) -> SizedSampler:
        """The steps of an epoch, planned by block."""
        return SizedSampler(self._reader.config, self._reader, start, self)

    def costs(self, reader: Reader, shard: int, numbers: npt.NDArray[np.int64]) -> Costs:
        """The aspect ratios of samples of a shard, and a column for the numbers of the sizes they get."""
        of_images = ratios(reader.facts(shard, numbers, FACTS))
        return np.stack([of_images, np.zeros_like(of_images)], axis=1)

    def divide(
        self, costs: Costs, steps: int, turns: int, origins: Origins, parts: int
    ) -> npt.NDArray[np.int64]:
        """Divide a block's rows among its steps; writes the number of each row's size beside its ratio."""
        of_images, options, rows = costs[:, 0], self._options, len(costs) // steps
        if not options.by_step:
            rows = options.microbatch or rows * self._split.groups // self._split.ranks
        cells, costs[:, 1] = sized_cells(losses(of_images, options.sizes), np.isnan(of_images), rows, turns)
        return cells.reshape(steps, -1)

    def deal(
        self, costs: Costs, sizes: npt.NDArray[np.int64], rank: int
    ) -> tuple[npt.NDArray[np.int64], Bounds]:
        """Deal the rows of a step to the ranks: the next cells to each, with the numbers of their sizes."""
        first = int(sizes[:rank].sum())
        places = np.arange(first, first + sizes[rank])
        bounds = np.zeros((len(places), 2), np.int32)
        bounds[:, 1] = costs[places, 1]
        return places, bounds

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        """The number of rows off their best size, and of those of which it is unknown: int64[2]."""
        step, counts = rows.step, np.zeros(2, np.int64)
        assert isinstance(step, SizedStep)
        for shard_rows in rows.by_shard():
            of_images = ratios(shard_rows.facts(FACTS))
            is_known = ~np.isnan(of_images)
            best = losses(of_images, self._options.sizes).argmin(axis=1)
            is_off = is_known & (best != step.sizes[shard_rows.places])
            counts += np.count_nonzero(is_off), np.count_nonzero(~is_known)
        return counts.tobytes()


class RankSizes(RankPart):
    """The rank's part."""

    def __init__(self, run: Run):
        self._counts, self._has_names = run.counts, run.options.output == "dict"
        self._counted = np.zeros(len(_COUNTERS), np.int64)

    def yielded(self, part: bytes, values: dict[str, Any]) -> dict[str, Any]:
        """Count the rows off their best size."""
        counts = np.frombuffer(part, np.int64)
        self._counted += counts
        for name, count in zip(_COUNTERS, counts.tolist(), strict=True):
            self._counts.add(name, count)
        return {}

    def metrics(self) -> dict[str, float]:
        """The numbers of such rows so far, for the page that the rank publishes."""
        return dict(zip(_COUNTERS, self._counted.tolist(), strict=True))

    def shaped(self, values: dict[str, Any]) -> dict[str, Any]:
        """The images first, of several cells as `Cells`; with names also what SDXL is conditioned by."""
        cells = Cells(values.pop(name) for name in [*values] if name.startswith("image["))
        conditions = {name: values.pop(name) for name in CONDITIONS}
        image = cells or values.pop("image")
        return {"image": image, **values, **(conditions if self._has_names else {})}


@dataclass(slots=True)
class SizedStep(PlannedStep):
    """A rank's part of a step; its cells stay whole.

    Attributes:
        sizes: int32[size], the number of the size that each row has; valid after `visits`.
    """

    sizes: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    def _rows(self, plans: Sequence[BlockPlan], number: int) -> tuple[Rows, Bounds | None]:
        """The rows that this rank computes in a step of the block, those of each group together."""
        parts = [self._dealt(group, plan, number) for group, plan in zip(self.groups, plans, strict=True)]
        bounds = np.concatenate([bounds for _, bounds in parts if bounds is not None])
        self.sizes = bounds[:, 1].copy()
        return np.concatenate([rows for rows, _ in parts]), bounds


class SizedSampler(PlannedSampler):
    """The steps of one epoch, all of them planned by block, as each row needs a size."""

    def at(self, position: int) -> SizedStep:
        """The step at a global position."""
        groups = {share.group: share.size for share in self._shares(position)}
        return SizedStep(self._config, self._planner, position, groups, position == self._start.position)
