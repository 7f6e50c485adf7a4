"""A shared cache that may be read but not written: a file system that is mounted read-only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamload.daemon.options import DaemonOptions, ServiceOptions
from streamload.daemon.service import Service
from streamload.daemon.warm import warm
from streamload.testing.shards import ShardOptions
from tests.support import flat
from tests.support.commands import run_forked
from tests.support.disks import read_only, small_disk, why_no_small_disk
from tests.support.kills import Child, Stage
from tests.support.sharing import Origin, Place

pytestmark = pytest.mark.skipif(bool(why_no_small_disk()), reason=why_no_small_disk())

COUNTS = (30, 25, 40, 20)
STORED = 2
"""So many shards are there, the first ones."""


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(tmp_path / "data", COUNTS, options=ShardOptions(padding_bytes=(3_000, 30_000)))
    yield made
    made.close()


def half_full(origin: Origin, tmp_path: Path, stored: int = STORED) -> Place:
    """A shared cache with some of the shards, which this process and its children can't write to."""
    disk = tmp_path / "disk"
    small_disk(disk, 64 << 20)
    place = Place(str(disk / "shared"), {})
    filled = warm(
        origin.urls[:stored],
        cache_dir=tmp_path / "filler",
        cache_size="1GB",
        shared_cache=place.url,
        write_back=True,
    )
    assert filled.shared_stored == stored
    read_only(disk)
    return place


def epoch_of(origin: Origin, cache: Path, **options: Any) -> list[Any]:
    """The batches of an epoch, as one digest, and what was counted."""
    with flat.make_loader(
        origin.urls, batch_size=10, num_workers=2, cache_size="1GB", seed=5, cache_dir=cache, **options
    ) as loader:
        seen = hashlib.sha256()
        for images, texts in loader:
            seen.update(images.numpy().tobytes())
            seen.update(repr(texts).encode())
        done = loader.stats()
    return [seen.hexdigest(), done.shared_hits, done.shared_stored, done.shared_waits, done.origin_bytes]


def test_a_training_takes_what_is_there_and_fetches_the_rest(origin: Origin, tmp_path: Path) -> None:
    expected = epoch_of(origin, tmp_path / "plain")[0]

    def alone(stage: Stage) -> list[Any]:
        place = half_full(origin, tmp_path)
        return epoch_of(origin, tmp_path / "own", shared_cache=place.url, write_back=True)

    with Child(alone) as child:
        digest, hits, stored, waits, fetched = child.finish(100)
    assert digest == expected
    assert (hits, stored, waits) == (STORED, 0, 0)
    assert fetched == sum(path.stat().st_size for path in origin.paths[STORED:])


def daemon(origin: Origin, tmp_path: Path, place: Place, *more: str) -> list[Any]:
    """A daemon's exit code, and what it said."""
    command = ["daemon", *origin.urls, "--notices", "none"]
    command += ["--listen", "none", "--shared-cache", place.url, "--cache-dir", str(tmp_path / "own")]
    done = run_forked([*command, *more], limit_seconds=90)
    return [done.returncode, done.stdout, done.stderr]


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--once",), marks=pytest.mark.deep)], ids=["on and on", "once"]
)
def test_a_daemon_that_may_not_write_says_so_at_once(
    origin: Origin, tmp_path: Path, more: tuple[str, ...]
) -> None:
    with Child(lambda stage: daemon(origin, tmp_path, half_full(origin, tmp_path), *more)) as child:
        status, said, errors = child.finish(100)
    assert (status, said) == (2, "")
    refused = [line for line in errors.splitlines() if line.startswith("streamload: ")]
    assert len(refused) == 1
    assert f"the shared cache {tmp_path / 'disk' / 'shared'} can't write " in refused[0]
    assert "Read-only file system" in refused[0]
    assert "Traceback" not in errors


def test_where_all_is_held_a_daemon_needs_not_write(origin: Origin, tmp_path: Path) -> None:
    def alone(stage: Stage) -> list[Any]:
        return daemon(origin, tmp_path, half_full(origin, tmp_path, stored=len(COUNTS)), "--once")

    with Child(alone) as child:
        status, said, errors = child.finish(100)
    assert status == 0, errors
    assert "4 of 4 shards are held" in said


def test_once_does_not_wait_for_ever_for_a_shared_cache_in_trouble(origin: Origin, tmp_path: Path) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    (place / "leases").symlink_to("leases")  # it can't be opened, which isn't for want of permission
    asked = ServiceOptions(
        urls=tuple(origin.urls),
        shared_cache=str(place),
        cache_dir=tmp_path / "own",
        once=True,
        notices="none",
        listen="none",
        daemon=DaemonOptions(look_seconds=0.05, trouble_seconds=0.3),
    )
    with Service(asked) as service:
        status = service.run()
    assert (status.held, status.wanted, status.is_complete) == (0, len(COUNTS), False)
    assert "leases" in status.trouble
