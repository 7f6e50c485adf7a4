"""Samples of a shard that a run uses, and how often: decided from the index and facts alone (steps C and G).

By key specifications such as `jpg;png` and `txt;json:caption`, and the user's functions. shard_cache.py asks
as samples arrive, before any of them is read: whether a JSON member has the requested field is only found out
when it is read. How a rate becomes a number of uses is in facts/repeats.py.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.cache.companion import OpenCompanion
from streamload.errors import OptionError, add_note
from streamload.order.lanes import Arrivals
from streamload.order.left_out import NONE_LEFT_OUT, LeftOut
from streamload.shards.columns import BUILT_IN, TOKENS, Column, Values
from streamload.shards.index import IndexReader
from streamload.shards.record import LINKED, OWN_LAYOUT, UNSUPPORTED
from streamload.shards.samples import JOINED, Entry

Numbers = npt.NDArray[np.int64]
Keep = Callable[[Entry], bool]
RateFunction = Callable[[Entry], "float | None"]

Modality = Literal["image-text", "image", "text"]
"""Members that are used of a source's samples."""

KEEP = "keep"
"""The name of the samples that `Shards(keep=…)` leaves out."""
MEMBER_LIMIT_BYTES = 64 << 20
"""The largest image or caption that is read; a sample with a larger one counts as lacking it."""
MOST_USES = 256
"""The largest rate: of uses of a sample in a pass."""
_NO_EXTENSION = re.compile(r"[\s,*?|/]")
"""Characters of lists and patterns in other loaders' keys."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """Extensions in order of preference, with the field for JSON members."""

    choices: tuple[tuple[str, str | None], ...]
    """(extension, field); field None: the whole member."""
    is_optional: bool = False
    """Whether samples without such a member are used."""
    falls_back: bool = False
    """Whether all of these members are read, as a later one is used where an earlier one holds nothing."""

    def __str__(self) -> str:
        return ";".join(
            extension if field is None else f"{extension}:{field}" for extension, field in self.choices
        )

    @classmethod
    def parse(cls, text: str) -> KeySpec:
        """Parse `ext;ext;…`, each `ext` or `ext:field`.

        Raises:
            OptionError: an empty choice, or a field of an extension other than JSON.
        """
        choices = []
        for choice in text.split(";"):
            extension, colon, field = choice.strip().partition(":")
            extension = extension.strip().lower().removeprefix(".")
            field = field.strip()
            is_json = extension.rpartition(".")[2] in ("json", "jsn", JOINED)
            is_pattern = _NO_EXTENSION.search(extension) is not None
            if not extension or is_pattern or (colon and not (field and is_json)):
                raise OptionError(
                    f"{text!r} is not a key: {choice!r} should be an extension, or json:<field>; "
                    'for example "jpg;png;webp" or "txt;json:caption"'
                )
            choices.append((extension, field or None))
        return cls(tuple(choices))

    @property
    def extensions(self) -> tuple[str, ...]:
        """The extensions in order of preference."""
        return tuple(extension for extension, _ in self.choices)

    def choose(self, extensions: Collection[str]) -> tuple[str, str | None] | None:
        """Return the first (extension, field) that is among these extensions, or None."""
        for choice in self.choices:
            if choice[0] in extensions:
                return choice
        return None


@dataclass(frozen=True, slots=True)
class Repeat:
    """Number of uses of each sample in a pass: by a fact, or by a function. Unknown (NaN, None): once.

    Attributes:
        fact: its name; "" with a function.
        function: takes an entry. Its errors propagate.
        digest: 32 hex characters of the definition.
        arrivals: makes of arrivals those in which samples come so often (facts/repeats.py).
    """

    fact: str
    function: RateFunction | None
    digest: str
    arrivals: Callable[[Arrivals, Callable[[int], Values], Callable[[], int], int, int], Arrivals]


class Selected(NamedTuple):
    """The used samples among some entries.

    Attributes:
        numbers: ascending.
        rates: float64, of each how often it is used in a pass in the mean, above 0; None: once.
        missing: how many entries lack a required member.
        unsupported: how many lack one and have members that can't be read, as links or as sparse files.
        left_out: the samples that a function doesn't keep.
    """

    numbers: Numbers
    rates: Values | None
    missing: int
    unsupported: int
    left_out: LeftOut


@dataclass(frozen=True, slots=True)
class Selection:
    """The samples that have the required members, and that the users' functions keep.

    Attributes:
        keys: of image, text, label: a sample must have one member for each.
        keeps: functions by name, each of which takes an entry. The first one that returns False leaves the
            sample out. Their errors propagate.
        reads_all: read all members of a sample, rather than those that the keys choose.
        columns: how the facts are made that batches are planned by and functions read, by name.
        repeat: how often samples are used in a pass; a rate of 0 excludes a sample. None: once.
        by_source: the selection of each source by its first shard, if they differ; empty: this is for all.
        open_companion: opens what keeps the values of columns; None: there are no columns.
    """

    keys: tuple[KeySpec, ...]
    keeps: Mapping[str, Keep] = field(default_factory=dict)
    reads_all: bool = False
    columns: Mapping[str, Column] = field(default_factory=dict)
    repeat: Repeat | None = None
    by_source: tuple[tuple[int, Selection], ...] = ()
    open_companion: OpenCompanion | None = None

    def of_shard(self, shard: int) -> Selection:
        """The selection of a shard's source."""
        if not self.by_source:
            return self
        return self.by_source[
            bisect.bisect_right(self.by_source, shard, key=lambda of_source: of_source[0]) - 1
        ][1]

    @property
    def names(self) -> list[str]:
        """The names of what leaves samples out."""
        return [*self.keeps]

    @property
    def facts(self) -> list[str]:
        """The names of the facts that `of` needs."""
        repeat = self.repeat
        calls = bool(self.keeps) or (repeat is not None and repeat.function is not None)
        names = self.of_entries if calls else []
        return names if repeat is None or not repeat.fact else list(dict.fromkeys([*names, repeat.fact]))

    @property
    def of_entries(self) -> list[str]:
        """The names of the facts that a user's function finds in `Entry.facts`."""
        return [name for name in self.columns if name not in (*BUILT_IN, TOKENS)]

    def needed(self, extensions: Collection[str]) -> set[str]:
        """The members of a sample to read."""
        return set(extensions) if self.reads_all else chosen(extensions, self.keys)

    def of(self, reader: IndexReader, start: int, facts: Mapping[str, Values]) -> Selected:
        """The used samples among the entries from `start` on.

        Args:
            reader: of an index.
            facts: of these entries, by name: those in `facts`.

        Raises:
            OptionError: a rate is no number from 0 to MOST_USES; it names the sample.
        """
        mask = usable(reader, self.keys, start)
        unsupported = int(np.count_nonzero(~mask & (reader.records["flags"][start:] & UNSUPPORTED > 0)))
        missing = len(mask) - int(mask.sum()) - unsupported
        left_out = self._left_out(reader, start, mask, facts) if self.keeps else NONE_LEFT_OUT
        places = np.flatnonzero(mask)
        if self.repeat is None:
            return Selected(start + places, None, missing, unsupported, left_out)
        rates = self._rates(self.repeat, reader, start, places, facts)
        is_used = rates > 0
        return Selected(start + places[is_used], rates[is_used], missing, unsupported, left_out)

    def _left_out(
        self, reader: IndexReader, start: int, mask: npt.NDArray[np.bool_], facts: Mapping[str, Values]
    ) -> LeftOut:
        """The samples that a function leaves out; it takes them out of the mask."""
        numbers, causes = [], []
        for place in np.flatnonzero(mask).tolist():
            entry = self._entry(reader, start, place, facts)
            for cause, (name, keep) in enumerate(self.keeps.items()):
                try:
                    is_kept = keep(entry)
                except Exception as exc:
                    where = "keep=" if name == KEEP else f"keep of the extension {name!r}"
                    add_note(exc, f"in {where}, for sample {entry.key!r}")
                    raise
                if not is_kept:
                    mask[place] = False
                    numbers.append(start + place)
                    causes.append(cause)
                    break
        return LeftOut(np.array(numbers, np.int64), np.array(causes, np.int64))

    def _entry(self, reader: IndexReader, start: int, place: int, facts: Mapping[str, Values]) -> Entry:
        return with_facts(reader.entry(start + place), self.of_entries, facts, place)

    def _rates(
        self, repeat: Repeat, reader: IndexReader, start: int, places: Numbers, facts: Mapping[str, Values]
    ) -> Values:
        if repeat.function is None:
            rates = facts[repeat.fact][places]
        else:
            entries = [self._entry(reader, start, place, facts) for place in places.tolist()]
            rates = np.array([number_of("repeat", repeat.function, entry) for entry in entries], np.float64)
        rates = np.where(np.isnan(rates), 1.0, rates)
        wrong = np.flatnonzero(~((rates >= 0) & (rates <= MOST_USES)))
        if len(wrong):
            key = reader.entry(start + int(places[wrong[0]])).key
            raise OptionError(
                f"repeat= is {rates[wrong[0]]:g} for sample {key!r}; expected a number from 0 to {MOST_USES}"
            )
        return rates


def usable(reader: IndexReader, keys: Sequence[KeySpec], start: int = 0) -> npt.NDArray[np.bool_]:
    """Return which entries, from number `start` on, have the members that a run needs.

    None of these members may be larger than MEMBER_LIMIT_BYTES.

    Args:
        reader: an index, finished or not.
        keys: of image, text and label: a sample needs a member for each that isn't optional.

    Returns:
        bool[count - start].
    """
    layouts = reader.records["layout"][start:]
    if not keys:
        return np.ones(len(layouts), dtype=np.bool_)

    def serves(extensions: Collection[str]) -> bool:
        return all(spec.is_optional or spec.choose(extensions) is not None for spec in keys)

    shared = reader.layouts()
    table = np.zeros(max(shared, default=-1) + 2, dtype=np.bool_)
    for layout, extensions in shared.items():
        table[layout] = serves(extensions)
    have_own_layout = layouts == OWN_LAYOUT
    mask: npt.NDArray[np.bool_] = table[np.where(have_own_layout, len(table) - 1, layouts)]
    for place in np.flatnonzero(have_own_layout):
        mask[place] = serves(reader.entry(start + int(place)).sizes)
    spans = reader.records["stop"][start:] - reader.records["start"][start:]
    links = reader.records["flags"][start:] & LINKED
    for place in np.flatnonzero(mask & ((spans > MEMBER_LIMIT_BYTES) | (links > 0))):
        sizes = reader.entry(start + int(place)).sizes
        mask[place] = all(sizes[extension] <= MEMBER_LIMIT_BYTES for extension in chosen(sizes, keys))
    return mask


def chosen(extensions: Collection[str], keys: Sequence[KeySpec]) -> set[str]:
    """Return the extensions of a sample that the keys choose."""
    needed: set[str] = set()
    for spec in keys:
        if spec.falls_back:
            needed.update(extension for extension in spec.extensions if extension in extensions)
        elif (choice := spec.choose(extensions)) is not None:
            needed.add(choice[0])
    return needed


def with_facts(entry: Entry, names: Sequence[str], facts: Mapping[str, Values], place: int) -> Entry:
    """An entry with its facts, as users' functions get it.

    Args:
        facts: of some samples, by name.
        place: of the sample among these.
    """
    if not names:
        return entry
    return entry._replace(facts={name: float(facts[name][place]) for name in names})


def number_of(option: str, function: RateFunction, entry: Entry) -> float:
    """Result of a user's function for a sample: a number; NaN for None.

    Args:
        option: the name of the argument, for errors.
        function: takes an entry; its errors propagate.

    Raises:
        OptionError: it returned no number, or NaN for a sample of which all facts are known.
    """
    try:
        returned = function(entry)
    except Exception as exc:
        add_note(exc, f"in the function of {option}=, for sample {entry.key!r}")
        raise
    if returned is None:
        return math.nan
    try:
        value = float(returned)
    except (TypeError, ValueError, OverflowError):
        value = math.inf
    if math.isnan(value) and any(math.isnan(fact) for fact in entry.facts.values()):
        return math.nan  # follows from an unknown fact
    if not math.isfinite(value):
        raise OptionError(
            f"the function of {option}= returned {returned!r:.60} for sample {entry.key!r}; expected a "
            f"number, or None if it is unknown"
        )
    return value
