"""Fill one shard (step F): claim → origin → data and index → publish, or leave a tombstone.

While bytes arrive they are written and scanned; a sample's entry is appended once the sample is whole, after
its data. Whatever ends the fill early leaves a part that holds only what is true of it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, TypeVar

from streamload.cache.budget import is_no_space
from streamload.cache.locks import FileLock
from streamload.cache.part import Part
from streamload.cache.shard import Shard
from streamload.cache.takeover import Outdated, open_data, verified_prefix
from streamload.descriptors import Descriptor
from streamload.errors import (
    CacheCorrupt,
    CacheError,
    CacheFull,
    DatasetChanged,
    OriginError,
    OriginStopped,
    ShardCut,
    ShardError,
    ShardFormatError,
    StreamloadError,
)
from streamload.origins.origin import Origin, Stream, Unproven, Version
from streamload.shards.index import COMPLETE, IndexWriter, Packed
from streamload.shards.local import LocalVersion, index_local
from streamload.shards.record import pack_header
from streamload.shards.samples import Entry, ShardScanner
from streamload.shards.tar import BLOCK_BYTES

_Result = TypeVar("_Result")
_INDEX_SHARE = 64
"""One byte of index for so many of data is reserved in advance; more as it grows."""
_GROWTH = 8
"""By which part of itself a reservation grows where the size isn't known."""
_SPARE_BYTES = 64 << 10
_SPARE_INDEX_BYTES = 8 << 10
_FIRST_BYTES = 4 << 10
"""What an index asks for that is begun without data: little, so that many fit into a tiny tier."""
_NO_ROOM_SECONDS = 0.05
_REFUSALS_LIMIT = 100
"""How often a fill that grows asks for more room, before it gives back what it has."""
_COPY_BYTES = 8 << 20


def reserved_bytes(data_bytes: int) -> int:
    """What a shard of a known size is given in a tier when its fill begins."""
    return data_bytes + index_bytes(data_bytes) + _SPARE_BYTES


def index_bytes(data_bytes: int) -> int:
    """About what the index of a shard takes."""
    return data_bytes // _INDEX_SHARE


class Filled(enum.Enum):
    """How a fill ended."""

    PUBLISHED = "published"
    GAVE_UP = "gave up"
    NO_ROOM = "no room"
    STOPPED = "stopped"
    OUTDATED = "outdated"
    """What a dead filler left was of another version, or somebody took the part away (where locks do
    nothing, or the tier was cleared); the next fill begins anew."""


class Outcome(NamedTuple):
    """How a fill ended; the lock that makes its tombstone stand; the size of a shard that had no room."""

    result: Filled
    tombstone: FileLock | None = None
    size_bytes: int = 0


def fill(
    part: Part,
    shard: Shard,
    open_origin: Callable[[], Origin],
    *,
    size_bytes: int = 0,
    next_use: Callable[[], float],
    stop: threading.Event,
    index_only: bool = False,
    refused: Callable[[bool], bool] = lambda waits: False,
    leave_tombstone: bool = True,
) -> Outcome:
    """Fill a claimed part from its origin and publish it.

    Args:
        part: the claim; whatever happens, it is over when this returns or raises.
        shard: what is filled. Of a local file only the index is made, unless it is to be prepared.
        open_origin: gives its origin (not asked for a local file that stays where it is); for a shard that is
            to be prepared, one that gives the prepared bytes under the version of what they are made of.
        size_bytes: of the shard, where it is known: without room for it its origin isn't asked.
        next_use: how soon the shard is needed, in shard visits (see `Budget.reserve`).
        stop: ends the fill; the samples that it has so far stay.
        index_only: keep the index alone; its readers get the bytes from the origin, by range.
        refused: told, with True, again and again while the fill waits for room in the middle of a shard, and
            with False when it has got it; what it returns ends the fill as one that had no room.
        leave_tombstone: whether a shard that can't be had is given up for all who read from the tier.

    Raises:
        OriginError, ShardError: why it can't be had, where no tombstone says so.
        CacheFull: no room on the disk, or the shard is larger than the tier.
    """
    job = _Fill(part, shard, next_use, stop, index_only, refused)
    try:
        is_whole = job.bring(open_origin, size_bytes, leave_tombstone)
        if is_whole and index_only:
            part.publish_bare()
        elif is_whole:
            part.publish()
        else:
            return Outcome(Filled.GAVE_UP, part.give_up())
        return Outcome(Filled.PUBLISHED)
    except BaseException as exc:
        taken_away = part.was_taken_away
        with contextlib.suppress(OSError):
            job.close()
        if isinstance(exc, OriginError) and job.is_of_use:
            part.leave()
        else:
            part.discard()
        return _cut_short(exc, part.tier.root, taken_away)


def _cut_short(exc: BaseException, root: Path, taken_away: bool) -> Outcome:
    """What it means that a fill has ended by an exception; raises what its caller has to know."""
    if isinstance(exc, _NoRoom):
        return Outcome(Filled.NO_ROOM, size_bytes=exc.args[0])
    if isinstance(exc, OriginStopped):
        return Outcome(Filled.STOPPED)
    if isinstance(exc, Outdated | Unproven) or (
        isinstance(exc, FileNotFoundError) and taken_away and not isinstance(exc, StreamloadError)
    ):
        return Outcome(Filled.OUTDATED)
    if not isinstance(exc, OSError) or isinstance(exc, StreamloadError):
        raise exc
    if is_no_space(exc) or exc.errno == errno.EFBIG:
        raise CacheFull(f"no space left for the cache at {root}: free some, or lower cache_size") from exc
    raise CacheError(f"the cache at {root} can't be written: {exc}") from exc


class _NoRoom(Exception):
    """The tier has no room for this shard now; its size."""


class _Fill:
    """The files of a part while they are written."""

    def __init__(
        self,
        part: Part,
        shard: Shard,
        next_use: Callable[[], float],
        stop: threading.Event,
        index_only: bool,
        refused: Callable[[bool], bool],
    ):
        self._part = part
        self._index_only = index_only
        self._refused = refused
        self._shard = shard
        self._is_prepared = bool(shard.recipe)
        self._next_use = next_use
        self._stop = stop
        self._index: IndexWriter | None = None
        self._data: Descriptor | None = None
        self._written = 0
        self._index_bytes = 0
        self.is_of_use = False
        """Whether there are samples for another to take up."""

    def bring(self, open_origin: Callable[[], Origin], size_bytes: int, leave_tombstone: bool) -> bool:
        """Bring all of it here, or write why it can't be had, for its readers; whether it is whole.

        Raises:
            OriginError, ShardError: why it can't be had, where no tombstone is to be left.
            _NoRoom, Outdated, OSError: it can't be had now.
        """
        try:
            self._make_room(size_bytes, patient=False)
            if self._shard.in_place is not None:
                self._index_local(self._shard.in_place)
            else:
                self._transfer(open_origin)
        except OriginStopped:
            raise
        except (OriginError, ShardError) as exc:
            if not leave_tombstone:
                raise
            says_which = self._shard.name in str(exc)
            self._record(type(exc).__name__, str(exc) if says_which else f"{self._shard.name}: {exc}")
            return False
        return True

    def _index_local(self, file: Path) -> None:
        """Index a file of this machine: its headers are read, its bytes stay where they are."""
        warnings: list[str] = []
        size = 0

        def begin(version: LocalVersion) -> None:
            nonlocal size
            size = version.size
            self._begin(version._asdict())

        for some in index_local(file, warnings, begin):
            self._append(some)
        self._record(COMPLETE, warnings=warnings, size=size)

    def _transfer(self, open_origin: Callable[[], Origin]) -> None:
        """Bring the bytes here, from where an orphan's verified prefix ends."""
        scanner, expected = self._take_up()
        with contextlib.closing(self._open(open_origin(), scanner.position, expected)) as stream:
            size = None if self._is_prepared else stream.version.size
            if expected is None:
                self._make_room(size or 0, patient=False)
                self._begin(asdict(stream.version))
            for chunk in stream.chunks():
                self._write(chunk)
                self._append(self._scan(scanner, chunk))
                if self._stop.is_set():
                    raise OriginStopped(f"{self._shard.name}: the fill was stopped")
        entries, warnings = scanner.finish()
        self._append(entries)
        if size is not None and size != self._written:
            raise ShardCut(f"{self._shard.name} has {self._written:,} bytes instead of {size:,}")
        self._record(COMPLETE, warnings=warnings, size=self._written)

    def _scan(self, scanner: ShardScanner, chunk: bytes | memoryview) -> list[Entry]:
        """The entries that a chunk completes; before it complains of damage, those in front of it.

        So what a damaged shard gives doesn't depend on how its bytes happened to arrive.
        """
        if self._index_only:
            view = memoryview(chunk)
            for start in range(0, len(view), BLOCK_BYTES):
                self._append(scanner.feed(view[start : start + BLOCK_BYTES]))
            return []
        known_stop = scanner.whole_stop
        try:
            return scanner.feed(chunk)
        except ShardFormatError:
            assert self._index is not None
            again = ShardScanner(known_stop, self._index.count, prepared=self._is_prepared)
            with (self._part.path / "data").open("rb") as data, contextlib.suppress(ShardFormatError):
                data.seek(again.position)
                # A block at a time, as damage is in a header; payloads in larger pieces.
                while block := data.read(min(max(BLOCK_BYTES, again.skippable()), _COPY_BYTES)):
                    self._append(again.feed(block))
            raise

    def _record(self, status: str, cause: str = "", warnings: list[str] | None = None, size: int = 0) -> None:
        """Write the end of the index: complete, or a tombstone with its cause."""
        if self._index is None:
            self._begin({})
        assert self._index is not None
        self._write_index(self._index, self._index.pack_end(status, size, cause, warnings or []))
        self.close()

    def close(self) -> None:
        """Close the files; what is in them stays."""
        if self._index is not None:
            self._index.close()
            self._index = None
        if self._data is not None:
            self._data.close()

    def _begin(self, facts: dict[str, object]) -> None:
        if self._shard.in_place is None and not self._index_only and self._data is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._data = Descriptor.open(self._part.path / "data", flags)
        kind: dict[str, object] = {"bare": True} if self._index_only else {}
        if self._is_prepared:
            kind["prepared"] = self._shard.recipe
        meta = {"url": self._shard.name, "digest": self._shard.digest, **kind, **facts}
        self._make_room(0, len(pack_header(meta)), patient=False)
        self._index = IndexWriter(self._part.path, meta)
        self._index_bytes = self._index.size_bytes

    def _write(self, chunk: bytes | memoryview) -> None:
        self._make_room(self._written + len(chunk), patient=True)
        view = memoryview(chunk)
        while view and self._data is not None:
            view = view[self._stored(functools.partial(os.write, self._data.number, view)) :]
        self._written += len(chunk)
        self._part.budget.enforce_limits()

    def _append(self, entries: list[Entry]) -> None:
        if entries:
            assert self._index is not None
            self._write_index(self._index, self._index.pack(entries))
            self.is_of_use = True

    def _write_index(self, index: IndexWriter, packed: Packed) -> None:
        """Make room, then write: what a tar's names take in the index is up to whoever wrote the tar."""
        self._make_room(self._written, packed.size_bytes, patient=True)
        self._stored(functools.partial(index.write, packed))
        self._index_bytes = index.size_bytes

    def _stored(self, write: Callable[[], _Result]) -> _Result:
        """Write something; where the disk turns out to be full, once more after others have made way."""
        try:
            return write()
        except OSError as exc:
            if not is_no_space(exc) or not self._part.make_way(self._next_use()):
                raise
        return write()

    def _make_room(self, data_bytes: int, more_index_bytes: int = 0, *, patient: bool) -> None:
        """See to it that so much data and the index are within what is reserved.

        Args:
            data_bytes: the data so far, or all of it where its size is known.
            more_index_bytes: what will be added to the index.
            patient: wait some seconds for room (else say at once that there is none).
        """
        # An index that turned out to have no room half-way would have to be begun anew.
        index = self._index_bytes + more_index_bytes
        needed = max(index, index_bytes(data_bytes)) if self._index_only else index + data_bytes
        is_first = not self._part.reserved_bytes and (self._index_only or not data_bytes)
        # Of an index-only copy nothing else asks for room before it is begun.
        if needed <= self._part.reserved_bytes and not (is_first and self._index_only):
            return
        growth = needed // _GROWTH if self._part.reserved_bytes else index_bytes(needed)
        fallback_tier = _SPARE_INDEX_BYTES if self._index_only else _SPARE_BYTES
        if is_first:
            fallback_tier = _FIRST_BYTES
        refusals = 0
        while not self._part.reserve(needed + growth + fallback_tier, self._next_use()):
            refusals += 1
            if not patient or self._refused(True) or refusals > _REFUSALS_LIMIT:
                # Where two wait for each other's room, one has to give its own back.
                raise _NoRoom(data_bytes)
            if self._stop.wait(_NO_ROOM_SECONDS):
                raise OriginStopped(f"{self._shard.name}: the fill was stopped while it waited for room")
        if patient:
            self._refused(False)

    def _open(self, origin: Origin, start: int, expected: Version | None) -> Stream:
        try:
            return origin.open(start, expected)
        except DatasetChanged:
            if expected is None:
                raise
            raise Outdated from None

    def _take_up(self) -> tuple[ShardScanner, Version | None]:
        """Copy an orphan's verified prefix; gives the scanner behind it, and the version of its bytes."""
        orphan, taken = self._part.orphan, None
        if orphan is not None and not self._index_only:
            # It may have to make room, or its stopped filler goes on and is through with it: then begin anew.
            with contextlib.suppress(FileNotFoundError, CacheCorrupt):
                taken = self._copy(orphan.path)
        self._part.forget_orphan()
        if taken is None:
            return ShardScanner(prepared=self._is_prepared), None
        return taken

    def _copy(self, orphan: Path) -> tuple[ShardScanner, Version] | None:
        version, entries = verified_prefix(orphan)
        if not entries or not version.is_traceable:
            return None
        scanner = ShardScanner.after(entries[-1], prepared=self._is_prepared)
        size = None if self._is_prepared else version.size
        self._make_room(size or scanner.position, patient=False)
        with open_data(orphan) as source:
            self._begin(asdict(version))
            while self._written < scanner.position:
                some = os.pread(source, min(_COPY_BYTES, scanner.position - self._written), self._written)
                if not some:
                    raise Outdated  # it was cut since it was verified
                self._write(some)
        self._append(entries)
        self._part.tier.counts.add("shards_taken_over", 1)
        return scanner, version
