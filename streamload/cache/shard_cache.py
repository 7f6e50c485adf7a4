"""The shards of one run as its readers use them: what has arrived, samples by reference, tombstones (G, H).

One value for each reading process. It decides which samples are usable (from the index alone), keeps views
of what is open, and applies the policy for shards that could not be had. It fills nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamload import errors
from streamload.cache.fallback_tier import FallbackTier
from streamload.cache.follow import Fetch, Found, ShardView, Versions
from streamload.cache.locks import FileLock
from streamload.cache.sample_io import ReadMemory
from streamload.cache.selection import Selection
from streamload.cache.shard import Shard
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt
from streamload.metrics import Counts
from streamload.origins.origin import Version
from streamload.shards.index import IndexReader
from streamload.shards.samples import Entry

logger = logging.getLogger("streamload")

Numbers = npt.NDArray[np.int64]
_PATIENCE_SHARDS = 3
_PATIENCE_SAMPLES = 3_000
_KEYS_SHOWN = 5
_SHOWN_CHARACTERS = 200


class ShardCache:
    """The shards of a run, by their place in its list.

    Not thread-safe; used in the process that made it.

    Args:
        tier: where they are kept.
        shards: all of them, as listed.
        selection: which samples are used.
        skip: whether a shard that can't be had is passed over (else its error is raised).
        counts: where hits, misses and tombstones are counted.
        counted: which shards this process counts, so that the workers of a rank count each of them once.
        fetch: gives the bytes of shards of which only the index is kept.
        fallback_tier: where shards are if the tier fails.
        versions: which version of a shard is read (see ShardView).
    """

    def __init__(
        self,
        tier: Tier,
        shards: Sequence[Shard],
        selection: Selection,
        *,
        skip: bool,
        counts: Counts,
        counted: Callable[[int], bool],
        fetch: Fetch | None = None,
        fallback_tier: FallbackTier | None = None,
        versions: Versions | None = None,
    ):
        self.tier = tier
        self.shards = shards
        self._selection = selection
        self._skip = skip
        self._counts = counts
        self._counted = counted
        self._fetch = fetch
        self._fallback_tier = fallback_tier
        self._versions = versions
        self._views: dict[int, ShardView] = {}
        self._usable: dict[int, tuple[int, Numbers]] = {}
        self._complete: set[int] = set()
        self._given_up: set[int] = set()
        self._tombstones: dict[str, FileLock] = {}
        self._barren = _Barren()

    def arrived(self, shard: int) -> tuple[Numbers, bool]:
        """The usable sample numbers of a shard so far, ascending, and whether no more will come.

        Raises:
            NoValidSamples: nothing usable has been seen in the first shards or samples.
            OriginError, ShardError: the shard was given up, and isn't to be passed over.
            OriginOutage: all of its server or bucket stays away.
        """
        view = self.view(shard)
        view.refresh()
        seen, numbers = self._usable.get(shard, (0, np.empty(0, np.int64)))
        if view.reader is not None and view.count > seen:
            try:
                mask, missing = self._selection.of(view.reader, seen)
            except CacheCorrupt:
                view.invalidate()
                return numbers, False
            fresh = seen + np.flatnonzero(mask)
            numbers = np.concatenate([numbers, fresh])
            self._count("samples_skipped_missing", shard, missing)
            self._barren.saw(view, seen, len(fresh))
            seen = view.count
            self._usable[shard] = (seen, numbers)
        if view.gave_up:
            self._heed(view, shard)
        if view.ended:
            self._barren.ended(view)
            if not view.gave_up and not view.is_index_only and shard not in self._complete:
                self._complete.add(shard)
                self._count("shards_complete", shard)
                self._warn(view, shard)
        return numbers, view.ended

    def view(self, shard: int) -> ShardView:
        """The open view of a shard; opened now if it isn't."""
        view = self._views.get(shard)
        if view is None:
            view = ShardView(self._tiers, self.shards[shard], self._fetch, self._versions)
            self._views[shard] = view
            self._count("tier_hits" if view.was_complete else "tier_misses", shard)
        return view

    def find(self, shard: int, numbers: Sequence[int]) -> list[Found | None]:
        """The entries of samples; None for each if one of them isn't in the tier. See `ShardView.find`."""
        return self.view(shard).find(numbers)

    def ranges(self, shard: int, numbers: Sequence[int]) -> list[tuple[Version, int, int]]:
        """Where samples of an open shard lie at its origin. See `ShardView.ranges`."""
        view = self._views.get(shard)
        return [] if view is None else view.ranges(numbers)

    def read(
        self, shard: int, number: int, memory: ReadMemory | None = None, found: Found | None = None
    ) -> tuple[Entry, memoryview] | None:
        """The entry and bytes of a sample; None while they aren't in the tier. See `ShardView.read`."""
        return self.view(shard).read(number, self._selection.needed, memory, found)

    def keep_open(self, shards: Collection[int]) -> None:
        """Let go of all other shards: they may be evicted."""
        for shard in [s for s in self._views if s not in shards]:
            self._views.pop(shard).close()
            self._usable.pop(shard, None)

    def mean_bytes(self) -> float:
        """The mean size of the open shards whose size is known; 0 if none is."""
        readers = [view.reader for view in self._views.values() if view.reader is not None]
        sizes = [reader.size or reader.meta.get("size") for reader in readers]
        known = [size for size in sizes if isinstance(size, int)]
        return sum(known) / len(known) if known else 0.0

    def mean_sample_bytes(self) -> float:
        """The mean size of a sample, by what has arrived of the open shards; 0 if nothing has."""
        seen = [view.reader for view in self._views.values() if view.reader is not None and view.count]
        arrived = (reader.size or int(reader.records["stop"][-1]) for reader in seen)
        return sum(arrived) / sum(reader.count for reader in seen) if seen else 0.0

    def complain_if_barren(self) -> None:
        """Raise if nothing usable has been seen: there is no more to come.

        Raises:
            NoValidSamples: it says what was seen instead.
        """
        self._barren.complain()

    def close(self) -> None:
        """Let go of everything."""
        self.keep_open(())
        for tombstone in self._tombstones.values():
            tombstone.close()
        self._tombstones.clear()

    def _tiers(self) -> Sequence[Tier]:
        fallback_tier = self._fallback_tier.tier if self._fallback_tier is not None else None
        return (self.tier,) if fallback_tier is None else (self.tier, fallback_tier)

    def _count(self, name: str, shard: int, n: int = 1) -> None:
        if n and self._counted(shard):
            self._counts.add(name, n)

    def _warn(self, view: ShardView, shard: int) -> None:
        """Say what is odd about a shard that is whole."""
        if view.reader is not None and self._counted(shard):
            for warning in view.reader.warnings:
                logger.warning("shard %s: %s", view.shard.name, warning)

    def _heed(self, view: ShardView, shard: int) -> None:
        """A shard was given up: raise, or pass over it once and for all."""
        reader = view.reader
        assert reader is not None
        if not self._skip or reader.status == errors.OriginOutage.__name__:  # it isn't the shard that fails
            raise tombstone_error(reader.status, reader.cause)
        if view.shard.digest not in self._tombstones:
            lock = view.keep_verdict()
            if lock is not None:  # else it was read where it was written, and isn't yet where tombstones are
                self._tombstones[view.shard.digest] = lock
        if shard in self._given_up:
            return
        self._given_up.add(shard)
        self._count("shards_given_up", shard)
        if self._counted(shard):
            what = "shard %s is left out after %d samples: %s"
            logger.warning(what, view.shard.name, reader.count, reader.cause)


class _Barren:
    """Watches for a data set in which nothing is usable, so that nobody searches it for ever.

    Only shards that were read say something of what is in them: one that is missing says nothing.
    """

    def __init__(self) -> None:
        self._fertile = False
        self._samples = 0
        self._read: set[str] = set()  # those that have ended
        self._keys: list[str] = []
        self._given_up: dict[str, str] = {}  # why, by the shard's name

    def saw(self, view: ShardView, start: int, usable: int) -> None:
        """New entries of a shard, from number `start` on, of which `usable` are used."""
        self._fertile = self._fertile or usable > 0
        if self._fertile or view.reader is None:
            return
        self._samples += view.count - start
        for number in range(start, min(view.count, start + _KEYS_SHOWN - len(self._keys))):
            entry = view.reader.entry(number)
            self._keys.append(_shown(f"{entry.key} ({', '.join(ext for ext, _, _ in entry.members)})"))
        if self._samples >= _PATIENCE_SAMPLES:
            self.complain()

    def ended(self, view: ShardView) -> None:
        """A shard has ended."""
        if self._fertile:
            return
        if view.gave_up and view.reader is not None:
            self._given_up[view.shard.name] = view.reader.cause
        if view.count:
            self._read.add(view.shard.name)
        if len(self._read) >= _PATIENCE_SHARDS:
            self.complain()

    def complain(self) -> None:
        """Say what was seen instead of a usable sample; nothing if one was seen."""
        if self._fertile:
            return
        causes = "; ".join(list(dict.fromkeys(self._given_up.values()))[:3])
        if not self._keys:
            what = f"none of {len(self._given_up)} shards could be read: {causes}" if causes else "no samples"
            raise errors.NoValidSamples(f"{what}. Check the URLs, and that the shards have samples")
        raise errors.NoValidSamples(
            f"no usable sample in {len(self._read)} shards and {self._samples} samples "
            f"(first: {', '.join(sorted(self._read)[:2]) or 'unfinished'}). Seen: {'; '.join(self._keys)}"
            f"{'; given up: ' + causes if causes else ''}. Check image_key, "
            f"text_key (None: there are no captions), label_key and keep"
        )


def _shown(text: str) -> str:
    """Names out of a tar as a message may hold them: any length and any bytes are possible there."""
    printable = text[:_SHOWN_CHARACTERS].encode("utf-8", "backslashreplace").decode()
    return printable if len(text) <= _SHOWN_CHARACTERS else f"{printable}…"


def tombstone_error(status: str, cause: str) -> errors.StreamloadError:
    """The error that a tombstone was written for."""
    kind: Callable[[str], errors.StreamloadError] = getattr(errors, status, errors.OriginError)
    return kind(cause)


def tombstone_cause(path: Path) -> str:
    """Why a shard was given up, from the directory of its tombstone."""
    with contextlib.closing(IndexReader(path)) as reader:
        reader.refresh()
        return reader.cause
