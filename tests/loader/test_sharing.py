"""A training with a shared cache gives the batches of one without, whatever becomes of the shared cache."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload.testing.shards import ShardOptions
from tests.support import flat
from tests.support.sharing import Origin, Place, running_s3
from tests.support.tiers import flip, until

COUNTS = (30, 25, 40, 20)
LARGE = ShardOptions(padding_bytes=(3_000, 30_000))
Batches = list[tuple[torch.Tensor, list[str]]]


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(tmp_path / "data", COUNTS, options=LARGE)
    yield made
    made.close()


def make(origin: Origin, cache: Path, place: Place | None, **options: Any) -> streamload.Loader:
    defaults: dict[str, Any] = {"batch_size": 10, "num_workers": 2, "cache_size": "1TB", "seed": 5}
    if place is not None:
        defaults |= {"shared_cache": place.url, "shared_cache_options": place.options}
    return flat.make_loader(origin.urls, cache_dir=cache, **{**defaults, **options})


def epoch_of(loader: streamload.Loader) -> Batches:
    loader.set_epoch(1)
    return [(images, list(texts)) for images, texts in loader]


def are_equal(some: Batches, others: Batches) -> bool:
    return len(some) == len(others) > 0 and all(
        torch.equal(images, theirs) and texts == their_texts
        for (images, texts), (theirs, their_texts) in zip(some, others, strict=True)
    )


def plain(origin: Origin, tmp_path: Path) -> Batches:
    """What a training without a shared cache gives."""
    with make(origin, tmp_path / "plain", None) as loader:
        return epoch_of(loader)


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.deep)])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_the_first_training_stores_and_the_next_ones_ask_the_origin_for_nothing(
    origin: Origin, tmp_path: Path, kind: str, method: str, request: pytest.FixtureRequest
) -> None:
    place = Place(str(tmp_path / "shared"), {})
    if kind == "s3":
        own = f"{random.getrandbits(64):x}"
        place = Place(f"s3://bucket/{own}/tier", request.getfixturevalue("s3").storage_options)
    with make(origin, tmp_path / "one", place, write_back=True, multiprocessing_context=method) as loader:
        first = epoch_of(loader)
        until(lambda: loader.stats().shared_stored == len(COUNTS))
        seen = loader.stats()
        assert (seen.origin_bytes, seen.shared_hits, seen.shared_misses) == (origin.bytes, 0, len(COUNTS))
        assert seen.shared_bytes < 100  # what says the format, once there is something
    for node in ("two", "three"):
        with make(origin, tmp_path / node, place, write_back=True, multiprocessing_context=method) as loader:
            assert are_equal(first, epoch_of(loader))
            seen = loader.stats()
        assert (seen.origin_requests, seen.origin_bytes, seen.shared_errors) == (0, 0, 0)
        assert (seen.shared_hits, seen.shared_misses, seen.shared_stored) == (len(COUNTS), 0, 0)
        assert seen.shared_bytes > origin.bytes
        assert f"shared   {len(COUNTS)} hits, 0 misses" in str(seen)
    assert origin.sent == origin.bytes


@pytest.mark.parametrize("trainings", [1, 2, pytest.param(3, marks=pytest.mark.deep)])
def test_any_number_of_trainings_at_once_take_the_origins_bytes_once(
    origin: Origin, tmp_path: Path, trainings: int
) -> None:
    place, expected = Place(str(tmp_path / "shared"), {}), plain(origin, tmp_path)
    origin.warm(tmp_path / "warmed", place, write_back=True)
    before = origin.sent
    with contextlib.ExitStack() as stack:
        loaders = [
            stack.enter_context(make(origin, tmp_path / f"node-{number}", place, num_workers=1))
            for number in range(trainings)
        ]
        for loader in loaders:
            loader.set_epoch(1)
        taken = list(zip(*loaders, strict=True))
    for number in range(trainings):
        assert are_equal(expected, [(images, list(texts)) for images, texts in (at[number] for at in taken)])
    assert (before, origin.sent) == (2 * origin.bytes, 2 * origin.bytes)  # of `plain` and of the warm-up


def test_a_damaged_shared_cache_changes_no_batch(
    origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, expected = Place(str(tmp_path / "shared"), {}), plain(origin, tmp_path)
    origin.warm(tmp_path / "one", place, write_back=True)
    rng = random.Random(4)
    for path in Path(place.url).glob("shards/*/*"):
        for _ in range(3):
            flip(path, rng.randrange(path.stat().st_size))
    with make(origin, tmp_path / "two", place, num_workers=0) as loader, caplog.at_level(logging.WARNING):
        assert are_equal(expected, epoch_of(loader))
        assert loader.stats().shared_errors == len(COUNTS)
    assert len([record for record in caplog.records if "fails for" in record.getMessage()]) == 1


def test_a_shared_cache_that_goes_in_a_run_changes_no_batch(origin: Origin, tmp_path: Path) -> None:
    with running_s3() as own:
        place = Place("s3://bucket/tier", own.storage_options)
        origin.warm(tmp_path / "one", place, write_back=True)
        with make(origin, tmp_path / "two", place, lanes=1, num_workers=1, ahead=1) as loader:
            loader.set_epoch(1)
            batches = iter(loader)
            given = [next(batches)]
            own.close()
            given += batches
            with make(origin, tmp_path / "other", None, lanes=1, num_workers=1) as other:
                assert are_equal([(images, list(texts)) for images, texts in given], epoch_of(other))


def test_a_training_without_room_reads_single_samples_from_there(origin: Origin, tmp_path: Path) -> None:
    place, expected = Place(str(tmp_path / "shared"), {}), plain(origin, tmp_path)
    origin.warm(tmp_path / "one", place, write_back=True)
    before = origin.sent
    with make(origin, tmp_path / "two", place, cache_size="300KB", num_workers=1) as loader:
        assert are_equal(expected, epoch_of(loader))
        seen = loader.stats()
    assert seen.range_reads > 0
    assert (seen.origin_bytes, origin.sent) == (0, before)


@pytest.mark.deep
def test_leaving_in_the_middle_of_storing_leaves_nothing_running(origin: Origin, tmp_path: Path) -> None:
    for after in range(1, 4):
        place = Place(str(tmp_path / f"shared-{after}"), {})
        with make(origin, tmp_path / f"cache-{after}", place, write_back=True) as loader:
            batches = iter(loader)
            for _ in range(after):
                next(batches)
        report = origin.warm(tmp_path / f"next-{after}", place)
        assert report.shards_complete == len(COUNTS)
        assert origin.is_whole(tmp_path / f"next-{after}")


def test_what_refuses_to_be_written_does_not_disturb_a_training(
    origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    place, expected = Place(str(tmp_path / "file" / "tier"), {}), plain(origin, tmp_path)
    with (
        make(origin, tmp_path / "two", place, write_back=True, num_workers=0) as loader,
        caplog.at_level(logging.WARNING),
    ):
        assert are_equal(expected, epoch_of(loader))
        until(lambda: loader.stats().shared_not_stored == len(COUNTS))
    said = [record.getMessage() for record in caplog.records]
    assert sum("fails for" in line for line in said) == 1
    assert sum("nothing is stored" in line for line in said) == 1


def test_the_variables_are_enough(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLOAD_SHARED_CACHE", str(tmp_path / "shared"))
    monkeypatch.setenv("STREAMLOAD_SHARED_WRITE_BACK", "1")
    with make(origin, tmp_path / "one", None) as loader:
        epoch_of(loader)
        until(lambda: loader.stats().shared_stored == len(COUNTS))
    with make(origin, tmp_path / "two", None) as loader:
        epoch_of(loader)
        assert loader.stats().origin_bytes == 0


def test_what_is_no_folder_is_refused_before_anything_begins(origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(streamload.errors.OptionError, match="shared="):
        make(origin, tmp_path, Place("s3://bucket/{0..9}", {}))


@pytest.mark.deep
def test_what_could_be_secret_is_not_shown(origin: Origin, tmp_path: Path) -> None:
    loader = make(origin, tmp_path, Place("ftp://user:swordfish@host/tier", {"password": "swordfish"}))
    assert "swordfish" not in repr(loader) + repr(loader.options)
