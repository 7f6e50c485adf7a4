"""What a rank counts, publishes and tells while it trains, and what becomes of it when something goes wrong.

How it shows that it works: real loaders read from servers that are slow or stop; what they publish is read as
`streamload top` reads it, and compared with what the training loop got.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload import torch_internals
from streamload.loader import output
from streamload.loader.output import Outputs
from streamload.observe import alerts, observer, publishing, verdict
from streamload.observe.page import RunPage, as_dict, files, read_runs
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat

COUNTS = [24] * 4
URLS = "{00000..00003}.tar"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_shards(directory, COUNTS, seed=3)
    return directory


@pytest.fixture
def server(data: Path) -> Iterator[ShardServer]:
    with ShardServer(data) as server:
        yield server


@pytest.fixture(autouse=True)
def at_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "TICK_SECONDS", 0.0)


class PaddingTokenizer:
    """Ids of the letters of a caption, in eight places."""

    pad_token_id = 0

    def __call__(self, captions: list[str]) -> torch.Tensor:
        rows = [[ord(c) for c in caption[:8]] for caption in captions]
        return torch.tensor([row + [0] * (8 - len(row)) for row in rows])


def make(urls: Any, tmp_path: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 8, "num_workers": 0, "cache_dir": tmp_path / "cache", "cache_size": "1GB"}
    return flat.make_loader(urls, **defaults | options)


def shown(page: RunPage, stats: streamload.Snapshot) -> streamload.Snapshot:
    """The counters on a page; it has no waits by shard."""
    return dataclasses.replace(page.snapshot(), shard_wait_seconds=stats.shard_wait_seconds)


def settled(loader: streamload.Loader, root: Path) -> tuple[RunPage, streamload.Snapshot]:
    """The page and the counters, once threads that fill count no more in between."""
    while True:
        stats = loader.stats()
        loader.observer.tick()
        (page,) = read_runs([root])
        if shown(page, stats) == stats:
            return page, stats


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_publishes_what_it_counts_until_it_is_closed(
    workers: int, server: ShardServer, tmp_path: Path
) -> None:
    url = f"{server.url.replace('//', '//user:hunter2@')}/{URLS}?token=secret"
    with make(url, tmp_path, num_workers=workers, tokenizer=PaddingTokenizer(), with_keys=True) as loader:
        batches = [(images, texts, extra["__key__"]) for images, texts, extra in loader]
        page, stats = settled(loader, tmp_path / "cache")
    assert (read_runs([tmp_path / "cache"]), files(tmp_path / "cache")) == ([], [])
    assert (page.rank, page.world_size, page.pid, page.workers) == (0, 1, os.getpid(), workers)
    assert page.sources == ("0",)
    assert stats.batches_yielded == len(batches) == sum(stats.wait_buckets)
    assert shown(page, stats) == stats
    assert page.gauge("samples", "0") == sum(COUNTS)
    assert page.gauge("tier_limit_bytes", "disk") == 10**9
    assert page.gauge("source_share", "0") == 1.0
    ids = torch.cat([texts for _, texts, _ in batches])
    assert stats.text_tokens_real == int((ids != 0).sum())
    assert stats.text_tokens_padding == int((ids == 0).sum())
    text = json.dumps(as_dict(page))
    assert "secret" not in text
    assert "hunter2" not in text
    assert "http" not in text
    assert not any(key in text for _, _, keys in batches for key in keys)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_time_of_every_stage_is_counted(workers: int, server: ShardServer, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": PaddingTokenizer(), "batch_size": 16, "num_workers": workers}
    with make(f"{server.url}/{URLS}", tmp_path, **options) as loader:
        for _ in loader:
            ready = loader.stats()
            assert ready.ready_batches <= 2 * workers
        stats = loader.stats()
    stages = ("read", "decode", "resize", "tokenize", "collate", "step")
    assert all(getattr(stats, f"{stage}_seconds") > 0 for stage in stages), stats
    assert stats.hand_over_seconds > 0
    made = stats.decode_seconds + stats.resize_seconds + stats.tokenize_seconds + stats.collate_seconds
    assert made + stats.read_seconds <= stats.transform_seconds * 1.001
    assert stats.ready_batches == stats.ready_image_bytes == stats.ready_text_bytes == 0
    assert stats.blocked_wait_seconds <= stats.data_wait_seconds


def test_batches_that_are_ready_have_the_bytes_of_their_tensors(data: Path, tmp_path: Path) -> None:
    with make(f"{data}/{URLS}", tmp_path, num_workers=1, tokenizer=PaddingTokenizer()) as loader:
        batches = iter(loader)
        images, texts = next(batches)
        while loader.stats().ready_batches < 2:
            pass
        stats = loader.stats()
        assert stats.ready_image_bytes == 2 * images.nbytes
        assert stats.ready_text_bytes == 2 * texts.nbytes
        assert stats.ready_other_bytes == 0


def slow(image: Any) -> torch.Tensor:
    zlib.compress(os.urandom(1 << 18), 6)
    return torch.zeros(3, 2, 2)


def as_objects(sample: dict[str, Any]) -> dict[str, Any]:
    return {"numbers": [(place, str(place)) for place in range(1_000)]}


@pytest.mark.parametrize("limit", ["origin", "CPU", "hand-over", "training"])
@pytest.mark.sampled(2)
def test_a_real_run_is_judged_by_what_slows_it(
    limit: str, server: ShardServer, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "_FEWEST_SECONDS", 0.1)
    urls, options = f"{data}/{URLS}", {}
    if limit == "origin":
        server.misbehave("*", Fault(bytes_per_second=30_000))
        urls = f"{server.url}/{URLS}"
    elif limit == "CPU":
        options = {"preprocess": slow}
    elif limit == "hand-over":
        workers = streamload.Workers(map_sample=as_objects, collate=list_of, multiprocessing_context="fork")
        options = {"workers": workers, "num_workers": 1}
    else:
        options = {"num_workers": 1}
    with make(urls, tmp_path, **options) as loader:
        for _ in loader:
            if limit == "training":
                zlib.compress(os.urandom(3 << 20), 6)
        found = loader.verdict(600)
    if limit in ("origin", "CPU"):
        assert found.limit == limit, found
    assert found.limit in {limit, "unclear"}, found


def numbers_of(samples: list[Any]) -> dict[str, Any]:
    return {"numbers": [list(range(200_000)) for _ in samples]}


def counted(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": 1}


def test_all_of_next_that_is_not_the_step_is_waiting(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forming a batch takes 50 ms here, in which the worker has long made the next one."""
    form = Outputs.form

    def slow_form(*given: Any) -> Any:
        time.sleep(0.05)
        return form(*given)

    monkeypatch.setattr(Outputs, "form", slow_form)
    with make(f"{data}/{URLS}", tmp_path, num_workers=1) as loader:
        batches = len(list(loader))
        stats = loader.stats()
    assert stats.data_wait_seconds >= stats.hand_over_seconds >= 0.05 * batches
    assert sum(stats.wait_buckets[-12:]) == batches  # each waited more than 33 ms


def test_lists_of_python_numbers_are_not_walked_when_they_are_yielded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0
    isinstance_ = isinstance

    def counting(value: Any, kind: Any) -> bool:
        nonlocal looked_at
        looked_at += 1
        return isinstance_(value, kind)

    monkeypatch.setattr(output, "isinstance", counting, raising=False)
    workers = streamload.Workers(map_sample=counted, collate=numbers_of)
    with make(f"{data}/{URLS}", tmp_path, workers=workers) as loader:
        batches = list(loader)
        assert 0 < looked_at < 1000 * len(batches)
        with pytest.raises(streamload.errors.OptionError, match="with tensors"):
            loader.microbatches(batches[0])


@pytest.mark.parametrize("argument", ["preprocess=", "map_sample=", "collate=", "tokenizer="])
@pytest.mark.sampled(2)
def test_a_slow_function_of_the_user_is_named(
    argument: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "_FEWEST_SECONDS", 0.1)
    options: dict[str, Any] = {
        "preprocess=": {"preprocess": slow},
        "map_sample=": {"workers": streamload.Workers(map_sample=slow_sample)},
        "collate=": {"workers": streamload.Workers(map_sample=counted, collate=slow_batch)},
        "tokenizer=": {"tokenizer": slow_tokenizer},
    }[argument]
    with make(f"{data}/{URLS}", tmp_path, **options) as loader:
        for _ in loader:
            pass
        cause = loader.verdict(600)
    assert cause.limit == "CPU", cause
    assert f"most of it in your {argument}" in cause.evidence


def slow_sample(sample: dict[str, Any]) -> dict[str, Any]:
    zlib.compress(os.urandom(1 << 18), 6)
    return {"number": 1}


def slow_batch(samples: list[Any]) -> dict[str, Any]:
    zlib.compress(os.urandom(2 << 20), 6)
    return {"number": torch.ones(len(samples))}


def slow_tokenizer(captions: list[str]) -> torch.Tensor:
    zlib.compress(os.urandom(4 << 20), 6)
    return torch.zeros(len(captions), 8, dtype=torch.int64)


def test_the_shard_that_most_waits_were_for_is_named(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "_FEWEST_SECONDS", 0.1)
    server.misbehave("00002.tar", Fault(bytes_per_second=30_000))
    with make(f"{server.url}/{URLS}?token=secret", tmp_path, shuffle=0) as loader:
        for _ in loader:
            pass
        cause = loader.verdict(600)
        page = loader.observer.page()
    assert cause.limit in {"origin", "unclear"}, cause
    assert cause.limit == "unclear" or "of the wait was for 00002.tar" in cause.evidence
    assert page is not None
    figures = re.compile(r"[\d.]+ ?%|[\d.]+ [KMG]?B/s")  # the page is of a moment later
    assert figures.sub("", page.run_verdict) == figures.sub("", str(cause))
    assert "secret" not in page.run_verdict
    assert "http" not in page.run_verdict


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


@pytest.mark.deep
@pytest.mark.parametrize(("epoch", "limit"), [(0, "origin"), (1, "shuffle")])
def test_a_cold_run_that_a_wide_window_holds_back_says_so(
    epoch: int, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first pass samples come as their bytes do; a later one, on a new machine, fills its window."""
    monkeypatch.setattr(verdict, "_FEWEST_SECONDS", 0.1)
    write_shards(tmp_path / "data", [300] * 4, options=ShardOptions((1, 1), (0, 0)))
    workers = streamload.Workers(map_sample=only_key)
    options: dict[str, Any] = {"workers": workers, "shuffle": 4_000, "batch_size": 32, "num_workers": 0}
    with (
        ShardServer(tmp_path / "data", bytes_per_second=8e5) as server,
        make(f"{server.url}/{URLS}", tmp_path, **options) as loader,
    ):
        loader.set_epoch(epoch)
        batches = list(loader)
        cause, stats = loader.verdict(600), loader.stats()
    assert len(batches) == 4 * 300 // 32
    assert cause.limit in {limit, "unclear"}, cause
    assert (stats.shuffle_wait_seconds > stats.bytes_wait_seconds) == (limit == "shuffle")
    assert (cause.limit == "shuffle") == ("shuffle= holds back" in str(cause))


def list_of(samples: list[Any]) -> dict[str, Any]:
    return {"all": [sample["numbers"] for sample in samples]}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stall_is_told_by_the_training_that_waits_and_its_end_too(
    workers: int, server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [rule for rule in alerts.RULES if rule.name == "stalled"]
    monkeypatch.setattr(alerts, "RULES", [dataclasses.replace(rules[0], limit=0.2)])
    monkeypatch.setattr(alerts, "HOLD_SECONDS", 0.0)
    monkeypatch.setattr(torch_internals, "_LOOK_SECONDS", 0.02)
    told: list[streamload.Alert] = []
    pages = []

    def go_on(alert: streamload.Alert) -> None:
        told.append(alert)
        assert threading.current_thread() is threading.main_thread()
        pages.extend(read_runs([tmp_path / "cache"]))
        server.go_on()

    server.stop_after(0.5)
    with make(f"{server.url}/{URLS}", tmp_path, num_workers=workers, shuffle=0) as loader:
        loader.on_alert(go_on)
        samples = sum(len(images) for images, _ in loader)
    assert samples == sum(COUNTS)
    assert [(alert.name, alert.is_raised) for alert in told[:2]] == [("stalled", True), ("stalled", False)]
    assert pages[0].alerts == {"stalled": told[0].message}
    assert (pages[0].gauge("waiting_seconds") or 0) > 0
    assert pages[0].still_seconds >= 0.2


def test_a_function_that_fails_is_logged_once_and_others_are_called(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    always = dataclasses.replace(alerts.RULES[0], value=lambda figures: 1.0, hold_seconds=0.0)
    never = dataclasses.replace(always, name="other", value=lambda figures: len(told) % 2)
    monkeypatch.setattr(alerts, "RULES", [always, never])
    monkeypatch.setattr(alerts, "HOLD_SECONDS", 0.0)
    monkeypatch.setattr(
        alerts, "RULES", [dataclasses.replace(rule, hold_seconds=0.0) for rule in alerts.RULES]
    )
    told: list[str] = []

    def fails(alert: streamload.Alert) -> None:
        raise KeyError("mine")

    with make(f"{data}/{URLS}", tmp_path) as loader:
        loader.on_alert(fails)
        loader.on_alert(lambda alert: told.append(alert.name))
        assert sum(len(images) for images, _ in loader) == sum(COUNTS)
    assert len(told) > 1
    assert len([one for one in caplog.records if "on_alert" in one.message]) == 1
    with pytest.raises(streamload.errors.OptionError, match="on_alert"):
        loader.on_alert(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("least", "lines"), [(0.0, 1), (1.1, 0)])
def test_an_epoch_that_waited_has_one_line_in_the_log_and_another_none(
    least: float,
    lines: int,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(observer, "_SHORTEST_EPOCH_SECONDS", 0.0)
    monkeypatch.setattr(observer, "LITTLE", least)
    caplog.set_level(logging.WARNING)
    with make(f"{data}/{URLS}", tmp_path) as loader:
        for _ in loader:
            pass
    said = [record.message for record in caplog.records if "for data:" in record.message]
    assert len(said) == lines
    assert all(line.startswith("epoch 0: the training waited ") for line in said)


def test_long_epochs_have_a_line_now_and_then(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observer, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(observer, "LITTLE", 0.0)
    with make(f"{data}/{URLS}", tmp_path) as loader:
        batches = sum(1 for _ in loader)
    said = [record.message for record in caplog.records if record.message.startswith("the training waited")]
    assert len(said) >= batches - 1  # the first batch only begins the time that is judged


def test_counters_never_go_back_when_a_worker_is_killed_and_replaced(data: Path, tmp_path: Path) -> None:
    with make(f"{data}/{URLS}", tmp_path, num_workers=1, num_samples=960) as loader:
        batches = iter(loader)
        next(batches)
        before = loader.stats()
        worker = loader._pool.batches._iterator._workers[0]  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"killed|exited"):
            for _ in batches:
                pass
        for _ in zip(range(4), loader, strict=False):
            pass
        done = loader.stats().since(before)
        loader.observer.tick()
        (page,) = read_runs([tmp_path / "cache"])
    assert done.samples_yielded > 0
    numbers = [value for value in done.as_dict().values() if isinstance(value, int | float)]
    assert all(value >= 0 for value in numbers)
    assert page.counters["samples_yielded"] == before.samples_yielded + done.samples_yielded


def test_sources_with_hostile_names_are_shown_and_stats_keep_their_names(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_SELDOM_SECONDS", 0.0)
    names = ['a"}\n# HELP x', "https://user:pw@host/?sig=abc", "x" * 300]
    sources = [streamload.Source(f"{data}/0000{place}.tar", name=name) for place, name in enumerate(names)]
    with make(sources, tmp_path, num_batches=12, batch_size=9) as loader:
        for _ in loader:
            pass
        loader.observer.reported = [{"name": names[2], "loss": 2.5, "alignment": None}]
        loader.observer.tick()
        (page,) = read_runs([tmp_path / "cache"])
        assert list(loader.stats().source_samples) == names
    assert len(set(page.sources)) == 3
    assert all(len(name) <= 64 and "\n" not in name and "pw" not in name for name in page.sources)
    assert [page.gauge("samples", name) for name in page.sources] == [36, 36, 36]
    assert page.gauge("source_loss", page.sources[2]) == 2.5
    assert [page.gauge("source_passes", name) for name in page.sources] == [1, 1, 1]


def test_a_loop_that_is_left_does_not_seem_to_stand_still(data: Path, tmp_path: Path) -> None:
    with make(f"{data}/{URLS}", tmp_path) as loader:
        batches = iter(loader)
        next(batches)
        loader.observer.tick()
        (page,) = read_runs([tmp_path / "cache"])
        assert page.still_seconds > 0
        del batches
        loader.observer.tick()
        (page,) = read_runs([tmp_path / "cache"])
        assert page.still_seconds == 0


def test_a_verdict_over_another_time_is_refused(data: Path, tmp_path: Path) -> None:
    with make(f"{data}/{URLS}", tmp_path) as loader:
        assert loader.verdict().limit == "unclear"
        for seconds in (0, -1.0, 601, float("nan")):
            with pytest.raises(streamload.errors.OptionError, match="600"):
                loader.verdict(seconds)


def test_what_was_reported_of_a_source_is_published_once_it_was_decided_on(
    data: Path, tmp_path: Path
) -> None:
    class Same(streamload.mixing.Policy):
        every = 2

        def decide(self, summary: Any, memory: Any) -> streamload.mixing.Decided:
            return streamload.mixing.Decided(None)

    sources = [streamload.Source(f"{data}/0000{place}.tar", name=name) for place, name in enumerate("ab")]
    with make(sources, tmp_path, num_batches=6, mixing=Same()) as loader:
        for _ in loader:
            loader.report(2.5)
        loader.observer.tick()
        (page,) = read_runs([tmp_path / "cache"])
    assert [page.gauge("source_loss", name) for name in "ab"] == [2.5, 2.5]
    assert page.gauge("source_alignment", "a") is None


def test_what_was_reported_is_published_by_source_without_a_policy_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.mixing.reports._EVERY", 3)
    sources = [streamload.Source(f"{data}/0000{place}.tar", name=name) for place, name in enumerate("ab")]
    with make(sources, tmp_path, num_batches=7) as loader:
        for _ in loader:
            source = loader.info.source.float()
            loader.report(loss=source + 2, alignment=torch.full(source.shape, torch.nan))
        before = loader.state_dict()
        loader.observer.tick()
        (page,) = read_runs([tmp_path / "cache"])
        assert [page.gauge("source_loss", name) for name in "ab"] == [2.0, 3.0]
        assert page.gauge("source_alignment", "a") is None
        assert "steering" not in before
