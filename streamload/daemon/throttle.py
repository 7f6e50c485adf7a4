"""A cap on the bytes per second that all transfers of a process take together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from streamload.origins.origin import Origin, Stream, Version

_BURST_SECONDS = 0.1


class Throttle:
    """Gives out bytes at a rate. Thread-safe.

    Args:
        bytes_per_second: the cap; None: there is none.
        clock: monotonic.
    """

    def __init__(self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic):
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def seconds_for(self, count: int) -> float:
        """Take so many bytes, and say how long to wait before the next."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - _BURST_SECONDS) + count / self._rate
            return max(0.0, self._free_at - now)

    def watched(self, origin: Origin, stop: threading.Event) -> Origin:
        """The same origin, whose streams keep to the rate; a wait ends with `stop`."""
        return origin if self._rate is None else _Throttled(origin, self, stop)


class _Throttled(Origin):
    """An origin whose streams keep to a rate."""

    def __init__(self, origin: Origin, throttle: Throttle, stop: threading.Event):
        self.url = origin.url
        self._origin, self._throttle, self._stop = origin, throttle, stop

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """See Origin."""
        return _ThrottledStream(self._origin.open(start, expected), self._throttle, self._stop)

    def version(self) -> Version:
        """See Origin."""
        return self._origin.version()

    def close(self) -> None:
        """See Origin."""
        self._origin.close()


class _ThrottledStream:
    """A stream that waits behind each chunk until the next is due."""

    def __init__(self, stream: Stream, throttle: Throttle, stop: threading.Event):
        self.version = stream.version
        self._stream, self._throttle, self._stop = stream, throttle, stop

    def chunks(self) -> Iterator[bytes]:
        """Give the wrapped stream's bytes, no faster than they may come."""
        for chunk in self._stream.chunks():
            self.version = self._stream.version
            yield chunk
            self._stop.wait(self._throttle.seconds_for(len(chunk)))

    def close(self) -> None:
        """Close it."""
        self._stream.close()
