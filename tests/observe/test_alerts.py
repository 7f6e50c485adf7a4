"""Alerts: each is raised and cleared in time, and none is raised in an hour in which nothing is wrong.

How it shows that it works: a model of a training (pipeline.py) runs on a clock of its own, in which something
is broken and mended; where the model has no such part, figures are given. No time passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from streamload.metrics.findings import SlowestRank
from streamload.observe.alerts import HOLD_SECONDS, RULES, WINDOW_SECONDS, Alert, Alerts
from streamload.observe.figures import Figures, History, Machine
from tests.support.pipeline import Rank, Speeds, changed, figures_of, run

UNIX = 1_700_000_000.0
QUIET = figures_of(seconds=10.0, batches_yielded=50, samples_yielded=5000, origin_requests=40, tier_misses=20)
WRONG: dict[str, Figures] = {
    "data wait": changed(QUIET, data_wait_seconds=4.0),
    "origin slow": changed(QUIET, data_wait_seconds=4.0, blocked_wait_seconds=3.5),
    "origin failing": changed(QUIET, origin_retries=12),
    "cache thrashing": changed(QUIET, range_reads=2000),
    "source starved": changed(
        QUIET, data_wait_seconds=4.0, blocked_wait_seconds=3.5, source_wait_seconds={"a": 9.0, "b": 0.5}
    ),
    "memory tight": changed(QUIET, memory_ratio=0.99),
    "straggler rank": changed(QUIET, slowest=SlowestRank(3, 0.5, "far-1")),
    "stalled": changed(QUIET, waiting_seconds=40.0),
}


def seconds_until(alerts: Alerts, figures: Figures, name: str, start: float) -> tuple[float, Alert]:
    """Look once a second at the same figures until this alert changes."""
    for second in range(1000):
        now = start + second
        for alert in alerts.look(figures, now, UNIX + now):
            if alert.name == name:
                return second, alert
    raise AssertionError(f"{name} hasn't changed in a thousand seconds")


@pytest.mark.parametrize("name", WRONG)
def test_each_alert_is_raised_and_cleared_after_half_a_minute(name: str) -> None:
    alerts = Alerts()
    raised_after, raised = seconds_until(alerts, WRONG[name], name, 100.0)
    assert raised.is_raised
    assert raised_after == (0 if name == "stalled" else HOLD_SECONDS)
    assert raised.since == UNIX + 100
    assert raised.message
    assert alerts.raised()[name] == raised.message
    cleared_after, cleared = seconds_until(alerts, QUIET, name, 500.0)
    assert (cleared_after, cleared.is_raised) == (HOLD_SECONDS, False)
    assert (cleared.since, cleared.message) == (raised.since, raised.message)
    assert name not in alerts.raised()


def test_every_rule_is_tried() -> None:
    assert [rule.name for rule in RULES] == list(WRONG)


@pytest.mark.parametrize("name", [name for name in WRONG if name != "stalled"])
def test_what_is_wrong_now_and_then_raises_nothing(name: str) -> None:
    alerts = Alerts()
    for second in range(3600):
        figures = WRONG[name] if second % 30 < 25 else QUIET
        assert not [one for one in alerts.look(figures, float(second), UNIX) if one.name == name]


def test_an_alert_stays_until_it_is_below_half_of_its_limit() -> None:
    alerts = Alerts()
    seconds_until(alerts, WRONG["data wait"], "data wait", 0.0)
    halfway = changed(QUIET, data_wait_seconds=1.5)
    assert not any(alerts.look(halfway, 100.0 + second, UNIX) for second in range(600))
    assert "data wait" in alerts.raised()


def test_a_calendar_that_jumps_changes_nothing_but_the_date() -> None:
    alerts = Alerts()
    for second in range(29):
        assert not alerts.look(WRONG["data wait"], float(second), UNIX + second * 10**6)
    assert not alerts.look(WRONG["data wait"], 29.5, 0.0)
    (alert,) = [one for one in alerts.look(WRONG["data wait"], 31.0, 1000.0) if one.name == "data wait"]
    assert alert.since == 969.0


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("origin slow", changed(WRONG["origin slow"], machine=Machine(is_local=True))),
        ("origin failing", changed(QUIET, origin_retries=2, origin_requests=2)),
        ("cache thrashing", changed(QUIET, shards_evicted=20, tier_misses=20)),
        ("cache thrashing", changed(QUIET, samples_yielded=0, range_reads=0)),
        ("source starved", changed(WRONG["source starved"], source_wait_seconds={"a": 9.0})),
        ("source starved", changed(WRONG["source starved"], source_wait_seconds={"a": 5.0, "b": 4.0})),
        ("memory tight", changed(QUIET, memory_ratio=0.95)),
        ("straggler rank", changed(WRONG["straggler rank"], data_wait_seconds=4.0)),
        ("stalled", changed(QUIET, still_seconds=300.0)),
    ],
)
def test_what_only_looks_wrong_raises_nothing(name: str, figures: Figures) -> None:
    alerts = Alerts()
    for second in range(120):
        assert not [one for one in alerts.look(figures, float(second), UNIX) if one.name == name]


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("origin failing", changed(QUIET, origin_outages=1)),
        ("cache thrashing", changed(QUIET, shards_evicted=40, tier_misses=20)),
        ("stalled", changed(QUIET, still_seconds=700.0)),
    ],
)
def test_what_is_wrong_in_another_way_is_found_too(name: str, figures: Figures) -> None:
    _, alert = seconds_until(Alerts(), figures, name, 0.0)
    assert alert.is_raised


def changes(
    rank: Rank, seconds: float, alerts: Alerts, history: History, at: Callable[[float], None]
) -> Iterator[tuple[float, Alert]]:
    """Let a rank train, and look every second; gives what changes, with the second."""
    began, next_look = rank.now, rank.now
    while rank.now < began + seconds:
        at(rank.now - began)
        rank.step(rank.take())
        if rank.now >= next_look:
            next_look = rank.now + 1.0
            sample = rank.sample()
            history.add(sample)
            figures = Figures.between(history.last(WINDOW_SECONDS, sample), sample, Machine(rank.workers))
            for alert in alerts.look(figures, rank.now, UNIX + rank.now):
                yield rank.now - began, alert


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_a_clean_hour_raises_nothing(seed: int) -> None:
    numbers = random.Random(seed)
    rank = Rank(Speeds(step=numbers.uniform(0.2, 0.6), jitter=0.4), seed)
    rank.speeds.origin = 0.7 * rank.speeds.step

    def hiccups(second: float) -> None:
        rank.speeds.origin = (4.0 if second % 600 < 8 else 0.7) * rank.speeds.step

    assert not list(changes(rank, 3600.0, Alerts(), History(600.0), hiccups))


@pytest.mark.parametrize("seed", range(5))
def test_a_server_at_a_tenth_raises_within_45_seconds_and_clears_within_60(seed: int) -> None:
    rank = Rank(Speeds(step=0.2, origin=0.1), seed)
    run([rank], 60.0)

    def throttle(second: float) -> None:
        rank.speeds.origin = 1.0 if 100 <= second < 300 else 0.1

    found = list(changes(rank, 600.0, Alerts(), History(600.0), throttle))
    slow = [(second, alert.is_raised) for second, alert in found if alert.name == "origin slow"]
    (raised, is_raised), (cleared, is_cleared) = slow[0], slow[1]
    assert (len(slow), is_raised, is_cleared) == (2, True, False)
    assert 130 <= raised <= 145 + rank.speeds.ahead * 0.2
    assert 330 <= cleared <= 360
    assert {alert.name for _, alert in found} == {"origin slow", "data wait"}
