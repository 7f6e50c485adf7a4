"""The results of an executor, on their way to its daemon."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from streamload.cache.shard import shard_of
from streamload.daemon.executor import Results, TaskResult
from streamload.daemon.status import Failures

ONE, OTHER = (TaskResult(shard_of(f"http://localhost:1/{name}.tar", None)) for name in ("one", "other"))


@pytest.fixture
def slow_signal() -> Iterator[int]:
    """A signal whose handler takes longer than the waits below."""
    before = signal.signal(signal.SIGUSR2, lambda number, frame: time.sleep(0.3))
    yield signal.SIGUSR2
    signal.signal(signal.SIGUSR2, before)


def test_results_come_once_and_in_order() -> None:
    results = Results()
    results.put(ONE)
    results.put(OTHER)
    assert results.drain(60) == [ONE, OTHER]
    assert results.drain(0) == []


def test_a_result_ends_the_wait() -> None:
    results = Results()
    thread = threading.Timer(0.05, results.put, [ONE])
    thread.start()
    assert results.drain(60) == [ONE]
    thread.join()


def test_a_signal_during_the_wait_does_not_make_it_endless(slow_signal: int) -> None:
    """That of a queue.SimpleQueue never ended if the deadline had passed when the handler returned."""
    thread = threading.Timer(0.05, os.kill, [os.getpid(), slow_signal])
    thread.start()
    assert Results().drain(0.2) == []
    thread.join()


def test_without_retries_a_failure_stays() -> None:
    failures = Failures(float("inf"))
    assert failures.note("digest", "name", "why") == (1, float("inf"))
    assert failures.waiting() == {"digest"}
    assert not failures.by_key()["digest"].is_refused
