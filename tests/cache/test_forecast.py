"""What a run may expect of its tier: the arithmetic, and a run that is held to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamload
from streamload import Workers
from streamload.cache.forecast import Forecast, forecast
from streamload.cache.shard import LOOKED_THROUGH, ShardList, shard_of
from streamload.cache.tier import Tier
from streamload.cli.doctor import _data
from streamload.order.lanes import Width, fits, fitting, live_shards
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from streamload.urls import expand_urls
from tests.support import flat

GB = 10**9


@pytest.mark.parametrize(
    ("limit", "data", "live", "rate"),
    [
        (50 * GB, 100 * GB, 10 * GB, 0.4),
        (100 * GB, 100 * GB, 10 * GB, 1.0),
        (500 * GB, 100 * GB, 10 * GB, 1.0),
        (5 * GB, 100 * GB, 10 * GB, 0.0),
        (50 * GB, None, None, None),
    ],
)
def test_a_warm_epoch_hits_with_what_is_left_beside_the_open_shards(
    limit: int, data: int | None, live: int | None, rate: float | None
) -> None:
    assert Forecast(limit, 0, 10, data, live).hit_rate == rate


@given(st.integers(0, 10**12), st.integers(1, 10**12), st.integers(0, 10**12))
def test_a_hit_rate_is_a_share(limit: int, data: int, live: int) -> None:
    rate = Forecast(limit, 0, 1, data, live).hit_rate
    assert rate is not None
    assert 0 <= rate <= 1


def test_lanes_and_window_say_how_many_shards_are_open() -> None:
    assert live_shards(8, 10_000, 1000) == pytest.approx(1.2 * 18 + 1)
    assert live_shards(1, 0, 0) == pytest.approx(2.2)


@given(
    st.lists(
        st.builds(
            Width,
            st.integers(1, 64),
            st.integers(1, 100_000),
            st.integers(1, 5_000),
            st.sampled_from([0, 100_000, 5 * 10**7, 2 * GB]),
            st.floats(1e3, 1e6),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(10**5, 10**12),
    st.booleans(),
    st.booleans(),
)
def test_lanes_and_windows_are_cut_no_further_than_until_they_fit(
    widths: list[Width], limit: int, lanes: bool, window: bool
) -> None:
    found = fitting(widths, limit, 64, lanes=lanes, window=window)
    if fits(widths, limit, 64):
        assert found == widths
    elif found is None:
        assert not (lanes and window) or 2 * sum(width.shard_bytes for width in widths) > limit
    else:
        least = {(width.lanes, width.window) for width in found if width.shard_bytes}
        assert fits(found, limit, 64) or least == {(1, 1)}
        for width, asked in zip(found, widths, strict=True):
            assert 1 <= width.lanes <= asked.lanes
            assert 1 <= width.window <= asked.window
            assert (lanes and asked.shard_bytes) or width.lanes == asked.lanes
            assert (window and asked.shard_bytes) or width.window == asked.window
    larger = fitting(widths, 2 * limit, 64, lanes=lanes, window=window)
    if found is not None and larger is not None:
        for less, more in zip(found, larger, strict=True):
            assert (less.lanes, less.window) <= (more.lanes, more.window)


def test_it_reads_as_text() -> None:
    text = str(Forecast(50 * GB, 20 * GB, 1000, 100 * GB, 10 * GB))
    assert "20.0 GB of at most 50.0 GB used" in text
    assert "1,000 shards of about 100.0 GB, of them 10.0 GB open at once: a warm epoch finds 40% here" in text
    assert "none of them seen yet" in str(Forecast(50 * GB, 0, 1000))


SHARDS, SAMPLES = 120, 24
OPTIONS = ShardOptions(image_side=(8, 8), padding_bytes=(1500, 2500))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardServer]:
    data = tmp_path_factory.mktemp("many")
    write_shards(data, [SAMPLES] * SHARDS, seed=61, options=OPTIONS)
    with ShardServer(data) as server:
        yield server


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def make(server: ShardServer, cache: Path, **options: Any) -> streamload.Loader:
    given: dict[str, Any] = {"batch_size": 8, "num_workers": 2, "lanes": 4, "shuffle": 50, "ahead": "100KB"}
    urls = f"{server.url}/{{00000..{SHARDS - 1:05d}}}.tar"
    return flat.make_loader(
        urls, workers=Workers(map_sample=only_key), cache_dir=cache, **{**given, **options}
    )


@pytest.mark.deep
def test_it_is_made_from_the_shards_that_the_tier_holds(server: ShardServer, tmp_path: Path) -> None:
    shards = [shard_of(f"{server.url}/{n:05d}.tar", None) for n in range(SHARDS)]
    tier = Tier(tmp_path / "cache", 10**9)
    assert forecast(tier, shards, 4, 50).hit_rate is None
    with make(server, tmp_path / "cache", cache_size="1GB") as loader:
        assert sum(len(batch["key"]) for batch in loader) == SHARDS * SAMPLES
    used = tier.used_bytes
    found = forecast(tier, shards, 4, 50)
    assert found.shards == SHARDS
    assert found.data_bytes == pytest.approx(used, rel=0.01)
    assert found.live_bytes == pytest.approx(live_shards(4, 50, SAMPLES) * used / SHARDS, rel=0.01)
    assert found.hit_rate == 1.0
    half = forecast(tier, shards, 4, 50, nodes=2)
    assert half.data_bytes == pytest.approx(used / 2, rel=0.02)


@pytest.mark.deep
def test_of_a_long_list_some_shards_are_looked_for_and_taken_for_the_others(
    server: ShardServer, tmp_path: Path
) -> None:
    listed = ShardList(expand_urls(f"{server.url}/{{00000..{3 * LOOKED_THROUGH - 1}}}.tar"), None)
    tier = Tier(tmp_path / "cache", 10**9)
    assert forecast(tier, listed, 4, 50, nodes=4).shards == 3 * LOOKED_THROUGH / 4
    with make(server, tmp_path / "cache", cache_size="1GB") as loader:
        list(loader)
    found = forecast(tier, listed, 4, 50)
    assert found.shards == 3 * LOOKED_THROUGH
    assert found.data_bytes == pytest.approx(tier.used_bytes / SHARDS * found.shards, rel=0.1)
    assert found.live_bytes == pytest.approx(found.data_bytes / found.shards * live_shards(4, 50, SAMPLES))
    other = ShardList(expand_urls(f"{server.url}/other/{{0..{3 * LOOKED_THROUGH}}}.tar"), None)
    assert forecast(tier, other, 4, 50).data_bytes is None


def test_a_run_logs_it_when_it_begins_and_the_doctor_says_the_same(
    server: ShardServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="streamload")
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        with make(server, tmp_path / "cache", cache_size="1GB", num_workers=0) as loader:
            list(loader)
    cold, warm = (r.getMessage() for r in caplog.records if r.getMessage().startswith(f"cache {tmp_path}"))
    assert "of at most 1.0 GB used; 120 shards, none of them seen yet" in cold
    assert "120 shards of about" in warm
    assert "a warm epoch finds 100% here" in warm
    (found,) = _data([f"{server.url}/{{00000..00119}}.tar"])
    assert "120 shards of about" in found.value
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "nowhere"))
    (unknown,) = _data([f"{server.url}/00000.tar"])
    assert "there is no streamload cache" in unknown.advice
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.deep
def test_with_half_of_the_data_fitting_each_warm_epoch_hits_as_often_as_was_said(
    server: ShardServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard is a hit if no byte of it was asked for in its epoch: seen at the server."""
    shards = [shard_of(f"{server.url}/{n:05d}.tar", None) for n in range(SHARDS)]
    with make(server, tmp_path / "all", cache_size="1GB") as loader:
        list(loader)
    said = forecast(Tier(tmp_path / "all"), shards, 4, 50)
    assert said.data_bytes is not None
    assert said.live_bytes is not None
    limit = said.data_bytes // 2
    expected = Forecast(limit, 0, SHARDS, said.data_bytes, said.live_bytes).hit_rate
    assert expected is not None
    whole = sum(path.stat().st_size for path in server.root.glob("*.tar"))
    with make(server, tmp_path / "half", cache_size=limit) as loader:
        rates = []
        for _ in range(3):
            before = loader.stats()
            list(loader)
            rates.append(1 - loader.stats().since(before).origin_bytes / whole)
    with capsys.disabled():
        print(
            f"\n(limit − live)/data = {expected:.3f}, hits of the warm epochs {rates[1]:.3f}, {rates[2]:.3f}"
        )
    assert rates[0] <= 0.1
    assert min(rates[1:]) >= 0.95 * expected
