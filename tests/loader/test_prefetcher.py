"""The next batch is sent to the device before it is asked for; nobody else can tell."""

from __future__ import annotations

import collections
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload.device import Direct
from streamload.loader import loader as module
from streamload.testing.resume import Layout, assert_resumes_exactly
from streamload.testing.shards import write_shards
from tests.support import flat


class Prefetcher(Direct):
    """A feed that takes batches before they are asked for, as those to devices with streams do."""

    runs_ahead = True
    on_its_way = 0
    """Batches that were sent and not handed out."""

    def send(self, values: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        ready = super().send(values)
        self.on_its_way += 1

        def hand_out() -> dict[str, Any]:
            self.on_its_way -= 1
            return ready()

        return hand_out


def feeds(kind: type[Direct]) -> Callable[..., Direct]:
    """In place of `feed_for`, whatever the device."""
    return lambda device, statistics, **_: kind(device, statistics)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(module, "feed_for", feeds(Prefetcher))
    return [str(path) for path in write_shards(tmp_path / "data", [40, 30, 50], seed=47)]


def make(paths: list[str], directory: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 5, "num_workers": 2, "with_keys": True, "output": "dict"}
    return flat.make_loader(
        paths, cache_dir=directory, cache_size="1GB", **{**defaults, "map_sample": small, **options}
    )


def small(sample: dict[str, Any]) -> dict[str, Any]:
    return {"size": len(sample["jpg"])}


def go_through(epoch: Iterator[Any], got: list[list[str]]) -> None:
    """As a training does whose steps take their time."""
    for batch in epoch:
        time.sleep(0.01)
        got.append(batch["__key__"])


def fails_at_the_70th(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"].endswith("29") and "00001" in sample["__url__"]:
        raise ZeroDivisionError("the 70th")
    return small(sample)


def test_the_next_batch_is_on_its_way_while_the_training_works(paths: list[str], tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    with make(paths, tmp_path / "cache") as loader:
        while not any_ahead(loader):
            assert time.monotonic() < deadline, "no batch was sent before it was asked for"


def any_ahead(loader: streamload.Loader) -> bool:
    """Whether in an epoch a batch was on its way behind the one that was handed out."""
    found = False
    for _ in loader:
        time.sleep(0.01)  # as a step takes its time
        found = found or loader._feed.on_its_way > 0
    return found


def test_an_epoch_has_each_sample_once_and_a_state_is_exact(paths: list[str], tmp_path: Path) -> None:
    def make_one(**options: Any) -> streamload.Loader:
        cache = options.pop("cache_dir")
        return make(paths, cache, **options)

    cuts = assert_resumes_exactly(
        make_one,
        tmp_path / "runs",
        global_batch=10,
        first=Layout(ranks=1, workers=2),
        layouts=[Layout(ranks=1, workers=2), Layout(ranks=2, workers=1)],
        cuts=range(0, 12, 5),
    )
    assert cuts == 3


def test_what_is_wrong_with_a_batch_is_said_in_its_turn(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until_it_fails() -> list[list[str]]:
        got: list[list[str]] = []
        options = {"shuffle": 0, "map_sample": fails_at_the_70th, "num_workers": 1}
        with make(paths, tmp_path / "cache", **options) as loader:
            with pytest.raises(ZeroDivisionError, match="the 70th"):
                go_through(iter(loader), got)
            assert loader.stats().batches_yielded == len(got)
        return got

    ahead = until_it_fails()
    monkeypatch.setattr(module, "feed_for", feeds(Direct))
    assert ahead == until_it_fails()
    assert len(ahead) == 13


@pytest.mark.parametrize("feed", [Direct, Prefetcher])
@pytest.mark.sampled(1)
def test_a_profiler_sees_each_batch_that_is_taken_and_the_batches_are_the_same(
    feed: type[Direct], paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "feed_for", feeds(feed))
    alone: list[list[str]] = []
    profiled: list[list[str]] = []
    with make(paths, tmp_path / "cache") as loader:
        go_through(iter(loader), alone)
        loader.set_epoch(0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            go_through(iter(loader), profiled)
    assert profiled == alone
    noted = [event for event in seen.events() if event.name.startswith("enumerate(DataLoader)#")]
    assert len(noted) >= len(profiled) > 0


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def seen_ahead(epoch: Any, batches: int) -> Any:
    """Take so many batches, the next one at leisure; what was found behind the last."""
    for _ in range(batches - 1):
        next(epoch)
    time.sleep(0.2)
    next(epoch)
    return epoch._pending


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("map_sample", "batches"), [(small, 24), (fails_at_the_70th, 13)])
def test_an_end_and_an_error_seen_ahead_keep_no_epoch_that_is_dropped(
    map_sample: Callable[[dict[str, Any]], dict[str, Any]], batches: int, paths: list[str], tmp_path: Path
) -> None:
    """Their tracebacks kept the epoch, so that the next one was refused until a collection."""
    deadline = time.monotonic() + 60
    with make(paths, tmp_path / "cache", shuffle=0, num_workers=1, map_sample=map_sample) as loader:
        while seen_ahead(iter(loader), batches) is None:
            assert time.monotonic() < deadline, "nothing was found behind the last batch"
        next(iter(loader))


def test_a_dropped_epoch_takes_what_was_on_its_way_along(paths: list[str], tmp_path: Path) -> None:
    with make(paths, tmp_path / "cache", shuffle=0, num_workers=1) as loader:
        for taken in (1, 3, 2):
            loader.set_epoch(0)
            epoch = iter(loader)
            keys = [key for _ in range(taken) for key in next(epoch)["__key__"]]
            state = loader.state_dict()
            del epoch
        assert len(set(keys)) == 10
        loader.load_state_dict(state)
        rest = [key for batch in loader for key in batch["__key__"]]
        assert (len(rest), set(rest) & set(keys)) == (110, set())


def test_a_killed_worker_is_told_and_the_loader_goes_on(paths: list[str], tmp_path: Path) -> None:
    def kill_one_and_go_on(epoch: Any) -> None:
        os.kill(epoch._batches._batches._workers[0].pid, signal.SIGKILL)
        collections.deque(epoch, maxlen=0)

    with make(paths, tmp_path / "cache", num_batches=1000) as loader:
        epoch = iter(loader)
        next(epoch)
        with pytest.raises(
            RuntimeError, match="DataLoader worker"
        ):  # torch says it wherever one is just then
            kill_one_and_go_on(epoch)
        loader.close()
        assert len(next(iter(loader))["__key__"]) == 5
