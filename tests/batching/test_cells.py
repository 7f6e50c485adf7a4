"""Blocks and cells: each row once, alike for all, and with less padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.batching.cells import cells, dealt, ordered
from streamload.errors import OptionError
from streamload.order.steps import Blocks


@given(batch=st.integers(1, 50), steps=st.integers(1, 70), origin=st.integers(0, 99), growing=st.booleans())
def test_blocks_follow_one_another_without_gaps(batch: int, steps: int, origin: int, growing: bool) -> None:
    blocks = Blocks(batch, steps, origin, growing)
    position, sizes = origin, []
    while len(sizes) < 12:
        block = blocks.at(position)
        assert block.begin == position
        assert all(blocks.at(at) == block for at in range(block.begin, block.end, batch))
        sizes.append((block.end - block.begin) // batch)
        position = block.end
    assert sizes[-1] == steps
    if growing:
        assert sizes[: min(5, len(sizes))] == [min(size, steps) for size in (1, 1, 2, 4, 8)] or steps < 16
        assert all(one <= max(1, sum(sizes[:place])) for place, one in enumerate(sizes))
    else:
        assert set(sizes) == {steps}


def test_blocks_of_nothing_are_refused() -> None:
    with pytest.raises(OptionError):
        Blocks(8, 0)


def web(rows: int, seed: int = 0) -> np.ndarray:
    """Lengths as they are on the web: half alternative texts, half captions by a model, and images."""
    draw = np.random.default_rng(seed)
    short, long = np.exp(draw.normal(2.6, 0.6, rows)), np.exp(draw.normal(4.6, 0.4, rows))
    texts = np.where(draw.random(rows) < 0.5, np.clip(short, 4, 77), np.clip(long, 8, 256))
    images = np.clip(np.exp(draw.normal(5.8, 0.8, rows)), 4, 1024)
    return np.stack([texts.astype(int), images.astype(int)], axis=1).astype(float)


@given(
    steps=st.integers(1, 40),
    size=st.integers(1, 60),
    kind=st.sampled_from(["both", "text", "image", "none"]),
    seed=st.integers(0, 99),
)
def test_each_row_comes_once(steps: int, size: int, kind: str, seed: int) -> None:
    costs = web(steps * size, seed) * {"both": (1, 1), "text": (1, 0), "image": (0, 1), "none": (0, 0)}[kind]
    found = cells(costs, steps, seed)
    assert found.shape == (steps, size)
    assert sorted(found.ravel().tolist()) == list(range(steps * size))
    again = cells(costs, steps, seed)
    assert (again == found).all()
    if kind == "text":
        spread = np.sort([np.ptp(costs[rows, 0]) for rows in found])
        bounds = np.sort(costs[:, 0]).reshape(steps, size)
        assert spread.sum() == np.ptp(bounds, axis=1).sum()  # no division has less
    one = cells(costs[:size], 1, seed)[0]
    assert (one == ordered(costs[:size])).all()


def test_cells_come_in_another_order_for_each_key() -> None:
    costs = web(512)
    orders = {tuple(cells(costs, 16, key)[:, 0].tolist()) for key in range(20)}
    assert len(orders) == 20
    sets = [{frozenset(rows.tolist()) for rows in cells(costs, 16, key)} for key in range(3)]
    assert sets[0] == sets[1] == sets[2]


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any), seed=st.integers(0, 9))
def test_rows_are_dealt_once_each(sizes: list[int], seed: int) -> None:
    costs = web(sum(sizes), seed)
    parts = [dealt(costs, np.array(sizes), own) for own in range(len(sizes))]
    assert [len(places) for places, _ in parts] == sizes
    assert sorted(np.concatenate([places for places, _ in parts]).tolist()) == list(range(sum(sizes)))
    for places, most in parts:
        assert (np.diff(places) > 0).all()
        assert (most >= costs[places]).all()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_all_ranks_have_the_same_bounds_and_about_the_same_costs(ranks: int) -> None:
    costs = web(512)
    costs = costs[ordered(costs)]
    parts = [dealt(costs, np.full(ranks, 512 // ranks), own) for own in range(ranks)]
    for places, most in parts:
        assert (most == parts[0][1]).all()
        assert abs(costs[places].sum() / (costs.sum() / ranks) - 1) < 0.05


def test_blocks_leave_less_padding() -> None:
    costs, rows, ranks = web(65_536), 512, 8

    def rate(steps: int) -> float:
        """The useful share of padded tokens, by what the slowest rank has to do."""
        done = 0.0
        for begin in range(0, len(costs), rows * steps):
            own = costs[begin : begin + rows * steps]
            for cell in cells(own, steps, begin) if steps else [np.arange(rows)]:
                by_rank = own[cell].reshape(-1, ranks, 2)
                done += by_rank.max(axis=0).sum(axis=1).max() * rows
        return float(costs.sum() / done)

    unsorted = np.mean([
        costs[at : at + rows].sum() / (costs[at : at + rows].max(axis=0).sum() * rows)
        for at in range(0, len(costs), rows)
    ])  # fmt: skip
    assert rate(32) > 1.9 * unsorted
    assert rate(8) > 1.6 * unsorted
