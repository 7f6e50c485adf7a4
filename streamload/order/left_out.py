"""Samples left out of the order by users' functions, counted at each position (steps C and D).

A sample that is left out comes before the next used one of its shard, or of its lane if the shard has no
more; those that no used sample follows count once the position is beyond the pass. Inside, counts are arrays,
with a column for each cause; a cursor has them by the names of the causes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tally = Counter[str]
"""Numbers of samples that were left out, by the name of what left them out."""
Counts = NDArray[np.int64]
"""int64[causes], or int64[N, causes]: the same by the index of the cause."""
_NO_COUNTS: Mapping[int, Counts] = MappingProxyType({})
_MOST = 1 << 62


class LeftOut(NamedTuple):
    """The samples of a shard that are left out of the order, as far as the shard is known.

    Attributes:
        numbers: int64[N], the raw numbers of their entries, ascending.
        causes: int64[N], of each the index of the name of what left it out.
    """

    numbers: NDArray[np.int64]
    causes: NDArray[np.int64]


NONE_LEFT_OUT = LeftOut(np.empty(0, np.int64), np.empty(0, np.int64))


class LeftOutOf(NamedTuple):
    """What leaves samples out of an order, and which.

    Attributes:
        names: the names of the causes.
        of_shard: returns the samples of a shard that are left out, as far as `Arrivals` last returned it.
    """

    names: Sequence[str]
    of_shard: Callable[[int], LeftOut]

    def passing(self, numbers: NDArray[np.int64], causes: NDArray[np.int64]) -> Passing:
        """Prepare the samples that are left out of a shard for lanes that pass them."""
        totals = np.zeros((len(numbers) + 1, len(self.names)), np.int64)
        totals[np.arange(1, len(numbers) + 1), causes] = 1
        return Passing(numbers, totals.cumsum(axis=0))

    def counts(self, tally: Mapping[str, int]) -> Counts:
        """The array of a tally, whose names are among those of the causes."""
        return np.array([tally.get(name, 0) for name in self.names], np.int64)

    def tally(self, counts: Counts) -> Tally:
        """The tally of an array."""
        return Counter(
            {name: count for name, count in zip(self.names, counts.tolist(), strict=True) if count}
        )


class Passing(NamedTuple):
    """The samples of a shard that are left out, for the lane that passes them.

    Attributes:
        numbers: int64[N], the raw numbers of their entries, ascending.
        totals: int64[N + 1, causes], how many there are before each of them, and in all.
    """

    numbers: NDArray[np.int64]
    totals: Counts

    def before(self, samples: NDArray[np.int64], *, is_first: bool) -> Counts:
        """Count those between consecutive used samples: int64[N, causes].

        Args:
            samples: raw numbers, ascending.
            is_first: count those before the first of them, too.
        """
        totals = self.totals[np.searchsorted(self.numbers, samples)]
        return np.diff(totals, axis=0, prepend=self.totals[:1] if is_first else self.totals[:0])

    def after(self, sample: int) -> Counts:
        """Count those after a used sample."""
        counts: Counts = self.totals[-1] - self.totals[np.searchsorted(self.numbers, sample)]
        return counts


class Passed(NamedTuple):
    """The samples that lanes have passed before references.

    Attributes:
        references: int64[N], packed.
        counts: int64[N, causes].
    """

    references: NDArray[np.int64]
    counts: Counts


class PassedOver(NamedTuple):
    """The samples left out up to a position, by the names of what left them out.

    Attributes:
        before: in the passes before that of the last reference.
        in_pass: in the pass of the last reference.
        following: of a cursor at the start of a pass, what `before` is from the next reference on.
        carried: of the cursor's lanes, by lane: see `Lanes`.
        tails: of the cursor's `done` shards, by place: see `Lanes`.
    """

    before: Tally
    in_pass: Tally
    following: Tally
    carried: Mapping[int, Tally]
    tails: Mapping[int, Tally]

    @property
    def total(self) -> Tally:
        """Those of the sequence so far."""
        return self.before + self.in_pass

    @property
    def names(self) -> list[str]:
        """The names of all causes."""
        tallies = (self.before, self.in_pass, self.following, *self.carried.values(), *self.tails.values())
        return list(dict.fromkeys(name for tally in tallies for name in tally))

    def to_json(self) -> dict[str, Any]:
        """Return them as JSON-able values: an empty dict if nothing was left out."""
        value: dict[str, Any] = {
            "before": dict(self.before),
            "pass": dict(self.in_pass),
            "following": dict(self.following),
        }
        value["carried"] = {str(lane): dict(tally) for lane, tally in self.carried.items()}
        value["tails"] = {str(place): dict(tally) for place, tally in self.tails.items()}
        return {name: part for name, part in value.items() if part}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PassedOver:
        """Parse the output of `to_json`; its errors are those of parsing."""
        before, in_pass, following = (_tally(value.get(name, {})) for name in ("before", "pass", "following"))
        carried, tails = (
            {_whole(int(key)): _tally(tally) for key, tally in value.get(name, {}).items()}
            for name in ("carried", "tails")
        )
        return cls(before, in_pass, following, carried, tails)


NOTHING_LEFT_OUT = PassedOver(Counter(), Counter(), Counter(), {}, {})


def _tally(value: dict[str, Any]) -> Tally:
    return Counter({str(name): _whole(count) for name, count in value.items()})


def _whole(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= _MOST:
        raise ValueError(f"not a whole number from 0 to {_MOST}")
    return number


class _PassCounts(NamedTuple):
    """Counts over some positions of one pass.

    Attributes:
        before: those of the passes before.
        positions: int64[N], ascending: from each of them on the counts in the pass are others.
        in_pass: int64[N, causes].
    """

    before: Counts
    positions: NDArray[np.int64]
    in_pass: Counts


class LeftOutSoFar:
    """Counts the samples left out up to each of the latest positions of a sequence.

    Args:
        causes: what leaves samples out.
        position: where counting starts.
        start: the counts before it.

    Attributes:
        following: those before the next reference, if that is the first one of a pass; else None.
    """

    def __init__(self, causes: LeftOutOf, position: int, start: PassedOver) -> None:
        self._causes = causes
        before, in_pass = causes.counts(start.before), causes.counts(start.in_pass)
        self._counted = deque([_PassCounts(before, np.array([position]), in_pass[None])])
        self._waiting = Passed(np.empty(0, np.int64), np.empty((0, len(causes.names)), np.int64))
        self.following = causes.counts(start.following) if start.following else None

    def of_lanes(self, start: PassedOver) -> dict[str, Any]:
        """The arguments of `Lanes` that make them count."""
        carried, tails = (
            {key: self._causes.counts(tally) for key, tally in tallies.items()}
            for tallies in (start.carried, start.tails)
        )
        return {"left_out": self._causes, "carried": carried, "tails": tails}

    def give(self, position: int, ready: NDArray[np.int64], skipped: int, passed: Sequence[Passed]) -> None:
        """Count what was passed before references.

        Args:
            position: before the references that aren't skipped.
            ready: packed references that leave the window now.
            skipped: the first so many are before a cursor's position, which has what was before them.
            passed: what lanes have passed before those that they gave to the window.
        """
        self._wait_for(passed)
        waiting, counts = self._waiting
        places = np.searchsorted(waiting, ready)
        counted = np.flatnonzero(places < waiting.size)
        counted = counted[waiting[places[counted]] == ready[counted]]
        self._waiting = Passed(
            np.delete(waiting, places[counted]), np.delete(counts, places[counted], axis=0)
        )
        counted = counted[counted >= skipped]
        if self.following is not None and ready.size > skipped:
            nothing = np.zeros((1, counts.shape[1]), np.int64)
            self._counted.append(_PassCounts(self.following, np.array([position + 1]), nothing))
            self.following = None
        if counted.size:
            before, _, in_pass = self._counted[-1]
            totals = in_pass[-1] + counts[places[counted]].cumsum(axis=0)
            self._counted.append(_PassCounts(before, position + 1 + counted - skipped, totals))

    def end_pass(self, carried: Mapping[int, Counts]) -> None:
        """End the pass, with what lanes still carry."""
        self.following = self._latest()
        for counts in carried.values():
            self.following = self.following + counts

    def at(
        self,
        position: int,
        following: Counts | None = None,
        carried: Mapping[int, Counts] = _NO_COUNTS,
        tails: Mapping[int, Counts] = _NO_COUNTS,
    ) -> PassedOver:
        """Return the counts before a position, and the others as they are given."""
        tally = self._causes.tally
        before, positions, in_pass = next(
            counted for counted in reversed(self._counted) if counted.positions[0] <= position
        )
        return PassedOver(
            tally(before),
            tally(in_pass[np.searchsorted(positions, position, "right") - 1]),
            Counter() if following is None else tally(following),
            {lane: tally(counts) for lane, counts in carried.items()},
            {place: tally(counts) for place, counts in tails.items()},
        )

    def total(self) -> Tally:
        """Return the count of all that is known."""
        return self._causes.tally(self._latest())

    def forget(self, position: int) -> None:
        """Drop the counts before a position."""
        while len(self._counted) > 1 and self._counted[1].positions[0] <= position:
            self._counted.popleft()

    def _latest(self) -> Counts:
        before, _, in_pass = self._counted[-1]
        return before + in_pass[-1] if self.following is None else self.following

    def _wait_for(self, passed: Sequence[Passed]) -> None:
        """Add what lanes have passed, so that references are sorted."""
        if not passed:
            return
        references = np.concatenate([part.references for part in passed])
        counts = np.concatenate([part.counts for part in passed])
        order = np.flatnonzero(counts.any(axis=1))
        order = order[np.argsort(references[order], kind="stable")]
        places = np.searchsorted(self._waiting.references, references[order])
        self._waiting = Passed(
            np.insert(self._waiting.references, places, references[order]),
            np.insert(self._waiting.counts, places, counts[order], axis=0),
        )
