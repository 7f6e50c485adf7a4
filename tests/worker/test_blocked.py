"""The policy for a batch that waits for bytes, action by action; without a clock, a tier or a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamload.worker import blocked as module
from streamload.worker.blocked import (
    REPORT_SECONDS,
    WARN_SECONDS,
    Action,
    Blocked,
    Wait,
    decide,
    poll_seconds,
)
from tests.support.order_oracle import Case, Given

PLAIN = Blocked((7, 3), 0.5)


def test_a_batch_that_waits_for_a_moment_needs_no_action() -> None:
    assert decide(PLAIN) == []


def test_nothing_is_done_where_no_shard_blocks() -> None:
    assert decide(Blocked((), 1e6, is_stuck=True, is_refused=True)) == []


@pytest.mark.parametrize(
    ("blocked", "action"),
    [
        (replace(PLAIN, is_stuck=True), Action.USE_FALLBACK),
        (replace(PLAIN, is_refused=True), Action.FIND_ROOM),
        (replace(PLAIN, seconds=REPORT_SECONDS + 0.1), Action.REPORT),
        (replace(PLAIN, seconds=WARN_SECONDS, is_reported=True), Action.WARN),
    ],
)
def test_each_fact_has_its_action(blocked: Blocked, action: Action) -> None:
    assert decide(blocked) == [action]


def test_storage_is_tried_before_anybody_is_told() -> None:
    everything = Blocked((1,), WARN_SECONDS, is_stuck=True, is_refused=True)
    assert decide(everything) == list(Action)


def test_a_shard_is_reported_once() -> None:
    assert decide(replace(PLAIN, seconds=REPORT_SECONDS + 0.1, is_reported=True)) == []


def test_a_warning_is_logged_once_in_each_period() -> None:
    found = []
    warnings = 0
    for seconds in range(100):
        now = replace(PLAIN, seconds=float(seconds), is_reported=True, warnings=warnings)
        if Action.WARN in decide(now):
            warnings += 1
            found.append(seconds)
    assert found == [30, 60, 90]


def test_the_sleep_grows_with_the_wait_within_bounds() -> None:
    least, most = module._POLL_SECONDS
    sleeps = [poll_seconds(replace(PLAIN, seconds=seconds)) for seconds in (0.0, 0.1, 1.0, 2.0, 100.0)]
    assert sleeps == [least, least, 0.02, 0.04, most]


def held_back(opens_slowly: bool, epoch: int, window: int, batch: int) -> list[bool]:
    """Of each look at 4 shards that arrive evenly, one sample of each at a time, what it says of the wait."""
    entries = [list(range(400)) for _ in range(4)]
    case = Case(3, entries, groups=1, lanes=4, window=window, epoch=epoch, opens_slowly=opens_slowly)
    order, wait, begins, looks = case.order(0, passes=1), Wait(), 0, []
    for count in range(400):
        arrivals = Given([(own[:count], False) for own in entries])
        while order.advance(arrivals).shards.size:
            pass
        if order.position - begins >= batch:
            begins, wait = order.position // batch * batch, Wait()
        looks.append(wait.is_held_back(0, order.read, order.released))
    return looks


def test_a_window_that_fills_holds_samples_back() -> None:
    looks = held_back(False, 1, window=10_000, batch=32)
    assert sum(looks) > 0.9 * len(looks)


@pytest.mark.parametrize(
    ("opens_slowly", "epoch", "window"), [(True, 0, 10_000), (False, 1, 0), (False, 1, 100)]
)
def test_a_window_that_opens_as_samples_arrive_or_is_full_holds_none_back(
    opens_slowly: bool, epoch: int, window: int
) -> None:
    looks = held_back(opens_slowly, epoch, window, batch=32)
    assert sum(looks[window // 4 :]) == 0
