"""The sampler's reference stream: references as they become known, and the shards they need (B to D, for F).

It joins the order of a group, of one source, with what prefetching and eviction need to know: the shards that
must stay readable, the next shards, and this reader's progress.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from streamload.cache.demand import VISITS_KEPT, DemandFile, short
from streamload.cache.shard import ShardList
from streamload.cache.tier import Tier
from streamload.order.group import GroupOrder
from streamload.order.lanes import Arrivals, apart
from streamload.order.left_out import Tally
from streamload.worker.arrivals import CheckedArrivals
from streamload.worker.states import SourceState

NextPass = Callable[[], npt.NDArray[np.int64]]

_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1
_SHARD = 1
"""The column of the shard in a row of references: pass, shard, sample."""


class ReferenceStream:
    """The sequence of one group and source as one process follows it.

    The order has the source's indexes of shards; everything returned here has the run's.

    Args:
        order: the sequence.
        next_pass: returns the source's shards that are read after the order has ended, in order.
        shards: all shards of the run.
        first: the index of the source's first shard among them.
        arrivals: what has arrived of the source's shards.
        tier: where this reader announces its demand.
        repeated: the same arrivals with each sample as often as it comes in the pass; None: once.
    """

    def __init__(
        self,
        order: GroupOrder,
        next_pass: NextPass,
        shards: ShardList,
        first: int,
        arrivals: CheckedArrivals,
        tier: Tier,
        repeated: Arrivals | None = None,
    ):
        self._order = order
        self._next_pass = next_pass
        self._shards = shards
        self._first = first
        self._arrivals = arrivals
        self._repeated = repeated
        self._base = self._begin = order.position
        self._known = np.empty((0, 3), np.int64)  # one row each
        self._demand_file = DemandFile(tier.root / "runs")
        self._hash = xxhash.xxh3_64()
        self._hashed = self._base
        self._in_use: list[int] | None = None  # cached: it is read several times per batch
        self._in_use_until = 0  # the position after which one of them isn't needed any more
        self._coming: tuple[tuple[object, ...], npt.NDArray[np.int64]] | None = (
            None  # the arguments, and the result
        )
        self._told: tuple[list[int], list[int]] | None = None
        self._named = (
            np.empty(0, np.int64),
            np.empty(0, np.uint64),
        )  # announced last, and names
        self.tell_progress()

    def blocked(self) -> list[int]:
        """The shards that the order waits for, the most urgent first."""
        self._in_use = None
        return self._here(self._order.blocked(self._repeated or self._arrivals))

    @property
    def is_over(self) -> bool:
        """True if all references are known: the sequence has ended."""
        return self._order.finished

    def has(self, position: int) -> bool:
        """True if the references up to a position are known."""
        return self._order.position >= position

    def known(self, stop: int) -> int:
        """The position up to which references are known, at most `stop`."""
        return min(stop, self._order.position)

    def follow(self, most: int | None = None) -> bool:
        """Extend the stream by what has arrived; False if that adds no reference.

        Args:
            most: about the most references to add, if room for their shards is short.
        """
        self._in_use = None
        fresh = self._order.advance(self._repeated or self._arrivals, most)
        if len(fresh.shards):
            rows = np.column_stack(fresh)
            rows[:, _SHARD] += self._first
            if self._repeated is not None:
                apart(rows)
            self._known = np.concatenate([self._known, rows])
        return len(fresh.shards) > 0

    def begin_at(self, position: int) -> None:
        """Leave the references before a position to other processes: here their shards aren't in use."""
        self._begin = max(self._begin, position)
        self._leave(position)

    def peek(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """The known references from position `first` to `stop`, without taking them."""
        return self._known[max(0, first - self._base) : max(0, stop - self._base)]

    def take(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Take the references from position `first` to `stop`, fewer at the end.

        Returns:
            int64[N, 3]: pass, shard and sample.
        """
        self.digest(stop)
        count = stop - self._base
        references = self._known[first - self._base : count]
        self._known = self._known[count:]
        self._base = stop
        self._leave(stop)
        return references

    def digest(self, position: int) -> int:
        """A hash of all references before a position, from where this process began.

        Args:
            position: not before an earlier call's, nor before taken references; known, or after the end.
        """
        start, stop = self._hashed - self._base, min(position, self._order.position) - self._base
        if stop > start:
            self._hash.update(self._known[start:stop].tobytes())
            self._hashed = self._base + stop
        return self._hash.intdigest()

    def state(self, position: int) -> SourceState:
        """The state at a taken position, or at the end of the sequence if that comes before."""
        cursor = self._order.mark_at(min(position, self._order.position))
        shards = np.array(self.shards_in_use(), np.int64) - self._first
        return SourceState(cursor, self._arrivals.begun(shards, cursor.pass_))

    def ended(self) -> list[tuple[int, ...]]:
        """The shards that have ended since the last call.

        Of each the pass, its index in the source, the group's samples in it, and its record in a state.
        """
        return [
            (pass_, shard, count, *self._arrivals.seen(shard, pass_))
            for pass_, shards, counts in self._order.ended()
            for shard, count in zip(shards.tolist(), counts.tolist(), strict=True)
        ]

    def shards_in_use(self) -> list[int]:
        """The shards that have to stay readable, the next needed first."""
        if self._in_use is None:
            of_others = max(0, self._begin - self._base)
            shards = self._known[of_others:, _SHARD]
            numbers = np.arange(of_others, of_others + shards.size)
            places = np.sort(shards << _PLACE_BITS | numbers)  # by shard, then by place
            last = places[np.diff(places >> _PLACE_BITS, append=-1) != 0]
            known_shards = (last >> _PLACE_BITS).tolist()
            self._in_use = list(dict.fromkeys([*self._here(self._order.open_shards()), *known_shards]))
            self._in_use_until = self._base + int((last & _PLACE_MASK).min(initial=_PLACE_MASK))
        return self._in_use

    def coming(self, count: int) -> npt.NDArray[np.int64]:
        """The next shards that will be opened, across the end of the pass."""
        question = (count, self._order.front, self._order.finished)
        if self._coming is None or self._coming[0] != question:
            coming = self._order.coming_shards(count)
            if len(coming) < count:
                coming = np.concatenate([coming, self._next_pass()[: count - len(coming)]])
            self._coming = question, coming + self._first
        return self._coming[1]

    @property
    def front(self) -> tuple[int, int]:
        """The current pass, and the index in it of the next shard to open."""
        return self._order.front

    @property
    def due(self) -> int:
        """References of the pass by the indexes of its shards, at its end."""
        return self._order.due

    @property
    def left_out_in_all(self) -> Tally:
        """The samples left out in the sequence, at its end."""
        return self._order.left_out_in_all

    @property
    def visits(self) -> int:
        """How many shards lanes have opened and references have left so far."""
        return 2 * self._order.begun - len(self.shards_in_use())

    @property
    def progress(self) -> tuple[int, int]:
        """Number of references that lanes have read so far, and how many of them the window has released."""
        return self._order.read, self._order.released

    @property
    def reads_everything(self) -> bool:
        """True if the group's own shards gave nothing, so that it reads those of all groups."""
        return self._order.everything

    def tell_progress(self) -> None:
        """Announce the open shards and the next ones in the tier's demand, if they have changed."""
        in_use = self.shards_in_use()
        state = (in_use, self._order.coming_shards(1).tolist())
        if state != self._told:
            self._told = state
            visits = np.concatenate([np.array(in_use, np.int64), self.coming(VISITS_KEPT)])[:VISITS_KEPT]
            self._demand_file.tell(self._names_of(visits))

    def _names_of(self, visits: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """The short names of shards, with those of the last call cached."""
        cached, names = self._named
        places = np.searchsorted(cached, visits)
        is_known = np.append(cached, -1)[places] == visits
        short_names = np.append(names, np.uint64(0))[places]
        for place in np.flatnonzero(~is_known).tolist():
            short_names[place] = short(self._shards.digest(int(visits[place])))
        order = np.argsort(visits)
        self._named = visits[order], short_names[order]
        return short_names

    def close(self) -> None:
        """Withdraw the demand. Idempotent."""
        self._demand_file.close()

    def _leave(self, position: int) -> None:
        """Look anew which shards are in use once the last known reference of one is before a position."""
        if position > self._in_use_until:
            self._in_use = None

    def _here(self, shards: list[int]) -> list[int]:
        """The run's indexes of shards of the source."""
        return [shard + self._first for shard in shards]
