"""What was computed once lies in a store that was damaged: right values come, made again and counted.

A table: each store through `make_loader`, as users have it, by each kind of damage. Expected is what a loader
with an empty cache gives. A new store is a subclass of `Stored` and an entry of STORES.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import streamload
from streamload import Features, Shards
from streamload.columns import columns
from streamload.columns.column import GROUP_ROWS, HEAD_BYTES
from streamload.derived.store import row_store
from streamload.derived.store.database import DATABASE
from streamload.features import names
from streamload.shards.record import RECORD, read_header
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat

COUNTS = (9, 9)
SAMPLES = sum(COUNTS)
_FIRST_ROW, _ROW_BYTES = HEAD_BYTES + 8 * GROUP_ROWS, 48 * 4
"""In a column."""


@streamload.cache_module
class Means(nn.Module):
    """Means of an image's parts, times a weight."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.factor * nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)


class Ran(NamedTuple):
    """What a run gave: values by sample key, and how many were made or fetched again."""

    values: dict[str, bytes]
    made_count: int


Between = Callable[[], object]


class Stored(ABC):
    """A store of computed values, as a run of `make_loader` fills and reads it.

    Args:
        folder: of the test.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def run(self, url: str, cache: Path, *, is_other: bool = False, between: Between = lambda: None) -> Ran:
        """Go through all samples once.

        Args:
            is_other: by another definition: other weights, another recipe, another function.
            between: called after the first batch.
        """
        row_store.close_stores()
        values: dict[str, bytes] = {}
        options = {"train": False, "output": "dict", "with_keys": True, "num_workers": 0, "batch_size": 3}
        given = self.options(is_other)
        with flat.make_loader(
            url, None, cache_dir=cache, cache_size="1GB", **{"text_key": None, **options, **given}
        ) as loader:
            for number, batch in enumerate(loader):
                values |= zip(batch["__key__"], self.values(given, batch), strict=True)
                if not number:
                    between()
            made_count = self.made_count(given, loader.stats())
        row_store.close_stores()
        return Ran(values, made_count)

    @abstractmethod
    def options(self, is_other: bool) -> dict[str, Any]:
        """Options of make_loader."""

    @abstractmethod
    def values(self, given: dict[str, Any], batch: dict[str, Any]) -> list[bytes]:
        """A batch's values, as bytes."""

    @abstractmethod
    def made_count(self, given: dict[str, Any], stats: streamload.Snapshot) -> int:
        """How many values were made by a run, or bytes fetched for that."""

    @abstractmethod
    def files(self, cache: Path) -> list[list[Path]]:
        """The files of the store, in a list for each shard: in the same order in each cache."""

    def torn(self, cache: Path) -> None:
        """Cut all files in the middle."""
        for path in chain.from_iterable(self.files(cache)):
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)

    def flipped(self, cache: Path) -> None:
        """Flip a bit in the middle of all files."""
        for path in chain.from_iterable(self.files(cache)):
            data = bytearray(path.read_bytes())
            data[len(data) * 3 // 4] ^= 4
            path.write_bytes(data)

    def swapped(self, cache: Path) -> None:
        """Exchange the files of two shards."""
        one, other = self.files(cache)
        for first, second in zip(one, other, strict=True):
            before = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(before)

    def replaced(self, cache: Path, source: Path) -> None:
        """Put the files of another cache in place of those of this one."""
        for ours, theirs in zip(self.files(cache), self.files(source), strict=True):
            for path, other in zip(ours, theirs, strict=True):
                path.write_bytes(other.read_bytes())

    @abstractmethod
    def shifted(self, cache: Path) -> None:
        """Give each sample the value of the next one."""

    def evicted(self, cache: Path) -> None:
        """Delete all files."""
        for path in chain.from_iterable(self.files(cache)):
            path.unlink()


def rotated(data: bytes, start: int, stop: int, step: int) -> bytes:
    """Bytes with the items between two places each moved by one."""
    return data[:start] + data[start + step : stop] + data[start : start + step] + data[stop:]


class Rows(Stored):
    """Rows of a module, in the table of a cache directory."""

    def options(self, is_other: bool) -> dict[str, Any]:
        return {"features": {"f": Features(Means(2.0 if is_other else 1.0).eval())}}

    def values(self, given: dict[str, Any], batch: dict[str, Any]) -> list[bytes]:
        return [row.numpy().tobytes() for row in given["features"]["f"](batch)]

    def made_count(self, given: dict[str, Any], stats: streamload.Snapshot) -> int:
        return stats.feature_rows_computed

    def files(self, cache: Path) -> list[list[Path]]:
        (path,) = cache.glob(f"rows/{DATABASE}")
        with contextlib.closing(sqlite3.connect(path)) as database:  # all is in one file then
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return [[path]]

    def flipped(self, cache: Path) -> None:
        self._write(cache, lambda rows: [value[:-1] + bytes([value[-1] ^ 4]) for value in rows])

    def swapped(self, cache: Path) -> None:
        self._write(
            cache, lambda rows: [value for pair in zip(rows[1::2], rows[::2], strict=True) for value in pair]
        )

    def replaced(self, cache: Path, source: Path) -> None:
        """As values under the keys of this store: those of another one would never be asked for."""
        others = [value for _, value in self._read(source)]
        self._write(cache, lambda rows: others)

    def shifted(self, cache: Path) -> None:
        self._write(cache, lambda rows: [*rows[1:], rows[0]])

    def evicted(self, cache: Path) -> None:
        """By another process, row by row, while the store is open."""
        (path,) = cache.glob(f"rows/{DATABASE}")
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as database, database:
            database.execute("DELETE FROM rows")

    def _read(self, cache: Path) -> list[tuple[int, bytes]]:
        ((path,),) = self.files(cache)
        with contextlib.closing(sqlite3.connect(path)) as database:
            return database.execute(
                "SELECT place, value FROM rows WHERE used NOT NULL ORDER BY key"
            ).fetchall()

    def _write(self, cache: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
        rows = self._read(cache)
        assert len(rows) == SAMPLES
        changed = zip(change([value for _, value in rows]), (place for place, _ in rows), strict=True)
        ((path,),) = self.files(cache)
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.executemany("UPDATE rows SET value = ? WHERE place = ?", changed)


class Columns(Rows):
    """Rows of a module, in the columns of the shards."""

    def files(self, cache: Path) -> list[list[Path]]:
        return [[path] for path in sorted(cache.glob("columns/*/rows.*"))]

    torn, swapped = Stored.torn, Stored.swapped
    replaced, evicted = Stored.replaced, Stored.evicted

    def flipped(self, cache: Path) -> None:
        for (path,) in self.files(cache):
            data = bytearray(path.read_bytes())
            for start in range(_FIRST_ROW, len(data), _ROW_BYTES):
                data[start] ^= 4
            path.write_bytes(data)

    def shifted(self, cache: Path) -> None:
        for (path,) in self.files(cache):
            data = path.read_bytes()
            path.write_bytes(rotated(data, _FIRST_ROW, _FIRST_ROW + _ROW_BYTES * COUNTS[0], _ROW_BYTES))


class Images(Stored):
    """Prepared images, in the tier: data, index and names."""

    def options(self, is_other: bool) -> dict[str, Any]:
        return {"prepare": "raw-24" if is_other else "raw-20", "revalidate": "start"}

    def values(self, given: dict[str, Any], batch: dict[str, Any]) -> list[bytes]:
        return [image.numpy().tobytes() for image in batch["image"]]

    def made_count(self, given: dict[str, Any], stats: streamload.Snapshot) -> int:
        return stats.origin_bytes

    def files(self, cache: Path) -> list[list[Path]]:
        return [[folder / name for name in self.names] for folder in sorted(cache.glob("shards/*"))]

    names: tuple[str, ...] = ("data", "index", "names")

    def shifted(self, cache: Path) -> None:
        for _, index, _ in self.files(cache):
            data = index.read_bytes()
            _, start = read_header(lambda size, at, data=data: data[at : at + size])
            index.write_bytes(rotated(data, start, start + COUNTS[0] * RECORD.itemsize, RECORD.itemsize))


class Facts(Stored):
    """Columns of facts, beside the index of each shard."""

    def options(self, is_other: bool) -> dict[str, Any]:
        made: list[str] = []
        facts: dict[str, tuple[str, float]] = {}

        def first(sample: dict[str, Any]) -> float:
            made.append(sample["__key__"])
            return float(zlib.crc32(sample["txt"]))

        def second(sample: dict[str, Any]) -> float:
            made.append(sample["__key__"])
            return float(zlib.adler32(sample["txt"]))

        def third(sample: dict[str, Any]) -> float:
            return 1.0 + first(sample)

        def keep(entry: Any) -> bool:
            facts[entry.key] = tuple(entry.facts.values())
            return True

        self.made, self.facts = made, facts
        functions = (third, second) if is_other else (first, second)
        columns = {
            name: (function, function.__name__) for name, function in zip("ab", functions, strict=True)
        }
        return {"shards": Shards(facts=columns, keep=keep)}

    def values(self, given: dict[str, Any], batch: dict[str, Any]) -> list[bytes]:
        return [repr(self.facts[key]).encode() for key in batch["__key__"]]

    def made_count(self, given: dict[str, Any], stats: streamload.Snapshot) -> int:
        return len(self.made)

    def files(self, cache: Path) -> list[list[Path]]:
        return [sorted(folder.glob("facts.*")) for folder in sorted(cache.glob("shards/*"))]

    def shifted(self, cache: Path) -> None:
        for path in chain.from_iterable(self.files(cache)):
            data = path.read_bytes()
            path.write_bytes(rotated(data, len(data) - 8 * COUNTS[0], len(data), 8))


STORES: dict[str, type[Stored]] = {
    "rows": Rows,
    "columns": Columns,
    "images": Images,
    "facts": Facts,
}


@pytest.fixture(params=STORES)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stored]:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "default"))
    monkeypatch.setenv("STREAMLOAD_CACHE_SIZE", "1GB")
    if request.param == "columns":  # of shards with so few samples; a batch has as many
        monkeypatch.setattr(names, "FIRST", 3)
        monkeypatch.setattr(columns, "FIRST", 3)
    yield STORES[request.param](tmp_path)
    row_store.close_stores()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write(tmp_path / "data", seed=1)
    with ShardServer(tmp_path / "data") as server:
        yield server


def write(folder: Path, seed: int) -> None:
    write_shards(folder, COUNTS, seed=seed, options=ShardOptions(image_side=(24, 40)))


def url_of(server: ShardServer) -> str:
    return f"{server.url}/{{00000..00001}}.tar"


DAMAGES = ["torn", "evicted", "flipped", "swapped", "stale", "foreign", "shifted", "evicted while read"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_costs_the_work_of_making_values_again_and_gives_no_wrong_one(
    damage: str, store: Stored, server: ShardServer, tmp_path: Path
) -> None:
    url, cache = url_of(server), tmp_path / "cache"
    if damage == "stale":
        store.run(url, tmp_path / "source")
        write(server.root, seed=2)
    elif damage == "foreign":
        store.run(url, tmp_path / "source", is_other=True)
    expected = store.run(url, cache)
    again = store.run(url, cache)
    assert again.values == expected.values
    assert again.made_count <= 2  # a byte of each shard, by revalidation, or checks of rows
    assert len({*expected.values.values()}) == len(expected.values) == SAMPLES
    if damage in ("stale", "foreign"):
        store.replaced(cache, tmp_path / "source")
    elif damage != "evicted while read":
        getattr(store, damage)(cache)
    found = store.run(url, cache, between=lambda: damage == "evicted while read" and store.evicted(cache))
    assert found.values == expected.values
    if damage != "evicted while read":  # a process may read on from what it has open
        assert found.made_count > again.made_count
    last = store.run(url, cache)
    assert last.values == expected.values
