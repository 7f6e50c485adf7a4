"""Rows of a small source in a block: no sample twice in a step, shares within bounds, little padding."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.batching.cells import cells
from streamload.batching.copies import Origins, apart
from streamload.order.steps import portion
from tests.batching.test_cells import web

UNIT = 1 << 32


def block(steps: int, size: int, sources: list[tuple[int, int]], seed: int) -> tuple[np.ndarray, Origins]:
    """A block as the order of a run has it: sources of so many samples, by weight, pass after pass.

    Returns:
        float64[rows, 2], what each row costs, and where it is from.
    """
    draw = np.random.default_rng(seed)
    total = sum(weight for _, weight in sources)
    shares = [weight * UNIT // total for _, weight in sources]
    shares[0] += UNIT - sum(shares)
    zeros = (0,) * len(sources)
    part = portion(zeros, zeros, tuple(shares), steps * size)
    seats = part.seats()
    samples, costs = np.empty(len(seats), np.int64), np.empty((len(seats), 2))
    for source, ((count, _), rows) in enumerate(zip(sources, part.take, strict=True)):
        start = int(draw.integers(count))  # within a pass
        passes = [draw.permutation(count) for _ in range(rows // count + 2)]
        own = np.concatenate(passes)[start : start + rows]
        samples[seats == source] = own + (source << 40)
        costs[seats == source] = web(count, seed + source)[own]
    return costs, Origins(seats, samples)


def repeats(origins: Origins, rows: np.ndarray) -> int:
    return len(rows) - len(set(origins.samples[rows].tolist()))


@settings(max_examples=80)
@given(
    steps=st.integers(2, 24),
    size=st.integers(1, 40),
    sources=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 9)), min_size=1, max_size=4),
    seed=st.integers(0, 999),
)
def test_rows_of_a_sample_are_spread_and_sources_keep_their_shares(
    steps: int, size: int, sources: list[tuple[int, int]], seed: int
) -> None:
    costs, origins = block(steps, size, [*sources, (10_000, 3)], seed)
    order = np.argsort(costs[:, 0], kind="stable")
    cut = apart(order, steps, origins)
    assert cut.shape == (steps, size)
    assert sorted(cut.ravel().tolist()) == list(range(steps * size))
    assert (cut == apart(order, steps, origins)).all()
    counts = Counter(origins.samples.tolist())
    for rows in cut:
        of_step = Counter(origins.samples[rows].tolist())
        assert all(rows_of_it <= -(-counts[sample] // steps) for sample, rows_of_it in of_step.items())
        assert all(of_step[sample] >= many // steps for sample, many in counts.items())
    for source in range(len(sources) + 1):
        of_source = origins.sources == source
        if len(set(origins.samples[of_source].tolist())) == of_source.sum():
            continue
        share = of_source.sum() / steps
        of_steps = [int(of_source[rows].sum()) for rows in cut]
        assert min(of_steps) > share / 2 - 1
        assert max(of_steps) < 1.5 * share + 1


@settings(max_examples=30)
@given(steps=st.integers(1, 20), size=st.integers(1, 40), seed=st.integers(0, 999))
def test_sources_without_repeats_are_cut_as_sorted(steps: int, size: int, seed: int) -> None:
    costs, origins = block(steps, size, [(1000, 2), (5000, 3)], seed)
    origins = Origins(origins.sources, np.random.default_rng(seed).permutation(steps * size))
    order = np.argsort(costs[:, 0], kind="stable")
    assert (apart(order, steps, origins) == order.reshape(steps, size)).all()
    assert (cells(costs, steps, seed, origins) == cells(costs, steps, seed)).all()


def test_without_copies_rows_of_a_step_are_a_stretch_that_begins_where_the_last_one_ended() -> None:
    """One sample with two rows, side by side in the middle: only the second moves, to the next step."""
    samples = np.arange(12)
    samples[5] = 4
    cut = apart(np.arange(12), 3, Origins(np.array([0] * 4 + [1] * 2 + [0] * 6), samples))
    assert [sorted(rows.tolist()) for rows in cut] == [[0, 1, 2, 3], [4, 6, 7, 8], [5, 9, 10, 11]]


def least_padded(lengths: np.ndarray, samples: np.ndarray, steps: int) -> float:
    """The least that any steps without two rows of a sample cost, padded to their longest rows.

    Of n steps, the one with the shortest longest row has at least the longest row that isn't among the rows
    of n - 1 steps: these have at most so many rows, and of each sample at most n - 1.
    """
    size = len(lengths) // steps
    longest = np.sort(lengths)[::-1][::size]
    often = Counter(samples.tolist())
    rows = np.array([often[sample] for sample in samples.tolist()])
    return float(
        sum(
            max(longest[step], max(lengths[rows > step], default=0)) * size
            for step in range(steps)
        )
    )  # fmt: skip


@pytest.mark.parametrize("steps", [16, 64])
@pytest.mark.parametrize("count", [50, 100, 200, 400])
def test_steps_are_padded_about_as_little_as_any_without_repeats(steps: int, count: int) -> None:
    """The small source has a quarter of a batch of 64."""
    costs, origins = block(steps, 64, [(count, 1), (1_000_000, 3)], count)
    costs[:, 1] = 0
    planned = cells(costs, steps, 7, origins)
    assert not any(repeats(origins, rows) for rows in planned)
    padded = sum(costs[rows, 0].max() * 64 for rows in planned)
    assert padded < 1.06 * least_padded(costs[:, 0], origins.samples, steps)


def test_the_copies_of_a_small_source_and_its_swing_without_this() -> None:
    """Sorting alone puts up to eleven rows of one sample into a step, and from none to half of its rows."""
    costs, origins = block(64, 64, [(100, 1), (1_000_000, 3)], 0)
    for planned, has_repeats in ((cells(costs, 64, 7), True), (cells(costs, 64, 7, origins), False)):
        of_steps = [int((origins.sources[rows] == 0).sum()) for rows in planned]
        assert any(repeats(origins, rows) for rows in planned) == has_repeats
        assert all(8 <= rows <= 24 for rows in of_steps) == (not has_repeats)


@pytest.mark.deep
def test_any_small_blocks_keep_what_is_promised() -> None:
    for steps, size, count, weight in itertools.product((2, 3, 7), (1, 2, 5, 16), (1, 2, 3, 11), (1, 4)):
        for seed in range(10):
            costs, origins = block(steps, size, [(count, weight), (7, 2), (1000, 3)], seed)
            cut = apart(np.argsort(costs[:, 0], kind="stable"), steps, origins)
            counts = Counter(origins.samples.tolist())
            for rows in cut:
                of_step = Counter(origins.samples[rows].tolist())
                assert all(
                    many // steps <= of_step[sample] <= -(-many // steps) for sample, many in counts.items()
                )
