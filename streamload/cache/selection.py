"""Which samples of a shard a run uses, and how often: decided from the index and facts alone.

shard_cache.py asks for it as samples arrive, before any of them is read. How a rate becomes a number of uses
is in order/repeats.py.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.cache.companion import OpenCompanion
from streamload.errors import OptionError, add_note
from streamload.shards.columns import BUILT_IN, TOKENS, Column, Values
from streamload.shards.index import IndexReader
from streamload.shards.keys import KeySpec, chosen, usable
from streamload.shards.samples import Entry

Numbers = npt.NDArray[np.int64]
Keep = Callable[[Entry], bool]
RateFunction = Callable[[Entry], "float | None"]

MOST_USES = 256
"""The largest rate: of uses of a sample in a pass."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Number of uses of each sample in a pass: by a fact, or by a function. Unknown (NaN, None): once.

    Attributes:
        fact: its name; "" with a function.
        function: takes an entry. Its errors propagate.
        digest: 32 hex characters of the definition.
        arrivals: makes of arrivals those in which samples come so often (order/repeats.py).
    """

    fact: str
    function: RateFunction | None
    digest: str
    arrivals: Callable[..., Any]


class Selected(NamedTuple):
    """The used samples among some entries.

    Attributes:
        numbers: ascending.
        rates: float64, of each how often it is used in a pass in the mean, above 0; None: once.
        missing: how many entries lack a required member.
    """

    numbers: Numbers
    rates: Values | None
    missing: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The samples that have the required members, and that the user's function keeps.

    Attributes:
        keys: of image, text, label: a sample must have one member for each.
        keep: takes an entry; returning False excludes the sample. Its errors propagate.
        reads_all: read all members of a sample, rather than those that the keys choose.
        columns: how the facts are made that batches are planned by and functions read, by name.
        repeat: how often samples are used in a pass; a rate of 0 excludes a sample. None: once.
        by_source: the selection of each source by its first shard, if they differ; empty: this is for all.
        open_companion: opens what keeps the values of columns; None: there are no columns.
    """

    keys: tuple[KeySpec, ...]
    keep: Keep | None = None
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
    def facts(self) -> list[str]:
        """The names of the facts that `of` needs."""
        repeat = self.repeat
        calls = self.keep is not None or (repeat is not None and repeat.function is not None)
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
            start: the number of the first entry.
            facts: of these entries, by name: those in `facts`.

        Raises:
            OptionError: a rate is no number from 0 to MOST_USES; it names the sample.
        """
        mask = usable(reader, self.keys, start)
        missing = len(mask) - int(mask.sum())
        if self.keep is not None:
            for place in np.flatnonzero(mask).tolist():
                mask[place] = bool(self.keep(self._entry(reader, start, place, facts)))
        if self.repeat is None:
            return Selected(start + np.flatnonzero(mask), None, missing)
        places = np.flatnonzero(mask)
        rates = self._rates(self.repeat, reader, start, places, facts)
        is_used = rates > 0
        return Selected(start + places[is_used], rates[is_used], missing)

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


def with_facts(entry: Entry, names: Sequence[str], facts: Mapping[str, Values], place: int) -> Entry:
    """An entry with its facts, as users' functions get it.

    Args:
        entry: of a sample.
        names: of the facts.
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
        entry: with its facts.

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
