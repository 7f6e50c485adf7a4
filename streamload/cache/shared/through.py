"""Read a shard through the shared cache: an origin that asks there first, then the shard's own (step F).

Both have the same version, so a transfer that breaks off there goes on here at the byte where it is, and a
part that was begun here is taken up there. Where nothing tells two versions apart (a command's output), a
transfer that breaks off begins anew. What the shared cache lacks is fetched in turns (single_flight.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamload.cache.freshness import Ask
from streamload.cache.shard import Shard
from streamload.cache.takeover import Outdated
from streamload.errors import CacheCorrupt, DatasetChanged, OriginError, OriginStopped, ShardError
from streamload.origins.origin import Origin, Stream, Unproven, Version

if TYPE_CHECKING:
    from streamload.cache.shared.copies import SharedShard
    from streamload.cache.shared.single_flight import Aside, SingleFlight
    from streamload.cache.shared.tier import SharedStream, SharedTier


class ReadThrough(Origin):
    """A shard's origin, with a shared cache in front of it.

    Args:
        shard: which one.
        tier: the shared cache.
        origin: where the shard lives.
        stop: ends every wait.
        ask: asks the origin for its version, so that an old copy isn't used; None takes what there is.
        turns: who of those that share it asks the origin for what it lacks; None: each for himself.

    Attributes:
        is_kept: whether what is opened is kept whole, so that it can be stored for others.
        yield_slot: entered while `open` waits for another node.
    """

    def __init__(
        self,
        shard: Shard,
        tier: SharedTier,
        origin: Origin,
        stop: threading.Event,
        ask: Ask | None = None,
        turns: SingleFlight | None = None,
    ):
        self.url = origin.url
        self.is_kept = True
        self.yield_slot: Aside = contextlib.nullcontext
        self._turns = turns
        self._has_turn = False
        self._shard, self._tier, self._origin = shard, tier, origin
        self._stop, self._ask = stop, ask
        self._held: SharedShard | None = None
        self._has_looked = False

    def __repr__(self) -> str:
        return f"ReadThrough({self._origin!r})"

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open what the shared cache holds, if it is of that version; else the origin, when it is its turn.

        The stream raises Outdated where neither can go on with what the other gave.
        """
        held = self._usable(expected or self._current())
        if held is None and self._turns is not None:
            self._has_turn = True
            held = self._turns.find(
                self._shard,
                lambda: self._look_again(expected),
                self._stop,
                takes=self.is_kept,
                yield_slot=self.yield_slot,
            )
        if held is not None and start <= held.size:
            shared = self._tier.attempt(
                lambda: self._tier.stream(self._shard, held, start, self._stop), self._shard
            )
            if shared is not None:
                self._tier.counts.add("shared_hits", 1)
                version = held.version if expected is None else expected.completed(held.version)
                return _ThroughStream(self._tier, self._shard, shared, self._origin, start, version)
        return self._origin.open(start, expected)

    def version(self) -> Version:
        """What the origin says."""
        return self._origin.version()

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Some bytes of a version, from whoever gives them."""
        held = self._usable(version)
        if held is not None and stop <= held.size:
            data = self._tier.attempt(lambda: self._tier.read(self._shard, held, start, stop), self._shard)
            if data is not None:
                return data
        return self._origin.read(start, stop, version)

    def close(self) -> None:
        """Close the origin, and give the turn back unless what it gave is being stored."""
        self._origin.close()
        if self._turns is not None and self._has_turn:
            self._has_turn = False
            self._turns.end(self._shard)

    def _look(self) -> SharedShard | None:
        if not self._has_looked:
            self._held, self._has_looked = self._tier.held(self._shard), True
        return self._held

    def _look_again(self, expected: Version | None) -> SharedShard | None:
        """What is held by now."""
        self._held = self._tier.attempt(lambda: self._tier.look(self._shard), self._shard)
        return self._usable(expected or self._current())

    def _usable(self, wanted: Version | None) -> SharedShard | None:
        """What is held, unless it is another version than the one that is wanted."""
        held = self._look()
        if held is not None and wanted is not None and wanted.difference(held.version) is not None:
            self._tier.lacks(self._shard)
            return None
        return held

    def _current(self) -> Version | None:
        """The version that a copy has to be of; None where that isn't asked, or the origin doesn't answer."""
        if self._ask is None or self._look() is None:
            return None
        try:
            version = self._ask(self._shard, self._stop)
        except OriginStopped:
            raise
        except (OriginError, ShardError):
            self._tier.counts.add("shards_unverified", 1)
            return None
        self._tier.counts.add("shards_revalidated", 1)
        return version


class _ThroughStream:
    """The shared cache's bytes, and the origin's from where those break off."""

    def __init__(
        self,
        tier: SharedTier,
        shard: Shard,
        shared: SharedStream,
        origin: Origin,
        start: int,
        version: Version,
    ):
        self.version = version
        self._tier, self._shard, self._origin = tier, shard, origin
        self._stream: SharedStream | Stream = shared
        self._size = shared.size
        self._position = start

    def chunks(self) -> Iterator[bytes]:
        """Give the bytes in order, once.

        Raises:
            Outdated: the origin has another version by now, or nothing tells whether it has.
        """
        try:
            for chunk in self._stream.chunks():
                self._position += len(chunk)
                yield chunk
            return
        except OriginStopped:
            raise
        except (CacheCorrupt, OriginError, ShardError) as exc:
            self._tier.failed(self._shard, exc)
        finally:
            self._stream.close()
        if self._position == self._size:
            return
        yield from self._rest()

    def close(self) -> None:
        """Close whichever is open; idempotent."""
        self._stream.close()

    def _rest(self) -> Iterator[bytes]:
        if not self.version.is_traceable:
            self._tier.invalidate(self._shard)
            raise Outdated
        try:
            self._stream = stream = self._origin.open(self._position, self.version)
        except Unproven:
            raise Outdated from None
        except DatasetChanged:
            self._tier.invalidate(self._shard)
            raise Outdated from None
        self.version = self.version.completed(stream.version)
        try:
            yield from stream.chunks()
        finally:
            stream.close()
