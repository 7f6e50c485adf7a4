"""Heartbeats of fills: touches this process's parts, and notices when the touches of others stop (step F)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from streamload import limits
from streamload.cache.part import Part
from streamload.cache.tier import Tier

_TOUCHES = 5
"""Heartbeats within the timeout after which a filler counts as stopped."""


class Heartbeat:
    """Touches the parts that this process fills, in a thread, and watches the touches of others.

    Args:
        stopped_seconds: after how long without a heartbeat a filler, of any process, is taken over from.
    """

    def __init__(self, stopped_seconds: float):
        self._stopped_seconds = stopped_seconds
        self._closing = threading.Event()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._parts: set[Part] = set()
        self._touched: dict[str, dict[Path, tuple[int, float]]] = {}
        # By digest, of others' parts: the last touch, and when it was seen first.
        self._thread = threading.Thread(target=self._beat, name="streamload-heartbeat", daemon=True)
        limits.start(self._thread)

    @contextlib.contextmanager
    def of(self, part: Part, digest: str) -> Iterator[None]:
        """Touch a part regularly while the block runs."""
        with self._lock:
            self._parts.add(part)
            self._touched.pop(digest, None)
        try:
            yield
        finally:
            with self._lock:
                self._parts.discard(part)

    def holds_room(self) -> bool:
        """True if a running fill of this process holds a reservation, which it may give back."""
        with self._lock:
            return any(part.reserved_bytes for part in self._parts)

    def stopped(self, tier: Tier, digest: str) -> list[Path]:
        """The parts of a shard whose heartbeats have stopped.

        A touch's time is compared with the last one seen, never with a clock: those of two machines differ.
        """
        now_seconds = time.monotonic()
        with self._lock:
            before = self._touched.get(digest, {})
        parts: dict[Path, tuple[int, float]] = {}
        for path in tier.parts(digest):
            with contextlib.suppress(FileNotFoundError):
                touched = (path / "index").stat().st_mtime_ns
                last, since = before.get(path, (touched, now_seconds))
                parts[path] = (touched, since if touched == last else now_seconds)
        with self._lock:
            self._touched[digest] = parts
        return [path for path, (_, since) in parts.items() if now_seconds - since >= self._stopped_seconds]

    def close(self) -> None:
        """Stop the heartbeats. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._closing.wait(self._stopped_seconds / _TOUCHES):
            with self._lock:
                parts = list(self._parts)
            for part in parts:
                part.touch()
