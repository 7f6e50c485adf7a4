"""`Batches(cost=…, max_tokens=…, max_patches=…)`: cells of as many samples as fit budgets: an extension."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from streamload.batches.collate import cell_name
from streamload.batching.equal_costs import Cost, EqualCosts, costs_of
from streamload.batching.packed_steps import UNLIMITED, Budgets, PackedSampler, PackedStep, limits
from streamload.errors import DataError, OptionError, StateMismatch
from streamload.extension import CellSize, RankPart, WorkerPart
from streamload.worker.messages import EpochStart
from streamload.worker.reader import Reader

if TYPE_CHECKING:
    from streamload.extension import BatchRows, LoaderOptions, Position, Run, WorkerProcess

_STEPS, _CELLS = 16, 512
"""Steps of a block, or more: as many as give it so many cells."""
_STATE = "cells"
"""The key of the budgets in a state."""
_MEASURED = ("input_ids", "pixel_values")
"""The values of a collated cell that are as long as its tokens, or its patches."""
_SAMPLES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class PackedCells(EqualCosts):
    """The extension of a loader whose steps have cells of as many samples as fit its budgets.

    Attributes:
        budgets: of a cell.
    """

    budgets: Budgets

    counts_cells = True

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse what has another notion of a batch's rows, and a budget without its cost."""
        EqualCosts.refuse_unusable(self, options)
        batches = options.batches
        if self.budgets[1] is not None and len(self.costs) < 2:
            raise OptionError("max_patches= needs two costs, of text and of images: cost=(…, …)")
        if max(limits(self.budgets)) > UNLIMITED:
            raise OptionError("max_tokens= and max_patches= are at most 2^40: give costs in larger units")
        for name, is_given, instead in (
            ("num_samples=", options.num_samples is not None, "give num_batches="),
            ("microbatch=", batches.microbatch is not None, "a cell is what goes through a device at once"),
            ("batch_policy=", batches.batch_policy is not None, "loader.set_batch_size() counts cells"),
            ("Workers(memory=…)", options.workers.memory is not None, "batches have any number of samples"),
            ("features=", bool(options.features), "compute them in the training loop, cell by cell"),
        ):
            if is_given:
                raise OptionError(
                    f"cost= with max_tokens= packs cells of any number of samples, so it can't be "
                    f"combined with {name}: {instead}"
                )

    def plans_as(self, state: Mapping[str, object]) -> bool:
        """True if the budgets are those before a state."""
        return state.get(_STATE) == limits(self.budgets)

    def left_block(
        self, state: Mapping[str, object], position: Position, block: tuple[int, int, int]
    ) -> tuple[int, ...] | None:
        """The block, its budgets, how many of its steps are behind, and the shares of the sources."""
        budgets, (begin, steps, cells) = state.get(_STATE), block
        if not isinstance(budgets, list):
            return None
        return (begin, steps, cells, *budgets, (position.position - begin) // cells, *position.shares)

    def block_steps(self, batch: int) -> int:
        """The steps of a block, of so many cells each."""
        return max(_STEPS, _CELLS // batch)

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """Its part in a worker process."""
        assert isinstance(process.reader, Reader)
        return WorkerCells(self.costs, self.budgets, process.reader)

    def in_rank(self, run: Run) -> RankPart:
        """Its part in the rank."""
        return RankCells(limits(self.budgets))


class WorkerCells(WorkerPart):
    """The worker's part.

    Args:
        costs: of a sample: of text and of images, and what it takes.
        budgets: of a cell.
        reader: of the process.
    """

    def __init__(self, costs: tuple[Cost, ...], budgets: Budgets, reader: Reader):
        self._costs, self._budgets, self._reader = costs, budgets, reader

    def sampler(self, start: EpochStart) -> PackedSampler:
        """The steps of an epoch, packed by block."""
        assert isinstance(start, EpochStart)
        costs = functools.partial(_three_costs, self._costs)
        return PackedSampler(self._reader.config, self._reader, start, costs, self._budgets)

    def finish(self, values: dict[str, object], rows: BatchRows) -> bytes:
        """What each cell has, and what all were planned to have.

        Raises:
            DataError: a collated cell is longer than its budget, as a cost was too small.
        """
        step = rows.step
        assert isinstance(step, PackedStep)
        step.took(rows.samples)
        begin, sizes = 0, step.sizes
        for number, cell in enumerate(sizes):
            for name, budget in zip(_MEASURED, self._budgets, strict=True):
                value = values.get(cell_name(number, name))
                if budget is None or not isinstance(value, torch.Tensor):
                    continue
                length = value.numel() if name == "input_ids" else len(value)
                if length > budget:
                    raise DataError(
                        self._overrun(name, length, budget, rows, range(begin, begin + cell.rows))
                    )
            begin += cell.rows
        return pickle.dumps((sizes, step.planned))

    def _overrun(self, name: str, length: int, budget: int, rows: BatchRows, places: range) -> str:
        column = _MEASURED.index(name)
        cost = self._costs[min(column, len(self._costs) - 1)]
        shown = []
        for place in places[:_SAMPLES_SHOWN]:
            shard, number = rows.samples[place]
            costs = costs_of(self._costs, self._reader, shard, np.array([number]), 3)
            shown.append(f"{self._reader.entries(shard, [number])[0].key!r} ({costs[0, column]:g})")
        return (
            f"a collated cell has {length} of {name}, and its budget is {budget}: cost="
            f"{cost if isinstance(cost, str) else 'a function'} is too small for a sample of "
            f"{', '.join(shown)}{', …' if len(places) > _SAMPLES_SHOWN else ''}"
        )


class RankCells(RankPart):
    """The rank's part: `loader.info` has the cells.

    Args:
        budgets: of a cell, as they are in states.
    """

    def __init__(self, budgets: list[int]):
        self._budgets = budgets

    def yielded(self, part: bytes, values: dict[str, object]) -> Mapping[str, object]:
        """The fields of a batch's info."""
        cells: list[CellSize]
        planned: CellSize
        cells, planned = pickle.loads(part)
        return {"cells": cells, "planned": planned}

    def state(self, position: int) -> Mapping[str, object]:
        """The budgets."""
        return {_STATE: self._budgets}

    def load(self, state: Mapping[str, object]) -> None:
        """Refuse budgets that aren't numbers."""
        budgets = state.get(_STATE, self._budgets)
        if not (isinstance(budgets, list) and len(budgets) == 2 and all(type(n) is int for n in budgets)):
            raise StateMismatch(f"not a valid state of a loader: {budgets!r:.100} as {_STATE}")


def _three_costs(
    costs: tuple[Cost, ...], reader: Reader, shard: int, numbers: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """float64[N, 3]: the third is NaN where nothing says what a sample takes."""
    columns = costs_of(costs, reader, shard, numbers, 3)
    if len(costs) < 3:
        columns[:, 2] = np.nan
    return columns
