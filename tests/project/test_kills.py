"""Processes that are killed on purpose: what they were doing is known, and what they said comes back."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.kills import Child, ChildFailed, Moment, Stage, kill_loop


def in_steps(stage: Stage) -> str:
    for name in ("one", "two", "three"):
        stage.enter(name)
        time.sleep(0.05)
    return "done"


def test_a_kill_hits_the_stage_that_it_is_aimed_at() -> None:
    with Child(lambda stage: [stage.enter("first"), stage.enter("second"), time.sleep(60)]) as child:
        assert child.stage.wait_for("second", 30)
        assert child.kill() == "second"
        assert child.status == -9
        assert child.kill() is None


def test_a_result_and_an_error_come_back() -> None:
    with Child(lambda stage: {"pid": os.getpid()}) as child:
        assert child.finish(30) == {"pid": child.pid}
    with Child(lambda stage: 1 / 0) as child, pytest.raises(ChildFailed, match="ZeroDivisionError"):
        child.finish(30)


def test_a_child_that_takes_too_long_is_killed_and_says_where_it_was() -> None:
    with Child(lambda stage: [stage.enter("asleep"), time.sleep(60)]) as child:
        child.stage.wait_for("asleep", 30)
        with pytest.raises(ChildFailed, match="asleep"):
            child.finish(0.0)


def test_a_stopped_child_goes_on_where_it_was(tmp_path: Path) -> None:
    def count(stage: Stage) -> None:
        for number in range(10**9):
            stage.enter(str(number))

    with Child(count) as child:
        child.stage.wait_for("1", 30)
        at = child.stop()
        time.sleep(0.01)
        assert str(child.stage) == at
        child.go_on()
        while str(child.stage) == at:
            time.sleep(0.001)


def test_a_kill_loop_tells_what_it_hit_and_lets_the_last_one_finish(tmp_path: Path) -> None:
    starts = tmp_path / "starts"

    def work(stage: Stage) -> str:
        with starts.open("a") as file:
            file.write("x")
        return in_steps(stage)

    moments = [Moment("one"), Moment("three"), Moment("nowhere"), Moment("", 0.0)]
    hits, result = kill_loop(work, moments)
    assert result == "done"
    assert [hit.stage for hit in hits[:3]] == ["one", "three", None]
    assert hits[3].stage in {"", "one"}
    assert len(starts.read_text()) >= 4


def test_a_child_that_fails_by_itself_ends_the_loop() -> None:
    with pytest.raises(ChildFailed, match="ZeroDivisionError"):
        kill_loop(lambda stage: 1 / 0, [Moment("", 5.0)])


def test_children_leave_nothing_behind(no_leaks) -> None:
    with no_leaks():
        kill_loop(in_steps, [Moment("two")])
