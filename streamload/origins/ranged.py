"""Parallel ranges of one shard, given in order; they start small and grow (step F).

Independent of the protocol: object stores and web servers each pass a function that requests one range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from streamload.origins.protocol import OriginOptions

_QUICK_SECONDS = 1.0
_SMALLEST_SHARE = 8


class RangePart(Protocol):
    """One requested range. Yields exactly its bytes, or raises.

    Attributes:
        size_bytes: of the range.
        seconds: from the request to the arrival of the last byte; None until then.
    """

    size_bytes: int
    seconds: float | None

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order, once."""
        ...

    def cancel(self) -> None:
        """Cancel the request; idempotent."""
        ...


class OrderedParts:
    """The parts from `start` to `stop`, requested in parallel and given in order.

    Args:
        ask: requests the range from one byte up to another.
        at_once: how many requests run in parallel. Parts that have arrived and wait for their turn hold at
            most `at_once` × `part_limit_bytes`.
    """

    def __init__(
        self,
        ask: Callable[[int, int], RangePart],
        start: int,
        stop: int,
        at_once: int,
        options: OriginOptions,
    ) -> None:
        self._ask, self._asked, self._stop = ask, start, stop
        self._at_once, self._options = at_once, options
        self._part_bytes = options.first_part_bytes
        self._parts: deque[RangePart] = deque()

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order. However it ends, no request is left running."""
        try:
            while self._parts or self._asked < self._stop:
                self._ask_more()
                for chunk in self._parts[0].chunks():
                    yield chunk
                    self._ask_more()
                self._grow(self._parts.popleft().seconds or 0.0)
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the running requests; idempotent."""
        while self._parts:
            self._parts.pop().cancel()

    def _ask_more(self) -> None:
        limit = self._at_once * self._options.part_limit_bytes
        while self._asked < self._stop:
            under_way = sum(part.seconds is None for part in self._parts)
            held = sum(part.size_bytes for part in self._parts)
            size = self._next_bytes()
            if under_way >= self._at_once or (self._parts and held + size > limit):
                return
            start, self._asked = self._asked, self._asked + size
            self._parts.append(self._ask(start, self._asked))

    def _next_bytes(self) -> int:
        """Return the size of the next part: smaller towards the end, to keep all connections busy."""
        left = self._stop - self._asked
        share = max(
            left // self._at_once, self._part_bytes // _SMALLEST_SHARE, self._options.first_part_bytes
        )
        return min(left, self._part_bytes, share)

    def _grow(self, seconds: float) -> None:
        """Double the next parts while they arrive quickly, halve them when they are slow."""
        if seconds < _QUICK_SECONDS:
            self._part_bytes = min(self._options.part_limit_bytes, self._part_bytes * 2)
        elif seconds > 2 * _QUICK_SECONDS:
            self._part_bytes = max(self._options.first_part_bytes, self._part_bytes // 2)
