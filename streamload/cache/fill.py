"""Fill one shard: claim → origin → data and index → publish, or leave a tombstone.

Bytes are written and scanned as they arrive; the entry of a sample is appended once the sample is complete,
after its data. A fill that ends early leaves a part of which every entry is true.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from streamload.cache.budget import is_no_space
from streamload.cache.locks import FileLock
from streamload.cache.part import NoRoom, Part, PartWriter
from streamload.cache.shard import Shard, version_of
from streamload.cache.shard_copy import read_sample
from streamload.descriptors import Descriptor
from streamload.errors import (
    CacheCorrupt,
    CacheError,
    CacheFull,
    DatasetChanged,
    LimitReached,
    OriginError,
    OriginStopped,
    ShardCut,
    ShardError,
    ShardFormatError,
    StreamloadError,
)
from streamload.origins.origin import Origin, Stream, Unproven, Version
from streamload.shards.index import IndexReader, LocalVersion
from streamload.shards.record import COMPLETE, open_file
from streamload.shards.samples import Entry, ShardScanner, border
from streamload.shards.tar import BLOCK_BYTES

_COPY_BYTES = 8 << 20


class Filled(enum.Enum):
    """End of a fill."""

    PUBLISHED = "published"
    GAVE_UP = "gave up"
    NO_ROOM = "no room"
    STOPPED = "stopped"
    OUTDATED = "outdated"
    """The orphan was of another version, or somebody removed the part (locks have no effect there, or the
    tier was cleared); the next fill starts over.
    """


class Outcome(NamedTuple):
    """End of a fill; the lock on its tombstone; the size of a shard that found no space."""

    result: Filled
    tombstone: FileLock | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FillOptions:
    """A fill: the wanted part of a shard, and what to do if it fails.

    Attributes:
        size_bytes: of the shard, if known: without space for it its origin isn't asked.
        index_only: keep the index alone; its readers get the samples from the origin, by range.
        leave_tombstone: whether a shard that can't be fetched is given up for all readers of the tier.
    """

    size_bytes: int = 0
    index_only: bool = False
    leave_tombstone: bool = True


class SizedStream:
    """A stream of a prepared shard that has been made before, so that its size is known.

    Its version, that of the shard as it is, has another one.
    """

    size_bytes: int


class Outdated(Exception):
    """The filled bytes are not of the version that the origin has: the fill starts over."""


def fill(
    part: Part,
    shard: Shard,
    open_origin: Callable[[], Origin],
    options: FillOptions = FillOptions(),
    *,
    next_use: Callable[[], float],
    stop: threading.Event,
    refused: Callable[[bool], bool] = lambda waits: False,
) -> Outcome:
    """Fill a claimed part from its origin and publish it.

    Args:
        part: the claim; it ends when this returns or raises.
        shard: what to fill. Of a local file only the index is made, unless it is to be prepared.
        open_origin: opens its origin (unused for a local file that is read in place); for a shard to be
            prepared, one that returns the prepared bytes under the version of what they are made of.
        options: what to fill, and what to do on failure.
        next_use: the shard's next use, in shard visits (see `Budget.reserve`).
        stop: ends the fill; the samples so far stay.
        refused: called with True at each refusal while the fill waits for space in the middle of a shard, and
            with False once it got some; returning True ends the fill with NO_ROOM.

    Raises:
        OriginError, ShardError: why the shard can't be fetched, if no tombstone is left.
        CacheFull: no space on the disk, or the shard is larger than the tier.
    """
    writer = PartWriter(part, shard, next_use, stop, refused, index_only=options.index_only)
    try:
        is_complete = _Fill(writer, shard, options, stop).run(open_origin)
        if is_complete and options.index_only:
            part.publish_index_only()
        elif is_complete:
            part.publish()
        else:
            return Outcome(Filled.GAVE_UP, part.give_up())
        return Outcome(Filled.PUBLISHED)
    except BaseException as exc:
        taken_away = part.was_taken_away
        with contextlib.suppress(OSError):
            writer.close()
        if isinstance(exc, OriginError | LimitReached) and writer.has_samples:
            part.leave()
        else:
            part.discard()
        return _failure(exc, part.tier.root, taken_away)


def _failure(exc: BaseException, root: Path, taken_away: bool) -> Outcome:
    """The outcome of a fill that ended with an exception; raises what the caller has to know."""
    if isinstance(exc, NoRoom):
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


class _Fill:
    """One fill: brings the bytes of a shard to the writer of its part."""

    def __init__(self, writer: PartWriter, shard: Shard, options: FillOptions, stop: threading.Event):
        self._writer = writer
        self._part = writer.part
        self._shard = shard
        self._options = options
        self._is_prepared = bool(shard.recipe)
        self._stop = stop
        self._version = Version()
        self._links_origin: Origin | None = None  # for the payloads of links, of an index-only copy

    def run(self, open_origin: Callable[[], Origin]) -> bool:
        """Fill the part, or write for its readers why that failed; whether it is complete.

        Raises:
            OriginError, ShardError: why the shard can't be fetched, if no tombstone is to be left.
            NoRoom, Outdated, OSError: it can't be filled now.
        """
        try:
            self._writer.size_bytes = None if self._is_prepared else self._options.size_bytes or None
            self._writer.reserve(self._options.size_bytes, patient=False)
            if self._shard.in_place is not None:
                self._index_local(self._shard.in_place)
            else:
                self._transfer(open_origin)
        except OriginStopped:
            raise
        except (OriginError, ShardError) as exc:
            if not self._options.leave_tombstone:
                raise
            is_named = self._shard.name in str(exc)
            self._writer.end(type(exc).__name__, str(exc) if is_named else f"{self._shard.name}: {exc}")
            return False
        finally:
            if self._links_origin is not None:
                self._links_origin.close()
        return True

    def _index_local(self, file: Path) -> None:
        """Index a local file: its headers are read, its bytes stay where they are."""
        from streamload.shards.local import index_local

        warnings: list[str] = []
        size = 0

        def begin(version: LocalVersion) -> None:
            nonlocal size
            size = version.size
            self._writer.begin(version._asdict())

        for entries in index_local(file, warnings, begin):
            self._writer.append(entries)
        self._writer.end(COMPLETE, warnings=warnings, size=size)

    def _transfer(self, open_origin: Callable[[], Origin]) -> None:
        """Fetch the bytes, from the end of an orphan's verified prefix on."""
        scanner, expected = self._take_over(open_origin)
        with contextlib.closing(self._open(open_origin(), scanner.position, expected)) as stream:
            self._version = stream.version
            if expected is None:
                self._writer.size_bytes = self._size_of(stream)
                self._writer.reserve(self._writer.size_bytes or 0, patient=False)
                self._writer.begin(asdict(stream.version))
            for chunk in stream.chunks():
                self._writer.write(chunk)
                self._writer.append(self._scan(scanner, chunk))
                if self._stop.is_set():
                    raise OriginStopped(f"{self._shard.name}: the fill was stopped")
        entries, warnings = scanner.finish()
        self._writer.append(entries)
        size = None if self._is_prepared else stream.version.size
        if size is not None and size != self._writer.written_bytes:
            raise ShardCut(f"{self._shard.name} has {self._writer.written_bytes:,} bytes instead of {size:,}")
        self._writer.end(COMPLETE, warnings=warnings, size=self._writer.written_bytes)

    def _size_of(self, stream: Stream) -> int | None:
        """The size of what a stream yields: a version has that of the shard as it is."""
        if not self._is_prepared:
            return stream.version.size
        return stream.size_bytes if isinstance(stream, SizedStream) else None

    def _scan(self, scanner: ShardScanner, chunk: bytes | memoryview) -> list[Entry]:
        """The entries that a chunk completes; those before any damage are appended before it raises.

        So the samples of a damaged shard don't depend on how its bytes were split into chunks.
        """
        if self._options.index_only:
            view = memoryview(chunk)
            for start in range(0, len(view), BLOCK_BYTES):
                self._writer.append(scanner.feed(view[start : start + BLOCK_BYTES]))
            return []
        known_stop = scanner.whole_stop
        try:
            return scanner.feed(chunk)
        except ShardFormatError:
            again = ShardScanner(
                known_stop, self._writer.count, prepared=self._is_prepared, read_back=self._read_back
            )
            with (self._part.path / "data").open("rb") as data, contextlib.suppress(ShardFormatError):
                data.seek(again.position)
                # A block at a time, as damage is in a header; payload in larger pieces.
                while block := data.read(min(max(BLOCK_BYTES, again.skippable()), _COPY_BYTES)):
                    self._writer.append(again.feed(block))
            raise

    def _open(self, origin: Origin, start: int, expected: Version | None) -> Stream:
        try:
            return origin.open(start, expected)
        except DatasetChanged:
            if expected is None:
                raise
            raise Outdated from None

    def _read_back(self, start: int, count: int) -> bytes:
        """Earlier bytes of the shard, for its links."""
        with open_data(self._part.path) as data:
            return os.pread(data.number, count, start)

    def _read_origin(self, open_origin: Callable[[], Origin], start: int, count: int) -> bytes:
        """The same for an index-only copy, by range."""
        self._links_origin = self._links_origin or open_origin()
        return self._links_origin.read(start, start + count, self._version)

    def _take_over(self, open_origin: Callable[[], Origin]) -> tuple[ShardScanner, Version | None]:
        """Copy an orphan's verified prefix; returns the scanner after it, and the version of its bytes."""
        orphan, prefix = self._part.orphan, None
        if orphan is not None and not self._options.index_only:
            # If it was evicted, or its stopped filler continued and published it, start over.
            with contextlib.suppress(FileNotFoundError, CacheCorrupt):
                prefix = self._copy(orphan.path)
        self._part.forget_orphan()
        if prefix is None:
            read_back = self._read_back
            if self._options.index_only:
                read_back = functools.partial(self._read_origin, open_origin)
            return ShardScanner(prepared=self._is_prepared, read_back=read_back), None
        return prefix

    def _copy(self, orphan: Path) -> tuple[ShardScanner, Version] | None:
        version, entries = verified_prefix(orphan)
        if not entries or not version.is_traceable:
            return None
        position = border(entries[-1])
        size = None if self._is_prepared else version.size
        self._writer.size_bytes = size
        self._writer.reserve(size or position, patient=False)
        with open_data(orphan) as source:
            self._writer.begin(asdict(version))
            while self._writer.written_bytes < position:
                chunk = os.pread(
                    source.number,
                    min(_COPY_BYTES, position - self._writer.written_bytes),
                    self._writer.written_bytes,
                )
                if not chunk:
                    raise Outdated  # it was cut since it was verified
                self._writer.write(chunk)
        self._writer.append(entries)
        self._part.tier.counts.add("shards_taken_over", 1)
        try:
            scanner = ShardScanner.after(entries[-1], prepared=self._is_prepared, read_back=self._read_back)
        except ShardError:
            raise Outdated from None  # a header between the verified samples is damaged
        return scanner, version


def can_be_taken_over(orphan: Path) -> bool:
    """True if a fill would continue from an orphan rather than start over. Reads one sample."""
    with contextlib.suppress(OSError):
        version, entries = verified_prefix(orphan, 1)
        return bool(entries) and version.is_traceable
    return False


def verified_prefix(orphan: Path, limit: int | None = None) -> tuple[Version, list[Entry]]:
    """The version of an orphan's bytes, and its entries up to the first that fails (at most `limit`)."""
    entries: list[Entry] = []
    with contextlib.closing(IndexReader(orphan)) as index, open_data(orphan) as data:
        index.refresh()
        version = version_of(index)
        for number in range(0 if index.ended else index.count)[:limit]:
            entry = index.entry(number)
            if read_sample(data.number, entry, lambda extensions: ()) is None:
                break
            entries.append(entry)
    return version, entries


def open_data(orphan: Path) -> Descriptor:
    """Open the data of an orphan.

    Raises:
        FileNotFoundError: there is none, or the orphan has been removed.
        CacheCorrupt: no filler made it.
    """
    try:
        return open_file(orphan / "data")
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise CacheCorrupt(f"{orphan / 'data'} is a symbolic link") from exc
        raise
