"""Read a shard that may still be arriving: its entries by number, its samples by entry.

The position of a reader is a sample number, so between two samples a view may switch to another copy of the
same bytes: from the part of a dead filler to the part that takes it over, or to the published shard. The
samples of an index-only copy come from the origin by range. Apart from those reads a view never waits: it
says what is there, and the caller decides how long to retry.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamload import descriptors, limits
from streamload.cache.directory import inode_of
from streamload.cache.locks import PATIENCE_SECONDS, FileLock
from streamload.cache.shard import Shard, is_of, is_outdated
from streamload.cache.shard_copy import Members, Needed, ReadMemory, ShardCopy, read_sample, verified
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt, CacheError, DatasetChanged, StreamloadError, is_shortage
from streamload.origins.origin import Version
from streamload.shards.index import IndexReader
from streamload.shards.samples import Entry

if TYPE_CHECKING:
    from streamload.cache.freshness import Freshness

_STALLED_SECONDS = 0.25
"""After this long without progress of a copy, the view looks for another one."""
_APPEAR_SECONDS = 0.01
"""Interval at which a view without a copy looks for one."""
_COMPLETE = frozenset({"shards", "bare", "gone"})
"""Subdirectories of copies that have ended: they get there by one rename."""

Found = tuple[ShardCopy, Entry]
"""An entry, and the copy that has it."""

Fetch = Callable[[Shard, Version, int, int], bytes]
"""Reads bytes `start` to `stop` of a version of a shard at its origin; raises OriginError, DatasetChanged."""
_SPARE_FILES = 128
"""Left to everything else in this process: fills, connections, batches, the training itself."""
_SPARE_SHARE = 4
"""But at most a quarter of the limit."""


class OpenFiles:
    """Files of a tier that one thread keeps open, within this process's limit of open files.

    Those that were used least recently are closed first, and opened anew when they are needed. So a low limit
    costs time, never samples. Half-way is enough at first: a shard whose data is closed stays pinned by its
    lock; only if that doesn't do, shards are closed entirely, and may be evicted and fetched again.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[ShardView, None] = OrderedDict()
        self._releasable: OrderedDict[ShardView, None] = OrderedDict()  # of these, data may be open
        self._shortages = descriptors.shortages
        descriptors.give_up_when_short(self.give_up)

    def __repr__(self) -> str:
        return f"<OpenFiles of {len(self._open)} shards, {len(self._releasable)} whole>"

    def use(self, view: ShardView) -> None:
        """Note that a view is used: it is closed last, and not before another one is used."""
        for views in (self._open, self._releasable):
            views[view] = None
            views.move_to_end(view)
        if descriptors.shortages != self._shortages:  # another thread couldn't open a file
            self.give_up()

    def forget(self, view: ShardView) -> None:
        """Note that a view is closed for good."""
        self._open.pop(view, None)
        self._releasable.pop(view, None)

    def trim(self) -> None:
        """Close files while this process has nearly as many open as it may; call it after opening some."""
        most = limits.most_files()
        ceiling = most - min(_SPARE_FILES, most // _SPARE_SHARE)
        registered = descriptors.count()
        if registered > ceiling // 2:
            self._close(limits.open_files(at_least=registered) - ceiling)

    def give_up(self) -> bool:
        """Close half of the files; False if there are none."""
        self._shortages = descriptors.shortages
        return self._close(max(1, descriptors.count() // 2)) > 0

    def _close(self, files: int) -> int:
        """Close so many files if possible; returns how many were closed."""
        closed = 0
        while closed < files and len(self._releasable) > 1:
            view, _ = self._releasable.popitem(last=False)
            closed += view.release()
        while closed < files and len(self._open) > 1:
            view, _ = self._open.popitem(last=False)
            closed += view.rest()
        return closed


class ShardView:
    """One shard as one reader sees it, arriving or complete.

    Args:
        tiers: where its copies may be, the preferred tier first.
        fetch: reads samples of an index-only copy; None: such copies are ignored.
        freshness: decides which version the run reads; None: any.
        files: closes the files of views that weren't used for long; None: none are closed.
        needed: selects the members that are read of a sample of more than AT_ONCE_BYTES; None: all of them,
            however large.
    """

    def __init__(
        self,
        tiers: Tier | Callable[[], Sequence[Tier]],
        shard: Shard,
        fetch: Fetch | None = None,
        freshness: Freshness | None = None,
        files: OpenFiles | None = None,
        needed: Needed | None = None,
    ):
        self.shard = shard
        self._files = files
        self._pid = os.getpid()
        self._freshness = freshness if shard.local is None else None
        self._tiers = (lambda: (tiers,)) if isinstance(tiers, Tier) else tiers
        self._avoided: set[Path] = set()  # damaged copies that can't be removed
        self._fetch, self._needed = fetch, needed
        self._index: ShardCopy | None = None  # provides the entries: never fewer than before
        self._data: ShardCopy | None = None  # provides the samples: usually the same copy
        self._is_resting = False  # its copies were closed; what is known of the shard remains
        self._looked_at = 0.0
        self._trouble_since: float | None = None
        self.was_complete = False
        """True if the whole shard was in the tier when the view was opened."""
        was_published = not self._may_open() and any(tier.has_whole(shard) for tier in self._tiers())
        self.refresh()
        self.was_complete = was_published or (self.ended and not self.gave_up and not self.is_index_only)

    def __repr__(self) -> str:
        where = self._index.path.parent.name if self._index else "nowhere"
        state = "ended" if self.ended else "arriving"
        return f"<ShardView {self.shard.name}: {self.count} samples, {state}, in {where}>"

    @property
    def is_index_only(self) -> bool:
        """True if its samples have to be read from the origin."""
        copy = self._index if self._is_resting else self._data
        return copy is not None and copy.is_index_only

    @property
    def reader(self) -> IndexReader | None:
        """The entries so far."""
        return self._index.reader if self._index else None

    @property
    def count(self) -> int:
        """The number of complete samples."""
        return self._index.reader.count if self._index else 0

    @property
    def ended(self) -> bool:
        """True if no more samples will come."""
        return self._index is not None and self._index.reader.ended

    @property
    def gave_up(self) -> bool:
        """True if the shard ended with a tombstone: it could not be fetched, or not to its end."""
        return self.ended and self._index is not None and not self._index.reader.is_complete

    def refresh(self) -> bool:
        """Look for new entries; True if there are any, or if the shard has ended."""
        if self.ended:
            return False
        before = (self.count, self.ended)
        self.wake()
        if self._index is not None and not self._is_resting:
            try:
                self._index.reader.refresh()
            except CacheCorrupt:
                self.invalidate(self._index)
        if (self.count, self.ended) != before:
            self._looked_at = time.monotonic()
        elif not self._is_resting and self._may_look(_STALLED_SECONDS if self._index else _APPEAR_SECONDS):
            self._switch_copy()
        return (self.count, self.ended) != before

    def find(self, numbers: Sequence[int]) -> list[Found | None]:
        """The entries of samples with the copy to read; all None if one of them isn't there (yet)."""
        self.wake()
        copy, last = self._data, max(numbers)
        if copy is None or copy.reader.count <= last or copy.is_index_only:
            copy = self._copy_with(last)
            if copy is None:
                return [None] * len(numbers)
        try:
            return [(copy, entry) for entry in copy.reader.entries(numbers)]
        except CacheCorrupt:
            self.invalidate(copy)
            return [None] * len(numbers)

    def ranges(self, numbers: Sequence[int]) -> list[tuple[Version, int, int]]:
        """The byte ranges of samples at the origin, if they are read from there; only those with entries."""
        self.wake()
        copy = self._data
        if copy is None or not copy.is_index_only:
            return []
        indexed = [number for number in numbers if number < copy.reader.count]
        try:
            entries = copy.reader.entries(indexed)
            places = [place for entry in entries for place in entry.ranges]
            return [(copy.version, start, stop) for start, stop in places if start < stop]
        except CacheCorrupt:
            return []  # `find` handles it

    def read(
        self,
        number: int,
        memory: ReadMemory | None = None,
        entry_place: Found | None = None,
        needed: Needed | None = None,
    ) -> tuple[Entry, Members] | None:
        """The entry and members of sample `number`; None if they aren't there (yet).

        A copy whose bytes fail their checksum is removed from the tier, so that it is fetched again.

        Args:
            memory: where the bytes may be put.
            entry_place: the result of `find` for this sample, if it was called.
            needed: in place of the view's.

        Raises:
            DatasetChanged: a local file, or the copy that was fetched again, differs from what the run began
                to read.
            OriginError: the copy is index-only, and the origin doesn't return the bytes.
        """
        if entry_place is None or entry_place[0] is not self._data:  # that copy may have been closed since
            (entry_place,) = self.find((number,))
            if entry_place is None:
                return None
        copy, entry = entry_place
        if copy.is_index_only:
            return entry, self.fetched(copy, [entry])[0]
        try:
            members = read_sample(copy.descriptor(), entry, needed or self._needed, memory)
        except OSError as exc:
            if not is_shortage(exc):
                raise
            self._note_trouble(exc)
            return None
        if copy.was_reopened:
            copy.was_reopened = False
            self._note_opened()
        if members is not None:
            return entry, members
        if copy.is_in_place:
            raise DatasetChanged(f"{self.shard.name} was changed or cut while it was being read")
        self.invalidate(copy)
        return None

    def invalidate(self, copy: ShardCopy | None = None) -> None:
        """Remove a damaged copy, so that it is fetched again.

        Args:
            copy: the copy that was read; None: the one that provides the entries.
        """
        if copy is None and self._is_resting:  # it was closed, that is all
            return
        copy = copy or self._index
        if copy is not None:
            self._quarantine(copy.path)
        self.close()

    @property
    def is_stuck(self) -> bool:
        """True if there is a damaged copy that can't be removed."""
        return any(path.exists() for path in self._avoided)

    def hold_tombstone(self) -> FileLock | None:
        """A lock that keeps the tombstone in place while a process that has acted on it lives."""
        for tier in self._tiers():
            lock = FileLock.acquire(tier.tombstone(self.shard.digest) / "names", shared=True)
            if lock is not None:
                return lock
        return None

    def close(self) -> None:
        """Close the shard; it may be evicted from now on."""
        for copy in self._copies_open():
            copy.close()
        self._index = self._data = None
        self._is_resting = False

    def release(self) -> int:
        """Close the data of its copies, which stay pinned; returns how many files."""
        return sum(copy.release() for copy in self._copies_open())

    def rest(self) -> int:
        """Close its copies, which may be evicted from now on, and remember what is known of the shard.

        They are opened again when something is read. One that was evicted meanwhile is fetched again, and has
        to be of the same version.

        Returns:
            How many files were closed.
        """
        closed = sum(copy.open_files for copy in self._copies_open())
        for copy in self._copies_open():
            copy.close()
        self._data = None
        self._is_resting = self._index is not None
        self._looked_at = 0.0
        return closed

    def wake(self) -> None:
        """Note that the copies are used; open one again after a rest, if it goes as far as what was known.

        Raises:
            DatasetChanged: the copy is of other bytes.
        """
        if self._files is not None:
            self._files.use(self)
        if self._is_resting and self._may_look(_APPEAR_SECONDS):
            self._switch_copy()

    def _copies_open(self) -> set[ShardCopy]:
        return {copy for copy in (self._index, self._data) if copy is not None}

    def fetched(self, copy: ShardCopy, entries: Sequence[Entry]) -> list[Members]:
        """The members of neighbouring samples of an index-only copy, by one request to the origin.

        Raises:
            DatasetChanged: the origin has other bytes now.
            OriginError: it doesn't return them.
        """
        assert self._fetch is not None
        start, stop = entries[0].start, entries[-1].stop
        try:
            data = memoryview(self._fetch(self.shard, copy.version, start, stop) if start < stop else b"")
            samples = []
            for entry in entries:
                own = data[entry.start - start : entry.stop - start]
                if entry.linked:
                    payloads = [self._fetch(self.shard, copy.version, *payload) for payload in entry.linked]
                    own = memoryview(b"".join((own, *payloads)))
                members = verified(entry, own)
                if members is None:
                    raise DatasetChanged(
                        f"{self.shard.name} returns other bytes for sample {entry.key} than when it was "
                        f"indexed"
                    )
                samples.append(members)
            return samples
        except DatasetChanged:  # the index is useless, to the next run as well
            for tier in self._tiers():
                if copy.path == tier.index_only(self.shard.digest):
                    tier.trash(copy.path)
            raise

    def tier_of(self, copy: ShardCopy) -> Tier | None:
        """The tier that has a copy."""
        return next((tier for tier in self._tiers() if copy.path.is_relative_to(tier.root)), None)

    def _switch_copy(self) -> None:
        """Switch to another copy if it has more samples.

        Raises:
            DatasetChanged: the shard has ended with fewer samples than have been read.
        """
        for copy in self._copies(None if self._is_resting else self._index):
            better = self._index is None or copy.reader.ended or copy.reader.count > self.count
            better = better or self._is_resting
            if better and copy.reader.count >= self.count:
                old, self._index = self._index, copy
                if self._data is None or self._data is old:
                    self._data = copy
                if old is not None and old is not self._data:
                    old.close()
                self._is_resting = False
                return
            reader = copy.reader
            copy.close()
            if reader.ended:
                why = ": ".join(filter(None, (reader.status, reader.cause)))
                raise DatasetChanged(
                    f"{self.shard.name} has ended ({why}) with {reader.count} samples; this run has begun to "
                    f"read {self.count}"
                )

    def _copy_with(self, number: int) -> ShardCopy | None:
        """A copy to read sample `number` from; an index-only one only if there is no other."""
        index_only = self._data if self._data is not None and self._data.reader.count > number else None
        if not self._may_look(_APPEAR_SECONDS if index_only is None else _STALLED_SECONDS):
            return index_only
        for copy in self._copies(index_only):
            if copy.reader.count > number and (index_only is None or not copy.is_index_only):
                old, self._data = self._data, copy
                if old is not None and old is not self._index:
                    old.close()
                return copy
            copy.close()
        return index_only

    def _may_look(self, interval_seconds: float) -> bool:
        looked_at = time.monotonic()
        if looked_at - self._looked_at < interval_seconds:
            return False
        self._looked_at = looked_at
        return True

    def _copies(self, current: ShardCopy | None) -> Iterator[ShardCopy]:
        """Open the copies of the shard other than `current`, the best first.

        Raises:
            CacheError, LimitReached: none was found, and a tier has failed for long.
        """
        trouble = None
        for tier in self._tiers():
            try:
                for path in self._paths(tier):
                    copy = self._open(path) if current is None or path != current.path else None
                    if copy is not None:
                        self._note_opened()
                        yield copy
            except StreamloadError:
                raise
            except OSError as exc:  # for example too many open files, which may pass
                trouble = exc
        if trouble is None:
            self._trouble_since = None
        else:
            self._note_trouble(trouble)

    def _note_trouble(self, trouble: OSError) -> None:
        """Note that a tier has failed, which may pass.

        Raises:
            CacheError, LimitReached: it has failed for long.
        """
        if self._trouble_since is None:
            self._trouble_since = time.monotonic()
        elif time.monotonic() - self._trouble_since > PATIENCE_SECONDS:
            failure = f"{self.shard.name} can't be read from the cache"
            if is_shortage(trouble):
                raise limits.reached(failure, trouble) from trouble
            raise CacheError(f"{failure}: {trouble}") from trouble

    def _note_opened(self) -> None:
        self._trouble_since = None
        if self._files is not None:
            self._files.trim()

    def _paths(self, tier: Tier) -> Iterator[Path]:
        digest = self.shard.digest
        paths: Iterable[Path] = [tier.tombstone(digest)]
        if self._may_open():
            digests = self.shard.digests
            if self._is_resting and self._index is not None:  # the form that it read before comes first
                form = self._index.path.name
                digests = tuple(sorted(digests, key=lambda digest: not form.startswith(digest)))
            published = map(tier.published, digests)
            parts = (part for name in digests for part in tier.parts(name))  # listed if nothing else is there
            paths = itertools.chain(published, [tier.index_only(digest)], paths, parts)
        return (path for path in paths if path not in self._avoided) if self._avoided else iter(paths)

    def _may_open(self) -> bool:
        """True if copies may be opened: their version is known to be current, or reading has begun."""
        return self._index is not None or self._freshness is None or self._freshness.is_current(self.shard)

    def _open(self, path: Path) -> ShardCopy | None:
        """The copy at `path`; None if there is none yet. An unusable one is removed."""
        is_complete = path.parent.name in _COMPLETE
        before = inode_of(path) if is_complete else None
        if is_complete and before is None:
            return None
        prepared = self.shard.prepared
        shard = prepared if prepared is not None and path.name.startswith(prepared.digest) else self.shard
        try:
            copy = ShardCopy.open(path, shard)
        except (FileNotFoundError, CacheCorrupt):
            copy = None
            if before is not None and before == inode_of(path):  # else it was published just now
                self._quarantine(path)
        if copy is None:
            return None
        with contextlib.ExitStack() as unless_used:
            unless_used.callback(copy.close)
            if copy.is_index_only and self._fetch is None:
                return None
            is_damaged = is_complete and not (copy.reader.ended and is_of(copy.reader, shard))
            if is_damaged or (self._index is None and is_outdated(copy.reader.meta, self.shard)):
                unless_used.close()  # open files wouldn't be deleted
                self._quarantine(path)
                return None
            if self._index is not None:
                self._index.refuse_other(copy, self.shard)
                before_rest = self._index.identity if self._is_resting and copy.is_in_place else ()
                if before_rest and copy.identity != before_rest:
                    raise DatasetChanged(f"{self.shard.name} was replaced while it was being read")
            elif self._freshness is not None and path.parent.name != "gone":
                self._freshness.agree(self.shard, copy.version)
            unless_used.pop_all()
        with contextlib.suppress(OSError):
            os.utime(path)
        return copy

    def _quarantine(self, path: Path) -> None:
        """Remove a damaged copy, or avoid it if the disk doesn't allow that.

        Raises:
            CacheError: it isn't damaged: a forked child reads files that its parent has opened.
        """
        if self._pid != os.getpid():
            raise CacheError(
                f"{self.shard.name} was opened by the parent of this forked process; iterate the loader again"
            )
        for tier in self._tiers():
            if path.is_relative_to(tier.root) and not tier.quarantine(path):
                self._avoided.add(path)
