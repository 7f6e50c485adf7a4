"""Origins of a daemon's tasks, under one cap of bytes per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from streamload.cache.shard import Shard, shard_of
from streamload.daemon.recipes import Recipes
from streamload.metrics import Counters
from streamload.origins.origin import Origin, OriginOptions, Stream, Version, open_origin
from streamload.origins.protocol import Named

_BURST_SECONDS = 0.1
Through = Callable[[Shard, Origin, threading.Event], Origin]
"""Puts a cache that is nearer in front of an origin."""


class Throttle:
    """A cap on the bytes per second of all transfers of a process. Thread-safe.

    Args:
        bytes_per_second: None: no cap.
        clock: monotonic.
    """

    def __init__(self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic):
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def seconds_for(self, count: int) -> float:
        """Take bytes; returns how long to wait before the next."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now_seconds = self._clock()
            self._free_at = max(self._free_at, now_seconds - _BURST_SECONDS) + count / self._rate
            return max(0.0, self._free_at - now_seconds)

    def watched(self, origin: Origin, stop: threading.Event) -> Origin:
        """The same origin with its streams throttled; `stop` ends their waits."""
        return origin if self._rate is None else _Throttled(origin, self, stop)


class _Throttled(Origin):
    """An origin with throttled streams."""

    def __init__(self, origin: Origin, throttle: Throttle, stop: threading.Event):
        self.url = origin.url
        self._origin, self._throttle, self._stop = origin, throttle, stop

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        return _ThrottledStream(self._origin.open(start, expected), self._throttle, self._stop)

    def version(self) -> Version:
        return self._origin.version()

    def close(self) -> None:
        self._origin.close()


class _ThrottledStream:
    """A stream that waits after each chunk until the next is due."""

    def __init__(self, stream: Stream, throttle: Throttle, stop: threading.Event):
        self.version = stream.version
        self._stream, self._throttle, self._stop = stream, throttle, stop

    def chunks(self) -> Iterator[bytes]:
        for chunk in self._stream.chunks():
            self.version = self._stream.version
            yield chunk
            self._stop.wait(self._throttle.seconds_for(len(chunk)))

    def close(self) -> None:
        self._stream.close()


@dataclass(frozen=True, slots=True)
class TaskOrigins:
    """Opens the origins of tasks; `open` is an OpenOrigin of the prefetcher.

    Attributes:
        counts: where arriving bytes are counted.
        storage_options: for origins.
        patience: timeouts and retries of transfers.
        throttle: the cap for all transfers together.
        recipes: by which tasks are prepared.
        through: puts a nearer cache in front of a task's origin.
        through_source: the same, for the shard that a task is prepared from.
        named: the origins that the user named, where a plan lists the tasks; None: the user lists them.
    """

    counts: Counters
    storage_options: dict[str, Any] | None = field(repr=False)
    patience: OriginOptions
    throttle: Throttle
    recipes: Recipes
    through: Through | None = None
    through_source: Through | None = None
    named: Named | None = None

    def open(self, task: Shard, stop: threading.Event) -> Origin:
        """The origin of a task; the event ends its waits."""
        far = open_origin(task.url, self.storage_options, self.patience, self.counts, stop, self.named)
        origin = self.throttle.watched(far, stop)
        if task.recipe:
            if self.through_source is not None:
                source = shard_of(task.url, self.storage_options, is_copied=task.is_copied)
                origin = self.through_source(source, origin, stop)
            origin = self.recipes[task.recipe].derive(origin)
        return origin if self.through is None else self.through(task, origin, stop)
