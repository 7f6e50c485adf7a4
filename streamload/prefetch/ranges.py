"""Samples of index-only shards, read from origins by range, several at once (steps F, H).

A reader announces the ranges that it will want; neighbours are joined into one request, and the bytes are
kept until they are read. For one reading thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby

from streamload import limits
from streamload.cache.shard import Shard, ShardRange
from streamload.origins.origin import Origin

_AT_ONCE = 8
_GAP_BYTES = 64 << 10
"""A gap up to this is fetched with the samples around it: a second request would take longer."""
_LONGEST_BYTES = 4 << 20
_AHEAD_BYTES = 64 << 20
"""The most that is requested in advance and kept."""
_TURNS_KEPT = 4
"""A block that wasn't read until this many later calls is dropped."""
_ORIGINS_KEPT = 32
"""Idle origins, each of which may keep a connection open."""


@dataclass(slots=True)
class _RangeRequest:
    """One request for neighbouring ranges of a shard."""

    digest: str
    start: int
    stop: int
    data: Future[bytes]
    left: int
    """Its ranges that haven't been read."""
    turn: int


class Ranges:
    """Reads ranges of shards."""

    def __init__(self, open_origin: Callable[[Shard], Origin]):
        self._open_origin = open_origin
        self._pool: limits.Threads | None = None  # made in the process that uses it
        self._blocks: list[_RangeRequest] = []  # in the order of their requests
        self._turn = 0
        self._lock = threading.Lock()
        self._idle: deque[tuple[str, Origin]] = deque()  # guarded by _lock

    def want(self, ranges: Iterable[ShardRange]) -> None:
        """Request ranges that will be read soon; only some of them if much is on its way."""
        self._turn += 1
        self._blocks = [block for block in self._blocks if self._turn - block.turn < _TURNS_KEPT]
        ordered = sorted(set(ranges), key=lambda part: (part.shard.digest, part.start))
        for _, of_shard in groupby(ordered, key=lambda part: part.shard.digest):
            for group in _joined([part for part in of_shard if self._holding(part) is None]):
                if sum(block.stop - block.start for block in self._blocks) > _AHEAD_BYTES:
                    return
                whole = group[0]._replace(stop=max(part.stop for part in group))
                self._pool = self._pool or limits.Threads(_AT_ONCE, "streamload-range")
                data = self._pool.submit(self._read, whole)
                place = whole.shard.digest, whole.start, whole.stop
                self._blocks.append(_RangeRequest(*place, data, len(group), self._turn))

    def read(self, part: ShardRange) -> bytes:
        """The bytes of a range, by an earlier request if there was one.

        Raises:
            OriginError, DatasetChanged: they can't be read.
        """
        block = self._holding(part)
        if block is None:
            return self._read(part)
        block.left -= 1
        if not block.left:
            self._blocks.remove(block)
        return block.data.result()[part.start - block.start : part.stop - block.start]

    def close(self) -> None:
        """Wait for running requests, which the origins' event ends. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._blocks.clear()
        while self._idle:
            self._idle.pop()[1].close()

    def _holding(self, part: ShardRange) -> _RangeRequest | None:
        digest, start, stop = part.shard.digest, part.start, part.stop
        for block in self._blocks:
            if block.digest == digest and block.start <= start and stop <= block.stop:
                return block
        return None

    def _read(self, part: ShardRange) -> bytes:
        with self._origin(part.shard) as origin:
            return origin.read(part.start, part.stop, part.version)

    @contextlib.contextmanager
    def _origin(self, shard: Shard) -> Iterator[Origin]:
        """An origin of a shard that no other thread uses."""
        with self._lock:
            idle = next((entry for entry in self._idle if entry[0] == shard.digest), None)
            if idle is not None:
                self._idle.remove(idle)
        origin = self._open_origin(shard) if idle is None else idle[1]
        try:
            yield origin
        except BaseException:
            origin.close()
            raise
        with self._lock:
            self._idle.append((shard.digest, origin))
            surplus = self._idle.popleft()[1] if len(self._idle) > _ORIGINS_KEPT else None
        if surplus is not None:
            surplus.close()


def _joined(ranges: Iterable[ShardRange]) -> list[list[ShardRange]]:
    """Ascending ranges of one shard, grouped into requests."""
    groups: list[list[ShardRange]] = []
    for part in ranges:
        last = groups[-1] if groups else []
        is_near = last and part.start - last[-1].stop <= _GAP_BYTES
        if is_near and part.stop - last[0].start <= _LONGEST_BYTES:
            last.append(part)
        else:
            groups.append([part])
    return groups
