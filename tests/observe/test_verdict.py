"""The verdict names what was planted, or says that it is unclear, but never something else.

How it shows that it works: a model of a training and its loader (pipeline.py) is given one slow part, with
speeds, workers and jitter drawn at random; what it counts is judged. Sentences are checked by what they name.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from streamload.metrics import COUNTERS, WIDTH
from streamload.metrics.findings import SlowestRank
from streamload.observe.figures import CounterSample, Figures, History, Machine
from streamload.observe.verdict import ONLY_DATA, Limit, Verdict, judge
from tests.support.pipeline import Rank, Speeds, changed, figures_of, run

SEEDS = range(20)
PARTS: dict[Limit, tuple[str, ...]] = {
    "origin": ("origin",),
    "disk": ("read",),
    "CPU": ("decode",),
    "hand-over": ("pass_on", "receive"),
    "device copy": ("copy",),
    "training": ("step",),
}


def planted(limit: Limit, seed: int) -> tuple[Rank, float]:
    """A rank whose slow part alone allows for fewer batches than all others; and how much fewer."""
    numbers = random.Random(f"{limit} {seed}")
    workers, step = numbers.choice([2, 4, 8]), numbers.uniform(0.02, 0.5)
    cores = numbers.choice([workers // 2, workers, 2 * workers])
    speeds = Speeds(step=step, jitter=numbers.uniform(0.02, 0.3))
    room = numbers.uniform(0.1, 0.5) * step  # what each part but the slow one takes at most
    speeds.origin = numbers.uniform(0.1, 1.0) * room
    speeds.copy, speeds.receive = numbers.uniform(0.0, 0.01) * step, numbers.uniform(0.0, 0.01) * step
    for part in ("read", "decode", "pass_on"):
        share = numbers.uniform(0.1, 0.3)
        setattr(speeds, part, share * room * workers / max(1.0, workers / cores))
    factor = numbers.uniform(1.3, 5.0)
    (part, *_) = PARTS[limit] if limit != "hand-over" else (numbers.choice(PARTS["hand-over"]),)
    if part in ("read", "pass_on"):
        setattr(speeds, part, factor * step * workers)
    elif part == "decode":
        speeds.decode = factor * step * min(workers, cores)
    elif part == "step":
        factor = 1.0
    else:
        setattr(speeds, part, factor * step)
    return Rank(speeds, seed, workers, cores), factor


def verdict_of(rank: Rank, first: CounterSample, slowest: SlowestRank | None = None) -> Verdict:
    figures = Figures.between(first, rank.sample(), Machine(rank.workers, rank.cores))
    return judge(changed(figures, slowest=slowest))


@pytest.mark.parametrize("limit", PARTS)
def test_the_slow_part_is_named(limit: Limit) -> None:
    named = []
    for seed in SEEDS:
        rank, factor = planted(limit, seed)
        run([rank], 30 * rank.speeds.step * factor)
        first = rank.sample()
        run([rank], 200 * rank.speeds.step * factor)
        verdict = verdict_of(rank, first)
        named.append(verdict.limit)
        if limit != "training":
            assert verdict.wait > 0.1
            # If data were free, the training would do its own steps alone.
            free = rank.speeds.step * np.exp(rank.speeds.jitter**2 / 2)
            taken = (rank.now - first.at_ns / 1e9) / (
                rank.row["batches_yielded"] - first.row[list(COUNTERS).index("batches_yielded")]
            )
            assert verdict.gain == pytest.approx(taken / free, rel=0.1)
    assert named.count(limit) >= 0.95 * len(named), named
    assert set(named) <= {limit, "unclear"}, named


def test_a_straggler_is_named_by_the_ranks_that_wait_for_it() -> None:
    named: dict[str, list[str]] = {"others": [], "straggler": []}
    for seed in SEEDS:
        numbers = random.Random(seed)
        step = numbers.uniform(0.05, 0.5)
        ranks = [Rank(Speeds(step=step, origin=0.1 * step), seed + place) for place in range(3)]
        ranks[2].speeds.origin = numbers.uniform(1.2, 4.0) * step
        run(ranks, 100 * step)
        firsts = [rank.sample() for rank in ranks]
        run(ranks, 200 * step)
        waits = [verdict_of(rank, first).wait for rank, first in zip(ranks, firsts, strict=True)]
        for place in (0, 1):
            named["others"].append(verdict_of(ranks[place], firsts[place], SlowestRank(2, waits[2])).limit)
        named["straggler"].append(verdict_of(ranks[2], firsts[2]).limit)
    assert set(named["others"]) == {"another rank"}
    assert set(named["straggler"]) == {"origin"}


def test_a_mixture_of_slow_parts_is_one_of_them_or_unclear() -> None:
    for seed in range(40):
        numbers = random.Random(seed)
        speeds = Speeds(step=0.05, jitter=0.2)
        parts = numbers.sample(["origin", "decode", "read"], 2)
        for part in parts:
            setattr(speeds, part, numbers.uniform(0.06, 0.12) * (1 if part == "origin" else 4))
        rank = Rank(speeds, seed)
        run([rank], 3)
        first = rank.sample()
        run([rank], 20)
        names = {"origin": "origin", "decode": "CPU", "read": "disk"}
        assert verdict_of(rank, first).limit in {*(names[part] for part in parts), "unclear"}


def test_a_rank_without_workers_makes_its_batches_while_the_training_waits() -> None:
    stages = {"bytes": 0.1, "read": 0.1, "decode": 5.0, "resize": 2.0}
    figures = figures_of(
        seconds=20,
        machine=Machine(0),
        data_wait_seconds=8,
        blocked_wait_seconds=0.1,
        stages=stages,
        batches_yielded=100,
    )
    verdict = judge(figures)
    assert verdict.limit == "CPU"
    assert "the training's process spent 88% of the wait making batches, most of it on decode" in str(verdict)
    assert "More workers" in verdict.advice


@pytest.mark.parametrize(
    ("given", "limit", "says"),
    [
        (
            {
                "blocked_wait_seconds": 18.0,
                "origin_bytes": 38 * 60 * 10**6,
                "stages": {"bytes": 200.0},
                "origin_requests": 100,
            },
            "origin",
            "waited 31% of the last 60 s for data: the origin gives 38.0 MB/s where 55.1 MB/s are needed",
        ),
        (
            {
                "blocked_wait_seconds": 18.0,
                "origin_bytes": 10**9,
                "origin_requests": 100,
                "origin_retries": 40,
            },
            "origin",
            "40 requests were retried). See the log",
        ),
        ({"blocked_wait_seconds": 18.0, "shared_bytes": 10**9}, "origin", "the shared cache gives 16.7 MB/s"),
        (
            {"blocked_wait_seconds": 18.0, "shared_bytes": 10**8, "origin_bytes": 10**9},
            "origin",
            "the origin gives 16.7 MB/s",
        ),
        ({"blocked_wait_seconds": 18.0}, "origin", "bytes don't arrive"),
        (
            {"blocked_wait_seconds": 58.0, "data_wait_seconds": 59.9, "origin_bytes": 60 * 10**6},
            "origin",
            "the origin gives 1.0 MB/s (",
        ),
        (
            {"blocked_wait_seconds": 18.0, "stages": {"bytes": 60.0, "shuffle": 80.0}},
            "shuffle",
            "the window of shuffle= holds back most samples that arrive (workers waited 58% of their time",
        ),
        (
            {"blocked_wait_seconds": 18.0, "stages": {"bytes": 80.0, "shuffle": 60.0}, "origin_bytes": 10**9},
            "origin",
            "(workers waited 58% of their time for bytes)",
        ),
        (
            {"blocked_wait_seconds": 18.0, "machine": Machine(4, 8, is_local=True)},
            "disk",
            "local shards are read too slowly",
        ),
        ({"stages": {"decode": 150.0, "resize": 80.0}}, "CPU", "making batches, most of it on decode"),
        ({"stages": {"read": 150.0, "decode": 30.0}}, "disk", "reading from the cache"),
        (
            {"blocked_wait_seconds": 18.0, "origin_bytes": 10**9, "shard_waits": {3: 12.4, 4: 5.0}},
            "origin",
            "67% of the wait was for shard 3)",
        ),
        (
            {"stages": {"resize": 200.0}, "machine": Machine(functions={"resize": "preprocess="})},
            "CPU",
            "making batches, most of it in your preprocess=.",
        ),
        ({"feature_compute_seconds": 14.0}, "features", "75% of that to compute features in this process"),
        ({"stages": {"hand-over": 200.0}}, "hand-over", "passing batches on"),
        ({"rank_hand_over_seconds": 15.0}, "hand-over", "receive batches in this process"),
        ({"stages": {"device": 12.0, "decode": 100.0}}, "device copy", "on their way to the device"),
        ({"stages": {"decode": 20.0}}, "unclear", "no single cause"),
        ({"blocked_wait_seconds": 7.0, "stages": {"decode": 200.0}}, "unclear", "no single cause"),
        ({}, "unclear", "had nothing to do"),
        ({"data_wait_seconds": 1.0}, "training", "data is never late"),
        (
            {"data_wait_seconds": 1.0, "feature_compute_seconds": 40.0},
            "training",
            "features were computed 67%",
        ),
        (
            {"data_wait_seconds": 1.0, "slowest": SlowestRank(7, 0.4)},
            "another rank",
            "rank 7 waits 40% of the time",
        ),
        ({"slowest": SlowestRank(7, 0.4), "stages": {"decode": 230.0}}, "CPU", "making batches"),
        (
            {"blocked_wait_seconds": 18.6, "shared_wait_seconds": 30.0},
            "origin",
            "fills waited 30 s for other nodes' fills",
        ),
        ({"batches_yielded": 2}, "unclear", "too few batches"),
        ({"batches_yielded": 0}, "unclear", "waited 31% of the last 60 s for data: no batch was taken yet"),
        (
            {"seconds": 0.25, "data_wait_seconds": 0.1},
            "unclear",
            "waited 40% of the last 0.25 s for data: too",
        ),
        (
            {"seconds": 0.0, "data_wait_seconds": 0.0, "batches_yielded": 0},
            "unclear",
            "no batch was taken yet. ",
        ),
        (
            {"batches_yielded": 0, "waiting_seconds": 60.0, "blocked_wait_seconds": 18.6},
            "origin",
            "bytes don't arrive",
        ),
    ],
)
def test_a_verdict_says_by_which_figures_it_was_reached(
    given: dict[str, object], limit: Limit, says: str
) -> None:
    plain = {"seconds": 60.0, "machine": Machine(4, 8), "data_wait_seconds": 18.6, "batches_yielded": 100}
    verdict = judge(figures_of(**plain | given))
    assert verdict.limit == limit
    assert says in str(verdict)
    assert verdict.gain == pytest.approx(1 / (1 - verdict.wait))


@pytest.mark.parametrize(
    "given",
    [
        {"stages": {"decode": 200.0}},
        {"stages": {"resize": 200.0}},
        {"blocked_wait_seconds": 18.0, "origin_bytes": 10**8},
    ],
    ids=["decode", "resize", "bytes"],
)
@pytest.mark.parametrize("unprepared", [0, 400])
@pytest.mark.parametrize("prepare", ["", "raw-256", "auto"])
def test_prepared_images_are_advised_only_where_they_are_not_asked_for(
    given: dict[str, Any], prepare: str, unprepared: int
) -> None:
    figures = figures_of(
        machine=Machine(4, 8, prepare=prepare),
        data_wait_seconds=18.6,
        batches_yielded=100,
        samples_yielded=1600,
        samples_unprepared=unprepared,
        **given,
    )
    advice = judge(figures).advice
    assert ("Images(prepare=…)" in advice) == (not prepare)
    is_ahead = prepare == "raw-256" and (unprepared > 0 or "blocked_wait_seconds" in given)
    assert ("streamload warm URLS --prepare raw-256" in advice) == is_ahead
    assert ("25% of the images weren't prepared" in advice) == (is_ahead and "stages" in given)
    assert advice


@pytest.mark.parametrize("function", ["", "preprocess="])
@pytest.mark.parametrize("prepare", ["", "raw-256", "auto"])
def test_compiling_is_advised_only_where_a_transform_runs_as_given(prepare: str, function: str) -> None:
    figures = figures_of(
        machine=Machine(4, 8, prepare=prepare, functions={"resize": function} if function else {}),
        data_wait_seconds=18.6,
        batches_yielded=100,
        stages={"resize": 200.0},
    )
    advice = judge(figures).advice
    assert ("A transform that is compiled costs less" in advice) == bool(function)
    assert ("Images(prepare=…)" in advice) == (not prepare)
    assert "More workers" in advice


@pytest.mark.parametrize(
    ("prepare", "origin_bytes", "limit"), [("raw-256", 10**8, "CPU"), ("raw-256", 0, "disk"), ("", 0, "disk")]
)
def test_the_disk_is_not_blamed_where_local_shards_are_being_prepared(
    prepare: str, origin_bytes: int, limit: Limit
) -> None:
    figures = figures_of(
        machine=Machine(4, 8, is_local=True, prepare=prepare),
        data_wait_seconds=18.6,
        batches_yielded=100,
        blocked_wait_seconds=18.0,
        origin_bytes=origin_bytes,
    )
    verdict = judge(figures)
    assert verdict.limit == limit
    assert ("streamload warm URLS --prepare raw-256" in verdict.advice) == (limit == "CPU")


def test_a_training_that_only_waits_would_gain_any_factor() -> None:
    verdict = judge(figures_of(seconds=60.0, data_wait_seconds=61.0, batches_yielded=0, waiting_seconds=60.0))
    assert (verdict.wait, verdict.gain) == (1.0, float("inf"))


@pytest.mark.parametrize(("batches", "is_only_data"), [(10, False), (1000, True)])
def test_a_loop_that_does_nothing_between_batches_is_told_that_data_is_its_only_work(
    batches: int, is_only_data: bool
) -> None:
    counted = {"data_wait_seconds": 59.7, "batches_yielded": batches, "origin_bytes": 10**9}
    verdict = judge(figures_of(seconds=60.0, **counted))
    assert (ONLY_DATA in str(verdict)) == is_only_data


@pytest.mark.parametrize(("seconds", "says"), [(60.0, "60 s"), (300.0, "5 min"), (7200.0, "120 min")])
def test_an_interval_is_named_as_one_would(seconds: float, says: str) -> None:
    assert f"of the last {says} for data" in str(judge(figures_of(seconds=seconds, batches_yielded=9)))


def sample(at_seconds: float) -> CounterSample:
    zeros = np.zeros(WIDTH, np.int64)
    return CounterSample(int(at_seconds * 1e9), zeros, zeros, np.zeros((1, 2), np.int64))


def test_a_history_gives_the_latest_sample_that_is_old_enough_and_forgets_the_rest() -> None:
    history = History(100.0)
    now = sample(0)
    assert history.last(10.0, now) is now
    for second in range(1000):
        history.add(now := sample(second))
    assert history.last(10.0, now).at_ns == 989 * 10**9
    assert history.last(10.5, now).at_ns == 988 * 10**9
    assert history.last(10**6, now).at_ns == 849 * 10**9


def test_batches_that_are_ready_in_host_memory_are_a_hint_and_no_limit() -> None:
    figures = figures_of(
        seconds=60, batches_yielded=100, data_wait_seconds=1.0, machine=Machine(is_on_host=True)
    )
    verdict = judge(figures)
    assert verdict.limit == "training"
    assert 'device="auto"' in verdict.advice
    elsewhere = changed(figures, machine=Machine())
    assert 'device="auto"' not in judge(elsewhere).advice
    late = changed(figures, data_wait_seconds=30.0, blocked_wait_seconds=29.0, origin_bytes=10**9)
    assert judge(late) == judge(changed(late, machine=Machine()))
