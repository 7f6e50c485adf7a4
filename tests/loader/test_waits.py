"""The time that a training waits is counted by shard, over batches, and the slowest one is named.

How it shows that it works: a server gives one shard of several slowly, so that no batch waits for long and
all of them together do; the counting itself is compared with sums that were made by hand.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import streamload
from streamload.loader import checks
from streamload.loader.checks import ShardWaits
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards

SECOND = 10**9


@pytest.mark.parametrize("workers", [0, 2])
def test_one_slow_shard_is_named_in_the_stats_and_now_and_then_in_the_log(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks, "_SLOW_SHARD_SECONDS", 0.1)
    write_shards(tmp_path / "data", [16] * 6, seed=3)
    with ShardServer(tmp_path / "data") as server:
        server.misbehave("00002.tar", Fault(bytes_per_second=20_000))
        with streamload.make_loader(
            f"{server.url}/{{00000..00005}}.tar?token=secret",
            batch_size=2,
            num_workers=workers,
            cache_dir=tmp_path / "cache",
            cache_size="1GB",
        ) as loader:
            batches = sum(1 for _ in loader)
            stats = loader.stats()
    worst, seconds = next(iter(stats.shard_wait_seconds.items()))
    assert worst == f"{server.url}/00002.tar"
    assert 0 < sum(stats.shard_wait_seconds.values()) <= stats.data_wait_seconds
    assert f"{seconds:.2f} s of it for {worst}" in str(stats)
    said = [record.message for record in caplog.records if "slow" in record.message]
    assert said
    assert len(said) < batches / 4
    assert all(worst in line and "secret" not in line for line in said)


def test_a_run_that_waits_for_nothing_names_no_shard(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "data", [8], seed=3)
    with streamload.make_loader(
        str(path), batch_size=4, num_workers=0, cache_dir=tmp_path / "cache", cache_size="1GB"
    ) as loader:
        before = loader.stats()
        assert before.shard_wait_seconds == {}
        assert "of it for" not in str(before)


def test_a_shard_has_no_more_of_a_wait_than_the_training_waited() -> None:
    waited = ShardWaits("shard-{}".format)
    waited.add([(1, 3 * SECOND), (2, SECOND)], 8 * SECOND, 8 * SECOND)
    waited.add([(1, 3 * SECOND), (2, SECOND)], 2 * SECOND, 10 * SECOND)
    assert waited.worst() == {"shard-1": 4.5 * SECOND, "shard-2": 1.5 * SECOND}


def test_a_slow_shard_is_logged_at_twice_the_seconds_again(caplog: pytest.LogCaptureFixture) -> None:
    waited = ShardWaits("shard-{}".format)
    for second in range(1, 131):
        waited.add([(7, SECOND)], SECOND, second * SECOND)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    said = [record.message.partition("slow: ")[2].partition(" in which")[0] for record in caplog.records]
    assert said == ["30 of the 30 s", "60 of the 60 s", "120 of the 120 s"]


def test_where_all_shards_are_slow_alike_none_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    waited = ShardWaits("shard-{}".format)
    for second in range(1, 1000):
        waited.add([(second % 4, SECOND)], SECOND, second * SECOND)
    assert not caplog.records


def test_the_shards_that_cost_most_are_kept_of_any_number() -> None:
    waited = ShardWaits("shard-{}".format)
    for shard in range(5000):
        waited.add([(shard, SECOND + (shard == 3) * SECOND)], 2 * SECOND, 10**18)
    assert next(iter(waited.worst())) == "shard-3"
    assert len(waited._by_shard_ns) <= checks._SHARDS_KEPT
