"""The facts of a shard as a process needs them: read from files beside the index, or made and stored there.

The rule: a value depends on the sample's bytes, or its key, and the column's definition; never on a file, nor
on time. A file only saves making the values again. So a fact is there as soon as its sample has arrived, the
same in all processes, and unknown (NaN) only where the sample itself doesn't have it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from streamload.cache.companion import Companion, FactsCarrier
from streamload.cache.locks import PATIENCE_SECONDS
from streamload.cache.shard import Shard, is_of
from streamload.cache.shard_copy import ReadMemory, ShardCopy
from streamload.cache.shard_view import ShardView
from streamload.errors import CacheCorrupt, FeatureMismatch
from streamload.facts.column_file import FactsFile
from streamload.shards.columns import Column, FactSample, Values
from streamload.shards.facts import OneOfSeveral, pack_values, stored_columns, unpack_values
from streamload.shards.samples import Entry

_AT_ONCE = 256
"""Samples whose values are made and stored together."""
_AT_ONCE_BYTES = 4 << 20
"""Fewer, if their members have more bytes than this."""
_RANGE_BYTES = 8 << 20
"""The most that is requested at once of an index-only shard."""
_MEMORY_BYTES = 1 << 20
_CHECKED = 4
"""Stored values of a column that each process makes again, once."""
_checked: set[tuple[int, str]] = set()
"""The processes, by forks, and columns of which values were."""
_POLL_SECONDS = 0.005


class ShardFacts(Companion):
    """The values of a shard's samples, by column; kept while the shard is open. Not thread-safe.

    Args:
        shared: has what other nodes made, and takes what is made here.
    """

    def __init__(self, shared: FactsCarrier) -> None:
        self._values: dict[str, Values] = {}
        self._files: dict[str, FactsFile] = {}
        self._shared = shared
        self._asked: set[str] = set()  # the columns that were looked for in the shared cache
        self._made: set[str] = set()  # those whose last value so far was made here
        self._stored: dict[str, int] = {}  # of columns to be checked, the first sample whose value was read
        self._form: tuple[Shard, ShardCopy] | None = None  # whose index the values belong to

    def values(self, column: Column) -> Values:
        """The values so far: float64[N], NaN where unknown; float64[N, k] of a column of k numbers."""
        if isinstance(column, OneOfSeveral):
            return self.values(column.stored)[:, column.place]
        values = self._values.get(column.digest)
        return unpack_values(b"", column.dtype) if values is None else values

    def extend(self, view: ShardView, columns: Sequence[Column], count: int) -> bool:
        """Have the values of the first `count` samples, which have arrived; False while they can't be read.

        Values that no file has come from the shared cache, or are made by one process; they are stored, and
        the others wait for it. What can't be stored (a full disk, no room) is made by each process.

        Raises:
            DatasetChanged, OriginError: see `ShardView.read`.
            FeatureMismatch: a stored value isn't what is made now.
        """
        columns = stored_columns(columns)
        lacking = self._lacking(columns, count)
        if not lacking:
            return True
        (entry_place,) = view.find((count - 1,))
        if entry_place is None:
            return False
        copy = entry_place[0]
        forms = [form for form in (view.shard, view.shard.prepared) if form is not None]
        self._form = next(((form, copy) for form in forms if is_of(copy.reader, form)), None)
        with ExitStack() as locks:
            for column in lacking:
                file = self._files.setdefault(column.digest, FactsFile(column))
                locks.callback(file.unlock)
                file.open(view, copy)
                self._take(file, column, copy)
                if len(self.values(column)) < count and not file.is_behind:
                    self._lock(file, column, copy, count)
                    self._fetch(file, column, copy)
            if any(self._files[form.digest].is_behind for form in self._lacking(columns, count)):
                return False  # another process has them, by an index that has grown since
            is_made = self._make(view, copy, self._lacking(columns, count))
        for column in lacking:
            self._check(view, copy, column)
        self.share(columns)
        return is_made

    def share(self, columns: Iterable[Column], *, with_found: bool = False) -> None:
        """Offer the values of a whole shard to other nodes, once.

        Args:
            columns: which ones.
            with_found: those that weren't made here, too.
        """
        if self._form is None or not self._form[1].reader.is_complete:
            return
        shard, reader = self._form[0], self._form[1].reader
        for column in stored_columns(columns):
            is_meant = column.from_members and (with_found or column.digest in self._made)
            if is_meant and len(self.values(column)) == reader.count:
                self._made.discard(column.digest)
                self._shared.offer(shard, column, self.values(column), reader.records.copy())

    def _lacking(self, columns: Sequence[Column], count: int) -> list[Column]:
        """The columns with too few values, in one order for all processes, which lock their files in turn."""
        lacking = {column.digest: column for column in columns if len(self.values(column)) < count}
        return [lacking[digest] for digest in sorted(lacking)]

    def _take(self, file: FactsFile, column: Column, copy: ShardCopy) -> None:
        """Take the values that a file has."""
        first, packed = file.read(copy)
        values = np.concatenate([self.values(column)[:first], unpack_values(packed, column.dtype)])
        if len(values) > len(self.values(column)):
            self._values[column.digest] = values
            self._made.discard(column.digest)
            if column.check_name:
                self._stored.setdefault(column.digest, first)

    def _fetch(self, file: FactsFile, column: Column, copy: ShardCopy) -> None:
        """Take a column from the shared cache, asked once if this node has none of its values."""
        is_new = column.digest not in self._asked and not len(self.values(column))
        if self._form is None or not column.from_members or not is_new:
            return
        self._asked.add(column.digest)
        frames = self._shared.read(self._form[0], column)
        if frames:
            file.fill(frames)
            self._take(file, column, copy)

    def _lock(self, file: FactsFile, column: Column, copy: ShardCopy, count: int) -> None:
        """Lock a file to extend it, unless another process does that in time or makes no progress."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not file.lock():
            count_before = len(self.values(column))
            time.sleep(_POLL_SECONDS)
            self._take(file, column, copy)
            if len(self.values(column)) >= count or time.monotonic() > deadline:
                return
            if len(self.values(column)) > count_before:
                deadline = time.monotonic() + PATIENCE_SECONDS
        self._take(file, column, copy)

    def _make(self, view: ShardView, copy: ShardCopy, columns: Sequence[Column]) -> bool:
        """Make the values of all samples that have arrived; False if they can't be read."""
        if not columns:
            return True
        try:
            for samples in _samples(view, copy, columns, min(len(self.values(column)) for column in columns)):
                for column in columns:
                    self._append(column, samples, copy)
        except _Unreadable:
            return False
        except CacheCorrupt:
            view.invalidate(copy)
            return False
        return True

    def _check(self, view: ShardView, copy: ShardCopy, column: Column) -> None:
        """Make some stored values of a column again: spread over a shard, the last first.

        So a function that remembers the sample before is found out, too.
        """
        first, which = self._stored.get(column.digest), (os.getpid(), column.digest)
        if first is None or which in _checked:
            return
        last = min(len(self.values(column)), copy.reader.count) - 1
        numbers = list(dict.fromkeys(np.linspace(last, first, _CHECKED).astype(int).tolist()))
        values = self.values(column)[numbers]
        entries = copy.reader.entries(numbers)
        needed = [set(column.needs(entry.sizes)) for entry in entries]
        if copy.is_index_only and any(needed):
            return  # another shard is here
        try:
            members = list(_members(view, copy, entries, needed, ReadMemory(_MEMORY_BYTES)))
        except (_Unreadable, CacheCorrupt):
            return
        remade = column.make([FactSample(*sample) for sample in zip(entries, members, strict=True)])
        remade = unpack_values(pack_values(remade, column.dtype), column.dtype)
        same = np.isclose(remade, values, rtol=1e-6, atol=0.0, equal_nan=True)
        if not same.all():
            place, name = np.unravel_index(np.argmin(same), same.shape), column.check_name
            raise FeatureMismatch(
                f"the fact {name} of sample {entries[place[0]].key!r} was stored as {values[place]:g}, and "
                f"is {remade[place]:g} now: it depends on more than its code and its sample. If that is "
                f"other samples, make a table of values beforehand; if it is a file, a variable or a "
                f"library, give the function with a version that you change with it: "
                f'facts={{{name}: (function, "1")}}'
            )
        _checked.add(which)  # only now: a caller that swallows the error, such as len(), is told again

    def _append(self, column: Column, samples: Sequence[FactSample], copy: ShardCopy) -> None:
        values_before, stop = self.values(column), samples[-1].entry.number + 1
        if len(values_before) >= stop:
            return
        packed = pack_values(column.make(samples[len(values_before) - stop :]), column.dtype)
        values = np.concatenate([values_before, unpack_values(packed, column.dtype)])
        self._values[column.digest] = values
        self._made.add(column.digest)
        self._files[column.digest].append(values, copy.reader.records[:stop])


class _Unreadable(Exception):
    """The bytes of a sample aren't in the tier any more."""


def _samples(
    view: ShardView, copy: ShardCopy, columns: Sequence[Column], start: int
) -> Iterator[list[FactSample]]:
    """The samples from number `start` on, some at a time, with the members that the columns need.

    Raises:
        _Unreadable: the bytes are not in the tier any more.
        CacheCorrupt: the index is damaged.
    """
    memory = ReadMemory(_MEMORY_BYTES)
    count = copy.reader.count if columns else start
    for first in range(start, count, _AT_ONCE):
        entries = copy.reader.entries(range(first, min(first + _AT_ONCE, count)))
        needed = [{name for column in columns for name in column.needs(entry.sizes)} for entry in entries]
        samples: list[FactSample] = []
        held_bytes = 0
        for entry, members in zip(entries, _members(view, copy, entries, needed, memory), strict=True):
            samples.append(FactSample(entry, members))
            held_bytes += sum(map(len, members.values()))
            if held_bytes > _AT_ONCE_BYTES:
                yield samples
                samples, held_bytes = [], 0
        if samples:
            yield samples


def _members(
    view: ShardView,
    copy: ShardCopy,
    entries: Sequence[Entry],
    needed: Sequence[set[str]],
    memory: ReadMemory,
) -> Iterator[dict[str, bytes]]:
    """The needed members of samples, whose checksums are verified."""
    if copy.is_index_only and any(needed):
        for group in _joined(entries):
            for entry, members in zip(group, view.fetched(copy, group), strict=True):
                yield _chosen(members, needed[entry.number - entries[0].number])
        return
    for entry, names in zip(entries, needed, strict=True):
        if not names:
            yield {}
            continue
        if entry.checksum is None:  # nothing to verify: the other members needn't be read
            entry = entry._replace(members=tuple(member for member in entry.members if member[0] in names))
        memory.reset()
        read = view.read(entry.number, memory, (copy, entry), lambda _, names=names: names)  # type: ignore[misc]
        if read is None:
            raise _Unreadable
        yield _chosen(read[1], names)


def _chosen(members: Mapping[str, memoryview], needed: set[str]) -> dict[str, bytes]:
    return {name: bytes(payload) for name, payload in members.items() if name in needed}


def _joined(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Neighbouring samples, grouped into requests."""
    group: list[Entry] = []
    for entry in entries:
        if group and entry.stop - group[0].start > _RANGE_BYTES:
            yield group
            group = []
        group.append(entry)
    yield group
