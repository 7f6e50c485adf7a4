"""Targets of a daemon: the tier of its node, or a shared tier."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from streamload import limits
from streamload.cache.locks import FileLock
from streamload.cache.shard import Shard
from streamload.cache.shared.facts import object_name
from streamload.cache.shared.tier import SharedTier
from streamload.cache.tier import Tier
from streamload.errors import OptionError
from streamload.shards.columns import Column

_SEEN_SECONDS = 3600.0
"""Time for which a shard that was seen in a shared tier is assumed to stay there."""
_ASKED_AT_ONCE = 8
MOST_MISSES = 64
"""Stop probing a shared tier after this many misses: later shards won't be started yet."""


class WarmTarget(Protocol):
    """Target that shards are delivered to. Thread-safe.

    Attributes:
        has_copies: whether delivered shards are also kept outside the tier of this node, and may be evicted.
    """

    has_copies: bool

    def missing(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards that the target lacks, in the order given.

        A shard seen there lately may count as held, and shards after many missing ones as missing, without a
        request: `holds` is called before a task starts.

        Raises:
            SharedTierError: the target can't be asked now.
        """
        ...

    def holds(self, shard: Shard) -> bool:
        """True if the target has a shard now.

        Raises:
            SharedTierError: the target can't be asked now.
        """
        ...

    def deliver(self, shard: Shard, directory: Path) -> None:
        """Deliver a shard that is published in the tier of this node, in `directory`.

        Raises:
            StreamloadError, OSError: the delivery failed.
        """
        ...

    def is_busy(self) -> bool:
        """True if deliveries go on in the background, after which delivered shards may be evicted."""
        return False


class LocalTarget(WarmTarget):
    """The tier of this node itself."""

    has_copies = False

    def __init__(self, tier: Tier):
        self._tier = tier

    def missing(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards that the target lacks, in the order given."""
        return [shard for shard in shards if not self.holds(shard)]

    def holds(self, shard: Shard) -> bool:
        """True if the target has a shard now."""
        return self._tier.published(shard.digest).exists()

    def deliver(self, shard: Shard, directory: Path) -> None:
        """Do nothing: the shard is in its place."""


class SharedTarget(WarmTarget):
    """A shared tier.

    Args:
        tier: the shared tier.
        facts: the columns whose values are to be there, too.
        clock: monotonic.
    """

    has_copies = True

    def __init__(
        self, tier: SharedTier, facts: Sequence[Column] = (), clock: Callable[[], float] = time.monotonic
    ):
        self._tier = tier
        self._names = ["index", *map(object_name, facts)]
        self._clock = clock
        self._seen: dict[str, float] = {}  # when a shard was seen there, by digest; for one thread
        self._pool = limits.Threads(_ASKED_AT_ONCE, "streamload-look")

    def missing(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards that the target lacks, in the order given."""
        since = self._clock() - _SEEN_SECONDS
        self._seen = {digest: seen_at for digest, seen_at in self._seen.items() if seen_at > since}
        unknown = [shard for shard in shards if shard.digest not in self._seen]
        misses = 0
        for first in range(0, len(unknown), _ASKED_AT_ONCE):
            chunk = unknown[first : first + _ASKED_AT_ONCE]
            for shard, is_there in zip(chunk, self._pool.map(self.holds, chunk), strict=True):
                if is_there:
                    self._seen[shard.digest] = self._clock()
                else:
                    misses += 1
            if misses >= MOST_MISSES:
                break
        return [shard for shard in unknown if shard.digest not in self._seen]

    def holds(self, shard: Shard) -> bool:
        """True if the target has a shard now: its index, which is written last, and its facts."""
        return all(self._tier.has(shard, name) for name in self._names)

    def deliver(self, shard: Shard, directory: Path) -> None:
        """Deliver a shard that is published in the tier of this node, in `directory`."""
        if shard.local is not None:
            raise OptionError(f"{shard.name} is a file of this machine, and isn't stored for others")
        pin = FileLock.acquire(directory / "names", shared=True)  # keeps it from being evicted meanwhile
        if pin is None:
            raise FileNotFoundError(f"{shard.name} was evicted before it was stored")
        with contextlib.closing(pin):
            self._tier.store(shard, directory)

    def close(self) -> None:
        """End all requests. Idempotent."""
        self._tier.close()
        self._pool.shutdown()
