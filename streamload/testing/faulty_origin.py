"""FaultyOrigin: wraps an origin and makes it fail at given bytes, to test readers of origins.

    RetryingOrigin(FaultyOrigin(origin, Break(at=4096, how="cut")), session)

Faults depend on byte positions, never on time, and are counted in `happened`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from streamload.errors import OriginCut, OriginError, OriginTimeout, OriginUnavailable
from streamload.origins.origin import Origin, Stream, Version

How = Literal["cut", "end", "stall", "flip", "refuse"]

__all__ = ["Break", "FaultyOrigin", "How"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A fault at one byte of a shard.

    Args:
        at: the byte; those before it arrive unharmed.
        how: "cut": the transfer breaks (OriginCut). "end": it ends as if complete, like a body without
            Content-Length whose connection closes. "stall": nothing arrives for `stall_seconds`, then
            OriginTimeout, as from an origin with a deadline. "flip": one bit of the byte is wrong, silently.
            "refuse": `open` fails if it starts at this byte or later.
        times: how often it happens.
        stall_seconds: see "stall".
        error: raised by "refuse"; default: OriginUnavailable.
    """

    at: int
    how: How
    times: int = 1
    stall_seconds: float = 0.2
    error: OriginError | None = None


class FaultyOrigin(Origin):
    """An origin that fails at given bytes. Like every origin, it isn't thread-safe.

    Args:
        origin: the wrapped origin.
        breaks: the faults. Several at one byte happen in this order, one per attempt.

    Attributes:
        happened: how often each kind of fault has happened: assert on it, as a test that never met its fault
            proves nothing.
    """

    def __init__(self, origin: Origin, *breaks: Break) -> None:
        self.url = origin.url
        self.happened: Counter[How] = Counter()
        self._origin = origin
        self._left = [_Left(fault, fault.times) for fault in breaks]

    def __repr__(self) -> str:
        return f"FaultyOrigin({self._origin!r}, happened={dict(self.happened)})"

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open the wrapped origin, unless a "refuse" fault is due."""
        for left in self._left:
            fault = left.fault
            if left.times and fault.how == "refuse" and fault.at <= start:
                self._happens(left)
                raise fault.error or OriginUnavailable(f"{self.url}: refused at byte {start}, on request")
        return _FaultyStream(self, self._origin.open(start, expected), start)

    def version(self) -> Version:
        """The wrapped origin's version."""
        return self._origin.version()

    def due(self, start: int, stop: int) -> Break | None:
        """The first fault in [start, stop), which is counted as happening now."""
        due = [
            left
            for left in self._left
            if left.times and left.fault.how != "refuse" and start <= left.fault.at < stop
        ]
        if not due:
            return None
        first = min(due, key=lambda left: left.fault.at)
        self._happens(first)
        return first.fault

    def _happens(self, left: _Left) -> None:
        left.times -= 1
        self.happened[left.fault.how] += 1


@dataclass(slots=True)
class _Left:
    """A fault, and how often it has yet to happen."""

    fault: Break
    times: int


class _FaultyStream:
    def __init__(self, owner: FaultyOrigin, stream: Stream, start: int) -> None:
        self.version = stream.version
        self._owner, self._stream, self._position = owner, stream, start
        self._closed = threading.Event()

    def chunks(self) -> Iterator[bytes]:
        """Yield the wrapped origin's bytes, with the faults."""
        for chunk in self._stream.chunks():
            left = memoryview(chunk)
            while left:
                fault = self._owner.due(self._position, self._position + len(left))
                sound = len(left) if fault is None else fault.at - self._position
                if sound:
                    self._position += sound
                    yield bytes(left[:sound])
                    left = left[sound:]
                if fault is None:
                    continue
                if fault.how == "end":
                    return
                if fault.how == "flip":
                    self._position += 1
                    yield bytes([left[0] ^ 1])
                    left = left[1:]
                else:
                    self._fail(fault)

    def close(self) -> None:
        self._closed.set()
        self._stream.close()

    def _fail(self, fault: Break) -> None:
        if fault.how == "cut":
            raise OriginCut(f"{self._owner.url}: cut at byte {fault.at}, on request")
        self._closed.wait(fault.stall_seconds)
        raise OriginTimeout(f"{self._owner.url}: nothing for {fault.stall_seconds:g} s, on request")
