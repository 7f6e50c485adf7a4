"""Inventory of a tier's directory: what the tier made, who uses it, what is foreign.

Changes nothing. Locks are tried for a moment to see who holds them, as eviction does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from streamload.cache import demand
from streamload.cache.directory import KINDS, bytes_below, reserved_for_rows
from streamload.cache.locks import is_locked
from streamload.cache.tier import Tier
from streamload.shards.record import END, RECORD, open_file, read_at, read_header, shown_url

_OWN_FILE = re.compile(r"data|index|names|reserved(\.new)?|facts\.[0-9a-f]{32}")
_OWN_COLUMN = re.compile(
    r"rows\.[0-9a-f]{32}(\.slots|\.data|\.asked)?(\.[0-9a-f]{8}\.new)?|uids(\.lock|\.new)?"
)
_RECORD = re.compile(r"lock|tier\.json(\.new)?")
_SHARES = {"shards": "published", "bare": "index_only", "gone": "tombstones"}
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


@dataclass(frozen=True, slots=True)
class Foreign:
    """Something in a tier's directory that the tier didn't make: it is never opened, moved or removed."""

    path: Path
    what: str
    """"a symbolic link", "a file of another user (uid 1000)" …"""


@dataclass(frozen=True, slots=True)
class KindShare:
    """The number of entries of one kind, and the bytes of the budget that they take."""

    count: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A process that has announced what it will read, maybe in several files."""

    pid: int
    shards: int
    """Number of different shards that it has open or will open, as far as it looks ahead."""
    held: int
    """Number of them that are published in the tier."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Content of a tier.

    Attributes:
        used_bytes: what counts against the limit: published shards, parts with their reservations, index-only
            copies, tombstones and trash.
        free_bytes: of the disk.
        published, live_parts, orphaned_parts, index_only, tombstones, columns, trash, run_files: number and
            size of each kind.
        rows_bytes: the room of rows of calls, which shards can't have.
        samples: in the published shards, by their indexes.
        open_shards: the published shards that a process has open, by URL without secrets.
        runs: the live ones.
        oldest_use, newest_use: when a published shard was last opened, in seconds since the epoch.
        foreign: what the tier didn't make.
    """

    root: Path
    limit_bytes: int
    used_bytes: int
    free_bytes: int
    published: KindShare
    live_parts: KindShare
    orphaned_parts: KindShare
    index_only: KindShare
    tombstones: KindShare
    columns: KindShare
    trash: KindShare
    run_files: KindShare
    rows_bytes: int
    samples: int
    open_shards: tuple[str, ...]
    runs: tuple[LiveRun, ...]
    oldest_use: float | None
    newest_use: float | None
    foreign: tuple[Foreign, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON."""
        values = asdict(self)
        values = {"cache_dir": str(values.pop("root")), **values}
        values["foreign"] = [{"path": str(entry.path), "what": entry.what} for entry in self.foreign]
        for name in ("oldest_use", "newest_use"):
            values[name] = None if values[name] is None else as_time(values[name])
        return values


def take_inventory(tier: Tier) -> Inventory:
    """Look at everything in a tier's directory. Reads some bytes of each index, and no data.

    What appears or disappears meanwhile may be missed, but is never an error.
    """
    rooms: dict[str, list[tuple[Path, int]]] = {
        name: [] for name in (*_SHARES.values(), "live_parts", "orphaned_parts")
    }
    uses: list[float] = []
    samples, open_shards, held = 0, [], set()
    for shard in tier.shards():
        if shard.kind == "parts":
            name = "live_parts" if is_filled(shard.path) else "orphaned_parts"
        else:
            name = _SHARES[shard.kind]
        rooms[name].append((shard.path, shard.size_bytes))
        if shard.kind == "shards":
            if not shard.is_superseded:
                uses.append(shard.used_at)
            held.add(demand.short(shard.digest))
            samples += count_samples(shard.path)
            if is_read(shard.path):
                open_shards.append(url_of(shard.path) or shard.digest)
    trash = [(path, bytes_below(path)) for path in tier.own("trash")]
    files = demand.files(tier.root / "runs")
    rooms["columns"] = [(column.path, column.size_bytes) for column in tier.columns()]
    shares = {
        name: KindShare(len(sized_paths), sum(size for _, size in sized_paths))
        for name, sized_paths in rooms.items()
    }
    return Inventory(
        root=tier.root,
        limit_bytes=tier.limit_bytes,
        used_bytes=sum(share.size_bytes for share in shares.values()) + sum(size for _, size in trash),
        free_bytes=shutil.disk_usage(tier.root).free,
        trash=KindShare(len(trash), sum(size for _, size in trash)),
        run_files=KindShare(len(files), sum(_size_of(path) for path in files)),
        rows_bytes=reserved_for_rows(tier.root),
        samples=samples,
        open_shards=tuple(sorted(open_shards)),
        runs=tuple(_live_runs(files, held)),
        oldest_use=min(uses, default=None),
        newest_use=max(uses, default=None),
        foreign=tuple(foreign(tier)),
        **shares,
    )


def foreign(tier: Tier) -> Iterator[Foreign]:
    """All that the tier didn't make, by its place."""
    for path in _listed(tier.root):
        if path.name not in (*KINDS, "runs", "rows", "joins"):  # rows: derived/store/; joins: join/table.py
            yield from _judge(path, _RECORD.fullmatch(path.name) is not None, stat.S_ISREG)
    for kind in KINDS:
        for path in _listed(tier.root / kind):
            strange = list(_judge(path, KINDS[kind].fullmatch(path.name) is not None, stat.S_ISDIR))
            yield from strange or (foreign_in(path) if kind != "trash" else ())
    run_files = set(demand.run_files(tier.root / "runs"))
    for path in _listed(tier.root / "runs"):
        yield from _judge(path, path in run_files, stat.S_ISREG)


def foreign_in(path: Path) -> list[Foreign]:
    """Foreign files in the directory of one shard, or of its columns."""
    foreign_files: list[Foreign] = []
    own = _OWN_COLUMN if path.parent.name == "columns" else _OWN_FILE
    for inner in _listed(path):
        foreign_files += _judge(inner, own.fullmatch(inner.name) is not None, stat.S_ISREG)
    return foreign_files


def is_filled(part: Path) -> bool:
    """True if a part's filler is live."""
    return _is_held(part / "index", shared=True)


def is_read(path: Path) -> bool:
    """True if anybody has a shard, part or tombstone open."""
    return _is_held(path / "names", shared=False)


def count_samples(path: Path) -> int:
    """The number of samples of a shard, from the size of its index; 0 if that can't be read."""
    with contextlib.suppress(OSError, ValueError), open_file(path / "index") as file:
        _, header_bytes = read_header(functools.partial(read_at, file))
        count = (os.fstat(file.number).st_size - header_bytes) // RECORD.itemsize
        last = read_at(file, RECORD.itemsize, header_bytes + (count - 1) * RECORD.itemsize)
        has_end = np.frombuffer(last, RECORD)["flags"][0] & END
        return count - bool(has_end)
    return 0


def url_of(path: Path) -> str:
    """The URL without secrets of a shard in the tier; empty if its index doesn't name it."""
    return shown_url(meta_of(path))


def meta_of(path: Path) -> dict[str, object]:
    """Header of a shard's index; empty if that can't be read."""
    with contextlib.suppress(OSError, ValueError), open_file(path / "index") as file:
        return read_header(functools.partial(read_at, file))[0]
    return {}


def as_time(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def _is_held(path: Path, *, shared: bool) -> bool:
    """True if a process holds the lock of a directory."""
    with contextlib.suppress(OSError):  # nothing that could be locked
        return is_locked(path, shared=shared)
    return False


def _live_runs(files: list[Path], held: set[int]) -> Iterator[LiveRun]:
    visits: dict[int, set[int]] = {}
    for path in files:
        if _is_held(path, shared=True):
            visits.setdefault(demand.pid_of(path), set()).update(demand.visits_of(path).tolist())
    for pid, shards in sorted(visits.items()):
        yield LiveRun(pid, len(shards), len(shards & held))


def _judge(path: Path, has_own_name: bool, is_own_kind: Any) -> Iterator[Foreign]:
    """A finding if `path` isn't something that the tier makes: by name, kind or owner."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    kind = next((words for is_kind, words in _KINDS if is_kind(status.st_mode)), "a special file")
    if status.st_uid != os.geteuid():
        yield Foreign(path, f"{kind} of another user (uid {status.st_uid})")
    elif not has_own_name or not is_own_kind(status.st_mode):
        yield Foreign(path, kind)


def _listed(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:  # it has gone, or can't be listed
        return []


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
