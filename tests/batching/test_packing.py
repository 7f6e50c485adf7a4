"""Cells packed by budgets, against a plain oracle: each sample in one cell, none over a budget or empty."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from streamload.batching.packing import enough, interleaved, pack
from streamload.order.events import UNIT

SEED = 4


def hostile(numbers: np.random.Generator, kind: int, count: int, budget: int) -> np.ndarray:
    """Costs of so many samples, int64[count, 2], none of them over the budget."""
    ones, drawn = np.ones(count), numbers.integers(1, budget + 1, count)
    columns = {
        "any": (drawn, numbers.integers(1, budget + 1, count)),
        "full": (ones * budget, ones * budget),
        "giants": (np.where(numbers.random(count) < 0.02, budget, 1), ones),
        "powers": (budget * 0.75 ** numbers.integers(0, 40, count), 0 * ones),
        "opposed": (drawn, budget - drawn),
        "halves": (ones * (budget // 2 + 1), numbers.integers(0, 5, count)),
        "images": (ones, numbers.integers(0, budget + 1, count)),
        "tails": ((numbers.pareto(1.1, count) + 0.1) * 20, numbers.pareto(1.1, count) * 20),
        "lognormal": (numbers.lognormal(3, 1, count), numbers.lognormal(4, 1.5, count)),
    }
    text, image = list(columns.values())[kind]
    costs = np.stack([np.maximum(1, text), image], 1)
    return np.minimum(costs, budget).astype(np.int64)


def wrong(costs: np.ndarray, cell: np.ndarray, cells: int, budget: int) -> str:
    """What is wrong with samples in cells, one by one."""
    loads = [[0, 0, 0] for _ in range(cells)]
    for (text, image), number in zip(costs.tolist(), cell.tolist(), strict=True):
        loads[number][0] += text
        loads[number][1] += image
        loads[number][2] += 1
    if any(max(text, image) > budget for text, image, _ in loads):
        return "over the budget"
    return "an empty cell" if any(not rows for _, _, rows in loads) else ""


@pytest.mark.parametrize("kind", range(9))
def test_hostile_costs_fit_each_cell_and_none_is_empty(kind: int) -> None:
    numbers = np.random.default_rng(SEED + kind)
    for _ in range(25):
        budget, cells = int(numbers.integers(64, 20_000)), int(numbers.choice([1, 2, 3, 8, 64]))
        steps = int(numbers.choice([1, 2, 4, 16]))
        count = int(numbers.integers(cells * steps, 20 * cells * steps + 2))
        costs, budgets = hostile(numbers, kind, count, budget), np.array([budget, budget])
        is_end = not enough(costs, cells * steps, budgets) or numbers.random() < 0.3
        packed = pack(costs, costs.sum(1).astype(float), steps, cells, budgets, count, is_end=is_end)
        assert wrong(costs[: len(packed.cell)], packed.cell, packed.steps * cells, budget) == ""
        assert packed.steps == steps or is_end
        left_over = packed.taken - len(packed.cell)
        assert left_over == 0 or (is_end and packed.taken == count and left_over < cells)
        if not is_end:
            more = np.concatenate([costs, hostile(numbers, kind, 50, budget)])  # another worker knows more
            times = more.sum(1).astype(float)
            again = pack(more, times, steps, cells, budgets, count, is_end=bool(count % 2))
            assert again.taken == packed.taken
            assert np.array_equal(again.cell, packed.cell)


@pytest.mark.parametrize(("cells", "unit"), [(9000, 1), (8, 1 << 30)])
def test_many_cells_and_large_units_make_the_same_cells(cells: int, unit: int) -> None:
    """Sums are of 64 bits: of a budget that is any number, and of costs in bytes or FLOPs."""
    costs = np.random.default_rng(SEED).integers(1, 60, (cells * 8, 2))
    times, budgets = costs.sum(1).astype(float), np.array([300, 1 << 40])
    small = pack(costs, times, 1, cells, budgets, 1, is_end=False)
    large = pack(costs * unit, times, 1, cells, np.array([300 * unit, 1 << 40]), 1, is_end=False)
    assert large.taken == small.taken > 5 * cells
    for packed in (small, large):
        assert wrong(costs[: packed.taken, [0, 0]], packed.cell, cells, 300) == ""


def test_the_end_of_a_sequence_is_spread_over_as_few_steps_as_hold_it() -> None:
    numbers = np.random.default_rng(SEED)
    budgets = np.array([100, 100])
    for count in [*range(1, 40), 333]:
        costs = numbers.integers(1, 60, (count, 2))
        packed = pack(costs, costs.sum(1).astype(float), 64, 6, budgets, 1, is_end=True)
        assert packed.taken == count
        assert packed.steps >= -(-int(costs.sum(0).max()) // 600) if count >= 6 else packed.steps == 0
        assert count - len(packed.cell) < 6
        assert wrong(costs[: len(packed.cell)], packed.cell, packed.steps * 6, 100) == ""
        if count % 6 == 0:
            assert len(packed.cell) == count


BUDGETS = np.array([8192, 28_672])


def mixture(seed: int, count: int = 14_000) -> np.ndarray:
    """Lengths of a mixture for vision-language models: texts, one image, up to eight."""
    numbers = np.random.default_rng(seed)
    images = numbers.choice([0, 1, 1, 1, 1, 1, 2, 5], count)
    patches = np.clip(numbers.lognormal(6.2, 0.8, (count, 8)), 64, 4096)
    image = (patches * (np.arange(8) < images[:, None])).sum(1).astype(np.int64)
    text = np.maximum(4, numbers.lognormal(4.8, 1.1, count)).astype(np.int64)
    costs = np.stack([image + text, 4 * image], 1)
    return costs[(costs <= BUDGETS).all(1)]


def test_cells_of_a_step_are_alike_and_full_and_lengths_leave_no_trace() -> None:
    slowest, filled, traces = [], [], []
    for seed in range(8):
        costs = mixture(seed)
        times = costs[:, 0] * (1 + costs[:, 0] / 60_000) + 0.0875 * costs[:, 1]
        packed = pack(costs, times, 16, 64, BUDGETS, seed, is_end=False)
        loads = np.bincount(packed.cell, times[: packed.taken]).reshape(16, 64)
        slowest.append((loads.max(1) / loads.mean(1)).mean())
        filled.append((costs[: packed.taken].sum(0) / (16 * 64 * BUDGETS)).max())
        step, lengths = packed.cell // 64, np.log(costs[: packed.taken, 0])
        rows = np.bincount(step)
        between = (np.bincount(step, lengths) / rows).var() - lengths.var() / rows.mean()  # beyond chance
        traces.append(between / lengths.var())
    assert np.mean(slowest) < 1.02
    assert np.mean(filled) > 0.95
    assert np.mean(traces) < 0.02


def test_sources_are_interleaved_alike_wherever_blocks_end() -> None:
    numbers = random.Random(SEED)
    for _ in range(30):
        weights = [numbers.random() ** 3 + 0.01 for _ in range(numbers.randint(2, 6))]
        shares = [int(weight / sum(weights) * UNIT) for weight in weights]
        shares[0] += UNIT - sum(shares)
        zeros = (0,) * len(shares)
        whole = interleaved(zeros, zeros, shares, 600).seats().tolist()
        given, owed, parts = zeros, zeros, list[int]()
        while len(parts) < 600:
            part = interleaved(given, owed, shares, min(numbers.randint(1, 90), 600 - len(parts)))
            parts += part.seats().tolist()
            given, owed = part.stop, part.owed
            assert sum(owed) == 0
            assert all(abs(credit) < 1.5 * UNIT for credit in owed)
        assert parts == whole
        assert all(
            math.isclose(whole.count(source), 600 * share / UNIT, abs_tol=1.5)
            for source, share in enumerate(shares)
        )


def test_plans_are_the_same_on_processors_without_vector_code() -> None:
    code = (
        "import numpy as np, zlib; from streamload.batching.packing import pack\n"
        "numbers = np.random.default_rng(1); costs = numbers.integers(1, 90, (4000, 2)); costs[::7] = 5\n"
        "packed = pack(costs, costs.sum(1) / 3, 8, 32, np.array([400, 500]), 9, is_end=False)\n"
        "print(packed.taken, zlib.crc32(packed.cell.tobytes()))"
    )
    features = "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
    printed = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled},
            capture_output=True, text=True, check=True,
        ).stdout
        for disabled in ("", features)
    ]  # fmt: skip
    assert printed[0] == printed[1] != ""
