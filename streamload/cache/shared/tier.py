"""The shared cache: shards behind an fsspec URL, between the tiers of nodes and the origins (step F).

    streamload.json             the format of all that follows
    shards/<digest>/<tag>.tar   a shard's bytes, as its origin gave them
    shards/<digest>/index       written last: version, entries, checksums, and the name of the bytes
    prepared/<recipe>/<digest>/ the same of shards that were prepared by a recipe

It may be away, slow, full, read-only, damaged or behind its own writes: then it is asked less, which is said
once and counted, and all goes on from the origins. What it gives is compared with its checksums before it is
handed on. Writing the same shard twice, or late, does no harm, and nothing is ever deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from streamload.cache.shard import Shard
from streamload.cache.shard_copy import ShardCopy
from streamload.cache.shared.blocks import BLOCK_BYTES, verified
from streamload.cache.shared.breaker import PAUSE_SECONDS, CircuitBreaker
from streamload.cache.shared.copies import SharedShard, index_files
from streamload.cache.shared.objects import OBJECT_LIMIT_BYTES, Objects, TooLarge
from streamload.errors import (
    CacheCorrupt,
    DatasetChanged,
    OriginError,
    OriginNotFound,
    OriginStopped,
    ShardError,
    SharedTierError,
)
from streamload.metrics import Counts
from streamload.origins.origin import Origin, OriginOptions, Stream, open_origin

logger = logging.getLogger("streamload")

_Result = TypeVar("_Result")
FORMAT = 1
_FORMAT_NAME = "streamload.json"
"""After so many in a row the shared cache is left alone …"""
BRIEF = OriginOptions(
    connect_seconds=10.0, stall_seconds=10.0, slow_seconds=10.0, slow_bytes=300_000, attempts=2
)
"""How patient reading from it is: there is the origin to go to."""


class SharedTier:
    """The shards that many nodes share. Thread-safe; for one process.

    Args:
        objects: what it is made of.
        counts: get "shared_requests", "shared_bytes" and the other "shared_…".
        stop: set by close(); it ends all waits of `objects`, too.
        folder: where its shards are; others than those of origins are elsewhere.
        rest_seconds: how long it isn't asked after failures.
    """

    def __init__(
        self,
        objects: Objects,
        counts: Counts,
        *,
        stop: threading.Event | None = None,
        folder: str = "shards",
        rest_seconds: float = PAUSE_SECONDS,
    ):
        self.objects = objects
        self.counts = counts
        self._stop = stop or threading.Event()
        self._folder = folder
        self._breaker = CircuitBreaker(rest_seconds)
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._has_told = False
        self._is_marked = False  # whether the format is there, and is ours
        self._lacking: set[str] = set()  # digests of shards that weren't there, or not as they should be
        self._distrusted: set[str] = set()  # of those whose bytes weren't what their index says

    def __repr__(self) -> str:
        return f"<SharedTier {self.objects.url}>"

    def close(self) -> None:
        """End all waits; once is enough."""
        self._stop.set()

    def check_format(self) -> bool:
        """Whether somebody has marked it as a shared cache.

        Raises:
            SharedTierError: it is another version's, or no shared cache.
        """
        with self._lock:
            if self._is_marked:
                return True
        text = self._read(_FORMAT_NAME)
        if text is None:
            return False
        try:
            found = json.loads(text)["format"]
        except (ValueError, TypeError, KeyError, RecursionError):
            found = None
        if found != FORMAT:
            raise SharedTierError(
                f"the shared cache {self.objects.url} has format {found!r}; this version uses {FORMAT}: give "
                "it another folder, or remove what is there"
            )
        with self._lock:
            self._is_marked = True
        return True

    def held(self, shard: Shard) -> SharedShard | None:
        """What it holds of a shard; None if it doesn't, or can't say."""
        if shard.local is not None or self._is_distrusted(shard):
            return None
        found, answered = self.attempt(lambda: (self.look(shard), True), shard) or (None, False)
        if answered and found is None:
            self.counts.add("shared_misses", 1)
            self.lacks(shard)
        return found

    def lacks(self, shard: Shard) -> None:
        """Note that it would be of use to store a shard: it isn't there, or of another version."""
        with self._lock:
            self._lacking.add(shard.digest)

    def is_lacking(self, shard: Shard) -> bool:
        """Whether it was seen in this process that a shard isn't there as it should be."""
        with self._lock:
            return shard.digest in self._lacking

    def is_absent(self, shard: Shard) -> bool:
        """Whether it answers, and what it answered last is that it hasn't a shard as it should be."""
        if self._breaker.is_open:
            return False
        with self._lock:
            return shard.digest in self._lacking and shard.digest not in self._distrusted

    def invalidate(self, shard: Shard) -> None:
        """Don't ask for a shard again before this process has stored it: what came wasn't of use."""
        with self._lock:
            self._distrusted.add(shard.digest)
            self._lacking.add(shard.digest)

    def has(self, shard: Shard) -> bool:
        """Whether it holds a shard, by the one object that is written last.

        Raises:
            SharedTierError: it can't be asked.
        """
        return self.objects.modified(self._name(shard, "index")) is not None

    def look(self, shard: Shard) -> SharedShard | None:
        """What it holds of a shard, now.

        Raises:
            SharedTierError: it can't be asked, or another version of streamload made it.
            CacheCorrupt: the index is damaged, or larger than any that is stored.
        """
        packed = self._read(self._name(shard, "index")) if self.check_format() else None
        if packed is None:
            return None
        found = SharedShard.unpack(packed)
        if found.digest != shard.digest:
            raise CacheCorrupt(f"the index of {shard.name} is another shard's")
        return found

    def read(self, shard: Shard, held: SharedShard, start: int, stop: int) -> bytes:
        """Some bytes of a shard that is held, verified.

        Raises:
            SharedTierError: they can't be had.
            CacheCorrupt: they aren't what was stored.
        """
        first = start - start % BLOCK_BYTES
        last = min(stop + -stop % BLOCK_BYTES, held.size)
        self.counts.add("shared_requests", 1)
        data = self.objects.read_range(self._name(shard, held.data), first, last)
        self.counts.add("shared_bytes", len(data))
        sums = held.sums[first // BLOCK_BYTES : -(-last // BLOCK_BYTES)]
        checked = b"".join(verified([data], sums, 0, last - first))
        return checked[start - first : stop - first]

    def stream(self, shard: Shard, held: SharedShard, start: int, stop: threading.Event) -> SharedStream:
        """The bytes of a shard that is held, from `start` on; the store has been asked for them.

        Raises:
            OriginError, SharedTierError: as it is with the object itself.
            CacheCorrupt: it has another size.
        """
        first = start - start % BLOCK_BYTES
        origin = open_origin(
            self.objects.target(self._name(shard, held.data)),
            self.objects.storage_options,
            BRIEF,
            _Renamed(self.counts),
            stop,
        )
        try:
            stream = origin.open(first)
            if stream.version.size not in (None, held.size):
                stream.close()
                raise CacheCorrupt(f"{held.data} has {stream.version.size} bytes instead of {held.size}")
        except BaseException:
            origin.close()
            raise
        return SharedStream(origin, stream, held, first, start - first)

    def store(self, shard: Shard, directory: Path) -> bool:
        """Store a shard that a tier holds, unless the same is there.

        What is stored is read and compared with its index first; a local file is left where it is.

        Args:
            shard: whose.
            directory: of a tier's published shard; pinned meanwhile.

        Returns:
            Whether it was stored.

        Raises:
            FileNotFoundError: it isn't there any more.
            CacheCorrupt: it isn't what its index says.
            SharedTierError: the shared cache doesn't take it.
        """
        source = ShardCopy.open(directory, shard) if shard.local is None else None
        if source is None:
            return False
        with contextlib.closing(source):
            if not self._is_distrusted(shard) and self._has_same(shard, source):
                self._stored(shard)
                return False
            new = SharedShard.of(shard, source)
            packed = new.pack()
            if len(packed) > OBJECT_LIMIT_BYTES:
                raise SharedTierError(
                    f"the index of {shard.name} has {len(packed):,} bytes, and no node reads more than "
                    f"{OBJECT_LIMIT_BYTES:,} of one: {new.samples:,} samples are too many for one shard"
                )
            self._mark()
            self.objects.put_file(self._name(shard, new.data), directory / "data")
            self.objects.write(self._name(shard, "index"), packed)
        self._stored(shard)
        self.counts.add("shared_stored", 1)
        return True

    def attempt(self, act: Callable[[], _Result], shard: Shard) -> _Result | None:
        """Ask for something of a shard that its origin has as well: None where that fails, or rests.

        Raises:
            OriginStopped: a wait was ended from this side.
        """
        if self._breaker.is_open:
            return None
        try:
            result = act()
        except OriginStopped:
            raise
        except (SharedTierError, CacheCorrupt, OriginError, ShardError) as exc:
            self.failed(shard, exc)
            return None
        self._breaker.succeed()
        return result

    def failed(self, shard: Shard, cause: Exception) -> None:
        """Something that was asked for of a shard failed; damaged or missing, it isn't asked for again."""
        if self._stop.is_set():
            return
        if isinstance(cause, CacheCorrupt | OriginNotFound | DatasetChanged):
            self.invalidate(shard)
        else:
            self._breaker.fail()
        self.complain(shard, cause)

    def complain(self, shard: Shard, cause: Exception) -> None:
        """Count a failure, and say so if it is the first."""
        self.counts.add("shared_errors", 1)
        with self._lock:
            is_first, self._has_told = not self._has_told, True
        if is_first:
            logger.warning(
                "the shared cache %s fails for %s: %s. What it doesn't give comes from where the shards live "
                "(this is said once; stats() counts shared_errors)",
                *(self.objects.url, shard.name, cause),
            )

    def _has_same(self, shard: Shard, source: ShardCopy) -> bool:
        """Whether it holds a shard with the same index, so with the same checksums of all samples."""
        with contextlib.suppress(CacheCorrupt):
            now = self.look(shard)
            return now is not None and (now.index, now.names) == index_files(source)
        return False

    def _stored(self, shard: Shard) -> None:
        with self._lock:
            self._distrusted.discard(shard.digest)
            self._lacking.discard(shard.digest)

    def _is_distrusted(self, shard: Shard) -> bool:
        with self._lock:
            return shard.digest in self._distrusted

    def _name(self, shard: Shard, name: str) -> str:
        folder = f"prepared/{shard.recipe}" if shard.recipe else self._folder
        return f"{folder}/{shard.digest}/{name}"

    def _read(self, name: str) -> bytes | None:
        self.counts.add("shared_requests", 1)
        try:
            data = self.objects.read(name)
        except TooLarge as exc:
            raise CacheCorrupt(str(exc)) from exc
        self.counts.add("shared_bytes", len(data or b""))
        return data

    def _mark(self) -> None:
        if not self.check_format():
            self.objects.write(_FORMAT_NAME, json.dumps({"format": FORMAT}).encode())


class SharedStream:
    """The bytes of a shard from the shared cache; see `SharedTier.stream`."""

    def __init__(self, origin: Origin, stream: Stream, held: SharedShard, first: int, skipped: int):
        self.size = held.size
        self._origin, self._stream, self._held = origin, stream, held
        self._first, self._skipped = first, skipped

    def chunks(self) -> Iterator[bytes]:
        """Give the bytes in order, once, each after its block was verified.

        Raises:
            OriginError: the store doesn't give them.
            CacheCorrupt: they aren't what was stored.
        """
        skip = self._skipped
        for chunk in verified(self._stream.chunks(), self._held.sums, self._first, self._held.size):
            if skip < len(chunk):
                yield chunk[skip:] if skip else chunk
            skip = max(0, skip - len(chunk))

    def close(self) -> None:
        """Give back what reading takes; idempotent."""
        self._stream.close()
        self._origin.close()


class _Renamed:
    """Counts what is read from the shared cache apart from what origins gave."""

    _NAMES: Mapping[str, str] = {
        "origin_requests": "shared_requests",
        "origin_bytes": "shared_bytes",
    }

    def __init__(self, counts: Counts):
        self._counts = counts

    def add(self, name: str, n: int = 1, /) -> None:
        """Count it under its own name; a second attempt that helps is a request like any other."""
        if name in self._NAMES:
            self._counts.add(self._NAMES[name], n)
