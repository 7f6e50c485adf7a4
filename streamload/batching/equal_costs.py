"""`Batches(cost=…)`: as many rows as ever on each rank, and they cost about the same on all: an extension."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamload.batching.copies import Origins
from streamload.batching.rounds import alike, dealt_alike
from streamload.batching.steps import Costs, PlannedSampler, refuse_unequal_parts
from streamload.cache.selection import RateFunction, number_of
from streamload.errors import OptionError
from streamload.extension import Extension, WorkerPart
from streamload.order.steps import Split
from streamload.shards.columns import BUILT_IN, LISTED
from streamload.worker.messages import EpochStart
from streamload.worker.reader import Reader

if TYPE_CHECKING:
    from streamload.extension import LoaderOptions, WorkerProcess

Cost = str | RateFunction
"""The name of a fact, or a pure function of the entry that returns a number."""
_STEPS, _MOST_SAMPLES = 16, 1 << 16
"""A block has so many steps, or fewer if it had more samples. Ranks are less alike in shorter ones."""


def read_costs(option: object, most: int = 2) -> tuple[Cost, ...]:
    """The one or two costs of `Batches(cost=…)`, or three where cells are packed by them.

    Raises:
        OptionError: it is something else.
    """
    costs = tuple(option) if isinstance(option, Sequence) and not isinstance(option, str) else (option,)
    if not 1 <= len(costs) <= most or not all(isinstance(cost, str) or callable(cost) for cost in costs):
        raise OptionError(
            f"cost={option!r:.100}; expected the name of a fact, a function of a sample's index entry that "
            f"returns a number, or two of these: of text and of images; or three, with max_tokens=: the last "
            f"is what a sample takes"
        )
    return costs


@dataclass(frozen=True, slots=True)
class EqualCosts(Extension):
    """The extension of a loader whose ranks get rows of about the same cost in each step.

    Attributes:
        costs: one, or those of text and of images.
    """

    costs: tuple[Cost, ...]

    name = "costs"

    @property
    def facts(self) -> Collection[str]:
        """The names of the built-in facts that it needs."""
        return [cost for cost in self.costs if isinstance(cost, str) and cost in BUILT_IN]

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse it where the order is fixed, and facts that nothing makes."""
        if not options.train:
            raise OptionError("cost= is for training: evaluation has the samples in the order as listed")
        for name, is_given in (
            ("bucketing=", options.batches.bucketing is not None),
            ("Patches(steps=…)", options.listed_steps is not None),
            (f"sources={options.batches.sources!r}", options.batches.sources != "mixed"),
        ):
            if is_given:
                raise OptionError(f"cost= plans which rows a step has: it can't be combined with {name}")
        facts = {*options.columns, *BUILT_IN} - {LISTED}
        for cost in self.costs:
            if isinstance(cost, str) and cost not in facts:
                raise OptionError(
                    f"cost={cost!r} is no fact of this run; expected one of {', '.join(sorted(facts))} "
                    f"(Shards(facts=…) adds to these), or a function of a sample's index entry"
                )

    def planned_by(self, options: LoaderOptions) -> Sequence[str | RateFunction]:
        """The costs, each a fact with its definition, or a function."""
        digests = {name: column.digest for name, column in options.columns.items()}
        return [
            f"the fact {cost!r} {digests.get(cost, '')}" if isinstance(cost, str) else cost
            for cost in self.costs
        ]

    def refuse_split(self, split: Split) -> None:
        """Refuse unequal parts of a step for the groups of a run."""
        refuse_unequal_parts(split, "cost=")

    def block_steps(self, batch: int) -> int:
        """The steps of a block, of so many samples each."""
        return max(1, min(_STEPS, _MOST_SAMPLES // batch))

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """Its part in a worker process; None: it has none there."""
        assert isinstance(process.reader, Reader)
        return WorkerCosts(self.costs, process.reader)


class WorkerCosts(WorkerPart):
    """The worker's part.

    Args:
        costs: one, or those of text and of images.
        reader: of the process.
    """

    def __init__(self, costs: tuple[Cost, ...], reader: Reader):
        self._costs, self._reader = costs, reader

    def sampler(self, start: EpochStart) -> PlannedSampler:
        """The steps of an epoch, planned by block."""
        assert isinstance(start, EpochStart)
        return PlannedSampler(self._reader.config, self._reader, start, LikeCosts(self._costs))


@dataclass(frozen=True, slots=True)
class LikeCosts:
    """Ranks get rows of about the same cost in each step; see `PlanRule`.

    Attributes:
        of_sample: one cost, or those of text and of images.
    """

    of_sample: tuple[Cost, ...]

    def costs(self, reader: Reader, shard: int, numbers: npt.NDArray[np.int64]) -> Costs:
        """The costs of samples of a shard."""
        return costs_of(self.of_sample, reader, shard, numbers)

    def divide(
        self, costs: Costs, steps: int, turns: int, origins: Origins, parts: int
    ) -> npt.NDArray[np.int64]:
        """Divide a block's rows among its steps."""
        return alike(costs, steps, turns, origins)

    def deal(
        self, costs: Costs, sizes: npt.NDArray[np.int64], rank: int
    ) -> tuple[npt.NDArray[np.int64], None]:
        """Deal the rows of a step to the ranks, each with room for any."""
        return dealt_alike(costs, sizes, rank), None


def costs_of(
    of_sample: Sequence[Cost], reader: Reader, shard: int, numbers: npt.NDArray[np.int64], columns: int = 2
) -> Costs:
    """What samples of a shard cost: float64[N, columns], 0 where a cost isn't given.

    Raises:
        OptionError: one is unknown or negative; it names the sample.
    """
    names = [cost for cost in of_sample if isinstance(cost, str)]
    facts = reader.facts(shard, numbers, names) if names else {}
    entries = reader.entries(shard, numbers.tolist()) if len(names) < len(of_sample) else []
    costs = np.zeros((len(numbers), columns))
    for column, cost in enumerate(of_sample):
        if isinstance(cost, str):
            costs[:, column] = facts[cost]
        else:
            costs[:, column] = [number_of("cost", cost, entry) for entry in entries]
        unusable = np.flatnonzero(~(costs[:, column] >= 0) | (costs[:, column] == math.inf))
        if len(unusable):
            place = int(unusable[0])
            entry = reader.entries(shard, [int(numbers[place])])[0]
            raise OptionError(
                f"cost={cost if isinstance(cost, str) else 'a function'} is {costs[place, column]:g} for "
                f"sample {entry.key!r}; expected a number from 0: leave out samples of which it is "
                f"unknown, Shards(keep=…), or give a function that has a number for all"
            )
    return costs
