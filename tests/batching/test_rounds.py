"""Rows of equal number and like cost: each row once, alike for all, whatever rows cost."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from streamload.batching.copies import Origins
from streamload.batching.rounds import alike, dealt_alike


def documents(rows: int, seed: int = 0) -> np.ndarray:
    """Tokens and patches of documents: heavy tails, up to 30 images."""
    draw = np.random.default_rng(seed)
    images = np.clip(draw.lognormal(5.4, 0.6, (rows, 30)), 64, 1024)
    patches = (images * (np.arange(30) < draw.geometric(0.4, rows)[:, None])).sum(axis=1)
    texts = np.maximum(8, draw.lognormal(6.0, 1.2, rows))
    return np.floor(np.stack([texts + patches, 4 * patches], axis=1))


def captions(rows: int, seed: int = 0) -> np.ndarray:
    """Tokens and patches of captions, half of them long, and their images."""
    draw = np.random.default_rng(seed)
    texts = np.where(draw.random(rows) < 0.5, draw.lognormal(2.5, 0.5, rows), draw.lognormal(4.5, 0.4, rows))
    patches = np.clip(draw.lognormal(5.9, 0.6, rows), 64, 1024)
    return np.floor(np.stack([np.clip(texts, 5, 256), patches], axis=1))


def one_source(rows: int) -> Origins:
    return Origins(np.zeros(rows, np.int64), np.arange(rows))


def of_ranks(costs: np.ndarray, rows: np.ndarray, ranks: int) -> np.ndarray:
    """What the rows of each rank cost in a step, [ranks, 2]."""
    sizes = np.full(ranks, len(rows) // ranks)
    return np.array([costs[rows[dealt_alike(costs[rows], sizes, rank)]].sum(axis=0) for rank in range(ranks)])


HOSTILE = st.sampled_from([0.0, 1.0, 1.0, 2.0, 7.5, 1e-300, 5e-324, 1e9, 1e18, 1e300])


@given(data=st.data(), steps=st.integers(1, 20), size=st.integers(1, 70), turns=st.integers(0, 2**63))
def test_each_row_comes_once_whatever_rows_cost(
    data: st.DataObject, steps: int, size: int, turns: int
) -> None:
    drawn = data.draw(st.lists(st.tuples(HOSTILE, HOSTILE), min_size=1, max_size=40))
    costs = np.resize(np.array(drawn), (steps * size, 2))
    planned = alike(costs, steps, turns, one_source(steps * size))
    assert planned.shape == (steps, size)
    assert sorted(planned.ravel().tolist()) == list(range(steps * size))
    assert (alike(costs, steps, turns, one_source(steps * size)) == planned).all()
    sizes = np.array(data.draw(st.lists(st.integers(0, size), min_size=1, max_size=8)))
    sizes = np.diff(np.sort(np.concatenate([[0], sizes, [size]])))
    dealt = [dealt_alike(costs[planned[0]], sizes, own) for own in range(len(sizes))]
    assert [len(places) for places in dealt] == sizes.tolist()
    assert sorted(np.concatenate(dealt).tolist()) == list(range(size))


@pytest.mark.parametrize(
    ("kind", "ranks", "rows", "most"),
    [
        (documents, 64, 64, 1.03), (documents, 8, 64, 1.01), (documents, 2, 64, 1.01),
        (captions, 64, 64, 1.005), (captions, 8, 64, 1.01), (captions, 64, 8, 1.02),
    ],
)  # fmt: skip
def test_ranks_cost_about_the_same_and_lengths_leave_no_trace_in_steps(kind, ranks, rows, most) -> None:
    worst, traces = [], []
    for seed in range(3 if ranks * rows < 4096 else 1):
        costs = kind(16 * ranks * rows, seed)
        planned = alike(costs, 16, seed, one_source(len(costs)))
        scaled = costs / costs.mean(axis=0)
        for step in planned:
            loads = of_ranks(scaled, step, ranks).sum(axis=1)
            worst.append(loads.max() / loads.mean())
        logs = np.log(costs[:, 0])[planned]
        traces.append((logs.mean(axis=1).var() - logs.var() / logs.shape[1]) / logs.var())
    assert np.mean(worst) <= most
    assert abs(np.mean(traces)) <= 0.02


@pytest.mark.parametrize("sizes", [[9, 10, 8], [10, 9, 8], [0, 9, 9, 9], [1, 26], [27], [8, 0, 9, 10]])
def test_ranks_of_unequal_parts_get_each_row_once(sizes: list[int]) -> None:
    costs = documents(27)
    dealt = [dealt_alike(costs, np.array(sizes), rank) for rank in range(len(sizes))]
    assert [len(places) for places in dealt] == sizes
    assert sorted(np.concatenate(dealt).tolist()) == list(range(27))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_a_ranks_rows_cost_about_the_same(ranks: int) -> None:
    """Microbatches of a quarter of 64 rows."""
    costs = captions(16 * ranks * 64)
    step = alike(costs, 16, 7, one_source(len(costs)))[3]
    rows = step[dealt_alike(costs[step], np.full(ranks, 64), 0)]
    parts = costs[rows].sum(axis=1).reshape(4, 16).sum(axis=1)
    assert parts.max() / parts.mean() < 1.15


@given(
    steps=st.integers(2, 16), size=st.integers(2, 40), few=st.integers(1, 12), seed=st.integers(0, 999)
)  # fmt: skip
def test_rows_of_one_sample_are_in_different_steps(steps: int, size: int, few: int, seed: int) -> None:
    """A small source has half of the rows, in passes; no sample has more rows than there are steps."""
    draw = np.random.default_rng(seed)
    rows = steps * size
    few = min(few, rows // 2)
    small = min(rows // 2, few * steps)
    samples = np.concatenate([np.arange(small) % few, few + np.arange(rows - small)])
    order = draw.permutation(rows)
    of_sample = captions(rows, seed)
    costs, origins = of_sample[samples[order]], Origins((samples[order] >= few).astype(int), samples[order])
    planned = alike(costs, steps, seed, origins)
    assert sorted(planned.ravel().tolist()) == list(range(rows))
    if few * 4 <= size:
        assert all(len(set(samples[order][step].tolist())) == size for step in planned)


PLAN = """
import sys, xxhash
from tests.batching.test_rounds import alike, captions, documents, one_source
for kind in (captions, documents):
    print(xxhash.xxh3_64_hexdigest(alike(kind(4096, 3), 16, 5, one_source(4096)).tobytes()))
"""


def test_plans_do_not_depend_on_the_instructions_of_the_processor() -> None:
    environ = {**os.environ, "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512_SKX AVX2 FMA3"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAN], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        xxhash.xxh3_64_hexdigest(alike(kind(4096, 3), 16, 5, one_source(4096)).tobytes())
        for kind in (captions, documents)
    ]
