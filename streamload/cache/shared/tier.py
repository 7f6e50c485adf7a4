"""The shared cache: shards behind an fsspec URL, between the tiers of nodes and the origins.

    streamload.json             the format of everything below
    shards/<digest>/<tag>.tar   a shard's bytes, as its origin has them
    shards/<digest>/index       written last: version, entries, checksums, and the name of the data object
    shards/<digest>/facts.…     values of a column of facts (facts.py)
    prepared/<recipe>/<digest>/ the same for shards prepared by a recipe
    columns/<name>/rows.…       rows of samples in blocks (streamload/columns/blocks.py)

It may be offline, slow, full, read-only, damaged or eventually consistent: then it is asked less, which is
logged once and counted, and the origins serve instead. Bytes are verified before they are handed on. Writing
a shard twice, or late, does no harm, and no run ever deletes one.
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
from streamload.cache.shared.breaker import PAUSE_SECONDS, CircuitBreaker
from streamload.cache.shared.format import BLOCK_BYTES, SharedShard, index_files, verified
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
BRIEF = OriginOptions(
    connect_seconds=10.0, stall_seconds=10.0, slow_seconds=10.0, slow_bytes=300_000, attempts=2
)
"""Short timeouts for reading: the origin is the alternative."""


class SharedTier:
    """The shards that many nodes share. Thread-safe; for one process.

    Args:
        counts: receives the counters named "shared_…".
        stop: set by close(); also ends all waits of `objects`.
        rest_seconds: how long it isn't asked after repeated failures.
    """

    def __init__(
        self,
        objects: Objects,
        counts: Counts,
        *,
        stop: threading.Event | None = None,
        rest_seconds: float = PAUSE_SECONDS,
    ):
        self.objects = objects
        self.counts = counts
        self._stop = stop or threading.Event()
        self._breaker = CircuitBreaker(rest_seconds)
        self._lock = threading.Lock()
        self._has_warned = False  # guarded by _lock
        # Changed by single atomic operations:
        self._has_format = False  # whether the format was found, and is ours
        self._lacking: dict[str, bool] = {}  # digests of missing or (True) damaged shards

    def __repr__(self) -> str:
        return f"<SharedTier {self.objects.url}>"

    def close(self) -> None:
        """End all waits. Idempotent."""
        self._stop.set()

    def check_format(self) -> bool:
        """True if this is a shared cache already.

        Raises:
            SharedTierError: it has another format, or something else is there.
        """
        if self._has_format:
            return True
        text = self._read(_FORMAT_NAME)
        if text is None:
            return False
        try:
            recorded = json.loads(text)["format"]
        except (ValueError, TypeError, KeyError, RecursionError):
            recorded = None
        if recorded != FORMAT:
            raise SharedTierError(
                f"the shared cache {self.objects.url} has format {recorded!r}; this version uses {FORMAT}: "
                "choose another folder, or clear this one"
            )
        self._has_format = True
        return True

    def held(self, shard: Shard) -> SharedShard | None:
        """The shared copy of a shard; None if there is none, or the shared cache doesn't answer."""
        if shard.local is not None or self._is_invalid(shard):
            return None
        held, answered = self.attempt(lambda: (self.look(shard), True), shard) or (None, False)
        if answered and held is None:
            self.counts.add("shared_misses", 1)
            self.lacks(shard)
        return held

    def lacks(self, shard: Shard) -> None:
        """Note that a shard should be stored: it is missing, or has another version."""
        self._lacking.setdefault(shard.digest, False)

    def is_lacking(self, shard: Shard) -> bool:
        """True if this process has seen that a shard is missing or unusable."""
        return shard.digest in self._lacking

    def is_absent(self, shard: Shard) -> bool:
        """True if the shared cache works, and answered last that it lacks a usable copy."""
        return not self._breaker.is_open and self._lacking.get(shard.digest) is False

    def invalidate(self, shard: Shard) -> None:
        """Don't read an unusable copy again before this process has replaced it."""
        self._lacking[shard.digest] = True

    def has(self, shard: Shard, name: str = "index") -> bool:
        """True if it holds a shard, judged by the object that is written last, or another object beside that.

        Raises:
            SharedTierError: it doesn't answer.
        """
        return self.objects.modified(self._name(shard, name)) is not None

    def look(self, shard: Shard) -> SharedShard | None:
        """Look up a shard now.

        Raises:
            SharedTierError: it doesn't answer, or has another format.
            CacheCorrupt: the index is damaged, or larger than any that is stored.
        """
        packed = self._read(self._name(shard, "index")) if self.check_format() else None
        if packed is None:
            return None
        held = SharedShard.unpack(packed)
        if held.digest != shard.digest:
            raise CacheCorrupt(f"the index stored for {shard.name} is another shard's")
        return held

    def read(self, shard: Shard, held: SharedShard, start: int, stop: int) -> bytes:
        """Read a range of a shared copy, verified.

        Raises:
            SharedTierError: the store doesn't return it.
            CacheCorrupt: its bytes aren't those that were stored.
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
        """Stream a shared copy from `start` on; the request has been sent.

        Raises:
            OriginError, SharedTierError: the object can't be opened.
            CacheCorrupt: it has another size.
        """
        first = start - start % BLOCK_BYTES
        origin = open_origin(
            self.objects.target(self._name(shard, held.data)),
            self.objects.storage_options,
            BRIEF,
            _SharedCounts(self.counts),
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
        """Store a published shard, unless the same is there. It is read and compared with its index first.

        Args:
            shard: which one; a local file is never stored.
            directory: of the published shard; pinned meanwhile.

        Returns:
            Whether it was stored.

        Raises:
            FileNotFoundError: it has been evicted.
            CacheCorrupt: it doesn't match its index.
            SharedTierError: the shared cache doesn't accept it.
        """
        source = ShardCopy.open(directory, shard) if shard.local is None else None
        if source is None:
            return False
        with contextlib.closing(source):
            if not self._is_invalid(shard) and self._has_same(shard, source):
                self._lacking.pop(shard.digest, None)
                return False
            new = SharedShard.of(shard, source)
            packed = new.pack()
            if len(packed) > OBJECT_LIMIT_BYTES:
                raise SharedTierError(
                    f"the index of {shard.name} has {len(packed):,} bytes, more than the "
                    f"{OBJECT_LIMIT_BYTES:,} that nodes read: {new.samples:,} samples are too many for one "
                    f"shard"
                )
            self._write_format()
            self.objects.put_file(self._name(shard, new.data), directory / "data")
            self.objects.write(self._name(shard, "index"), packed)
        self._lacking.pop(shard.digest, None)
        self.counts.add("shared_stored", 1)
        return True

    def beside(self, shard: Shard, name: str) -> bytes | None:
        """Read a small object beside the index of a shard; None if there is none.

        Raises:
            SharedTierError: it doesn't answer, or has another format.
            CacheCorrupt: the object is larger than any that is stored.
        """
        return self._read(self._name(shard, name)) if self.check_format() else None

    def store_beside(self, shard: Shard, name: str, data: bytes) -> None:
        """Store a small object beside the index of a shard, unless the same is there.

        Raises:
            SharedTierError: the shared cache doesn't accept it.
        """
        with contextlib.suppress(CacheCorrupt):
            if self.beside(shard, name) == data:
                return
        self._write_format()
        self.objects.write(self._name(shard, name), data)

    def column(self, name: str) -> bytes | None:
        """Read an object of columns; None if there is none.

        Raises:
            SharedTierError: it doesn't answer, or has another format.
            CacheCorrupt: the object is larger than any that is stored.
        """
        return self._read(name) if self.check_format() else None

    def store_column(self, name: str, data: bytes) -> None:
        """Store an object of columns, or replace it.

        Raises:
            SharedTierError: the shared cache doesn't accept it.
        """
        self._write_format()
        self.objects.write(name, data)

    def attempt(self, act: Callable[[], _Result], shard: Shard) -> _Result | None:
        """Run a request that the origin could serve as well; None if it fails or the breaker is open.

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
        """Note a failed request; an object that is damaged or missing isn't requested again."""
        if self._stop.is_set():
            return
        if isinstance(cause, CacheCorrupt | OriginNotFound | DatasetChanged):
            self.invalidate(shard)
        else:
            self._breaker.fail()
        self.report(shard, cause)

    def report(self, shard: Shard, cause: Exception) -> None:
        """Count a failure, and log the first."""
        self.counts.add("shared_errors", 1)
        with self._lock:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            logger.warning(
                "the shared cache %s fails for %s: %s. The origins serve instead (logged once; stats() "
                "counts shared_errors)",
                *(self.objects.url, shard.name, cause),
            )

    def _has_same(self, shard: Shard, source: ShardCopy) -> bool:
        """True if it holds a shard with the same index, hence the same checksums of all samples."""
        with contextlib.suppress(CacheCorrupt):
            held = self.look(shard)
            return held is not None and (held.index, held.names) == index_files(source)
        return False

    def _is_invalid(self, shard: Shard) -> bool:
        return self._lacking.get(shard.digest, False)

    def _name(self, shard: Shard, name: str) -> str:
        folder = f"prepared/{shard.recipe}" if shard.recipe else "shards"
        return f"{folder}/{shard.digest}/{name}"

    def _read(self, name: str) -> bytes | None:
        self.counts.add("shared_requests", 1)
        try:
            data = self.objects.read(name)
        except TooLarge as exc:
            raise CacheCorrupt(str(exc)) from exc
        self.counts.add("shared_bytes", len(data or b""))
        return data

    def _write_format(self) -> None:
        if not self.check_format():
            self.objects.write(_FORMAT_NAME, json.dumps({"format": FORMAT}).encode())


class SharedStream:
    """The bytes of a shard from the shared cache; see `SharedTier.stream`."""

    def __init__(self, origin: Origin, stream: Stream, held: SharedShard, first: int, skipped: int):
        self.size = held.size
        self._origin, self._stream, self._held = origin, stream, held
        self._first, self._skipped = first, skipped

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order, once, each after its block was verified.

        Raises:
            OriginError: the store doesn't return them.
            CacheCorrupt: they aren't those that were stored.
        """
        skip = self._skipped
        for chunk in verified(self._stream.chunks(), self._held.sums, self._first, self._held.size):
            if skip < len(chunk):
                yield chunk[skip:] if skip else chunk
            skip = max(0, skip - len(chunk))

    def close(self) -> None:
        """Close the stream and its origin. Idempotent."""
        self._stream.close()
        self._origin.close()


class _SharedCounts:
    """Counts requests and bytes of the shared cache apart from those of origins."""

    _NAMES: Mapping[str, str] = {
        "origin_requests": "shared_requests",
        "origin_bytes": "shared_bytes",
    }

    def __init__(self, counts: Counts):
        self._counts = counts

    def add(self, name: str, n: int = 1, /) -> None:
        """Count under the shared name; hedged requests count as plain requests."""
        if name in self._NAMES:
            self._counts.add(self._NAMES[name], n)
