"""What the benchmark of the shuffle measures, counted one by one; docs/results/order.md has its results."""

import itertools
import json
import random
import statistics

import numpy as np
import pytest

from benchmarks import arrival, shuffle_report
from benchmarks.arrival import Data
from benchmarks.following import epoch_of
from benchmarks.markdown import filled
from benchmarks.order_measures import Epoch, measures
from benchmarks.turns import RESULTS
from streamload.order.plan import OrderOptions


def drawn(rng, sizes, steps, batch):
    """An epoch that gives some samples twice and others never."""
    samples = [(shard, number) for shard, size in enumerate(sizes) for number in range(size)]
    order = rng.sample(samples, steps * batch - 2)
    order += order[:2]
    pairs = np.array(order).reshape(steps, batch, 2)
    return Epoch(pairs[:, :, 0], pairs[:, :, 1])


def batches_of(epoch, ranks=1):
    steps, batch = epoch.shards.shape
    every = list(zip(epoch.shards.ravel().tolist(), epoch.samples.ravel().tolist(), strict=True))
    size = batch // ranks
    return [every[at : at + size] for at in range(0, steps * batch, size)]


def alike(batch):
    pairs = list(itertools.combinations(batch, 2))
    return sum(one[0] == other[0] for one, other in pairs) / len(pairs)


def steps_of(epoch):
    """In which step each sample comes; of one that comes twice, the last."""
    return {sample: step for step, batch in enumerate(batches_of(epoch)) for sample in batch}


@pytest.mark.parametrize("number", range(8))
def test_every_measure_is_what_counting_one_by_one_gives(number):
    rng = random.Random(number)
    sizes = [rng.randint(5, 12) for _ in range(6)]
    steps, batch, ranks = 9, 4, 2
    first, later = (drawn(rng, sizes, steps, batch) for _ in range(2))
    found = measures(first, later, sizes, ranks)
    wanted = {}
    for prefix, parts in (("", 1), ("rank_", ranks)):
        one, other = ([alike(batch) for batch in batches_of(epoch, parts)] for epoch in (first, later))
        wanted[f"{prefix}pairs"] = statistics.mean(other)
        wanted[f"first_epoch_{prefix}pairs"] = statistics.mean(one)
        wanted[f"worst_{prefix}pairs"] = max(one + other)
        wanted[f"{prefix}shards_in_1"] = statistics.mean(
            len({shard for shard, _ in batch}) for batch in batches_of(later, parts)
        )
    wanted["first_pairs"] = alike(batches_of(first)[0])
    wanted["shards_in_8"] = len({shard for batch in batches_of(later)[:8] for shard, _ in batch})
    gaps, spans, spreads = [], [], []
    for shard in range(len(sizes)):
        visits = [
            (step, number)
            for step, batch in enumerate(batches_of(later))
            for s, number in batch
            if s == shard
        ]
        gaps += [abs(two[1] - one[1]) for one, two in itertools.pairwise(visits)]
        if len(visits) > 1:
            when = [step / steps for step, _ in visits]
            spans.append(max(when) - min(when))
            spreads.append(12**0.5 * statistics.pstdev(when))
    wanted |= {
        "gap": statistics.median(gaps),
        "span": statistics.median(spans),
        "spread": statistics.median(spreads),
    }
    places = [steps_of(epoch) for epoch in (first, later)]
    both = list(itertools.combinations(places[0].keys() & places[1].keys(), 2))
    met = [[place[one] == place[other] for one, other in both] for place in places]
    chance = sum(met[0]) * sum(met[1]) / len(both)
    wanted["again"] = sum(a and b for a, b in zip(*met, strict=True)) / chance
    for prefix, epoch in (("", later), ("first_epoch_", first)):
        every = [sample for batch in batches_of(epoch) for sample in batch]
        in_shard = [number / sizes[shard] for shard, number in every]
        wanted[f"{prefix}place_correlation"] = statistics.correlation(range(len(every)), in_shard)
    seen = len(places[1])
    wanted |= {"unseen": 1 - seen / sum(sizes), "doubled": (steps * batch - seen) / sum(sizes)}
    assert found == pytest.approx(wanted, abs=1e-5)


def test_an_epoch_that_is_followed_gives_each_sample_of_the_groups_at_most_once():
    sizes = [300, 500, 100, 700, 400]
    for groups in (1, 2):
        epoch, opened = epoch_of(OrderOptions(1, groups, 2, 200, hints=np.array(sizes)), sizes, 1, 16)
        given = list(zip(epoch.shards.ravel().tolist(), epoch.samples.ravel().tolist(), strict=True))
        assert len(set(given)) == len(given) == sum(sizes) // 16 * 16
        assert all(number < sizes[shard] for shard, number in given)
        assert 2 <= opened <= 5


def test_the_page_shows_the_results_that_are_committed():
    shuffled, arrived = shuffle_report.results()
    page = shuffle_report.PAGE.read_text()
    tables = shuffle_report.page_tables(shuffled, arrived)
    assert filled(page, tables) == page
    assert all(f"<!-- {name} -->" in page for name in tables)
    assert shuffle_report.CHART.read_text() == shuffle_report.trained_chart(arrived)


@pytest.mark.parametrize(
    ("data", "order", "least", "most"),
    [
        (Data(20, 100, 64), arrival.REMOTE, 0.85, 1.0),
        (Data(16, 300, 64), arrival.REMOTE, 0.85, 1.0),
        (Data(20, 100, 64), arrival.LOCAL, 0.0, 0.2),
    ],
)
def test_a_remote_first_pass_is_trained_as_it_arrives(data, order, least, most):
    assert least <= arrival.trained(data.options(order, 0), data)["trained"] <= most


def test_the_first_passes_that_were_measured_reach_what_is_promised():
    targets = json.loads((RESULTS / "arrival.json").read_text())["targets"]
    assert len(targets) > 20
    assert [target["claim"] for target in targets if not target["met"]] == []
