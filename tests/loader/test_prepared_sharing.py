"""Prepared shards in the shared cache: a training takes them, and gets the same batches without them."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamload import Images
from streamload.cache.part import Part
from streamload.cache.shard import prepared_form
from streamload.cache.tier import Tier
from streamload.derived.prepare.preparation import Preparation
from streamload.testing.shards import ShardOptions
from tests.support import flat
from tests.support.sharing import Origin, Place, running_s3
from tests.support.tiers import flip, until

COUNTS = (14, 9, 20)
RECIPE = "jpeg-32-q90"
PREPARATION = Preparation.parse(RECIPE)
SOME = [("never", 0, "folder"), ("never", 2, "s3"), ("start", 0, "s3"), ("start", 2, "folder")]
"""Each pair of parameters once; all of them are deep."""
Batches = list[tuple[torch.Tensor, list[str]]]


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(tmp_path / "data", COUNTS, options=ShardOptions(image_side=(40, 90)))
    yield made
    made.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "shared"), {})


def epoch_of(
    origin: Origin, cache: Path, place: Place | None, prepare: str | None = RECIPE, **options: Any
) -> tuple[Batches, Any]:
    given: dict[str, Any] = {"batch_size": 5, "num_workers": 0, "cache_size": "1GB", **options}
    if place is not None:
        given |= {"shared_cache": place.url, "shared_cache_options": place.options}
    with flat.make_loader(origin.urls, cache_dir=cache, images=Images(prepare=prepare), **given) as loader:
        return [(images, list(texts)) for images, texts in loader], loader.stats()


def are_equal(some: Batches, others: Batches) -> bool:
    return len(some) == len(others) > 0 and all(
        torch.equal(images, theirs) and texts == their_texts
        for (images, texts), (theirs, their_texts) in zip(some, others, strict=True)
    )


def prepare(origin: Origin, root: Path, place: Place) -> None:
    report = origin.warm(root, place, write_back=True, prepare=PREPARATION)
    assert (report.shards_complete, report.shared_stored, report.shared_failures) == (3, 3, {})


@pytest.mark.parametrize(
    ("revalidate", "workers", "kind"),
    [
        pytest.param(*case, marks=[pytest.mark.deep] * (case not in SOME))
        for case in itertools.product(["never", "start"], [0, 2], ["folder", "s3"])
    ],
)
@pytest.mark.sampled(2)
def test_a_training_takes_prepared_shards_and_nothing_from_the_origin(
    origin: Origin,
    tmp_path: Path,
    kind: str,
    workers: int,
    revalidate: str,
    place: Place,
    request: pytest.FixtureRequest,
) -> None:
    if kind == "s3":
        own = f"{random.getrandbits(64):x}"
        place = Place(f"s3://bucket/{own}/tier", request.getfixturevalue("s3").storage_options)
    prepare(origin, tmp_path / "spot", place)
    sent = origin.sent
    options = {"num_workers": workers, "revalidate": revalidate}
    found, seen = epoch_of(origin, tmp_path / "node", place, **options)
    assert seen.origin_bytes == 0
    assert origin.sent - sent <= 20  # to ask for a version is to ask for a byte
    assert (seen.shared_hits, seen.shards_published) == (3, 3)
    again, seen = epoch_of(origin, tmp_path / "node", place, **options)
    assert (seen.shared_hits, seen.shards_published) == (0, 0)
    made, _ = epoch_of(origin, tmp_path / "alone", None)
    assert are_equal(found, made)
    assert are_equal(again, made)


def test_the_room_of_a_prepared_shard_in_the_shared_cache_is_reserved_at_once(
    origin: Origin, tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(origin, tmp_path / "spot", place)
    reserve, reservations = Part.reserve, list[tuple[str, int]]()

    def recorded(part: Part, size_bytes: int, next_use: float, **more: Any) -> bool:
        reservations.append((part.digest, size_bytes))
        return reserve(part, size_bytes, next_use, **more)

    monkeypatch.setattr(Part, "reserve", recorded)
    epoch_of(origin, tmp_path / "node", place)
    sizes = {path.parent.name: path.stat().st_size for path in (tmp_path / "node").glob("shards/*/data")}
    first = dict(reversed(reservations))
    assert len(sizes) == 3
    assert all(first[digest] > size for digest, size in sizes.items())


def test_raw_shards_of_the_shared_cache_give_the_batches_of_the_original_images(
    origin: Origin, tmp_path: Path, place: Place
) -> None:
    origin.warm(tmp_path / "spot", place, write_back=True, prepare=Preparation.parse("raw"))
    found, seen = epoch_of(origin, tmp_path / "node", place, "raw")
    assert (seen.origin_bytes, seen.shared_hits) == (0, 3)
    plain, _ = epoch_of(origin, tmp_path / "alone", None, None)
    assert are_equal(found, plain)


def test_others_never_see_them(origin: Origin, tmp_path: Path, place: Place) -> None:
    prepare(origin, tmp_path / "spot", place)
    for recipe in (None, "raw-32"):
        found, seen = epoch_of(origin, tmp_path / f"node-{recipe}", place, recipe)
        made, _ = epoch_of(origin, tmp_path / f"alone-{recipe}", None, recipe)
        assert are_equal(found, made)
        assert (seen.shared_hits, seen.origin_bytes) == (0, origin.bytes)


def test_what_is_missing_is_fetched_and_prepared(origin: Origin, tmp_path: Path, place: Place) -> None:
    prepare(origin, tmp_path / "spot", place)
    form = prepared_form(origin.shard(1), PREPARATION.name)
    for path in Path(place.url).glob(f"prepared/{PREPARATION.name}/{form.digest}/*"):
        path.unlink()
    found, seen = epoch_of(origin, tmp_path / "node", place)
    made, _ = epoch_of(origin, tmp_path / "alone", None)
    assert are_equal(found, made)
    assert (seen.shared_hits, seen.shared_errors) == (2, 0)
    assert seen.origin_bytes == origin.paths[1].stat().st_size


@pytest.mark.parametrize("which", ["*.tar", "index"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.sampled(2)
def test_damage_changes_no_batch(
    origin: Origin, tmp_path: Path, place: Place, which: str, workers: int
) -> None:
    prepare(origin, tmp_path / "spot", place)
    rng = random.Random(3)
    for path in Path(place.url).glob(f"prepared/*/*/{which}"):
        flip(path, rng.randrange(path.stat().st_size // 2, path.stat().st_size))
    found, seen = epoch_of(origin, tmp_path / "node", place, num_workers=workers)
    made, _ = epoch_of(origin, tmp_path / "alone", None)
    assert are_equal(found, made)
    assert seen.shared_errors >= 3
    assert seen.checksum_failures == 0


@pytest.mark.deep
def test_a_shared_cache_that_goes_in_a_run_changes_no_batch(origin: Origin, tmp_path: Path) -> None:
    with running_s3() as own:
        place = Place("s3://bucket/tier", own.storage_options)
        prepare(origin, tmp_path / "spot", place)
        given: dict[str, Any] = {"shared_cache": place.url, "shared_cache_options": place.options}
        given |= {"lanes": 1, "num_workers": 1, "ahead": 1, "batch_size": 5, "cache_size": "1GB"}
        with flat.make_loader(
            origin.urls, cache_dir=tmp_path / "node", images=Images(prepare=RECIPE), **given
        ) as loader:
            batches = iter(loader)
            found = [next(batches)]
            own.close()
            found += batches
    made, _ = epoch_of(origin, tmp_path / "alone", None, lanes=1, num_workers=1)
    assert are_equal([(images, list(texts)) for images, texts in found], made)


def test_a_prepared_shard_of_an_older_version_is_not_taken(
    origin: Origin, tmp_path: Path, place: Place
) -> None:
    prepare(origin, tmp_path / "spot", place)
    newer = Origin(tmp_path / "newer", COUNTS, options=ShardOptions(image_side=(41, 91)))
    newer.close()
    newer.paths[2].replace(origin.paths[2])
    os.utime(origin.paths[2], (1e9, 1e9))
    found, seen = epoch_of(origin, tmp_path / "node", place, revalidate="start")
    made, _ = epoch_of(origin, tmp_path / "alone", None)
    assert are_equal(found, made)
    assert seen.shared_hits == 2


def test_preparing_again_stores_nothing_and_reads_what_is_there(
    origin: Origin, tmp_path: Path, place: Place
) -> None:
    prepare(origin, tmp_path / "spot", place)
    sent, before = origin.sent, {path: path.stat().st_mtime_ns for path in Path(place.url).rglob("*")}
    report = origin.warm(tmp_path / "other", place, write_back=True, prepare=PREPARATION)
    assert (report.shards_complete, report.shared_stored, report.bytes_arrived) == (3, 0, 0)
    assert origin.sent == sent
    assert before.items() <= {path: path.stat().st_mtime_ns for path in Path(place.url).rglob("*")}.items()
    one, other = (
        sorted(path.read_bytes() for path in (tmp_path / root).glob("shards/*/data"))
        for root in ("spot", "other")
    )
    assert one == other


def test_preparing_reads_the_shards_themselves_from_the_shared_cache(
    origin: Origin, tmp_path: Path, place: Place
) -> None:
    origin.warm(tmp_path / "one", place, write_back=True)
    sent = origin.sent
    report = origin.warm(tmp_path / "spot", place, prepare=PREPARATION)
    assert (report.shards_complete, report.bytes_arrived, origin.sent) == (3, 0, sent)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_that_writes_back_stores_what_it_has_prepared_for_all_nodes(
    origin: Origin, tmp_path: Path, place: Place, workers: int
) -> None:
    given = {"shared_cache": place.url, "write_back": True, "num_workers": workers, "batch_size": 5}
    with flat.make_loader(
        origin.urls, cache_dir=tmp_path / "one", images=Images(prepare=RECIPE), **given
    ) as loader:
        made = [(images, list(texts)) for images, texts in loader]
        until(lambda: loader.stats().shared_stored == 3)
    assert not list(Path(place.url).glob("shards/*/index"))
    assert len(list(Path(place.url).glob("prepared/*/*/index"))) == 3
    found, seen = epoch_of(origin, tmp_path / "other", place, num_workers=workers)
    assert are_equal(found, made)
    assert (seen.origin_bytes, seen.shared_hits) == (0, 3)


@pytest.mark.deep
def test_a_training_prepares_from_what_the_shared_cache_has_as_it_is(
    origin: Origin, tmp_path: Path, place: Place
) -> None:
    origin.warm(tmp_path / "spot", place, write_back=True)
    found, seen = epoch_of(origin, tmp_path / "node", place)
    assert (seen.origin_bytes, seen.shards_published) == (0, 3)
    made, _ = epoch_of(origin, tmp_path / "alone", None)
    assert are_equal(found, made)
    forms = [prepared_form(origin.shard(number), PREPARATION.name) for number in range(3)]
    assert all(Tier(tmp_path / "node").has_whole(form) for form in forms)
