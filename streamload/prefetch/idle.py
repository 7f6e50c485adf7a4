"""Prepare in idle time what the tier has as it is (step F).

One thread of each process looks through the run's shards. It reads a copy that isn't prepared again, compares
it with its index, and fills the prepared form beside it: claimed, reserved and published as by any other
fill, so that the processes of a node work on different shards, and one that is killed is taken over from.
From then on the old copy is the first to be evicted. The thread keeps to a share of a processor, and stops as
long as the training loop waits for data.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from streamload import limits
from streamload.cache.demand import VISITS_KEPT
from streamload.cache.directory import inode_of
from streamload.cache.fill import Filled, FillOptions, fill
from streamload.cache.freshness import Freshness
from streamload.cache.shard import Shard, refuse_other
from streamload.cache.shard_copy import ShardCopy, verified_chunks
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, CacheFull, OriginStopped, StreamloadError
from streamload.metrics import Counts
from streamload.origins.origin import Origin, Stream, Version

IDLE_SHARE = 0.1
"""The most of a node's processors that the processes of a run use for it together."""
_LOOK_SECONDS = 60.0
"""Between two looks through all shards."""
_WAIT_SECONDS = 0.05
_PIECE_BYTES = 64 << 10
_SHORTEST_PAUSE_SECONDS = 0.01
_NEXT_USE = float(VISITS_KEPT)
"""Only what no run has announced, or an old copy of what is prepared, is evicted for a prepared form."""


def idle_share(processes: int) -> float:
    """The share of a processor that each of so many processes of a node may use to prepare in idle time."""
    return min(1.0, IDLE_SHARE * len(os.sched_getaffinity(0)) / processes)


class IdlePace:
    """Keeps a thread to a share of a processor, and stops it while there is other work. For one thread.

    Args:
        share: of one processor, above 0.
        is_idle: whether there is no other work now.
    """

    def __init__(self, share: float, is_idle: Callable[[], bool], stop: threading.Event):
        self._rest = max(0.0, 1.0 / share - 1.0)
        self._is_idle = is_idle
        self._stop = stop
        self._counted_seconds = 0.0  # of this thread's CPU time

    def keep(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait as long as the work since the last wait demands.

        Args:
            check: called meanwhile, and may raise.

        Raises:
            OriginStopped: the process is stopping.
        """
        pause_seconds = (time.thread_time() - self._counted_seconds) * self._rest
        if pause_seconds >= _SHORTEST_PAUSE_SECONDS:
            self._stop.wait(pause_seconds)
            self._counted_seconds = time.thread_time()
        check()
        while not self._is_idle() and not self._stop.wait(_WAIT_SECONDS):
            check()
        if self._stop.is_set():
            raise OriginStopped("the process is stopping")


class IdlePreparer:
    """A thread that prepares, in idle time, the shards that a tier has as they are.

    Args:
        tier: has them, and takes their prepared forms.
        derive: makes the origin of a prepared form from that of the shard as it is.
        freshness: the versions that the run reads; a copy that isn't known to be current stays as it is.
        counts: where published shards are counted.
        share: of one processor, above 0.
        is_idle: whether the training loop doesn't wait for data now.
    """

    def __init__(
        self,
        tier: Tier,
        shards: Iterable[Shard],
        derive: Callable[[Origin], Origin],
        freshness: Freshness,
        *,
        counts: Counts,
        share: float,
        is_idle: Callable[[], bool],
    ):
        self._tier, self._shards, self._derive = tier, shards, derive
        self._freshness, self._counts = freshness, counts
        self._stop = threading.Event()
        self._pace = IdlePace(share, is_idle, self._stop)
        self._failed: set[str] = set()  # digests of those that couldn't be prepared
        self._looks = 0  # through all shards
        self._thread = threading.Thread(target=self._run, name="streamload-prepare", daemon=True)
        limits.start(self._thread)

    def __repr__(self) -> str:
        return f"<IdlePreparer {self._looks} looks, {len(self._failed)} failed>"

    def close(self) -> None:
        """Stop where it is; a form that isn't complete stays, to be taken over. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OriginStopped):
            while not self._stop.is_set():
                self._look_through()
                self._looks += 1
                self._stop.wait(_LOOK_SECONDS)

    def _look_through(self) -> None:
        """Prepare what isn't, as long as there is room."""
        for shard in self._shards:
            self._pace.keep()
            try:
                if self._prepare(shard) is Filled.NO_ROOM:
                    return
            except CacheFull:
                return
            except (StreamloadError, OSError):  # whoever reads it will report what is wrong
                self._failed.add(shard.digest)

    def _is_wanted(self, shard: Shard, form: Shard) -> bool:
        published = self._tier.published
        return (
            shard.local is None
            and published(shard.digest).exists()
            and not published(form.digest).exists()
            and shard.digest not in self._failed
            and self._freshness.is_current(shard)
        )

    def _prepare(self, shard: Shard) -> Filled | None:
        """Fill a shard's prepared form, if that is to be done and no other process does it; else None."""
        form = shard.prepared
        part = self._tier.claim(form.digest) if form is not None and self._is_wanted(shard, form) else None
        if form is None or part is None:
            return None
        origin = _CopyOrigin(shard, self._tier, self._freshness, self._pace)
        outcome = fill(
            *(part, form, lambda: self._derive(origin), FillOptions(leave_tombstone=False)),
            next_use=lambda: _NEXT_USE,
            stop=self._stop,
            refused=lambda waits: waits,
        )
        if outcome.result is Filled.PUBLISHED:
            self._tier.supersede(shard.digest)
            self._counts.add("shards_published")
        return outcome.result


class _CopyOrigin(Origin):
    """A shard's copy in the tier as an origin, read at a pace."""

    def __init__(self, shard: Shard, tier: Tier, freshness: Freshness, pace: IdlePace):
        self.url = shard.name
        self._shard, self._tier, self._freshness, self._pace = shard, tier, freshness, pace

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open it at its first byte: what is made of it always begins there."""
        assert start == 0
        try:
            copy = ShardCopy.open(self._tier.published(self._shard.digest), self._shard)
        except (FileNotFoundError, CacheCorrupt):
            copy = None
        if copy is None:
            raise OriginStopped(f"{self.url} isn't in the tier any more")
        try:
            copy.reader.refresh()
            self._freshness.agree(self._shard, copy.version)
            refuse_other(self._shard, expected, copy.version)
        except BaseException:
            copy.close()
            raise
        return _CopyStream(copy, self._tier, self._pace, lambda: self._freshness.is_current(self._shard))

    def version(self) -> Version:
        """The version of the copy."""
        with contextlib.closing(self.open()) as stream:
            return stream.version


class _CopyStream:
    """The bytes of a copy, as long as it stays where it is and the run reads its version."""

    def __init__(self, copy: ShardCopy, tier: Tier, pace: IdlePace, is_current: Callable[[], bool]):
        self.version = copy.version
        self._copy, self._tier, self._pace, self._is_current = copy, tier, pace, is_current
        self._inode = inode_of(copy.path)

    def chunks(self) -> Iterator[bytes]:
        """The bytes in order, each sample compared with the index first.

        Raises:
            OriginStopped: the copy was removed, is damaged, which removes it, or isn't current any more: then
                the shard is fetched again once it is needed.
        """
        try:
            for chunk in verified_chunks(self._copy, _PIECE_BYTES, is_prepared=False):
                self._pace.keep(self._check)
                yield chunk
            self._check()
        except CacheCorrupt as exc:
            self._tier.quarantine(self._copy.path)
            raise OriginStopped(str(exc)) from exc

    def close(self) -> None:
        """Close the copy: it may be evicted from now on."""
        self._copy.close()

    def _check(self) -> None:
        """Raise OriginStopped if somebody may already wait for what is made here."""
        if self._inode is None or inode_of(self._copy.path) != self._inode or not self._is_current():
            raise OriginStopped(f"{self._copy.path} was replaced")
