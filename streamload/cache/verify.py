"""Verify what a tier holds: each index, each sample against its checksum, and the facts beside the index.

Covers what readers could get: published shards, index-only copies, and orphaned parts up to their last entry.
Bytes between samples (tar headers and padding) are never read, and aren't compared. Safe while trainings run:
a shard is pinned while it is read, and one that appears or disappears meanwhile is no error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from streamload import limits
from streamload.cache.eviction import HeldShard
from streamload.cache.garbage import unused
from streamload.cache.inventory import foreign_in, is_filled, url_of
from streamload.cache.locks import FileLock, exclusive
from streamload.cache.shard import Shard, is_outdated
from streamload.cache.shard_copy import checksum
from streamload.cache.tier import Tier
from streamload.descriptors import Descriptor
from streamload.errors import CacheCorrupt, StreamloadError
from streamload.shards.facts import valid_frames
from streamload.shards.index import IndexReader, LocalVersion
from streamload.shards.record import open_file, shown_url

_ATTEMPTS = 3
_WHOLE = ("shards", "bare")
_IN_LINE = 2
"""Shards queued per thread."""
_UNREADABLE = (OSError, StreamloadError, ValueError, TypeError, LookupError, ArithmeticError)
"""Exceptions from reading an index with valid checksums and malicious content."""


@dataclass(frozen=True, slots=True)
class ShardDamage:
    """A shard, or an orphaned part of one, that differs from what arrived.

    Attributes:
        kind: "shards", "bare" or "parts".
        url: as its index names it, without secrets; empty if that can't be read.
        cause: what is wrong, for messages.
        size_bytes: of the whole shard if that is known, else 0.
        taken_out: whether it has been removed.
    """

    digest: str
    kind: str
    url: str
    cause: str
    size_bytes: int
    taken_out: bool = False


@dataclass(frozen=True, slots=True)
class VerifiedShard:
    """One shard, or orphaned part, that has been verified.

    Attributes:
        samples: how many have been read.
        size_bytes: of the data that has been read.
        damage: None if nothing is wrong.
        bad_facts: how many files of facts fail their checksums; removed with `take_out`, and made again by
            the next run that needs them.
    """

    held: HeldShard
    samples: int
    size_bytes: int
    damage: ShardDamage | None
    bad_facts: int = 0


def verify(
    tier: Tier,
    *,
    by_digest: Mapping[str, Shard] | None = None,
    jobs: int = 2,
    take_out: bool = False,
    is_asked: Callable[[HeldShard], bool] = lambda shard: True,
    on_total: Callable[[int], None] = lambda count: None,
) -> Generator[VerifiedShard | None, None, None]:
    """Verify everything in a tier, some shards at once, with a megabyte of memory for each.

    Args:
        by_digest: shards that the caller has named: a local one is compared with its file, others with the
            URL in their index. Nothing outside of the tier is opened for other shards.
        jobs: how many shards are read at once.
        take_out: remove damaged shards at once.
        is_asked: whether a shard is to be read.
        on_total: called with the number of shards, before the first is read.

    Yields:
        The findings, in order; None for a shard that disappeared before it was read.
    """
    held = filter(is_asked, tier.shards())
    shards = [s for s in held if s.kind in _WHOLE or (s.kind == "parts" and not is_filled(s.path))]
    shards.sort(key=lambda shard: (shard.kind != "shards", shard.digest))
    on_total(len(shards))
    halt = threading.Event()

    def work(shard: HeldShard) -> VerifiedShard | None:
        return _verify(tier, shard, (by_digest or {}).get(shard.digest), take_out, halt)

    with limits.Threads(jobs, "streamload-verify") as pool:
        line: deque[Future[VerifiedShard | None]] = deque()
        try:
            for shard in shards:
                line.append(pool.submit(work, shard))
                if len(line) >= _IN_LINE * jobs:
                    yield line.popleft().result()
            while line:
                yield line.popleft().result()
        finally:
            halt.set()
            for waiting in line:
                waiting.cancel()


class _Halted(Exception):
    """The caller has stopped iterating."""


def _verify(
    tier: Tier, held: HeldShard, shard: Shard | None, take_out: bool, halt: threading.Event
) -> VerifiedShard | None:
    for _ in range(_ATTEMPTS):
        try:
            directory = Descriptor.open(held.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as exc:
            name = shard.name if shard is not None else ""
            return VerifiedShard(held, 0, 0, ShardDamage(held.digest, held.kind, name, _describe(exc), 0))
        with directory:
            reading = _ShardCheck(held, shard, take_out, halt)
            with contextlib.suppress(_Halted):
                reading.run()
            url = url_of(held.path) or (shard.name if shard is not None else "")
            if reading.cause and not _is(held.path, directory):
                continue  # it was being removed: look at what is there now
            damage = None
            if reading.cause:
                taken_out = take_out and _take_out(tier, held, directory)
                damage = ShardDamage(
                    held.digest, held.kind, url, reading.cause, reading.size_bytes, taken_out
                )
            return VerifiedShard(held, reading.samples, reading.read_bytes, damage, reading.bad_facts)
    return None


class _ShardCheck:
    """One reading of one directory of the tier; `cause` is what is wrong."""

    def __init__(self, held: HeldShard, shard: Shard | None, take_out: bool, halt: threading.Event):
        self.cause = ""
        self.bad_facts = 0
        self._held = held
        self._known = shard
        self._takes_out = take_out
        self._halt = halt
        self.samples = 0
        self.read_bytes = 0
        self.size_bytes = 0
        """Size of the whole shard; 0 if its index doesn't tell."""

    def run(self) -> None:
        """Read all of it."""
        with contextlib.ExitStack() as closing:
            reader = None
            try:
                pin = FileLock.acquire(self._held.path / "names", shared=True)
                if pin is not None:
                    closing.callback(pin.close)
                reader = closing.enter_context(IndexReader(self._held.path))
                data = -1
                if not _is_index_only(reader):
                    data = closing.enter_context(open_file(self._held.path / "data")).number
                if self._held.kind in _WHOLE:
                    self.cause = self._check_whole(reader, data)
            except _UNREADABLE as exc:
                # A filler may have died before it wrote a header, or a sample: nothing to verify then.
                if self._held.kind in _WHOLE or (reader is not None and reader.count):
                    self.cause = _describe(exc)
                return
            if not self.cause:
                self._check_samples(reader, data)
            if not self.cause and reader.ended:
                self._check_facts(reader)

    def _check_whole(self, reader: IndexReader, data: int) -> str:
        """Defects of a published shard that show before its samples are read; empty if there are none."""
        if not reader.ended:
            state = "the next record fails its checksum" if reader.damaged else "it has no end record"
            return f"its index stops after {reader.count} samples: {state}"
        if not reader.is_complete:
            return f"its index says that the shard was given up: {reader.status}"
        self.size_bytes = reader.size or 0
        stated = None if "prepared" in reader.meta else reader.meta.get("size")  # of what it was made of
        if stated is not None and stated != reader.size:
            return f"its index states both {stated} and {reader.size} bytes"
        if data >= 0 and os.fstat(data).st_size != reader.size:
            return f"there are {os.fstat(data).st_size} bytes of data instead of {reader.size}"
        return self._check_known(reader)

    def _check_known(self, reader: IndexReader) -> str:
        """Return why it isn't the shard that its name says, or that the caller knows; empty if it is."""
        if reader.meta.get("digest") != self._held.digest:
            return f"it is another shard: {shown_url(reader.meta)}"
        if self._known is None:
            return ""
        if self._known.local is not None:
            if self._known.in_place is None:  # it was unpacked
                is_same = not is_outdated(reader.meta, self._known)
            else:
                is_same = LocalVersion.of(self._known.local).is_of(reader.meta)
            return "" if is_same else "its file was changed since it was indexed"
        return ""

    def _check_samples(self, reader: IndexReader, data: int) -> None:
        bad, first = 0, ""
        for number in range(reader.count):
            if self._halt.is_set():
                raise _Halted
            try:
                entry = reader.entry(number)
                is_good = data < 0 or entry.checksum in (None, checksum(data, entry, self._took))
                why = "" if is_good else f"sample {number} ({entry.key}) fails its checksum"
            except CacheCorrupt:
                why = f"sample {number}: its names fail their checksum"
            except _UNREADABLE as exc:
                why = f"sample {number}: {_describe(exc)}"
            self.samples += 1
            if why:
                bad += 1
                first = first or why
        if bad:
            self.cause = first + (f", and {bad - 1} more of {reader.count}" if bad > 1 else "")

    def _check_facts(self, reader: IndexReader) -> None:
        """Find the files of facts that don't belong to the index, and remove them if that was asked for."""
        for path in self._held.path.glob("facts.*"):
            digest = path.name.removeprefix("facts.")
            try:
                with contextlib.suppress(FileNotFoundError), open_file(path) as file:
                    data = os.pread(file.number, os.fstat(file.number).st_size, 0)
                    if valid_frames(digest, data, reader.records).size_bytes == len(data):
                        continue
            except OSError:  # not a file of ours: see inventory.py
                continue
            lock = FileLock.acquire(path)
            if lock is not None:  # else a process writes it now
                self.bad_facts += 1
                if self._takes_out:
                    path.unlink(missing_ok=True)
                lock.close()

    def _took(self, extension: str, piece: bytes) -> None:
        if self._halt.is_set():
            raise _Halted
        self.read_bytes += len(piece)


def _take_out(tier: Tier, held: HeldShard, directory: Descriptor) -> bool:
    """Remove a damaged directory, if it is still the one that was verified."""
    if foreign_in(held.path):
        return False
    with exclusive(tier.root / "lock"):
        if not _is(held.path, directory):
            return False
        if held.kind == "parts":
            with unused(held) as is_unused:
                if not is_unused:
                    return False
        try:
            leaving = tier.move_to_trash(held.path)
        except OSError:  # the disk doesn't allow it
            return False
        tier.counts.add("checksum_failures")
    tier.delete(leaving)
    return True


def _is(path: Path, directory: Descriptor) -> bool:
    """True if `path` is (still) the directory that is open as `directory`."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(directory.number))
    except FileNotFoundError:
        return False


def _is_index_only(reader: IndexReader) -> bool:
    """True if the tier has no data beside the index: the file is local, or read at its origin."""
    return "mtime_ns" in reader.meta or reader.meta.get("bare") is True


def _describe(exc: BaseException) -> str:
    if isinstance(exc, FileNotFoundError) and not isinstance(exc, StreamloadError):
        return f"{Path(exc.filename).name} is missing" if exc.filename else "a file is missing"
    if isinstance(exc, OSError) and exc.filename and exc.errno == errno.ELOOP:
        return f"{Path(exc.filename).name} is a symbolic link"
    if isinstance(exc, OSError) and exc.filename:
        return f"{Path(exc.filename).name} can't be read: {exc.strerror}"
    return str(exc) if isinstance(exc, StreamloadError) else f"{type(exc).__name__}: {exc}"
