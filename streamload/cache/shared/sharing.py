"""The shared cache as one process of a run uses it: read-through, single-flight, write-back.

A read goes to the shared cache first, then to the shard's origin. Both have the same version, so a transfer
that fails there continues at the origin from the same byte, and a part that began at the origin continues
there. If nothing identifies a version (the output of a command), a failed transfer starts over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streamload.cache.backing import Backing, BackingStore, WaitingOrigin
from streamload.cache.companion import FactsCarrier
from streamload.cache.fill import Outdated, SizedStream
from streamload.cache.freshness import Ask
from streamload.cache.shard import Shard
from streamload.cache.shared.facts import SharedFacts
from streamload.cache.shared.format import SharedShard
from streamload.cache.shared.objects import Objects, refuse_url
from streamload.cache.shared.single_flight import SingleFlight, spare_of
from streamload.cache.shared.tier import SharedStream, SharedTier
from streamload.cache.shared.write_back import WriteBack
from streamload.errors import CacheCorrupt, DatasetChanged, OriginError, OriginStopped, ShardError
from streamload.metrics import Counts
from streamload.options import DEFAULT_SHARED_WAIT_SECONDS, Settings
from streamload.options.storage import copy_options
from streamload.origins.origin import Origin, Stream, Unproven, Version
from streamload.topology import RunAttempt, Topology

_TIMEOUT_SECONDS = 10.0
_FACTS_SECONDS = 2.0
"""For facts, which a batch waits for: a node can make them itself."""
_LOOK_SECONDS = 30.0
"""Seconds for which an answer about a prepared shard is reused."""


@dataclass(frozen=True, slots=True)
class SharedOptions(Backing):
    """Location of the shared cache, and whether a run writes to it.

    Args:
        url: see Objects.
        write_back: store what this process has fetched from origins.
        wait_seconds: the longest wait for a shard that another node is fetching; 0: none.
        attempt, borders, spare: see SingleFlight.
    """

    url: str = field(repr=False)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    write_back: bool = False
    wait_seconds: float = DEFAULT_SHARED_WAIT_SECONDS
    attempt: RunAttempt | None = None
    borders: frozenset[str] = frozenset()
    spare: int = 0

    @classmethod
    def of(cls, settings: Settings, storage_options: Mapping[str, Any] | None = None) -> SharedOptions | None:
        """The options of a run; None if it has no shared cache.

        Raises:
            OptionError: its URL can't be one.
        """
        if settings.shared_cache is None:
            return None
        source = settings.sources["shared_cache"]
        refuse_url(settings.shared_cache, "shared_cache" if source == "argument" else source)
        return cls(
            settings.shared_cache,
            copy_options(storage_options),
            settings.write_back,
            settings.shared_wait,
        )

    def in_run(
        self,
        attempt: RunAttempt,
        shards: int,
        borders: Iterable[Shard],
        groups: int,
        here: Topology,
        workers: int,
    ) -> SharedOptions:
        """The same for a process of a run.

        Args:
            shards: the number of all shards.
            borders: the shards that its groups share with other groups.
            groups, here, workers: see `spare_of`.
        """
        return replace(
            self,
            attempt=attempt,
            borders=frozenset(digest for shard in borders for digest in shard.digests),
            spare=spare_of(shards, groups, here, workers),
        )

    def open_objects(
        self, stop: threading.Event | None = None, timeout_seconds: float | None = None
    ) -> Objects:
        """The objects of the shared cache; makes no request yet."""
        seconds = _TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        return Objects(self.url, self.storage_options, timeout_seconds=seconds, stop=stop)

    def open_tier(self, counts: Counts, timeout_seconds: float | None = None) -> SharedTier:
        """The shared cache, for one process; makes no request yet."""
        stop = threading.Event()
        return SharedTier(self.open_objects(stop, timeout_seconds), counts, stop=stop)

    def open(self, counts: Counts, ask: Ask | None = None) -> Sharing:
        """Open the store in the process that uses it; makes no request yet."""
        return Sharing(self, counts, ask)

    def open_read_only(self, counts: Counts) -> Sharing:
        """Open the store for some reads, which wait for no other node."""
        return Sharing(replace(self, write_back=False, wait_seconds=0.0), counts)


class Sharing(BackingStore):
    """The shared cache as one process uses it. Thread-safe; made in the process that uses it.

    Args:
        options: where it is; None: there is none, and every method does nothing.
        counts: receives the counters named "shared_…".
        ask: asks an origin for a shard's version before a copy is used; None: copies are used as they are.
        uploads: how many shards are stored at once.
    """

    def __init__(
        self, options: SharedOptions | None, counts: Counts, ask: Ask | None = None, uploads: int = 1
    ):
        self.tier: SharedTier | None = None
        self.write_back: WriteBack | None = None
        self.facts: FactsCarrier = FactsCarrier()
        self._single_flight: SingleFlight | None = None
        self._ask = ask
        self._prepared: dict[str, tuple[bool, float]] = {}  # by digest: whether it is there, valid until
        if options is not None:
            self.tier = options.open_tier(counts)
            self._single_flight = SingleFlight(
                self.tier,
                wait_seconds=options.wait_seconds,
                stores=self._stores,
                attempt=options.attempt,
                borders=options.borders,
                spare=options.spare,
            )
            if options.write_back:
                self.write_back = WriteBack(self.tier, uploads, self._single_flight.stored)
            self.facts = SharedFacts(options.open_tier(counts, _FACTS_SECONDS), self.write_back)

    def through(
        self,
        shard: Shard,
        origin: Origin,
        stop: threading.Event,
        *,
        single_flight: bool = True,
        revalidates: bool = True,
    ) -> Origin:
        """An origin that reads through the shared cache."""
        if self.tier is None or shard.local is not None:
            return origin
        flight = self._single_flight if single_flight else None
        return ReadThrough(shard, self.tier, origin, stop, self._ask if revalidates else None, flight)

    def has_prepared(self, form: Shard) -> bool:
        """True if the shared cache holds a prepared shard; the answer is cached for some seconds."""
        if self.tier is None or form.local is not None:
            return False
        tier, asked_at = self.tier, time.monotonic()
        is_held, until = self._prepared.get(form.digest, (False, 0.0))
        if asked_at < until:
            return is_held
        try:
            is_stored = tier.attempt(lambda: tier.look(form), form) is not None
        except OriginStopped:
            return False
        self._prepared[form.digest] = is_stored, asked_at + _LOOK_SECONDS
        return is_stored

    def size(self, shard: Shard) -> int | None:
        """The size of a shard in the shared cache; None: it isn't there, or no answer comes."""
        held = None if self.tier is None else self.tier.held(shard)
        return None if held is None else held.size

    def published(self, shard: Shard, directory: Path) -> None:
        """After this process has filled a shard: queue it for write-back if the shared cache lacked it."""
        if self.write_back is not None:
            self.kept(shard)
            self.write_back.offer(shard, directory)

    def kept(self, shard: Shard) -> None:
        """After this process has filled a shard that the caller will pass to `write_back` itself."""
        if self._single_flight is not None and self.write_back is not None:
            self._single_flight.keep(shard)

    def close(self) -> None:
        """Stop everything, also what is under way. Idempotent."""
        for part in (self.facts, self._single_flight, self.write_back, self.tier):
            if part is not None:
                part.close()

    def _stores(self) -> bool:
        return self.write_back is not None and self.write_back.takes


class ReadThrough(WaitingOrigin):
    """A shard's origin, with a shared cache in front of it.

    Args:
        stop: ends every wait.
        ask: asks the origin for its version, so that no old copy is used; None: copies are used as they are.
        single_flight: which node asks the origin for what is missing; None: each node for itself.
    """

    def __init__(
        self,
        shard: Shard,
        tier: SharedTier,
        origin: Origin,
        stop: threading.Event,
        ask: Ask | None = None,
        single_flight: SingleFlight | None = None,
    ):
        self.url = origin.url
        self._single_flight = single_flight
        self._has_turn = False
        self._shard, self._tier, self._origin = shard, tier, origin
        self._stop, self._ask = stop, ask
        self._held: SharedShard | None = None
        self._has_looked = False

    def __repr__(self) -> str:
        return f"ReadThrough({self._origin!r})"

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open the shared copy if it has that version; else the origin, once it is this node's turn.

        The stream raises Outdated if neither can continue what the other began.
        """
        held = self._usable(expected or self._current())
        if held is None and self._single_flight is not None:
            self._has_turn = True
            held = self._single_flight.find(
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
        stream = self._origin.open(start, expected)
        return (
            stream
            if self._single_flight is None
            else self._single_flight.fetching(self._shard, stream, start)
        )

    def version(self) -> Version:
        """The origin's version."""
        return self._origin.version()

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Read a range of a version, from the shared cache or the origin."""
        held = self._usable(version)
        if held is not None and stop <= held.size:
            data = self._tier.attempt(lambda: self._tier.read(self._shard, held, start, stop), self._shard)
            if data is not None:
                return data
        return self._origin.read(start, stop, version)

    def close(self) -> None:
        """Close the origin, and end the turn unless the shard is being stored."""
        self._origin.close()
        if self._single_flight is not None and self._has_turn:
            self._has_turn = False
            self._single_flight.end(self._shard)

    def _look(self) -> SharedShard | None:
        if not self._has_looked:
            self._held, self._has_looked = self._tier.held(self._shard), True
        return self._held

    def _look_again(self, expected: Version | None) -> SharedShard | None:
        """Look up what is held by now."""
        self._held = self._tier.attempt(lambda: self._tier.look(self._shard), self._shard)
        return self._usable(expected or self._current())

    def _usable(self, version: Version | None) -> SharedShard | None:
        """The shared copy, unless it is another version than the wanted one."""
        held = self._look()
        if held is not None and version is not None and version.difference(held.version) is not None:
            self._tier.lacks(self._shard)
            return None
        return held

    def _current(self) -> Version | None:
        """The version that a copy must have; None if it isn't asked for, or the origin doesn't answer."""
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


class _ThroughStream(SizedStream):
    """The bytes of the shared copy, and the origin's from where those fail."""

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
        self.size_bytes = shared.size
        self._position = start

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order, once.

        Raises:
            Outdated: the origin has another version by now, or nothing identifies its version.
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
        if self._position == self.size_bytes:
            return
        yield from self._rest()

    def close(self) -> None:
        """Close the open stream. Idempotent."""
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
