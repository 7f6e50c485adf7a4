"""Notices of preemption: from metadata services that are real, if not the clouds' own, and from signals."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from typing import Any

import pytest

from streamload.daemon import metadata as clouds
from streamload.daemon.metadata import Cloud
from streamload.daemon.preemption import Notice, NoticeWatch, on_signals
from tests.support.metadata import MetadataServer

TOLD = {"aws": 90.0, "gcp": 30.0, "azure": 25.0}
SLACK_SECONDS = 10.0


def wait_for(notice: Notice) -> None:
    while not notice.is_given:  # the test's time limit ends it
        time.sleep(0.01)


def told(cloud: Cloud, server: MetadataServer) -> Notice:
    notice = Notice()
    with closing(NoticeWatch(notice, cloud, bases=server.bases, poll_seconds=0.02)):
        wait_for(notice)
    return notice


def check_time_left(notice: Notice, cloud: str) -> None:
    assert notice.by == cloud
    assert TOLD[cloud] - SLACK_SECONDS < notice.seconds_left() <= TOLD[cloud] + 1


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("asked", ["itself", "auto"])
def test_a_clouds_notice_is_heeded_with_the_time_that_it_leaves(cloud: Any, asked: str) -> None:
    with MetadataServer(cloud) as server:
        server.take_away(TOLD[cloud])
        check_time_left(told(cloud if asked == "itself" else "auto", server), cloud)


@pytest.mark.parametrize("cloud", ["aws", "azure"])
@pytest.mark.parametrize("skew", [-600.0, 600.0])
def test_a_clock_that_is_minutes_off_doesnt_change_the_time_left(cloud: Any, skew: float) -> None:
    with MetadataServer(cloud, skew_seconds=skew) as server:
        server.take_away(TOLD[cloud])
        check_time_left(told(cloud, server), cloud)


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("answer", [(500, b""), (200, b"<html>"), (200, b"{}"), (302, b""), (200, b"[[]]")])
def test_an_answer_that_isnt_understood_is_no_notice_and_it_is_asked_again(cloud: Any, answer: Any) -> None:
    with MetadataServer(cloud, first=[answer]) as server:
        server.take_away(TOLD[cloud])
        check_time_left(told(cloud, server), cloud)
        assert len(server.asked) >= 2


def test_azure_is_known_while_it_takes_its_time_for_the_first_answer_about_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clouds, "_TIMEOUT_SECONDS", 0.2)
    with MetadataServer("azure", enabling_seconds=1.0) as server:
        server.take_away(TOLD["azure"])
        check_time_left(told("auto", server), "azure")


def test_a_machine_of_azures_whose_name_isnt_given_asks_for_it_again() -> None:
    with MetadataServer("azure") as server:
        notice = Notice()
        with closing(NoticeWatch(notice, "azure", bases=server.bases, poll_seconds=0.02)):
            while not server.asked:
                time.sleep(0.01)
            server.take_away(TOLD["azure"])
            server.first = [(404, b"")] * 3
            wait_for(notice)
        check_time_left(notice, "azure")


def test_a_token_that_has_expired_is_renewed() -> None:
    with MetadataServer("aws") as server:
        notice = Notice()
        with closing(NoticeWatch(notice, "aws", bases=server.bases, poll_seconds=0.02)):
            while len(server.asked) < 3:
                time.sleep(0.01)
            server.forget_tokens()
            server.take_away(90)
            wait_for(notice)


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure", "auto"])
def test_without_a_notice_nothing_is_said(cloud: Any) -> None:
    with MetadataServer("gcp" if cloud == "auto" else cloud) as server:
        notice = Notice()
        with closing(NoticeWatch(notice, cloud, bases=server.bases, poll_seconds=0.01)):
            while len(server.asked) < 5:
                time.sleep(0.01)
        assert not notice.is_given
        assert notice.seconds_left() == float("inf")


def test_where_no_cloud_answers_nobody_is_asked_any_more() -> None:
    notice = Notice()
    with MetadataServer("none") as server:
        watch = NoticeWatch(notice, "auto", bases=server.bases, poll_seconds=0.01)
        watch.join(30)
        assert not watch.is_alive()
        watch.close()
        assert len(server.asked) <= 3
    assert not notice.is_given


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_notice_and_a_second_one_ends_the_grace(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    notice = Notice()
    with on_signals(notice, 30.0):
        os.kill(os.getpid(), number)
        wait_for(notice)
        assert notice.by == number.name
        assert 20 < notice.seconds_left() <= 30
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_signal_behind_a_clouds_notice_is_the_first_one() -> None:
    notice = Notice()
    notice.give("gcp", 30)
    with on_signals(notice, 600.0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert notice.by == "gcp"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_the_first_notice_counts() -> None:
    now = [100.0]
    notice = Notice(clock=lambda: now[0])
    notice.give("aws", 120)
    notice.give("SIGTERM", 5)
    now[0] += 20
    assert (notice.by, notice.seconds_left()) == ("aws", 100)
    now[0] += 200
    assert notice.seconds_left() == 0
