"""Lanes: shards read side by side give references, one sample from each lane in turn (step C).

A lane reads one shard of the pass; at its end it takes the next. The order depends only on how many samples
each shard turns out to have. So lanes wait where that isn't known yet, and never longer: a reference is
given as soon as no arrival can change it. shuffle.py (step D) shuffles them. How many lanes and which window
a tier has room for follows from the shards that are open at once (`fitting`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.order.left_out import Counts, LeftOutOf, Passed, Passing
from streamload.order.plan import ShardPart

EVEN_ROUNDS = 128
EVEN_SHARDS = 10
"""Shards a lane, in a pass whose lanes all stay even as shards arrive: in a longer one few of the bytes that
wait for slow lanes are left at the end, and shards that all end at once would be many open ones."""
LARGE_SHARD_BYTES, LARGE_SAMPLE_BYTES = 4 << 30, 1 << 20
"""The assumed size of shards and samples before one is looked at."""
_KNOWN_AHEAD = 256
KNOWN_PART = 8
"""A worker knows 256 references ahead (order/group.py), or as many as fill this part of the tier if these are
fewer: their shards are open, too."""
_STEPS_AHEAD = 8
"""The distance between a rank's first and last worker when all wait, by the default number of workers; the
run's own number must not matter, as batches are the same for every number."""
_CUTS, _CUTS_OF_HALF = 256, 8
_WINDOW_DIGITS = 2
SAMPLE_BITS = 32
SAMPLE_MASK = (1 << SAMPLE_BITS) - 1

_NEVER = np.iinfo(np.int64).max
_NOTHING = np.empty(0, np.int64)
_NONE: Mapping[int, int] = MappingProxyType({})
_NO_COUNTS: Mapping[int, Counts] = MappingProxyType({})


class LaneState(NamedTuple):
    """The lanes of a group between two turns.

    Attributes:
        given: references that the lanes have given in this pass.
        round: the current round. In each round every open lane gives a sample (a slow one may skip its turn).
        slot: the lane whose turn is next.
        next: place in the pass of the next shard that a lane takes.
        lanes: for each lane the place in the pass of its shard (-1: none), the number of samples given from
            it, and its slowness (0: one sample in every round).
    """

    given: int
    round: int
    slot: int
    next: int
    lanes: tuple[tuple[int, int, int], ...]


class Arrivals(Protocol):
    """Sizes of the shards, as far as known. For one thread; called again for a shard while it grows."""

    def arrived(self, shard: int) -> tuple[NDArray[np.int64], bool]:
        """Return the raw numbers of the usable entries so far, ascending, and whether that is all."""
        ...


COPY_SHIFT = 24
"""Where samples come several times in a pass, a raw number has the sample's in its low bits, and above them
which use of the sample it is."""
_PASS_SHIFT = 32


def apart(rows: NDArray[np.int64]) -> None:
    """Turn references with such numbers, int64[N, 3], into those of samples, in place.

    Which use of the sample it is moves from its number to the pass: each use is augmented anew.
    """
    rows[:, 0] += rows[:, 2] >> COPY_SHIFT << _PASS_SHIFT
    rows[:, 2] &= (1 << COPY_SHIFT) - 1


class Turn(NamedTuple):
    """Lanes `first` to `last` - 1 give for `rounds` rounds, starting with the current one."""

    rounds: int
    first: int
    last: int


def served(rounds: NDArray[np.int64], slow: NDArray[np.int64], lanes: int) -> NDArray[np.int64]:
    """Return how many samples a lane gives in the first `rounds` rounds of a pass.

    After an even start, the first shards of the lanes are read at different speeds; otherwise shards of
    equal size would all end, and the next ones begin, at the same time. In a pass without next shards, and in
    a short one over remote shards, all lanes stay even: the shards arrive evenly, and the data of a slow lane
    would only wait.
    """
    late = EVEN_ROUNDS + (rounds - EVEN_ROUNDS) * lanes // (lanes + slow)
    return np.where(rounds <= EVEN_ROUNDS, rounds, late)


def rounds_for(samples: NDArray[np.int64], slow: NDArray[np.int64], lanes: int) -> NDArray[np.int64]:
    """Return the most rounds in which a lane gives at most `samples`: the inverse of `served`."""
    late = EVEN_ROUNDS + ((samples - EVEN_ROUNDS + 1) * (lanes + slow) - 1) // lanes
    return np.where(samples < EVEN_ROUNDS, samples, late)


class Lanes:
    """The lanes of one group in one pass.

    References are packed in an int64: the place of the shard in the pass, then 32 bits of raw entry number.

    Args:
        order: int64[shards], the shards of the pass in the order in which lanes take them.
        parts: what the group owns of the shards that it shares.
        count: the number of lanes.
        state: where to resume; None begins the pass.
        done: numbers of samples, by place, of shards that needn't be read: their references are dropped by
            the caller.
        are_even: all lanes read at one speed.
        left_out: what leaves samples out, to count them; None: they aren't counted.
        carried: by lane the samples left out since it gave its last reference, in `state`.
        tails: of the shards in `done`, by place, the samples left out after the last used one.

    Attributes:
        order: as given.
        given: references that the lanes have given in this pass.
        tails: by place of a shard that has ended, the samples left out after its last reference, by cause.
        samples: int32[shards], the group's samples in each shard of the pass; -1: not known.
        begun: how many shards of the pass the lanes have taken.
    """

    def __init__(
        self,
        order: NDArray[np.int64],
        parts: Mapping[int, ShardPart],
        count: int,
        state: LaneState | None = None,
        done: Mapping[int, int] = _NONE,
        are_even: bool = False,
        left_out: LeftOutOf | None = None,
        carried: Mapping[int, Counts] = _NO_COUNTS,
        tails: Mapping[int, Counts] = _NO_COUNTS,
    ) -> None:
        if state is None:
            state = LaneState(0, 0, 0, 0, ((-1, 0, 0),) * count)
        if len(state.lanes) != count or state.next > order.size:
            raise OptionError(
                f"The cursor has {len(state.lanes)} lanes and at least {state.next} shards, this order has "
                f"{count} lanes and {order.size} shards; lanes and URLs must stay the same within a run."
            )
        self.order = order
        self.given = state.given
        self._start = state
        self.samples = np.full(order.size, -1, np.int32)
        self._done = done
        self._last_done = max(done, default=-1)
        self._parts = parts
        self._count = count
        self._are_even = are_even or order.size <= count
        # Mutable state: given, the turn (round, slot, next), and for each lane: the place of its shard, the
        # value of `served` when it began the shard, its slowness, the known samples, whether they are all,
        # and `dry`: the first round in which it lacks a sample.
        self._round, self._slot, self.begun = state.round, state.slot, state.next
        lanes = np.array(state.lanes, np.int64)
        self._place, references, self._slow = lanes[:, 0].copy(), lanes[:, 1], lanes[:, 2].copy()
        self._base = np.where(self._place < 0, 0, served(self._rounds_done(), self._slow, count) - references)
        self._samples = [_NOTHING] * count
        self._left_out_of = left_out
        self._left_out: list[Passing | None] = [None] * count
        self._carried = dict(carried)
        self._passed: list[Passed] = []
        self.tails = dict(tails)
        self._ended = self._place < 0
        self._dry = self._rounds_done()

    @property
    def finished(self) -> bool:
        """True if the pass is over: no lane has a shard, and none is left to take."""
        return self.begun == self.order.size and bool((self._dry == _NEVER).all())

    @property
    def due(self) -> int:
        """References of the pass by the numbers of samples of its shards, at its end."""
        start = self._start
        reading = [(place, references) for place, references, _ in start.lanes if place >= 0]
        samples = self.samples[[place for place, _ in reading]].sum() + self.samples[start.next :].sum()
        return start.given - sum(references for _, references in reading) + int(samples)

    def state(self) -> LaneState:
        """Return the current state, to resume from."""
        open_ = self._place >= 0
        references = np.where(open_, served(self._rounds_done(), self._slow, self._count) - self._base, 0)
        lanes = zip(self._place.tolist(), references.tolist(), self._slow.tolist(), strict=True)
        return LaneState(self.given, self._round, self._slot, self.begun, tuple(lanes))

    def carried(self) -> dict[int, Counts]:
        """Return by lane what was left out since its last reference, in shards that it has left."""
        return dict(self._carried)

    def take_passed(self) -> list[Passed]:
        """Return what lanes have passed before the references since the last call."""
        passed, self._passed = self._passed, []
        return passed

    def forget_tails(self, state: LaneState) -> None:
        """Drop the tails of shards that lanes had left before a state."""
        reading = [place for place, _, _ in state.lanes if place >= 0]
        first = min([*reading, state.next])
        self.tails = {place: tail for place, tail in self.tails.items() if place >= first}

    def reading(self) -> NDArray[np.int64]:
        """Return the places in the pass of the shards that lanes are reading, int64."""
        return np.array([p for p in self._place.tolist() if p >= 0 and p not in self._done], np.int64)

    def coming(self, count: int) -> NDArray[np.int64]:
        """Return the places in the pass of the next shards to take, at most `count`, in order."""
        places = np.arange(self.begun, min(self.begun + count + len(self._done), self.order.size))
        if self.begun <= self._last_done:
            places = places[[place not in self._done for place in places.tolist()]]
        return places[:count]

    def lacking(self) -> list[int]:
        """Return the places of the shards whose samples are lacking, one per lane, most urgent first.

        For a lane whose shard is completely known, that is the next shard to take.
        """
        coming = iter(self.coming(self._count).tolist())
        places = []
        for lane in np.argsort(np.maximum(self._dry, self._rounds_done()), kind="stable").tolist():
            if not self._ended[lane]:
                places.append(int(self._place[lane]))
            elif (place := next(coming, None)) is not None:
                places.append(place)
        return places

    def refresh(self, arrivals: Arrivals) -> None:
        """Check arrivals for every lane; `take` checks only lanes that ran dry."""
        for lane in np.flatnonzero(~self._ended).tolist():
            self._look(lane, arrivals)

    def take(self, arrivals: Arrivals, limit: int) -> NDArray[np.int64]:
        """Return the next references, packed: `limit` and up to a round more, or all that are determined."""
        blocks = [self._references(turn) for turn in self._turns(arrivals, limit, exact=False)]
        return np.concatenate(blocks) if blocks else _NOTHING

    def pass_over(self, arrivals: Arrivals, limit: int) -> int:
        """Skip `limit` references or up to a round fewer, or all that are determined. Return how many."""
        before = self.given
        for _ in self._turns(arrivals, limit, exact=True):
            pass
        return self.given - before

    def _turns(self, arrivals: Arrivals, limit: int, exact: bool) -> Iterator[Turn]:
        """Yield turn after turn; each is applied when the iteration continues."""
        stop_at = self.given + limit - (self._count - 1 if exact else 0)
        while self.given < stop_at:
            ready = self._serve_dry(arrivals)
            if ready == self._slot or self.finished:
                return
            rounds = 1
            if ready == self._count and self._slot == 0:
                needed_rounds = -(-(stop_at - self.given) // int(np.count_nonzero(self._place >= 0)))
                rounds = min(needed_rounds, int(self._dry.min()) - self._round)
            turn = Turn(rounds, self._slot, ready)
            yield turn
            self._finish(turn)
            if ready < self._count:
                return

    def _serve_dry(self, arrivals: Arrivals) -> int:
        """Find samples for the lanes that lack one in this round. Return the first lane that has to wait."""
        for lane in (np.flatnonzero(self._dry[self._slot :] <= self._round) + self._slot).tolist():
            while self._dry[lane] <= self._round:
                if not self._ended[lane]:
                    self._look(lane, arrivals)
                    if self._dry[lane] <= self._round and not self._ended[lane]:
                        return int(lane)
                    continue
                self._leave(lane)
                if self.begun < self.order.size:
                    self._begin(lane)
                else:
                    self._place[lane], self._dry[lane] = -1, _NEVER
        return self._count

    def _leave(self, lane: int) -> None:
        """Carry what was left out at the end of a lane's shard to its next reference."""
        tail = self.tails.get(int(self._place[lane]))
        if tail is not None:
            self._carried[lane] = tail + self._carried[lane] if lane in self._carried else tail

    def _begin(self, lane: int) -> None:
        """Give a lane the next shard of the pass."""
        self._place[lane] = self.begun
        self._slow[lane] = lane if self._round == 0 and not self._are_even else 0
        self._base[lane] = self._round
        self._samples[lane] = _NOTHING
        self._ended[lane] = False
        self.begun += 1

    def _look(self, lane: int, arrivals: Arrivals) -> None:
        """Check what has arrived of a lane's shard."""
        place = int(self._place[lane])
        shard = int(self.order[place])
        if place in self._done:
            self._samples[lane], ended = np.arange(self._done[place]), True
            self._left_out[lane] = None
        else:
            entries, ended = arrivals.arrived(shard)
            part = self._parts.get(shard)
            self._samples[lane] = entries if part is None else part.owned(entries)
            if self._left_out_of is not None:
                self._note_left_out(self._left_out_of, lane, part, ended)
        self._ended[lane] = ended
        if ended:
            self.samples[place] = self._samples[lane].size
        stop = self._base[lane] + self._samples[lane].size
        self._dry[lane] = rounds_for(stop, self._slow[lane], self._count)

    def _note_left_out(self, left_out: LeftOutOf, lane: int, part: ShardPart | None, ended: bool) -> None:
        """Note which samples of a lane's shard are left out."""
        place, samples = int(self._place[lane]), self._samples[lane]
        numbers, causes = left_out.of_shard(int(self.order[place]))
        if part is not None:
            owned = part.owned(numbers)
            numbers, causes = owned, causes[np.searchsorted(numbers, owned)]
        passing = self._left_out[lane] = left_out.passing(numbers, causes) if numbers.size else None
        if ended and passing is not None:
            tail = passing.after(samples[-1] if samples.size else -1)
            if tail.any():
                self.tails[place] = tail

    def _pass_by(self, lane: int, start: int, stop: int) -> None:
        """Note which samples were left out before references that a lane gives now: `start` to `stop`."""
        passing, carried = self._left_out[lane], self._carried.get(lane)
        if passing is None and carried is None:
            return
        samples = self._samples[lane]
        references = samples[start:stop] + (self._place[lane] << SAMPLE_BITS)
        counts = np.zeros((stop - start, 0 if carried is None else carried.size), np.int64)
        if passing is not None:
            counts = passing.before(samples[max(0, start - 1) : stop], is_first=start == 0)
        if carried is not None:
            counts[0] += carried
        self._passed.append(Passed(references, counts))

    def _references(self, turn: Turn) -> NDArray[np.int64]:
        """Return the references of a turn, packed, in the order in which lanes give them."""
        lanes = np.flatnonzero(self._place[turn.first : turn.last] >= 0) + turn.first
        slow = self._slow[lanes][:, None]
        rounds = np.arange(self._round, self._round + turn.rounds + 1)
        spans = served(rounds[[0, -1]], slow, self._count) - self._base[lanes][:, None]
        parts = [_NOTHING]
        for lane, (start, stop) in zip(lanes.tolist(), spans.tolist(), strict=True):
            parts.append(self._samples[lane][start:stop])
            if self._left_out_of is not None and start < stop:
                self._pass_by(lane, start, stop)
        references = np.concatenate(parts)
        references += np.repeat(self._place[lanes] << SAMPLE_BITS, spans[:, 1] - spans[:, 0])
        # Reorder from lane by lane to round by round.
        if references.size == lanes.size * turn.rounds:
            return np.ravel(references.reshape(lanes.size, turn.rounds), order="F")
        after = served(rounds, slow, self._count)
        gives = after[:, 1:] > after[:, :-1]
        table = np.empty(gives.shape, np.int64)
        table[gives] = references
        by_round: NDArray[np.int64] = table.T[gives.T]
        return by_round

    def _finish(self, turn: Turn) -> None:
        lanes = slice(turn.first, turn.last)
        slow = self._slow[lanes][self._place[lanes] >= 0]
        rounds_done = np.int64(self._round)
        gave = served(rounds_done + turn.rounds, slow, self._count) - served(rounds_done, slow, self._count)
        self.given += int(gave.sum())
        if self._carried:
            open_lanes = np.flatnonzero(self._place[lanes] >= 0) + turn.first
            for lane in open_lanes[gave > 0].tolist():
                self._carried.pop(lane, None)
        whole = turn.last == self._count
        self._round += turn.rounds if whole else 0
        self._slot = 0 if whole else turn.last

    def _rounds_done(self) -> NDArray[np.int64]:
        """Return for each lane the number of rounds in which it has had its turn."""
        return self._round + (np.arange(self._count) < self._slot)


def default_lanes(batch_slice: int) -> int:
    """Return the default number of lanes for a group's slice of a global batch: 1/32, 8 to 64."""
    return min(max(batch_slice // 32, 8), 64)


@dataclass(frozen=True, slots=True)
class Width:
    """Lanes and window of one source.

    Attributes:
        lanes, window: of its order.
        shards: the number in a group; more are never open at once.
        shard_bytes: the size of a shard in the tier; 0: none, or unknown.
        sample_bytes: the size of a sample.
    """

    lanes: int
    window: int
    shards: int
    shard_bytes: int = 0
    sample_bytes: float = 1.0

    @property
    def open_bytes(self) -> int:
        """Bytes that have to be in the tier at once."""
        most = self.shards * self.shard_bytes
        live = live_shards(self.lanes, self.window, self.shard_bytes / self.sample_bytes)
        return min(most, int(live * self.shard_bytes))

    def scaled(self, share: float, lanes: bool, window: bool) -> Width:
        """The same with a share of the lanes, the window, or both; at least one of each.

        A source that takes no space stays as it is.
        """
        if not self.shard_bytes:
            return self
        samples = self.shards * self.shard_bytes / self.sample_bytes  # a wider window has no effect
        cut = int(min(self.window, samples) * share)
        unit = 10 ** max(0, len(str(cut)) - _WINDOW_DIGITS)  # so a slightly smaller limit has no effect
        return replace(
            self,
            lanes=max(1, math.ceil(self.lanes * share)) if lanes else self.lanes,
            window=max(1, cut // unit * unit) if window else self.window,
        )


def fitting(
    widths: Sequence[Width], limit_bytes: int, step: int, *, lanes: bool, window: bool
) -> list[Width] | None:
    """The widest reading that fits into a tier, with one share for all sources; None if nothing fits.

    One lane with a window of one sample is assumed to fit wherever two shards do: one of them ends.

    Args:
        limit_bytes: of the tier, for each group that is read through it.
        step: how many samples of a group the training takes at a time.
        lanes, window: whether these may be reduced.
    """
    cut = [*widths]
    for number in range(1, _CUTS + 1):
        if fits(cut, limit_bytes, step):
            return cut
        cut = [width.scaled(0.5 ** (number / _CUTS_OF_HALF), lanes, window) for width in widths]
    is_least = lanes and window and 2 * sum(width.shard_bytes for width in widths) <= limit_bytes
    return cut if is_least else None


def fits(widths: Sequence[Width], limit_bytes: int, step: int) -> bool:
    """True if a tier can hold what has to be open at once, of all sources; see `fitting`."""
    if sum(width.shards * width.shard_bytes for width in widths) <= limit_bytes:
        return True
    sample_bytes = max(width.sample_bytes for width in widths)
    ahead_bytes = min(_KNOWN_AHEAD * sample_bytes, limit_bytes / KNOWN_PART)
    ahead_bytes += _STEPS_AHEAD * step * sample_bytes
    return sum(width.open_bytes for width in widths) + ahead_bytes <= limit_bytes


def live_shards(lanes: int, window: int, samples_per_shard: float) -> float:
    """Number of shards that have to be open at once: those in lanes, those of a window, and a margin."""
    return 1.2 * (lanes + window / max(1.0, samples_per_shard)) + 1
