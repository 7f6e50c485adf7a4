"""Rows of about one length put together, `Batches(bucketing=…)`: an extension (streamload/extension/)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from streamload.batches.in_progress import Bounds
from streamload.batching.cells import cells, cells_of_parts, dealt
from streamload.batching.copies import Origins
from streamload.batching.costs import RowCosts, row_costs_of
from streamload.batching.steps import Costs, PlannedSampler, fitted, refuse_unequal_parts
from streamload.errors import OptionError
from streamload.extension import Extension, WorkerPart
from streamload.order.steps import SourcesName, Split
from streamload.ranks.distributed import can_compare
from streamload.shards.columns import TOKENS
from streamload.worker.messages import EpochStart, Visit, WorkerConfig
from streamload.worker.reader import Reader
from streamload.worker.sampler import RankStep

if TYPE_CHECKING:
    from streamload.extension import BatchAssembly, LoaderOptions, WorkerProcess

__all__ = ["Bucketing", "Buckets", "bucketing_of"]


@dataclass(frozen=True, slots=True)
class Bucketing(Extension):
    """The extension of a loader whose steps are planned by block; a run has `Buckets`.

    Attributes:
        block: samples of a block, or "step".
        max_tokens: of a part of a batch; None: any.
        by_texts: whether the lengths of captions vary.
        sources: of a step.
    """

    block: Literal["step"] | int
    max_tokens: int | None
    by_texts: bool
    sources: SourcesName

    name = "buckets"

    @property
    def facts(self) -> Collection[str]:
        """The names of the built-in facts that it needs."""
        return (TOKENS,) if self.by_texts else ()

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse it where nothing varies that it could go by, or where the order is fixed."""
        if not options.train:
            raise OptionError("bucketing= is for training: evaluation has the samples in the order as listed")
        if options.listed_steps is not None:
            raise OptionError("bucketing= is for steps of one size, not for those of Patches(steps=…)")
        patches = options.images.patches
        if not self.by_texts and (patches is None or patches.max_ratio is None):
            raise OptionError(
                'bucketing= goes by lengths that vary: give text_padding="longest", or patches=Patches(…, '
                "max_ratio=1.0) (captions of one length and images that fill theirs have nothing to gain)"
            )

    def refuse_split(self, split: Split) -> None:
        """Refuse unequal parts of a step for the groups of a run, and groups that can't agree."""
        refuse_unequal_parts(split, "bucketing=")
        few, many = sorted((split.groups, split.ranks))
        if self.sources == "rank" and many % few:
            raise OptionError(
                f"bucketing= with sources='rank' needs groups that share ranks evenly, and there are "
                f"{split.ranks} ranks and {split.groups} groups: give Order(groups=…)"
            )
        if self.max_tokens is not None and not (split.has_one_plan or can_compare(split.ranks)):
            raise OptionError(
                f"max_tokens= needs ranks that agree on the width of rows, as each of {split.groups} groups "
                f"has a plan of its own: initialise torch.distributed first, or give order=Order(groups=1)"
            )

    def block_steps(self, batch: int) -> int:
        """The steps of a block, of so many samples each."""
        return 1 if self.block == "step" else max(1, self.block // batch)

    def in_run(self, options: LoaderOptions, config: WorkerConfig, plain: BatchAssembly) -> Buckets:
        """The extension of a run, which knows what rows cost."""
        return Buckets(row_costs_of(options, config.assembly.tokenizer))


def bucketing_of(options: LoaderOptions) -> Bucketing:
    """The extension of a loader, by its options, `LoaderOptions`, with bucketing."""
    batches = options.batches
    assert batches.bucketing is not None
    return Bucketing(
        batches.bucketing, batches.max_tokens, batches.text_padding == "longest", batches.sources
    )


@dataclass(frozen=True, slots=True)
class Buckets(Extension):
    """The extension of a run whose steps are planned by block.

    Attributes:
        costs: of rows.
    """

    costs: RowCosts

    name = Bucketing.name

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """Its part in a worker process; None: it has none there."""
        assert isinstance(process.reader, Reader)
        return WorkerBuckets(self.costs, process.reader)


class WorkerBuckets(WorkerPart):
    """The worker's part.

    Args:
        costs: of rows.
        reader: of the process.
    """

    def __init__(self, costs: RowCosts, reader: Reader):
        self._costs, self._reader = costs, reader

    def sampler(self, start: EpochStart) -> BucketSampler:
        """The steps of an epoch, planned by block."""
        assert isinstance(start, EpochStart)
        return BucketSampler(self._reader.config, self._reader, start, self._costs)


@dataclass(frozen=True, slots=True)
class LikeLengths:
    """Rows of about one length make a step; see `PlanRule`.

    Attributes:
        row_costs: of rows.
        has_sources: whether there are several: a small one may repeat in a block.
    """

    row_costs: RowCosts
    has_sources: bool

    def costs(self, reader: Reader, shard: int, numbers: npt.NDArray[np.int64]) -> Costs:
        """The costs of samples of a shard, in tokens."""
        return self.row_costs.costs(reader.facts(shard, numbers, self.row_costs.facts), len(numbers))

    def divide(
        self, costs: Costs, steps: int, turns: int, origins: Origins, parts: int
    ) -> npt.NDArray[np.int64]:
        """Divide a block's rows among its steps."""
        if parts and self.has_sources:
            return cells_of_parts(costs, steps, turns, origins, parts)
        return cells(costs, steps, turns, origins if self.has_sources else None)

    def deal(
        self, costs: Costs, sizes: npt.NDArray[np.int64], rank: int
    ) -> tuple[npt.NDArray[np.int64], Bounds]:
        """Deal the rows of a step to the ranks."""
        places, most = dealt(costs, sizes, rank)
        return places, self.row_costs.rounded(most)


class BucketSampler(PlannedSampler):
    """The steps of one epoch, in ascending order, most of them planned by block.

    Args:
        config, reader, start: see Sampler.
        costs: of rows.
    """

    def __init__(self, config: WorkerConfig, reader: Reader, start: EpochStart, costs: RowCosts):
        self._rule = LikeLengths(costs, len(config.sources) > 1)
        super().__init__(config, reader, start, self._rule)

    def at(self, position: int) -> RankStep:
        """The step at a global position; one that isn't planned has room for rows of any length."""
        step = super().at(position)
        if not self.steps.is_planned(position):
            step.bounds = fitted(self._rule.row_costs.any_row(step.size), self.steps.seq_len(position))
        return step

    def fits(self, visit: Visit, shard: int, number: int) -> bool:
        """True if a sample isn't longer than the place of a visit is wide."""
        if visit.most is None:
            return True
        tokens, patches = self._rule.costs(self._reader, shard, np.array([number]))[0].tolist()
        return bool(tokens <= visit.most[0] and patches <= visit.most[1])
