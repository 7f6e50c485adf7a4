"""Rows in a mapping of a user's own, and rows in a loader's directory: what is stored and read where."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamload import CacheLevel, Features, cache_info, cache_module
from streamload.cache.forecast import forecast
from streamload.cache.inventory import take_inventory
from streamload.cache.tier import Tier
from streamload.derived import log_once
from streamload.derived.calls import module_call
from streamload.derived.proof import row_check
from streamload.derived.store import row_store
from streamload.derived.store.catalog import open_catalog, verify
from streamload.derived.store.row_store import RowPlace
from streamload.derived.store.table import RowCounts, RowTable
from streamload.errors import FeatureMismatch, OptionError
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat

X, KEYS = torch.arange(32.0).reshape(8, 4), [f"key {at}" for at in range(8)]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    log_once.cache_clear()
    yield
    row_store.close_stores()


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Refuses(RuntimeError):
    pass


def diskcache_of(kind: str, directory: Path) -> Any:
    """diskcache's Cache or FanoutCache, with a `Disk` that stores bytes and never unpickles."""
    diskcache = pytest.importorskip("diskcache")

    class NoPickles(diskcache.Disk):  # type: ignore[misc, name-defined]
        def put(self, key: Any) -> Any:
            if type(key) is not str:
                raise Refuses
            return super().put(key)

        def store(self, value: Any, read: bool, key: Any = diskcache.UNKNOWN) -> Any:
            if type(value) is not bytes:
                raise Refuses
            return super().store(value, read, key=key)

        def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
            if mode == diskcache.core.MODE_PICKLE:
                raise Refuses
            return super().fetch(mode, filename, value, read)

    return getattr(diskcache, kind)(str(directory), disk=NoPickles)


@pytest.fixture(params=["dict", "Cache", "FanoutCache"])
def mapping(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "dict":
        yield {}
        return
    opened = diskcache_of(request.param, tmp_path / "own")
    yield opened
    opened.close()


@pytest.mark.parametrize("level", [CacheLevel.DISK, CacheLevel.MEMORY])
@pytest.mark.sampled(3)
def test_any_mapping_of_text_to_bytes_keeps_rows(mapping: Any, tmp_path: Path, level: CacheLevel, shm: Path):
    mapping["of the user"] = b"stays"
    module = cache_module(cache_level=level, store=mapping)(Doubles)()
    assert torch.equal(module(X, cache_key=KEYS), 2 * X)
    assert cache_info(module).stored == 8
    assert not (tmp_path / "cache" / "rows").exists()
    assert all(type(mapping[key]) is bytes for key in mapping)
    row_store.close_stores()
    again = cache_module(cache_name="Doubles", store=mapping)(Doubles)()
    assert torch.equal(again(X[2:5], cache_key=KEYS[2:5]), 2 * X[2:5])
    assert cache_info(again).hits == 3
    assert mapping["of the user"] == b"stays"


def test_what_a_mapping_has_changed_or_refuses_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(dict[str, bytes]):
        is_broken = False

        def __getitem__(self, key: str) -> bytes:
            if self.is_broken:
                raise Refuses(key)
            return super().__getitem__(key)

    mapping = Fails()
    module = cache_module(store=mapping)(Doubles)()
    module(X, cache_key=KEYS)
    cache_info(module)
    names = [name for name in mapping if len(name) == 64]
    mapping[names[0]] = pickle.dumps(X)
    mapping[names[1]] = bytes([*mapping[names[1]][:-1], mapping[names[1]][-1] ^ 1])
    mapping[names[2]] = "text"  # type: ignore[assignment]
    mapping[names[3]], mapping[names[4]] = mapping[names[4]], mapping[names[3]]
    with caplog.at_level(logging.WARNING):
        assert torch.equal(module(X, cache_key=KEYS), 2 * X)
    assert cache_info(module).hits == 3
    mapping.is_broken = True
    assert torch.equal(module(X, cache_key=KEYS), 2 * X)
    assert cache_info(module).hits == 3


def test_what_isn_t_a_mapping_or_has_a_directory_as_well_fails(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected a mapping of str to bytes"):
        cache_module(store=[])  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="leave out cache_path"):
        cache_module(str(tmp_path), store={})
    with pytest.raises(OptionError, match="expected a mapping"):
        Features(Doubles(), store=object())  # type: ignore[arg-type]


class Means(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


SAMPLES = 12


@pytest.fixture
def shard(tmp_path: Path) -> str:
    write_shards(tmp_path / "data", [SAMPLES], options=ShardOptions(image_side=(24, 40)))
    return str(tmp_path / "data")


def features_of(shard: str, features: Features, **options: Any) -> dict[str, torch.Tensor]:
    """A row for each sample's key, by way of a loader."""
    rows: dict[str, torch.Tensor] = {}
    chosen = {
        "batch_size": 4,
        "train": False,
        "output": "dict",
        "with_keys": True,
        "num_workers": 0,
        **options,
    }
    with flat.make_loader(shard, None, features={"mean": features}, **chosen) as loader:
        for batch in loader:
            rows.update(zip(batch["__key__"], features(batch), strict=True))
    return rows


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_rank_reads_and_writes_a_mapping_of_features(shard: str, workers: int) -> None:
    mapping: MutableMapping[str, bytes] = {}
    features = Features(Means(), store=mapping)
    first = features_of(shard, features, num_workers=workers)
    assert len(first) == SAMPLES
    assert len([name for name in mapping if len(name) == 64]) == SAMPLES
    again = Features(Means(), store=mapping)
    second = features_of(shard, again, num_workers=workers)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert cache_info(again.module).hits >= SAMPLES
    assert cache_info(again.module).stored == 0


class ScaledMeans(Means):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(sys, "scale_of_the_test", 1.0)


def test_rows_of_a_mapping_are_checked_unless_that_is_off(
    shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping: MutableMapping[str, bytes] = {}
    first = features_of(shard, Features(ScaledMeans(), store=mapping, dtype=torch.float16))
    again = features_of(shard, Features(ScaledMeans(), store=mapping, dtype=torch.float16))
    assert all(torch.equal(first[key], again[key]) for key in first)
    as_another_run(monkeypatch, 2.0)
    unchecked = Features(ScaledMeans(), store=mapping, dtype=torch.float16, check=False)
    assert all(torch.equal(first[key], row) for key, row in features_of(shard, unchecked).items())
    with pytest.raises(FeatureMismatch, match=r"the row of key '.*' of ScaledMeans isn't"):
        features_of(shard, Features(ScaledMeans(), store=mapping, dtype=torch.float16))


def test_rows_that_a_mapping_has_count_as_read(shard: str) -> None:
    mapping: MutableMapping[str, bytes] = {}
    features = Features(Means(), store=mapping)
    options: Any = {"batch_size": 4, "train": False, "output": "dict", "num_workers": 0}
    with flat.make_loader(shard, None, features={"mean": features}, **options) as loader:
        for epoch, (read, computed) in enumerate(((0, SAMPLES), (SAMPLES, SAMPLES))):
            *_, row_bytes = (features(batch)[0].nbytes for batch in loader)
            stats = loader.stats()
            assert (stats.feature_rows_read, stats.feature_rows_computed) == (read, computed), epoch
            assert stats.feature_bytes_read == read * row_bytes


def test_a_loader_s_rows_are_in_its_cache_dir_and_those_of_the_default_one_are_read(
    shard: str, tmp_path: Path
) -> None:
    default, own = tmp_path / "cache" / "rows", tmp_path / "own"
    first = features_of(shard, Features(Means()))
    assert default.is_dir()
    row_store.close_stores()
    before = sorted((path, path.stat().st_mtime_ns) for path in default.rglob("rows.db"))
    features = Features(Means())
    second = features_of(shard, features, cache_dir=str(own), cache_size="64MB")
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert cache_info(features.module).stored == 0  # all of them are in the default directory
    row_store.close_stores()
    assert sorted((path, path.stat().st_mtime_ns) for path in default.rglob("rows.db")) == before
    other = Features(Means(), dtype=torch.float16)
    features_of(shard, other, cache_dir=str(own), cache_size="64MB")
    assert cache_info(other.module).stored == SAMPLES
    row_store.close_stores()
    tier = Tier.open(own)
    assert take_inventory(tier).rows_bytes > 0
    assert forecast(tier, [], 1, 1).rows_bytes > 0
    assert "of rows of modules" in str(forecast(tier, [], 1, 1))
    reserved = int((own / "rows" / "reserved").read_text())
    assert 0 < reserved <= tier.limit_bytes // 2
    assert reserved % (tier.limit_bytes // 64) in (0, tier.limit_bytes // 2 % (tier.limit_bytes // 64))


def test_features_of_two_loaders_have_their_rows_in_the_cache_dir_of_each(shard: str, tmp_path: Path) -> None:
    features = Features(Means())
    for stored, directory in (SAMPLES, "one"), (SAMPLES, "one"), (2 * SAMPLES, "two"), (2 * SAMPLES, "one"):
        features_of(shard, features, cache_dir=str(tmp_path / directory))
        assert cache_info(features.module).stored == stored
    assert not (tmp_path / "cache" / "rows").exists()
    decorated = cache_module(str(tmp_path / "named"))(Means)()
    for directory in ("one", "two"):  # the module itself names a place
        features_of(shard, Features(decorated), cache_dir=str(tmp_path / directory))
    assert cache_info(decorated).stored == SAMPLES


def test_options_of_features_hold_for_a_loader_and_not_for_the_module_s_own_calls(
    shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decorate = cache_module(cache_name="ScaledMeans")
    images, keys = torch.rand(2, 3, 4, 4), ["a", "b"]
    mapping: MutableMapping[str, bytes] = {}

    def rows_of(module: Any) -> dict[str, torch.Tensor]:
        return features_of(shard, Features(module, store=mapping, check=False))

    module = decorate(ScaledMeans)()
    first = rows_of(module)
    names = set(mapping)
    module(images, cache_key=keys)
    assert cache_info(decorate(ScaledMeans)).stored == 2  # in the default directory
    assert set(mapping) == names
    as_another_run(monkeypatch, 2.0)
    again = decorate(ScaledMeans)()
    again(images)  # builds it, so that rows are checked here
    assert all(torch.equal(first[key], row) for key, row in rows_of(again).items())
    with pytest.raises(FeatureMismatch, match=r"the row of key '[ab]' of ScaledMeans isn't"):
        again(images, cache_key=keys)


def as_another_run(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Results depend on what no fingerprint covers, and this process has stored no row."""
    monkeypatch.setattr(sys, "scale_of_the_test", factor, raising=False)
    monkeypatch.setattr(row_check, "_checks", {})
    monkeypatch.setattr(module_call, "run_began", time.time)


class HiddenFactor:
    def __call__(self, image: Any) -> torch.Tensor:
        return torch.full((3, 4, 4), getattr(sys, "scale_of_the_test", 1.0))


def test_rows_of_samples_are_checked_also_after_those_of_the_module_s_own_calls(
    shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decorate = cache_module(cache_name="Means")
    images, keys = torch.rand(8, 3, 4, 4), list(range(8))
    for factor in (1.0, 2.0):
        as_another_run(monkeypatch, factor)
        module = decorate(Means)()
        features = Features(module, preprocess=HiddenFactor())
        module(images)  # builds it
        module(images, cache_key=keys)  # one row is computed again in the second run
        if factor == 1:
            features_of(shard, features)
    with pytest.raises(FeatureMismatch, match="of Means isn't"):
        features_of(shard, features)


def test_a_result_with_a_shape_in_it_is_whole_to_the_commands(tmp_path: Path) -> None:
    class Shapes(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"size": x.shape, "sum": x.sum(0)}

    module = cache_module(str(tmp_path))(Shapes)()
    module(X, cache_key="all")
    row_store.close_stores()
    with open_catalog(tmp_path / "rows") as catalog:
        *_, verified = verify(catalog)
        assert (verified.rows, verified.damages) == (1, [])


class Scaled(nn.Module):
    """Depends on what no fingerprint covers."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) * getattr(sys, "scale_of_the_test", 1.0)


def test_rows_of_the_default_directory_that_were_found_to_be_wrong_are_not_read_from_another_one(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = features_of(shard, Features(Scaled()))
    as_another_run(monkeypatch, 2.0)
    with pytest.raises(FeatureMismatch):
        features_of(shard, Features(Scaled()))
    row_store.close_stores()
    features = Features(Scaled())
    rows = features_of(shard, features, cache_dir=str(tmp_path / "own"), cache_size="64MB")
    assert all(torch.allclose(rows[sample], 2 * first[sample]) for sample in first)
    assert cache_info(features.module).stored == SAMPLES


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_rows_take_room_of_shards_that_are_needed_last_but_half_of_the_limit_at_most(tmp_path: Path) -> None:
    from streamload.derived.store.sealed import seal

    root = tmp_path / "tier"
    tier = Tier(root, 8 << 20)
    for number in range(14):
        directory = root / "shards" / f"{number:032x}"
        directory.mkdir(mode=0o700)
        (directory / "data").write_bytes(bytes(500 << 10))
        (directory / "names").touch()
        os.utime(directory, (1000 + number, 1000 + number))
    tier.budget.count()
    store = row_store.RowStore(RowPlace(str(root)))
    for start in range(0, 2000, 50):
        sealed = [
            (key(at), seal(key(at), b'["n","|u1",[4000]]', os.urandom(4000), 1))
            for at in range(start, start + 50)
        ]
        store.write(sealed, "it")
        taken = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
        assert taken <= 1.05 * (8 << 20)
    store.close()
    left = sorted(int(path.name, 16) for path in (root / "shards").iterdir())
    assert left == list(range(14 - len(left), 14))  # those that were opened longest ago went
    assert 6 <= len(left) < 10
    assert store.counts.evicted > 500
    assert sum(path.stat().st_size for path in (root / "rows").rglob("rows.db*")) <= 4 << 20


def test_rows_in_a_directory_that_is_only_read_are_neither_touched_nor_made(tmp_path: Path) -> None:
    missing = RowTable(tmp_path / "none", None, RowCounts())
    assert missing.read([key(1)]) == []
    assert not (tmp_path / "none").exists()
