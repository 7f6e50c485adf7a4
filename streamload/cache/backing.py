"""The contract of a backing store: shards between a node's tier and their origins (cache/shared/).

Read-through: a shard's origin is wrapped, and the store is asked first. Write-back: what this process has
filled is stored, if the store lacks it. A run without a backing store has no object.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from streamload.cache.companion import FactsCarrier
from streamload.cache.freshness import Ask
from streamload.cache.shard import Shard
from streamload.metrics import Counts
from streamload.origins.origin import Origin

YieldSlot = Callable[[], contextlib.AbstractContextManager[object]]
"""Returns a context manager that is entered while a fill waits."""


class WaitingOrigin(Origin):
    """An origin that may wait until another node has stored the shard.

    Attributes:
        is_kept: whether the whole shard is kept here, so that it can be stored for others.
        yield_slot: entered while `open` waits for another node.
    """

    is_kept: bool = True
    yield_slot: YieldSlot = contextlib.nullcontext


class BackingStore:
    """A backing store as one process uses it, thread-safe; cache/shared/ subclasses it.

    Attributes:
        facts: carries facts of samples between nodes.
    """

    facts: FactsCarrier = FactsCarrier()

    def through(
        self,
        shard: Shard,
        origin: Origin,
        stop: threading.Event,
        *,
        single_flight: bool = True,
        revalidates: bool = True,
    ) -> Origin:
        """An origin that reads through the store.

        Args:
            stop: ends its waits.
            single_flight: wait for other nodes that fetch the same shard. Its `close` has to follow, and
                before that `published` if the shard was fetched.
            revalidates: ask the origin for its version before a copy is used, if this process does so at all.
        """
        raise NotImplementedError

    def has_prepared(self, form: Shard) -> bool:
        """True if the store holds a prepared shard; the answer is cached for some seconds."""
        raise NotImplementedError

    def size(self, shard: Shard) -> int | None:
        """The size of a shard in the store; None: it isn't there, or no answer comes."""
        raise NotImplementedError

    def published(self, shard: Shard, directory: Path) -> None:
        """After this process has filled a shard: store it in time, if the store lacks it."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop everything, also what is under way. Idempotent."""
        raise NotImplementedError


class Backing:
    """Options of a backing store; picklable. cache/shared/ subclasses it.

    Attributes:
        url: of the store.
    """

    __slots__ = ()
    url: str

    def open(self, counts: Counts, ask: Ask | None = None) -> BackingStore:
        """Open the store in the process that uses it; makes no request yet.

        Args:
            counts: receives the counters named "shared_…".
            ask: asks an origin for a shard's version before a copy is used; None: any copy is used.
        """
        raise NotImplementedError

    def open_read_only(self, counts: Counts) -> BackingStore:
        """Open the store for some reads, which wait for no other node."""
        raise NotImplementedError
