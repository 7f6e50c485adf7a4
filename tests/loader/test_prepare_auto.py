"""`prepare="auto"`: the batches of the original images; what is chosen, stored and logged."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload.cache.shard import prepared_form, shard_of
from streamload.cache.tier import Tier
from streamload.daemon.warm import warm
from streamload.derived.prepare import decision
from streamload.derived.prepare.choice import Costs, Form
from streamload.derived.prepare.preparation import Preparation
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from streamload.transforms import kernel
from tests.loader.test_prepared import as_stored, same
from tests.support import flat

COUNTS = [7, 12, 6]
NAMES = [f"{number:05d}.tar" for number in range(len(COUNTS))]
SECONDS = {"": 9.0, "raw": 8.0, "raw-224": 7.0}
CHOICES = ["", "raw", *([] if kernel.why_not() else ["raw-224"])]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", COUNTS, seed=8, options=ShardOptions(image_side=(150, 320)))
    return tmp_path / "data"


@pytest.fixture
def server(data: Path) -> Iterator[ShardServer]:
    with ShardServer(data) as server:
        yield server


def make(place: str | Path, cache: Path, **options: Any) -> streamload.Loader:
    urls = [f"{place}/{name}" for name in NAMES]
    chosen = {"batch_size": 5, "num_workers": 0, "output": "dict", "with_keys": True, "prepare": "auto"}
    return flat.make_loader(urls, cache_dir=cache, **{**chosen, "cache_size": "1GB", **options})


def batches(place: str | Path, cache: Path, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    with make(place, cache, **options) as loader:
        found = list(loader)
    return found, loader.stats()


def costs_in_favour_of(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """Put numbers in place of what is measured, by which a recipe pays."""

    def measured(images: Any, recipes: Any, directory: Any) -> Costs:
        assert Path(directory).is_dir()
        names = ["", *map(str, recipes)]
        forms = tuple(Form(name, 1000.0, 1.0 if name == choice else SECONDS[name]) for name in names)
        return Costs(forms, memory_seconds=0.0, disk_seconds=0.0)

    monkeypatch.setattr(decision, "measure", measured)


def published(cache: Path, place: str | Path, recipe: str) -> int:
    """How many shards a tier has as prepared by a recipe; "": as they are."""
    shards = [shard_of(f"{place}/{name}", None) for name in NAMES]
    forms = [prepared_form(shard, Preparation.parse(recipe).name) if recipe else shard for shard in shards]
    return sum(Tier(cache).published(form.digest).is_dir() for form in forms)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"preprocess": as_stored}, {"train": False}, {"train": False, "dtype": "uint8"}],
    ids=lambda options: "-".join(options) or "training",
)
@pytest.mark.parametrize(
    "local", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["remote", "local"]
)
@pytest.mark.sampled(5)
def test_batches_are_those_of_the_original_images_and_the_first_epoch_stores_what_was_chosen(
    data: Path,
    server: ShardServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    options: dict[str, Any],
    local: bool,
) -> None:
    place = data if local else server.url
    plain, _ = batches(place, tmp_path / "plain", prepare=None, **options)
    costs_in_favour_of(monkeypatch, choice)
    if choice == "raw-224" and "train" not in options:  # its first resize is random
        choice = ""
    first, stats = batches(place, tmp_path / "cache", **options)
    assert same(first, plain)
    assert stats.shards_published == len(NAMES)
    assert published(tmp_path / "cache", place, choice) == len(NAMES)
    assert bool(choice) != (published(tmp_path / "cache", place, "") == len(NAMES))
    second, stats = batches(place, tmp_path / "cache", **options)
    assert same(second, plain)
    assert (stats.shards_published, stats.origin_bytes) == (0, 0)


def test_what_is_measured_here_leads_to_a_choice_with_the_same_batches(
    server: ShardServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = batches(server.url, tmp_path / "plain", prepare=None)
    with caplog.at_level(logging.INFO, "streamload"):
        found, _ = batches(server.url, tmp_path / "cache")
    assert same(found, plain)
    (line,) = [record.message for record in caplog.records if record.message.startswith("prepare")]
    assert line.startswith(("prepare: auto chose images as they are: ", "prepare: auto chose raw: "))
    assert "µs and" in line


def test_augmentation_stays_random_from_epoch_to_epoch_and_an_epoch_repeats(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the crops are the whole image, in any epoch."""

    def by_key(loader: streamload.Loader, epoch: int) -> dict[str, torch.Tensor]:
        loader.set_epoch(epoch)
        return {
            key: image
            for batch in loader
            for key, image in zip(batch["__key__"], batch["image"], strict=True)
        }

    def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[bool]:
        assert one.keys() == other.keys()
        return [torch.equal(one[key], other[key]) for key in one]

    costs_in_favour_of(monkeypatch, "raw")
    with make(server.url, tmp_path / "cache") as loader:
        first, second, again = by_key(loader, 0), by_key(loader, 1), by_key(loader, 0)
    with make(server.url, tmp_path / "plain", prepare=None) as loader:
        plain = [by_key(loader, epoch) for epoch in (0, 1)]
    assert sum(are_equal(first, second)) < len(first) // 2
    assert all(are_equal(first, again))
    assert all(are_equal(first, plain[0]))
    assert all(are_equal(second, plain[1]))


@pytest.mark.parametrize("choices", [("raw", ""), ("", "raw")])
def test_a_state_resumes_under_another_choice(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: tuple[str, str]
) -> None:
    reference, _ = batches(server.url, tmp_path / "plain", prepare=None)
    costs_in_favour_of(monkeypatch, choices[0])
    with make(server.url, tmp_path / "one") as loader:
        part = list(itertools.islice(loader, 2))
        state = loader.state_dict()
    costs_in_favour_of(monkeypatch, choices[1])
    with make(server.url, tmp_path / "other") as loader:
        loader.load_state_dict(state)
        assert same(part + list(loader), reference)


def test_loaders_of_a_node_that_read_the_same_agree(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs_in_favour_of(monkeypatch, "raw")
    with make(server.url, tmp_path / "cache") as first:
        reading = iter(first)
        next(reading)
        costs_in_favour_of(monkeypatch, "")
        batches(server.url, tmp_path / "cache")
    assert published(tmp_path / "cache", server.url, "raw") == len(NAMES)
    assert published(tmp_path / "cache", server.url, "") == 0


def test_what_the_cache_has_is_read_and_nothing_measured(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    urls = [f"{server.url}/{name}" for name in NAMES]
    warm(urls, cache_dir=tmp_path / "cache", cache_size="1GB", prepare=Preparation.parse("raw"))
    plain, _ = batches(server.url, tmp_path / "plain", prepare=None)
    monkeypatch.setattr(decision, "measure", lambda *_: pytest.fail("it was measured"))
    with (
        caplog.at_level(logging.INFO, "streamload"),
        make(server.url, tmp_path / "cache", train=True) as loader,
    ):
        assert loader.num_batches == sum(COUNTS) // 5  # by the indexes of prepared shards
        assert same(list(loader), plain)
    assert loader.stats().origin_bytes == 0
    assert "prepare: auto chose raw: 3 of 3 shards looked for are in the cache so" in caplog.messages


def test_with_a_shared_cache_images_stay_as_they_are(
    server: ShardServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = batches(server.url, tmp_path / "plain", prepare=None)
    with caplog.at_level(logging.INFO, "streamload"):
        found, _ = batches(server.url, tmp_path / "cache", shared_cache=str(tmp_path / "shared"))
    assert same(found, plain)
    assert published(tmp_path / "cache", server.url, "") == len(NAMES)
    assert any("have to agree on a recipe" in message for message in caplog.messages)


@pytest.mark.parametrize("local", [False, True], ids=["remote", "local"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.sampled(2)
def test_shards_whose_raw_form_finds_no_room_stay_as_they_are(
    data: Path,
    server: ShardServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    local: bool,
    workers: int,
) -> None:
    """The room was counted before another run took it."""
    place = data if local else server.url
    plain, _ = batches(place, tmp_path / "plain", prepare=None)
    costs_in_favour_of(monkeypatch, "raw")
    most = max((data / name).stat().st_size for name in NAMES)
    limit = sum((data / name).stat().st_size for name in NAMES) + 3 * most
    found, stats = batches(place, tmp_path / "cache", cache_size=limit, num_workers=workers)
    assert same(found, plain)
    assert published(tmp_path / "cache", place, "raw") < len(NAMES)
    assert stats.shards_given_up == 0


def test_an_index_of_a_local_file_does_not_keep_it_from_being_prepared(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = batches(data, tmp_path / "cache", prepare=None)
    costs_in_favour_of(monkeypatch, "raw")
    with make(data, tmp_path / "cache") as loader:
        assert same(list(loader), plain)
        loader.set_epoch(1)
        list(loader)
    found, _ = batches(data, tmp_path / "cache")
    assert same(found, plain)
    assert published(tmp_path / "cache", data, "raw") > 0
