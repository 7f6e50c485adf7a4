"""The index of a joined file in the cache directory: made once for all processes of a node, and found again.

`joins/` has a folder for each file and version of it. It counts against no limit; a newer version replaces
it, and `streamload cache` lists and clears it. Who uses it holds a shared lock on its `about.json`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from streamload.cache.locks import FileLock, is_locked
from streamload.cache.selection import KeySpec
from streamload.errors import CacheCorrupt, CacheError, DatasetChanged, OptionError, StreamloadError
from streamload.join.index import MappedRows, write_index
from streamload.join.options import Join
from streamload.join.rows import as_key, read_rows
from streamload.origins.origin import Origin, Version, open_origin
from streamload.shards.json_paths import at_path
from streamload.shards.samples import JOINED, Sample
from streamload.urls import identity, is_local, local_path, redact

logger = logging.getLogger("streamload")

_ABOUT = "about.json"
_FORMAT = 1
_ATTEMPTS = 100
_RETRY_SECONDS = 0.01


class JoinTable:
    """The rows of a file, for samples. Pickles as its folder.

    Args:
        folder: of the index.
        join: of the loader.

    Attributes:
        version: of keys and rows, the same wherever the same file is read.
        keys: digest of its keys.
        columns: names of what its rows have.

    Raises:
        FileNotFoundError: it was removed.
        CacheCorrupt: it is damaged.
    """

    def __init__(self, folder: Path, join: Join):
        self._folder, self.join, self._member = folder, join, join.member
        lock = FileLock.acquire(folder / _ABOUT, shared=True)
        if lock is None:
            raise FileNotFoundError(f"the index {folder} of {join!r} was removed")
        weakref.finalize(self, lock.close)
        try:
            about = json.loads((folder / _ABOUT).read_bytes())
            self.version, self.keys = str(about["version"]), str(about["keys"])
            self.columns = tuple(map(str, about["columns"]))
            self._rows = MappedRows(folder, about["rows"], about["row_bytes"])
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise CacheCorrupt(f"the index {folder} of {join!r} is damaged: {exc!r:.200}") from exc
        with contextlib.suppress(OSError):
            os.utime(folder)

    def __repr__(self) -> str:
        return f"<JoinTable of {len(self._rows):,} rows, {self.version[:8]}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder, self.join)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JoinTable) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self._folder)

    def row(self, key: str, members: Mapping[str, bytes | memoryview]) -> memoryview | None:
        """The row of a sample, as a JSON object; None: it has none.

        Args:
            key: of the sample.
            members: its JSON member among them, if rows are found by that.
        """
        extension, field = self._member
        if field is None:
            return self._rows.row(key)
        try:
            fields = json.loads(bytes(members[extension]))
        except (KeyError, ValueError, RecursionError):
            return None
        uid = as_key(next(at_path(fields, field), None)) if isinstance(fields, dict) else None
        return None if uid is None else self._rows.row(uid)

    def check(self, key: KeySpec) -> None:
        """Refuse a key of a column that the rows don't have.

        Raises:
            OptionError: it names the columns that they have.
        """
        for extension, path in key.choices:
            if extension == JOINED and path is not None and not self._has_column(path):
                columns = ", ".join(self.columns)
                raise OptionError(
                    f"{str(key)!r}: {self.join!r} has no column {path!r}; it has {columns!a:.300}"
                )

    def _has_column(self, path: str) -> bool:
        return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in self.columns)

    def check_keys(self) -> None:
        """Compare the keys with their digest: a damaged one would leave its sample out.

        Raises:
            CacheCorrupt: they differ.
        """
        if self._rows.keys_digest() != self.keys:
            raise CacheCorrupt(f"the keys of the index {self._folder} of {self.join!r} are damaged")

    def add(self, sample: Sample) -> Sample:
        """A sample with its row as a further member."""
        row = self.row(sample.key, sample.members)
        return sample if row is None else sample._replace(members={**sample.members, JOINED: row})


def open_table(join: Join, cache_dir: Path, storage_options: Mapping[str, Any] | None = None) -> JoinTable:
    """The table of a file as it is now. The first process of a node to ask for it reads the file.

    Raises:
        OptionError: the file can't be used.
        OriginError: it can't be read.
        CacheError: the cache directory can't be used.
    """
    root = cache_dir / "joins"
    definition = [_FORMAT, identity(join.url, storage_options), join.on, join.columns]
    name = xxh3_128_hexdigest(json.dumps(definition).encode())
    with contextlib.closing(open_origin(join.url, storage_options)) as origin:
        version = origin.version()
        if not version.is_traceable:
            raise OptionError(f"{join!r}: its server gives neither ETag nor date: download the file")
        folder = root / f"{name}.{xxh3_64_hexdigest(repr(version).encode())}"
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError, CacheCorrupt):
                return _opened(folder, join)
            time.sleep(_RETRY_SECONDS)  # it isn't there, or is listed or removed just now
            try:
                cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                root.mkdir(mode=0o700, exist_ok=True)
                lock = FileLock.acquire(root / f"{name}.lock", create=True, wait=True)
                assert lock is not None
                with contextlib.closing(lock):
                    if _is_to_be_made(folder, join):
                        _make(folder, join, origin, version)
            except OSError as exc:
                if isinstance(exc, StreamloadError):
                    raise
                raise CacheError(f"the index of {join!r} can't be written to {root}: {exc}") from exc
    raise CacheError(f"the index {folder} of {join!r} is removed again and again")


def _opened(folder: Path, join: Join) -> JoinTable:
    table = JoinTable(folder, join)
    table.check_keys()
    return table


def _is_to_be_made(folder: Path, join: Join) -> bool:
    """True if there is no index; a damaged one goes. For the process that holds the lock."""
    try:
        _opened(folder, join)
        return False
    except FileNotFoundError:
        if (folder / _ABOUT).exists():
            return False  # listed just now
    except CacheCorrupt as exc:
        logger.warning("%s; it is made again", exc)
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.is_dir():
        folder.unlink(missing_ok=True)
    return True


def _make(folder: Path, join: Join, origin: Origin, version: Version) -> None:
    """Read a file and write its index; older ones that no process has open go."""
    logger.info("reading %r (%s bytes), once for this node", join, version.size)
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    new.mkdir()
    try:
        path = local_path(join.url) if is_local(join.url) else _fetched(new / "file", origin, version)
        try:
            written = write_index(new, ((as_key(key), row) for key, row in read_rows(path, join)))
        except OptionError as exc:
            raise OptionError(f"{join!r}: {exc}") from exc
        if origin.version() != version:
            raise DatasetChanged(f"{join!r} was changed while it was read")
        (new / "file").unlink(missing_ok=True)
        about = {"source": redact(join.url), "on": join.on, **written._asdict()}
        (new / _ABOUT).write_text(json.dumps(about))
        for path in new.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if written.without_key:
        logger.warning("%d rows of %r have no key and are left out", written.without_key, join)
    for held in held_joins(folder.parent.parent):
        if held.rows and held.folder != folder and held.folder.name[:32] == folder.name[:32]:
            held.remove()


def _fetched(path: Path, origin: Origin, version: Version) -> Path:
    """A copy of a file."""
    with path.open("wb") as file, contextlib.closing(origin.open(0, version)) as stream:
        for chunk in stream.chunks():
            file.write(chunk)
    return path


class HeldJoin(NamedTuple):
    """An index in a cache directory; one without rows was not finished."""

    folder: Path
    lock: Path
    source: str
    """The URL of its file, without secrets."""
    rows: int
    size_bytes: int
    used_at: float
    is_open: bool
    """Whether a process uses it."""

    def remove(self) -> bool:
        """Remove it, unless a process uses it."""
        lock = FileLock.acquire(self.lock)
        if lock is None:
            return False
        with contextlib.closing(lock):
            going = self.folder.rename(f"{self.folder}.new") if self.rows else self.folder
            shutil.rmtree(going, ignore_errors=True)
        return True


def held_joins(cache_dir: Path) -> Iterator[HeldJoin]:
    """The indexes in a cache directory."""
    for folder in sorted((cache_dir / "joins").glob(f"{'?' * 32}.{'?' * 16}*")):
        with contextlib.suppress(OSError, ValueError):
            lock, source, rows = folder / _ABOUT, "", 0
            if folder.suffix == ".new":
                lock = folder.with_name(f"{folder.name[:32]}.lock")
            else:
                about = json.loads(lock.read_bytes())
                source, rows = about["source"], about["rows"]
            size_bytes = sum(path.stat().st_size for path in folder.iterdir())
            used_at = folder.stat().st_mtime
            yield HeldJoin(folder, lock, source, rows, size_bytes, used_at, is_locked(lock))
