"""The shared cache as one process of a run uses it: read through, and written back (step F)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload.cache.freshness import Ask
from streamload.cache.shard import Shard
from streamload.cache.shared.through import ReadThrough
from streamload.errors import OriginStopped
from streamload.metrics import Counts
from streamload.options import DEFAULT_SHARED_WAIT_SECONDS, Settings
from streamload.origins.origin import Origin

if TYPE_CHECKING:
    from streamload.cache.shared.objects import Objects
    from streamload.cache.shared.single_flight import SingleFlight
    from streamload.cache.shared.tier import SharedTier
    from streamload.cache.shared.write_back import WriteBack

_TIMEOUT_SECONDS = 10.0
_LOOK_SECONDS = 30.0
"""For so long what the shared cache says of a prepared shard is taken to hold."""


@dataclass(frozen=True, slots=True)
class SharedOptions:
    """Where the shared cache is, and whether a run writes to it.

    Args:
        url: as for Objects.
        storage_options: of its file system.
        write_back: store what this process has fetched from origins.
        wait_seconds: the longest wait for a shard that another node is fetching; 0: none.
    """

    url: str = field(repr=False)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    write_back: bool = False
    wait_seconds: float = DEFAULT_SHARED_WAIT_SECONDS

    @classmethod
    def of(cls, settings: Settings, storage_options: Mapping[str, Any] | None = None) -> SharedOptions | None:
        """Those of a run; None where it has no shared cache.

        Raises:
            OptionError: its URL can't be one.
        """
        if settings.shared_cache is None:
            return None
        from streamload.cache.shared.objects import refuse_url

        source = settings.sources["shared_cache"]
        refuse_url(settings.shared_cache, "shared_cache" if source == "argument" else source)
        return cls(
            settings.shared_cache,
            dict(storage_options or {}),
            settings.write_back,
            settings.shared_wait,
        )

    def open_objects(self) -> Objects:
        """What the shared cache is made of; nothing is asked of it yet."""
        return self._objects(None)

    def open_tier(self, counts: Counts) -> SharedTier:
        """The shared cache, for one process; nothing is asked of it yet."""
        from streamload.cache.shared.tier import SharedTier

        stop = threading.Event()
        return SharedTier(self._objects(stop), counts, stop=stop)

    def _objects(self, stop: threading.Event | None) -> Objects:
        from streamload.cache.shared.objects import Objects

        return Objects(self.url, self.storage_options, timeout_seconds=_TIMEOUT_SECONDS, stop=stop)


class Sharing:
    """What one process does with the shared cache. Thread-safe; made in the process that uses it.

    Args:
        options: where it is; None: there is none, and all of this does nothing.
        counts: get the counters named "shared_…".
        ask: asks an origin for the version of a shard before a copy is used; None takes what there is.
        uploads: how many shards are stored at once.
    """

    def __init__(
        self, options: SharedOptions | None, counts: Counts, ask: Ask | None = None, uploads: int = 1
    ):
        self.tier: SharedTier | None = None
        self.write_back: WriteBack | None = None
        self.turns: SingleFlight | None = None
        self._ask = ask
        self._prepared: dict[str, tuple[bool, float]] = {}  # by digest: whether it is there, until when
        if options is not None:  # what has no shared cache begins without its modules
            from streamload.cache.shared.single_flight import SingleFlight
            from streamload.cache.shared.write_back import WriteBack

            self.tier = options.open_tier(counts)
            self.turns = SingleFlight(self.tier, wait_seconds=options.wait_seconds, stores=self._stores)
            if options.write_back:
                self.write_back = WriteBack(self.tier, uploads, self.turns.stored)

    def through(self, shard: Shard, origin: Origin, stop: threading.Event, *, in_turn: bool = True) -> Origin:
        """An origin that asks the shared cache first; the event ends its waits.

        Args:
            shard: which one.
            origin: where it lives.
            stop: the event.
            in_turn: whether it waits for other nodes that fetch the same. Then its `close` has to follow, and
                before that `published` or `kept` if the shard is there.
        """
        if self.tier is None or shard.local is not None:
            return origin
        return ReadThrough(shard, self.tier, origin, stop, self._ask, self.turns if in_turn else None)

    def has_prepared(self, form: Shard) -> bool:
        """Whether the shared cache holds a prepared shard; it is asked once in a while."""
        if self.tier is None or form.local is not None:
            return False
        tier, now = self.tier, time.monotonic()
        known, until = self._prepared.get(form.digest, (False, 0.0))
        if now < until:
            return known
        try:
            found = tier.attempt(lambda: tier.look(form), form) is not None
        except OriginStopped:
            return False
        self._prepared[form.digest] = found, now + _LOOK_SECONDS
        return found

    def published(self, shard: Shard, directory: Path) -> None:
        """This process has filled a shard: store it, by and by, if the shared cache hadn't got it."""
        if self.write_back is not None:
            self.kept(shard)
            self.write_back.offer(shard, directory)

    def kept(self, shard: Shard) -> None:
        """This process has filled a shard, and will give it to `write_back` itself."""
        if self.turns is not None and self.write_back is not None:
            self.turns.keep(shard)

    def close(self) -> None:
        """End all of it, whatever is under way; once is enough."""
        if self.turns is not None:
            self.turns.close()
        if self.write_back is not None:
            self.write_back.close()
        if self.tier is not None:
            self.tier.close()

    def _stores(self) -> bool:
        return self.write_back is not None and self.write_back.takes
