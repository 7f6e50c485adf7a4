"""Fill the shards that a run needs, in order of need, by some threads of a process (step F).

Every worker of a node runs one of these with the same list: whoever claims a shard first fills it, the others
pass on to the next. There is no queue: what is wanted is compared with what is there again and again. Whoever
fills shows life by touching its parts; one that doesn't for some seconds is stopped, and another takes over.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from streamload.cache.fill import Filled, fill
from streamload.cache.freshness import Freshness
from streamload.cache.locks import PATIENCE_SECONDS, FileLock
from streamload.cache.part import Part
from streamload.cache.shard import Shard
from streamload.cache.shared.through import ReadThrough
from streamload.cache.spare import Spare
from streamload.cache.tier import Tier
from streamload.errors import CacheError, CacheFull, OriginError, ShardError, StreamloadError
from streamload.metrics import Counts
from streamload.origins.origin import Origin
from streamload.prefetch.life import Life

logger = logging.getLogger("streamload")

_HELD_SECONDS = 1.0  # how long a shard that is here is taken to stay
_ELSEWHERE_SECONDS = 0.1  # until a shard that another process fills is looked at again
_NO_ROOM_SECONDS = 0.2
_IDLE_SECONDS = 0.25  # the longest that nobody looks at all
_MOST_TROUBLES = 3
"""After so many failures of the disk it is left alone."""
_MOST_ASIDE = 32
"""So many fills that wait for other nodes leave their threads to others; any more keep theirs."""
STOPPED_SECONDS = 5.0

OpenOrigin = Callable[[Shard, threading.Event], Origin]


class Ahead:
    """Threads that fill what is wanted.

    Args:
        tier: where to.
        open_origin: gives the origin of a shard, which is closed when the fill is over and `published` was
            told; the event ends its waits.
        threads: how many shards this process fills at once; those that wait for another node don't count.
        counts: where fills are counted.
        report: told, from a filling thread, how each look at a shard ended; PUBLISHED if it was there.
        may_be_bare: whether a shard's samples can be read from its origin, so that its index is enough where
            the shard itself can't be kept.
        spare: where to fill what the tier can't take.
        stopped_seconds: how long a filler, of any process, may show no life before another takes over.
        freshness: by which versions the run goes; None takes what is published as it is.
        published: told, from a filling thread, of each shard that was filled here, and where it is.
        wait_of: how soon a shard is needed, in shard visits, as the process announces it; None: by its place
            among those that are wanted.
        failed: told why a shard can't be had, from a filling thread, and says in how many seconds it is tried
            again; None: it is given up, by a verdict that all who read from the tier heed.
        is_prepared: whether a prepared shard can be had as it is; then it is filled in place of the shard
            that it stands for.
    """

    def __init__(
        self,
        tier: Tier,
        open_origin: OpenOrigin,
        *,
        threads: int,
        counts: Counts,
        report: Callable[[Shard, Filled], None] = lambda shard, result: None,
        may_be_bare: Callable[[Shard], bool] = lambda shard: False,
        spare: Spare | None = None,
        stopped_seconds: float = STOPPED_SECONDS,
        freshness: Freshness | None = None,
        published: Callable[[Shard, Path], None] = lambda shard, directory: None,
        wait_of: Callable[[Shard], float] | None = None,
        failed: Callable[[Shard, StreamloadError], float] | None = None,
        is_prepared: Callable[[Shard], bool] = lambda form: False,
    ):
        self.tier = tier
        self._open_origin = open_origin
        self._counts = counts
        self._report = report
        self._may_be_bare = may_be_bare
        self._spare = spare
        self._freshness = freshness
        self._published = published
        self._wait_of = wait_of or self._place_of
        self._failed = failed
        self._is_prepared = is_prepared
        self._stop = threading.Event()
        self._change = threading.Condition()
        self._at_once = threads
        # Guarded by _change:
        self._aside = 0  # of those that are busy, how many wait for another node
        self._is_watched = False  # whether an idle thread watches the clock
        self._wanted: tuple[Shard, ...] = ()
        self._needed = 0  # how many of them, from the first, a reader waits for
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._refused_since: dict[str, float] = {}
        self._sizes: dict[str, int] = {}  # of shards that were refused: their origin needn't be asked again
        self._bare: set[str] = set()  # of these only the index is asked for
        self._elsewhere: set[str] = set()  # these go into the spare tier
        self._troubles = 0
        self._short_since: float | None = None  # of descriptors
        self._has_told = False
        self._error: BaseException | None = None
        self._verdicts: list[FileLock] = []
        self._life = Life(stopped_seconds)
        self._threads = [self._filler(i) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        with self._change:
            return f"<Ahead wanted={len(self._wanted)} needed={self._needed} busy={sorted(self._busy)}>"

    def want(self, needed: Sequence[Shard], later: Sequence[Shard] = ()) -> None:
        """Say what is to be filled, in order of need; it replaces what was said before.

        Args:
            needed: shards that readers have open: anything that isn't open may go for them.
            later: shards to fill while there is room that is needed less.
        """
        wanted = (*needed, *later)
        with self._change:
            if wanted != self._wanted or len(needed) != self._needed:
                self._wanted, self._needed = wanted, len(needed)
                self._bare &= {shard.digest for shard in needed}
                self._elsewhere &= {shard.digest for shard in needed}
                self._change.notify()  # who takes one of them calls another for the next

    def look_again(self) -> None:
        """Look at all shards anew, now: what was settled about them may not hold any more."""
        with self._change:
            self._not_before.clear()
            self._change.notify_all()

    def check(self) -> None:
        """Raise what a filling thread could not deal with: a cache that can't be used.

        Raises:
            CacheError: a tier can't take a shard that is needed, and nothing else can.
        """
        if self._error is not None:
            raise self._error

    def refused_seconds(self, shard: Shard) -> float:
        """How long this process has been refused the room for a shard (0: it hasn't)."""
        with self._change:
            since = self._refused_since.get(shard.digest)
        return 0.0 if since is None else time.monotonic() - since

    def do_without(self, shard: Shard) -> bool:
        """Be content with a shard's index as long as it is wanted; its samples are read from the origin then.

        Returns:
            False if they can't be, or if even the index has been asked for.
        """
        with self._change:
            if shard.digest in self._bare or not self._may_be_bare(shard):
                return False
            self._bare.add(shard.digest)
            self._begin_anew(shard)
            return True

    def do_elsewhere(self, shard: Shard, trouble: Exception | None = None) -> bool:
        """Fill a shard into the spare tier as long as it is wanted.

        Returns:
            False if there is none, or if it has been asked for.
        """
        spare = self._spare.open() if self._spare is not None else None
        with self._change:
            if spare is None or shard.digest in self._elsewhere:
                return False
            if not self._has_told:
                self._has_told = True
                logger.warning(
                    "the cache at %s doesn't take %s%s: such shards are kept in memory at %s, up to %d bytes",
                    *(self.tier.root, shard.name, f" ({trouble})" if trouble else ""),
                    *(spare.root, spare.limit_bytes),
                )
            self._troubles += trouble is not None and not isinstance(trouble, CacheFull)
            self._elsewhere.add(shard.digest)
            self._bare.discard(shard.digest)
            self._begin_anew(shard)
            return True

    def _begin_anew(self, shard: Shard) -> None:
        for known in (self._sizes, self._refused_since, self._not_before):
            known.pop(shard.digest, None)
        self._change.notify_all()

    def filling(self, shard: Shard) -> bool:
        """Whether a thread of this process is filling it."""
        with self._change:
            return shard.digest in self._busy

    def holds_room(self) -> bool:
        """Whether a fill is under way here that has got some room, which it may give back."""
        return self._life.holds_room()

    def close(self) -> None:
        """Stop all fills where they are; what they have filled stays for whoever takes it up."""
        self._stop.set()
        with self._change:
            self._change.notify_all()
            threads = list(self._threads)  # with the event set there won't be more
        for thread in threads:
            thread.join()
        self._life.close()
        for verdict in self._verdicts:
            verdict.close()
        self._verdicts.clear()

    def _work(self) -> None:
        while not self._stop.is_set() and not self._is_surplus():
            self.tier.room.tend()
            job = self._take()
            if job is None:
                continue
            try:
                pause = self._fill(job)
            except BaseException as exc:
                pause = _NO_ROOM_SECONDS
                self._error = exc
                self._stop.set()
            if self._freshness is not None:
                self._freshness.filled(job)
            with self._change:
                self._busy.discard(job.digest)
                self._not_before[job.digest] = time.monotonic() + pause
                if pause < _IDLE_SECONDS:  # else whoever watches the clock looks again before it is due
                    self._change.notify_all()

    def _take(self) -> Shard | None:
        """The next shard that nobody here fills; None after a while in which there was none.

        One of the idle threads watches the clock, the others sleep until they are called: each time that one
        wakes up takes the processor from those who decode. Who takes a shard calls one other, where there is
        more to take or nobody watches any more.
        """
        with self._change:
            now = time.monotonic()
            until = now + _IDLE_SECONDS
            is_free = len(self._busy) - self._aside < self._at_once
            taken, is_more = None, False
            for place, shard in enumerate(self._wanted if is_free else ()):
                if shard.digest in self._busy:
                    continue
                due = self._not_before.get(shard.digest, 0.0)
                if due <= now and taken is None:
                    taken = shard
                elif due <= now:
                    is_more = True
                    break
                elif place >= self._needed and shard.digest in self._refused_since:
                    break  # what is needed later still won't find room either
                else:
                    until = min(until, due)
            if taken is not None:
                self._busy.add(taken.digest)
                if is_more or not self._is_watched:
                    self._change.notify()
                return taken
            if self._stop.is_set():  # set before all are called for the last time
                return None
            if self._is_watched:
                self._change.wait()
                return None
            self._is_watched = True
            try:
                self._change.wait(timeout=until - now)
            finally:
                self._is_watched = False
            return None

    def _place_of(self, shard: Shard) -> float:
        """How soon a shard is needed, in shard visits; those that readers have open are needed alike."""
        with self._change:
            try:
                return float(max(self._wanted.index(shard), self._needed - 1))
            except ValueError:
                return float("inf")

    def _fill(self, shard: Shard) -> float:
        """Fill a shard if it has to be done and can be; returns the seconds until it is looked at again."""
        tier = self._tier_of(shard)
        try:
            pause = self._fill_into(tier, shard)
        except OSError as trouble:  # an origin's are settled where they come up
            return _NO_ROOM_SECONDS if self._may_pass(trouble) else self._make_do(shard, trouble)
        with self._change:
            self._short_since = None
        return pause

    def _may_pass(self, trouble: OSError) -> bool:
        """Whether it is only that many files are open now: no disk's fault, and soon fewer may be."""
        cause = trouble.__cause__ if isinstance(trouble, CacheError) else trouble
        if not isinstance(cause, OSError) or cause.errno not in (errno.EMFILE, errno.ENFILE):
            return False
        with self._change:
            now = time.monotonic()
            self._short_since = self._short_since or now
            return now - self._short_since < PATIENCE_SECONDS

    def _tier_of(self, shard: Shard) -> Tier:
        spare = self._spare.tier if self._spare is not None else None
        if spare is not None and (shard.digest in self._elsewhere or self._troubles >= _MOST_TROUBLES):
            return spare
        return self.tier

    def _tiers(self) -> tuple[Tier, ...]:
        spare = self._spare.tier if self._spare is not None else None
        return (self.tier,) if spare is None else (self.tier, spare)

    def _make_do(self, shard: Shard, trouble: OSError) -> float:
        """Where a tier fails a shard: keep less of it, keep it elsewhere, or leave it until it is needed."""
        with self._change:
            is_needed = shard in self._wanted[: self._needed]
            if not is_needed:
                self._refused_since.setdefault(shard.digest, time.monotonic())
        if not is_needed:
            if isinstance(trouble, CacheFull):
                self._report(shard, Filled.NO_ROOM)
            return _NO_ROOM_SECONDS
        if isinstance(trouble, CacheFull) and self.do_without(shard):
            return 0.0
        if self.do_elsewhere(shard, trouble):
            return 0.0
        if isinstance(trouble, CacheError):
            raise trouble
        raise CacheError(f"the cache at {self.tier.root} can't be used any more: {trouble}") from trouble

    def _fill_into(self, tier: Tier, shard: Shard) -> float:
        bare = shard.digest in self._bare
        if self._freshness is not None and self._freshness.has_to_ask(shard, self._tiers()):
            is_settled = self._freshness.check(shard, self._stop, self._tiers())
            return 0.0 if is_settled else _ELSEWHERE_SECONDS
        if tier.has_whole(shard) or (bare and tier.bare(shard.digest).exists()):
            self._note_refusal(tier, shard, bare, False)
            self._report(shard, Filled.PUBLISHED)
            return _HELD_SECONDS
        job = self._job(tier, shard, bare)
        part = tier.claim(job.digest, self._life.stopped(tier, job.digest))
        if part is None:
            with self._change:
                self._refused_since.pop(shard.digest, None)
            if tier.verdict(shard.digest).exists():
                self._report(shard, Filled.GAVE_UP)
            return _ELSEWHERE_SECONDS
        with contextlib.ExitStack() as opened:
            return self._fill_part(tier, shard, job, part, bare, opened)

    def _fill_part(
        self, tier: Tier, shard: Shard, job: Shard, part: Part, bare: bool, opened: contextlib.ExitStack
    ) -> float:
        """Fill what was claimed; what it opens is closed by the caller."""
        try:
            with self._life.of(part, job.digest):
                outcome = fill(
                    part,
                    job,
                    lambda: self._origin(shard, job, bare, opened),
                    size_bytes=self._sizes.get(shard.digest, 0),
                    wait=lambda: self._wait_of(shard),
                    stop=self._stop,
                    bare=bare,
                    refused=lambda waits: self._note_refusal(tier, shard, bare, waits),
                    leave_verdict=self._failed is None,
                )
        except (OriginError, ShardError) as why:
            if self._failed is None:
                raise
            return self._failed(shard, why)
        if outcome.verdict is not None:
            self._verdicts.append(outcome.verdict)
        refused = outcome.result is Filled.NO_ROOM
        if self._note_refusal(tier, shard, bare, refused):
            return 0.0
        if refused:
            with self._change:
                self._sizes[shard.digest] = outcome.size_bytes
        if outcome.result is Filled.PUBLISHED and not bare:
            self._counts.add("shards_published")
            self._published(job, tier.published(job.digest))
        if outcome.result is Filled.GAVE_UP and job is not shard:
            return 0.0  # the shard itself may be had
        self._report(shard, outcome.result)
        return _NO_ROOM_SECONDS if refused else _HELD_SECONDS

    def _job(self, tier: Tier, shard: Shard, bare: bool) -> Shard:
        """What is filled for a shard: its prepared form where that can be had, else itself."""
        form = shard.prepared
        if form is None or bare or tier.verdict(form.digest).exists() or not self._is_prepared(form):
            return shard
        return form

    def _note_refusal(self, tier: Tier, shard: Shard, bare: bool, waits: bool) -> bool:
        """Whether a fill that waits for room in the middle is to end: the shard is wanted in another way."""
        with self._change:
            is_outdated = self._tier_of(shard) is not tier or (shard.digest in self._bare) is not bare
            if waits and not is_outdated:
                self._refused_since.setdefault(shard.digest, time.monotonic())
            else:
                self._refused_since.pop(shard.digest, None)
            return is_outdated

    def _origin(self, shard: Shard, job: Shard, bare: bool, opened: contextlib.ExitStack) -> Origin:
        origin = self._open_origin(job, self._stop)
        opened.callback(origin.close)
        if isinstance(origin, ReadThrough):
            origin.is_kept, origin.aside = not bare, self._step_aside
        return origin if self._freshness is None else self._freshness.watched(shard, origin)

    @contextlib.contextmanager
    def _step_aside(self) -> Iterator[None]:
        """A fill waits for another node: meanwhile others take its place, if need be in a thread more."""
        with self._change:
            counts = self._aside < _MOST_ASIDE
            self._aside += counts
            if counts and len(self._threads) < self._at_once + self._aside and not self._stop.is_set():
                self._threads.append(self._filler(len(self._threads)))
                self._threads[-1].start()
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self._aside -= counts
                self._change.notify_all()

    def _is_surplus(self) -> bool:
        """Whether the thread that asks stood in for one that has gone on; then it is over."""
        with self._change:
            if len(self._threads) <= self._at_once + self._aside:
                return False
            self._threads.remove(threading.current_thread())
            self._change.notify()  # another, in its stead
            return True

    def _filler(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._work, name=f"streamload-fill-{number}", daemon=True)
