"""Freshness of the copies in a tier: they are what their origins have (`revalidate=`), agreed on by a run.

The processes of a run on a node share a version log in the tier's `runs/`: one line per shard, appended by
any of them, of which the first counts. The process that first finds a published shard or an index-only copy
without a line asks the origin, while the others wait; a fill writes the line that its origin returned. No
reader begins with a copy without a line, nor with another version than the line has. With "start" the log
lasts as long as any process of the run, with "always" each epoch begins a new one. With "never" nobody asks,
and the first copy opened in an epoch writes the line: another run may replace a copy at any time.

Local files need no log: their size and time are compared whenever they are opened.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from streamload import urls
from streamload.cache.demand import VersionLog
from streamload.cache.locks import FileLock
from streamload.cache.shard import Shard, refuse_other, version_of
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, OriginError, OriginStopped, ShardError
from streamload.metrics import Counts
from streamload.origins.origin import Origin, OriginOptions, Stream, Version, open_origin
from streamload.shards.index import IndexReader

logger = logging.getLogger("streamload")

Ask = Callable[[Shard, threading.Event], Version]
"""Asks a shard's origin for its version; the event ends its waits."""

_SILENT_SECONDS = 60.0
"""How long an endpoint that didn't answer isn't asked about other shards."""


class Freshness:
    """One process's view of its run's version log.

    Thread-safe among the filling threads and the reader of a process; a forked child makes its own.

    Args:
        tier: has the log, and the copies that are compared.
        run: the same name in all processes of the run on this node, and in no other run.
        each_epoch: begin a new log at each `begin` (else only at the first).
        ask: asks an origin. None: published copies are used as they are, though in one version.
        asks_remote: whether remote origins are asked, too, and not only files that are copied.
        counts: receives the answers.
        patience_seconds: how long another process may take to ask before this one asks as well.
    """

    def __init__(
        self,
        tier: Tier,
        run: str,
        *,
        each_epoch: bool,
        ask: Ask | None,
        counts: Counts,
        asks_remote: bool = True,
        patience_seconds: float = 30.0,
    ):
        self._tier = tier
        self._run = run
        self._each_epoch = each_epoch
        self._ask = ask
        self._asks_remote = asks_remote
        self._counts = counts
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._version_log: VersionLog | None = None
        self._filling: dict[str, Version] = {}
        self._waiting: dict[str, float] = {}  # since when another process is asking
        self._warned: set[str] = set()
        self._silent_until: dict[str, float] = {}  # when an endpoint that did not answer may be asked again

    def begin(self, epoch: str) -> None:
        """Begin an epoch; its name is the same in all processes of the run, and is never reused."""
        with self._lock:
            if self._version_log is not None and not self._each_epoch:
                return
            old, name = self._version_log, f"{self._run}.{epoch}" if self._each_epoch else self._run
            self._version_log = VersionLog(self._tier.root, name)
            for digest, version in self._filling.items():  # their origins have only just been asked
                self._version_log.write(digest, version)
        if old is not None:
            old.close()

    def is_current(self, shard: Shard) -> bool:
        """True if readers may begin with the tier's copies of a shard. Quick if they may."""
        if self._ask is None or shard.local is not None or not (self._asks_remote or shard.is_copied):
            return True
        return self.version(shard.digest) is not None

    def version(self, digest: str) -> Version | None:
        """The version of a shard that the run uses, once that is decided."""
        with self._lock:
            return None if self._version_log is None else self._version_log.version(digest)

    def has_to_ask(self, shard: Shard, tiers: Sequence[Tier]) -> bool:
        """True if there is a copy that readers may not begin with yet."""
        return not self.is_current(shard) and any(True for _ in _copies(shard, tiers))

    def check(self, shard: Shard, stop: threading.Event, tiers: Sequence[Tier] = ()) -> bool:
        """Ask whether a shard has changed; if so, remove its copies. Transfers no data.

        Args:
            tiers: where copies may be; by default the tier.

        Returns:
            False if another process is asking about it.
        """
        tiers = tiers or (self._tier,)
        place = next((path for _, path in _copies(shard, tiers)), None)
        claim = FileLock.acquire(place / "index") if place is not None else None
        is_asked_elsewhere = place is not None and claim is None and (place / "index").exists()
        if is_asked_elsewhere and not self._has_waited_long(shard):
            return False
        try:
            if not self.is_current(shard):
                self._settle(shard, stop, tiers)
        except OriginStopped:
            return False
        finally:
            if claim is not None:
                claim.close()
        with self._lock:
            self._waiting.pop(shard.digest, None)
        return True

    def watched(self, shard: Shard, origin: Origin) -> Origin:
        """The origin of a shard for a fill: the version that it returns becomes the run's."""
        return _Watched(origin, shard, self)

    def agree(self, shard: Shard, version: Version) -> None:
        """Begin to read or fill this version; the first process decides for all.

        Raises:
            DatasetChanged: the run has begun with another one.
        """
        with self._lock:
            self._agree(shard, version)

    def fills(self, shard: Shard, version: Version) -> None:
        """Begin to fill this version, which its origin has just returned; see `agree`."""
        with self._lock:  # for both: an epoch that begins in between has to count the fill
            self._agree(shard, version)
            self._filling[shard.digest] = version

    def filled(self, shard: Shard) -> None:
        """The fill is over, however it ended."""
        with self._lock:
            self._filling.pop(shard.digest, None)

    def close(self) -> None:
        """Close the log. Idempotent."""
        with self._lock:
            if self._version_log is not None:
                self._version_log.close()
                self._version_log = None

    def _has_waited_long(self, shard: Shard) -> bool:
        """True if another process, which may be stopped, has been asking about a shard for too long."""
        looked_at = time.monotonic()
        with self._lock:
            return looked_at - self._waiting.setdefault(shard.digest, looked_at) > self._patience_seconds

    def _settle(self, shard: Shard, stop: threading.Event, tiers: Sequence[Tier]) -> None:
        """Ask, and write down the version that the run uses; the claim on the shard is held."""
        copies: list[tuple[Tier, Path, Version]] = []
        for tier, path in _copies(shard, tiers):
            version = _version_at(path)
            if version is not None:
                copies.append((tier, path, version))
            elif path.exists() and not tier.quarantine(path):
                self._choose(shard, Version())  # readers will avoid it
                return
        if not copies:
            return
        current = self._answer(shard, stop)
        if current is not None:
            self._counts.add("shards_revalidated")
        kept: Version | None = None
        for tier, path, version in copies:
            difference = version.difference(kept or current or version)
            if difference is None:
                kept = kept or version
            elif tier.trash(path):
                if current is not None:
                    self._counts.add("shards_changed")
                    logger.info("%s has changed (%s): it is fetched again", shard.name, difference)
            else:
                self._warn_once(
                    f"{path} stays", "%s has changed, but its old copy can't be removed", shard.name
                )
                kept = kept or version
        if kept is not None:
            self._choose(shard, kept)

    def _agree(self, shard: Shard, version: Version) -> None:
        """Do what `agree` says, under the lock."""
        current = None
        if self._version_log is not None:
            if self._version_log.version(shard.digest) is None:
                self._version_log.write(shard.digest, version)
            current = self._version_log.version(shard.digest)
        refuse_other(shard, current, version)

    def _choose(self, shard: Shard, version: Version) -> None:
        with self._lock:
            if self._version_log is not None:
                self._version_log.write(shard.digest, version)

    def _answer(self, shard: Shard, stop: threading.Event) -> Version | None:
        """The version that the origin returns; None if it doesn't answer, and the copy is used as it is."""
        endpoint = urls.endpoint(shard.name) or str(Path(shard.name).parent)  # of a file
        with self._lock:
            is_silent = time.monotonic() < self._silent_until.get(endpoint, 0.0)
        if not is_silent and self._ask is not None:
            try:
                version = self._ask(shard, stop)
            except OriginStopped:
                raise
            except (OriginError, ShardError) as exc:
                self._warn_once(
                    endpoint,
                    "%s didn't answer whether its shards have changed (%s); the copies in the cache are used "
                    "as they are",
                    *(endpoint, exc),
                )
                with self._lock:
                    self._silent_until[endpoint] = time.monotonic() + _SILENT_SECONDS
            else:
                if version != Version():
                    return version
                self._warn_once(
                    f"{endpoint} knows none",
                    "%s reports no versions of shards: the copies in the cache are used as they are",
                    endpoint,
                )
        self._counts.add("shards_unverified")
        return None

    def _warn_once(self, key: str, message: str, *values: object) -> None:
        """Log a warning once per run."""
        with self._lock:
            is_new = key not in self._warned and (
                self._version_log is None or self._version_log.version(key) is None
            )
            self._warned.add(key)
            if self._version_log is not None:
                self._version_log.write(key, Version())
        if is_new:
            logger.warning(message, *values)


class _Watched(Origin):
    """An origin that reports its version before it yields any byte."""

    def __init__(self, origin: Origin, shard: Shard, freshness: Freshness):
        self.url = origin.url
        self._origin, self._shard, self._freshness = origin, shard, freshness

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open the origin for the version that the run uses."""
        agreed = self._freshness.version(self._shard.digest)
        if expected is not None:
            refuse_other(self._shard, agreed, expected)
        stream = self._origin.open(start, expected or agreed)
        try:
            self._freshness.fills(self._shard, stream.version)
        except BaseException:
            stream.close()
            raise
        return stream

    def version(self) -> Version:
        """The origin's version."""
        return self._origin.version()

    def close(self) -> None:
        """Close the origin."""
        self._origin.close()


def _copies(shard: Shard, tiers: Sequence[Tier]) -> Iterator[tuple[Tier, Path]]:
    """The published copies of a shard, prepared or not, and its index-only copy."""
    for tier in tiers:
        for path in (*map(tier.published, shard.digests), tier.index_only(shard.digest)):
            if path.exists():
                yield tier, path


def _version_at(path: Path) -> Version | None:
    """The version of a copy; None if it is damaged, or has gone."""
    try:
        with IndexReader(path) as index:
            return version_of(index)
    except (OSError, CacheCorrupt):
        return None


def asker(options: OriginOptions, counts: Counts) -> Ask:
    """Asks origins, with less patience than a fill: the shard is here, and a training waits."""
    brief = replace(
        options, attempts=min(options.attempts, 3), outage_seconds=0.0, retry_after_limit_seconds=5.0
    )

    def ask(shard: Shard, stop: threading.Event) -> Version:
        return open_origin(shard.url, shard.storage_options, brief, counts, stop).version()

    return ask
