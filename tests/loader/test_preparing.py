"""`prepare=` prepares: by fills where all fits, else a line says what would; in idle time what is here."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamload
from streamload.daemon.warm import warm
from streamload.derived.prepare import decision
from streamload.derived.prepare.choice import Costs, Form
from streamload.derived.prepare.preparation import Preparation
from streamload.derived.store.row_store import close_stores
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.loader.test_prepare_auto import published
from tests.loader.test_prepared import same
from tests.support import flat
from tests.support.tiers import until

COUNTS = [7, 12, 6]
NAMES = [f"{number:05d}.tar" for number in range(len(COUNTS))]
RECIPE = "raw-32"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", COUNTS, seed=8, options=ShardOptions(image_side=(150, 320)))
    return tmp_path / "data"


@pytest.fixture
def server(data: Path) -> Iterator[ShardServer]:
    with ShardServer(data) as server:
        yield server


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "streamload"):
        yield caplog


def line(log: pytest.LogCaptureFixture) -> tuple[int, str]:
    """The level and text of the one line about preparing, from now on."""
    (record,) = [each for each in log.records if each.message.startswith("prepare: ")]
    log.clear()
    return record.levelno, record.message


def make(place: str | Path, cache: Path, **options: Any) -> streamload.Loader:
    chosen = {"batch_size": 5, "num_workers": 0, "output": "dict", "with_keys": True, "prepare": RECIPE}
    urls = options.pop("urls", [f"{place}/{name}" for name in NAMES])
    return flat.make_loader(urls, cache_dir=cache, **{**chosen, "cache_size": "1GB", **options})


def batches(place: str | Path, cache: Path, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    with make(place, cache, **options) as loader:
        return list(loader), loader.stats()


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"train": False}, {"dtype": "uint8", "prepare": "jpeg-32-q90"}],
    ids=lambda options: "-".join(options) or "training",
)
@pytest.mark.parametrize(
    "local", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["remote", "local"]
)
@pytest.mark.sampled(2)
def test_a_named_recipe_is_made_by_the_first_run_and_the_second_decodes_and_fetches_nothing(
    data: Path, server: ShardServer, tmp_path: Path, options: dict[str, Any], local: bool
) -> None:
    place, recipe = data if local else server.url, options.get("prepare", RECIPE)
    with make(place, tmp_path / "cache", **options) as loader:
        first = list(loader)
        until(lambda: published(tmp_path / "cache", place, recipe) == len(NAMES))
    assert loader.stats().samples_unprepared == 0
    assert published(tmp_path / "cache", place, "") == 0
    second, stats = batches(place, tmp_path / "cache", **options)
    assert same(first, second)
    assert (stats.shards_published, stats.origin_bytes, stats.samples_unprepared) == (0, 0, 0)
    batches(place, tmp_path / "plain", **{**options, "prepare": None})
    as_used, _ = batches(place, tmp_path / "plain", **options)
    assert same(first, as_used)


def test_one_line_says_what_is_prepared_and_what_it_takes(
    data: Path, server: ShardServer, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    for place in (server.url, data):
        cache = tmp_path / f"cache-{place == data}"
        warm([f"{place}/{NAMES[0]}"], cache_dir=cache, cache_size="1GB", prepare=Preparation.parse(RECIPE))
        batches(place, cache)
        level, text = line(log)
        assert level == logging.INFO
        assert re.fullmatch(
            rf"prepare: raw-32: 33 % of the data is prepared in the cache; prepared, all of it takes about "
            rf"[0-9.]+ KB of the [0-9.]+ [GM]B of the cache at {cache}, and this run prepares the rest",
            text,
        )
        batches(place, cache)
        level, text = line(log)
        assert level == logging.INFO
        assert text.startswith("prepare: raw-32: 100 % of the data is prepared in the cache")
        assert "this run" not in text


@pytest.mark.parametrize("local", [False, True], ids=["remote", "local"])
def test_where_not_all_fits_nothing_is_prepared_and_the_line_has_the_command_that_would(
    data: Path, server: ShardServer, tmp_path: Path, log: pytest.LogCaptureFixture, local: bool
) -> None:
    place, cache = data if local else server.url, tmp_path / "cache"
    size = 3 * sum((data / name).stat().st_size for name in NAMES)
    found, stats = batches(place, cache, prepare="raw", cache_size=size)
    level, text = line(log)
    assert level == logging.WARNING
    assert "this run prepares no more" in text
    assert (published(cache, place, "raw"), stats.samples_unprepared) == (0, sum(COUNTS))
    plain, _ = batches(place, tmp_path / "plain", prepare=None)
    assert same(found, plain)
    options = rf"--prepare (?P<prepare>raw) --cache-dir {cache} --cache-size (?P<size>\S+)"
    command = re.search(rf"streamload warm URLS {options}$", text)
    assert command is not None
    recipe, urls = Preparation.parse(command["prepare"]), [f"{place}/{name}" for name in NAMES]
    warm(urls, cache_dir=cache, cache_size=command["size"], prepare=recipe)
    again, stats = batches(place, cache, prepare="raw", cache_size=command["size"])
    assert line(log)[1].startswith("prepare: raw: 100 %")
    assert same(again, plain)
    assert stats.samples_unprepared == 0


def test_where_the_size_is_unknown_the_line_says_so(
    data: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    urls = [f"pipe:cat {data / name}" for name in NAMES]
    _, stats = batches(data, tmp_path / "cache", urls=urls)
    level, text = line(log)
    assert level == logging.WARNING
    assert "as the size of the data is unknown, this run prepares no more" in text
    assert stats.samples_unprepared == sum(COUNTS)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prepare", [RECIPE, "auto"])
@pytest.mark.sampled(2)
def test_what_the_cache_has_as_it_is_is_prepared_while_nothing_else_is_to_do(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, prepare: str
) -> None:
    def measured(images: Any, recipes: Any, directory: Any) -> Costs:
        return Costs((Form("", 1000.0, 9.0), Form("raw", 1000.0, 1.0)), memory_seconds=0.0, disk_seconds=0.0)

    monkeypatch.setattr(decision, "measure", measured)
    recipe = "raw" if prepare == "auto" else prepare
    batches(server.url, tmp_path / "cache", prepare=None)
    asked = len(server.log)
    with make(server.url, tmp_path / "cache", num_workers=workers, train=False, prepare=prepare) as loader:
        first = list(loader)
        until(lambda: published(tmp_path / "cache", server.url, recipe) == len(NAMES))
        unprepared = loader.stats().samples_unprepared
        second = list(loader)
        assert loader.stats().samples_unprepared == unprepared
    assert same(first, second)
    assert {request.path for request in server.log[asked:]} <= {"sizes.json"}


@streamload.cache_module
class Mean(nn.Module):
    """A feature of an image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3))


def test_rows_of_features_stay_those_of_the_samples_as_they_are(
    server: ShardServer, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))  # the rows are there, too
    monkeypatch.setenv("STREAMLOAD_CACHE_SIZE", "1GB")
    close_stores()

    def run(**options: Any) -> tuple[torch.Tensor, int]:
        mean = Mean().eval()
        with make(server.url, tmp_path / "cache", features={"f": mean}, train=False, **options) as loader:
            rows = torch.cat([mean(batch) for batch in loader])
            return rows, loader.stats().feature_rows_computed

    first, computed = run()
    assert computed == sum(COUNTS)
    assert "rows of features are found by the bytes of samples" in line(log)[1]
    second, computed = run()
    assert computed == 0
    assert torch.equal(first, second)
    assert published(tmp_path / "cache", server.url, RECIPE) == 0
    close_stores()


def test_auto_measures_the_images_of_the_first_shard_where_none_is_here(
    data: Path, server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[bytes] = []

    def keep(images: list[bytes], recipes: Any, directory: Any) -> Costs:
        measured.extend(images)
        return Costs((Form("", 1.0, 1.0),), memory_seconds=0.0, disk_seconds=0.0)

    monkeypatch.setattr(decision, "measure", keep)
    batches(server.url, tmp_path / "cache", prepare="auto")
    assert measured == [members["jpg"] for _, members in read_oracle(data / NAMES[0])]
