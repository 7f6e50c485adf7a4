"""The shards of one run as its readers see them: what has arrived, samples by reference, tombstones.

One object for each reading process. It selects samples (from the index alone), caches views of open shards,
and applies the policy for shards that could not be fetched. It fills nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamload import errors, limits
from streamload.cache.companion import Companion, FactsCarrier
from streamload.cache.freshness import Freshness
from streamload.cache.locks import FileLock
from streamload.cache.selection import KeySpec, Numbers, Selection
from streamload.cache.shard import Shard
from streamload.cache.shard_copy import ReadMemory
from streamload.cache.shard_view import Fetch, Found, OpenFiles, ShardView
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt
from streamload.metrics import Counts
from streamload.order.left_out import NONE_LEFT_OUT, LeftOut
from streamload.origins.origin import Version
from streamload.shards.columns import IN_RECORDS, Column, Values
from streamload.shards.index import IndexReader
from streamload.shards.samples import Entry, Sample

logger = logging.getLogger("streamload")

Facts = dict[str, Values]
_MEASURED_SHARDS = 64
"""Number of shards in the mean size, so that its cost doesn't depend on how many are open."""
_PATIENCE_SHARDS = 3
_PATIENCE_SAMPLES = 3_000
_KEYS_SHOWN = 5
_ODD_EXTENSION = re.compile(r"\s|^\d")
_SHOWN_CHARACTERS = 200


class _Usable(NamedTuple):
    """The usable samples among the first ones of a shard.

    Attributes:
        looked_through: how many were looked at.
        numbers: of the usable ones, ascending.
        rates: how often they are used.
        left_out: the samples that a function doesn't keep.
    """

    looked_through: int
    numbers: Numbers
    rates: Values
    left_out: LeftOut


_NONE_USABLE = _Usable(0, np.empty(0, np.int64), np.empty(0), NONE_LEFT_OUT)


class ShardCache:
    """The shards of a run, by their position in its list.

    Not thread-safe; used in the process that made it.

    Args:
        tiers: see ShardView.
        skip: skip shards that can't be fetched (else raise).
        counts: receives hits, misses and tombstones.
        counted: which shards this process counts, so that the workers of a rank count each of them once.
        fetch: see ShardView.
        freshness: see ShardView.
        files: of this thread, which keeps the shards open.

    Attributes:
        carrier: of facts between nodes.
    """

    carrier: FactsCarrier = FactsCarrier()

    def __init__(
        self,
        tiers: Tier | Callable[[], Sequence[Tier]],
        shards: Sequence[Shard],
        selection: Selection,
        *,
        skip: bool,
        counts: Counts,
        counted: Callable[[int], bool],
        fetch: Fetch | None = None,
        freshness: Freshness | None = None,
        files: OpenFiles | None = None,
    ):
        self._tiers = tiers
        self.shards = shards
        self._selection = selection
        self._skip = skip
        self._counts = counts
        self._counted = counted
        self._fetch = fetch
        self._freshness = freshness
        self._files = files or OpenFiles()
        self._views: dict[int, ShardView] = {}
        self._usable: dict[int, _Usable] = {}
        self._companions: dict[int, Companion] = {}
        self._complete: set[int] = set()
        self._warned: set[int] = set()
        self._given_up: set[int] = set()
        self._tombstones: dict[str, FileLock] = {}
        self._usable_check = _UsableCheck()

    def arrived(self, shard: int) -> tuple[Numbers, bool]:
        """The usable sample numbers of a shard so far, ascending, and whether no more will come.

        Raises:
            NoValidSamples: nothing usable was found in the first shards or samples.
            OriginError, ShardError: the shard was given up, and isn't to be skipped.
            OriginOutage: the whole server or bucket doesn't answer.
        """
        view = self.view(shard)
        view.refresh()
        looked_through, numbers, rates, left_out = self._usable.get(shard, _NONE_USABLE)
        if view.reader is not None and view.count > looked_through:
            view.wake()  # its files may have been given up since it was opened
            selection = self._selection.of_shard(shard)
            facts = self.facts(shard, range(looked_through, view.count), selection.facts)
            if facts is None or view.reader is None:
                return numbers, False
            try:
                fresh = selection.of(view.reader, looked_through, facts)
            except CacheCorrupt:
                view.invalidate()
                return numbers, False
            numbers = np.concatenate([numbers, fresh.numbers])
            if fresh.rates is not None:
                rates = np.concatenate([rates, fresh.rates])
            self._count("samples_skipped_missing", shard, fresh.missing)
            self._count("samples_skipped_unsupported", shard, fresh.unsupported)
            self._usable_check.saw(view, looked_through, len(fresh.numbers), selection.keys)
            if len(fresh.left_out.numbers):
                left_out = LeftOut(*map(np.concatenate, zip(left_out, fresh.left_out, strict=True)))
            self._usable[shard] = _Usable(view.count, numbers, rates, left_out)
        if view.gave_up:
            self._give_up(view, shard)
        if view.ended:
            self._usable_check.ended(view)
            if not view.gave_up and shard not in self._warned:
                self._warned.add(shard)
                self._warn(view, shard)
            if not view.gave_up and not view.is_index_only and shard not in self._complete:
                self._complete.add(shard)
                self._count("shards_complete", shard)
                if shard in self._companions:
                    self._companions[shard].share(self._selection.columns.values())
        return numbers, view.ended

    def rates(self, shard: int) -> Values:
        """Number of uses in a pass of each usable sample so far; empty if nothing says so."""
        return self._usable.get(shard, _NONE_USABLE).rates

    def left_out(self, shard: int) -> LeftOut:
        """The samples of an open shard that are left out, as far as `arrived` has looked through it."""
        return self._usable.get(shard, _NONE_USABLE).left_out

    def view(self, shard: int) -> ShardView:
        """The open view of a shard; opened now if it isn't."""
        view = self._views.get(shard)
        if view is None:
            view = ShardView(
                self._tiers,
                self.shards[shard],
                self._fetch,
                self._freshness,
                self._files,
                self._selection.of_shard(shard).needed,
            )
            self._views[shard] = view
            self._count("tier_hits" if view.was_complete else "tier_misses", shard)
        return view

    def ranges(self, shard: int, numbers: Sequence[int]) -> list[tuple[Version, int, int]]:
        """The byte ranges of samples of an open shard at its origin. See `ShardView.ranges`."""
        return self.view(shard).ranges(numbers) if shard in self._views else []

    def sample(
        self, shard: int, number: int, memory: ReadMemory | None = None, entry_place: Found | None = None
    ) -> Sample | None:
        """A sample and its bytes; None while they aren't in the tier. See `ShardView.read`."""
        view = self.view(shard)
        read = view.read(number, memory, entry_place)
        if read is None:
            return None
        entry, members = read
        prepared = "" if entry.prepared is None else entry.prepared[0]
        return Sample(entry.key, view.shard.name, members, prepared, entry.checksum, shard, number)

    def facts(self, shard: int, numbers: Sequence[int] | Numbers, names: Sequence[str]) -> Facts | None:
        """Facts of samples that have arrived, by name: float64[N], NaN where unknown.

        They are the same in every process and at any time (see streamload/facts).

        Args:
            numbers: of the samples, in any order.
            names: of columns of the run, or "width", "height", "caption_bytes", "image_bytes".

        Returns:
            None while the samples can't be read.

        Raises:
            DatasetChanged, OriginError: see `ShardView.read`.
        """
        if not len(names) or not len(numbers):
            return {name: np.empty(0) for name in names}
        places = np.asarray(numbers, np.int64)
        view, columns = self.view(shard), self._selection.columns
        stored_columns = {name: columns[name] for name in names if name not in IN_RECORDS}
        count = int(places.max()) + 1
        if (
            view.count < count
            or not self._extend(shard, stored_columns.values(), count)
            or view.reader is None
        ):
            view.refresh()
            return None
        records = view.reader.records
        return {
            name: self._companions[shard].values(stored_columns[name])[places]
            if name in stored_columns
            else _nan_where_unknown(records[name][places])
            for name in names
        }

    def keep_open(self, shards: Collection[int]) -> None:
        """Close all other shards: they may be evicted."""
        for shard in self._views.keys() - shards:
            view = self._views.pop(shard)
            self._files.forget(view)
            view.close()
            self._usable.pop(shard, None)
            self._companions.pop(shard, None)

    def mean_bytes(self) -> float:
        """The mean size of the shards opened last whose size is known; 0 if none is."""
        sizes = []
        for view in itertools.islice(reversed(self._views.values()), _MEASURED_SHARDS):
            reader = view.reader
            size = None if reader is None else reader.size or reader.meta.get("size")
            if isinstance(size, int):
                sizes.append(size)
        return sum(sizes) / len(sizes) if sizes else 0.0

    def mean_sample_bytes(self) -> float:
        """The mean size of the samples that have arrived of the open shards; 0 if there are none."""
        readers = [view.reader for view in self._views.values() if view.reader is not None and view.count]
        arrived = (reader.size or int(reader.records["stop"][-1]) for reader in readers)
        return sum(arrived) / sum(reader.count for reader in readers) if readers else 0.0

    def expect_usable(self) -> None:
        """Look no more whether anything is usable: a state is at samples that were."""
        self._usable_check.found_usable = True

    def raise_if_unusable(self) -> None:
        """Raise if nothing usable was found: no more samples will come.

        Raises:
            NoValidSamples: its message describes what was found instead.
        """
        self._usable_check.raise_if_unusable()

    def close(self) -> None:
        """Close everything."""
        self.keep_open(())
        for tombstone in self._tombstones.values():
            tombstone.close()
        self._tombstones.clear()

    def _extend(self, shard: int, columns: Collection[Column], count: int) -> bool:
        """Have the values of columns for the first samples of a shard; False while they can't be read."""
        if not columns:
            return True
        if shard not in self._companions:
            assert self._selection.open_companion is not None
            self._companions[shard] = self._selection.open_companion(self.carrier)
        return self._companions[shard].extend(self.view(shard), list(columns), count)

    def _count(self, name: str, shard: int, n: int = 1) -> None:
        if n and self._counted(shard):
            self._counts.add(name, n)

    def _warn(self, view: ShardView, shard: int) -> None:
        """Log the warnings about a complete shard."""
        if view.reader is not None and self._counted(shard):
            for warning in view.reader.warnings:
                logger.warning("shard %s: %s", view.shard.name, warning)

    def _give_up(self, view: ShardView, shard: int) -> None:
        """A shard was given up: raise, or skip it for good."""
        reader = view.reader
        assert reader is not None
        if not self._skip or reader.status == errors.OriginOutage.__name__:  # not the fault of the shard
            raise tombstone_error(reader.status, reader.cause)
        if view.shard.digest not in self._tombstones:
            try:
                lock = view.hold_tombstone()
            except OSError as exc:
                raise limits.reached(f"{view.shard.name} can't be skipped by all", exc) from exc
            if lock is not None:  # else it is still a part, on its way to the tombstones
                self._tombstones[view.shard.digest] = lock
        if shard in self._given_up:
            return
        self._given_up.add(shard)
        self._count("shards_given_up", shard)
        if self._counted(shard):
            message = "shard %s is skipped after %d samples: %s"
            logger.warning(message, view.shard.name, reader.count, reader.cause)


class _UsableCheck:
    """Detects a data set in which nothing is usable, so that nobody searches it for ever.

    Judges by shards that were read: a missing one says nothing about the others.

    Attributes:
        found_usable: whether a sample is known that is usable.
    """

    def __init__(self) -> None:
        self.found_usable = False
        self._samples = 0
        self._read: set[str] = set()  # those that have ended
        self._keys: list[str] = []
        self._names: set[tuple[str, str]] = set()  # shards and keys
        self._folders: dict[tuple[str, str], Entry] = {}  # by shard and key without folder
        self._wanted = ""  # members that a sample needs
        self._empty: list[str] = []  # shards without samples
        self._cause = ""  # a likely one, that names show
        self._given_up: dict[str, str] = {}  # why, by the shard's name

    def saw(self, view: ShardView, start: int, usable: int, keys: Sequence[KeySpec]) -> None:
        """New entries of a shard, from number `start` on, of which `usable` are used.

        Args:
            keys: the members that a sample needs.
        """
        self.found_usable = self.found_usable or usable > 0
        if self.found_usable or view.reader is None:
            return
        self._samples += view.count - start
        self._wanted = " and ".join(map(str, keys))
        for number in range(start, 0 if self._cause else view.count):
            self._look_for_cause(view.shard.name, view.reader.entry(number))
        for number in range(start, min(view.count, start + _KEYS_SHOWN - len(self._keys))):
            entry = view.reader.entry(number)
            self._keys.append(_in_words(entry))
        if self._samples >= _PATIENCE_SAMPLES:
            self.raise_if_unusable()

    def _look_for_cause(self, shard: str, entry: Entry) -> None:
        if self._cause:
            return
        odd = next((extension for extension, _, _ in entry.members if _ODD_EXTENSION.search(extension)), None)
        if odd is not None:
            self._cause = (
                f"a key ends at the first dot of a member's name, so that of {_shown(entry.key)} leaves the "
                f"extension {_shown(odd)!r}: write names without dots before the extension"
            )
        elif (shard, entry.key) in self._names:
            self._cause = (
                f"{_shown(entry.key)} comes again in {shard}: the members of a sample must be adjacent "
                f"in the tar (tar --sort=name, or `streamload pack`)"
            )
        base = entry.key.rpartition("/")[2]
        other = self._folders.setdefault((shard, base), entry)
        if not self._cause and other.sizes.keys().isdisjoint(entry.sizes):
            self._cause = (
                f"{_in_words(other)} and {_in_words(entry)} are two samples of {shard}: a key has the folder "
                f"in it, so the members of a sample must be in one folder, and adjacent (`streamload pack`)"
            )
        self._names.add((shard, entry.key))

    def ended(self, view: ShardView) -> None:
        """A shard has ended."""
        if self.found_usable:
            return
        if view.gave_up and view.reader is not None:
            self._given_up[view.shard.name] = view.reader.cause
        if view.count:
            self._read.add(view.shard.name)
        elif not view.gave_up:
            self._empty.append(view.shard.name)
        left_out = (
            [] if view.reader is None else [text for text in view.reader.warnings if "left out" in text]
        )
        self._cause = self._cause or "; ".join(left_out)
        if len(self._read) >= _PATIENCE_SHARDS:
            self.raise_if_unusable()

    def raise_if_unusable(self) -> None:
        """Raise NoValidSamples with what was found instead; nothing if a usable sample was found."""
        if self.found_usable:
            return
        causes = "; ".join(list(dict.fromkeys(self._given_up.values()))[:3])
        if not self._keys:
            problem = "no samples"
            if causes:
                problem = f"none of {len(self._given_up)} shards could be read: {causes}"
            elif self._empty:
                problem += f" in {len(self._empty)} tars (first: {', '.join(self._empty[:2])})"
            raise errors.NoValidSamples(f"{problem}. Check the URLs, and that the shards have samples")
        raise errors.NoValidSamples(
            f"no usable sample in {len(self._read)} shards and {self._samples} samples "
            f"(first: {', '.join(sorted(self._read)[:2]) or 'unfinished'}). "
            f"{f'Needed: {self._wanted}. ' if self._wanted else ''}Seen: {'; '.join(self._keys)}"
            f"{'; given up: ' + causes if causes else ''}. "
            f"{f'A likely cause: {self._cause}. Else check' if self._cause else 'Check'} image_key, "
            f"text_key (None: there are no captions), label_key, join and keep, of Shards and of extensions"
        )


def _nan_where_unknown(sizes: npt.NDArray[np.uint32]) -> Values:
    """Facts in index records, where 0 says that they are unknown."""
    values = sizes.astype(np.float64)
    values[sizes == 0] = np.nan
    return values


def _in_words(entry: Entry) -> str:
    return _shown(f"{entry.key} ({', '.join(extension for extension, _, _ in entry.members)})")


def _shown(text: str) -> str:
    """Text from a tar, made safe for a message: it may have any length and any bytes."""
    printable = text[:_SHOWN_CHARACTERS].encode("utf-8", "backslashreplace").decode()
    return printable if len(text) <= _SHOWN_CHARACTERS else f"{printable}…"


def tombstone_error(status: str, cause: str) -> errors.StreamloadError:
    """The error that led to a tombstone."""
    kind: Callable[[str], errors.StreamloadError] = getattr(errors, status, errors.OriginError)
    return kind(cause)


def tombstone_cause(path: Path) -> str:
    """Why a shard was given up, from the directory of its tombstone."""
    with contextlib.closing(IndexReader(path)) as reader:
        reader.refresh()
        return reader.cause
