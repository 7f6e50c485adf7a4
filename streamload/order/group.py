"""The sample sequence of one group, as far as the arrived data determines it (steps B to D).

Every worker that needs a group computes it with its own `GroupOrder` and gets the same sequence, whatever
arrives when. The only input is the numbers of usable entries.

A group whose own shards give no sample in a pass (missing, or fewer shards than groups) takes the next pass
from the shards of all groups. So every rank has batches as long as there is any sample.

A cursor has a position, and a state of the lanes at least a window before it. Running the lanes from there
and dropping `skip` references resumes exactly. The options are saved separately.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError
from streamload.order.hashing import DUE, key
from streamload.order.lanes import EVEN_SHARDS, SAMPLE_BITS, SAMPLE_MASK, Arrivals, Lanes, LaneState
from streamload.order.left_out import NOTHING_LEFT_OUT, Counts, LeftOutOf, LeftOutSoFar, PassedOver, Tally
from streamload.order.plan import OrderOptions, Pieces, pass_order
from streamload.order.plan import pieces as pieces_of
from streamload.order.shuffle import ShuffleWindow

_FIRST_PORTION = 256
_HISTORY = 65_536
_MOST = 1 << 62
_MOST_OF_A_PASS = 1 << 40
"""Keeps the arithmetic of lanes.py within 64 bits."""


def most_skipped(lanes: int, window: int) -> int:
    """Return the largest `skip` of a cursor from `mark_at`."""
    # Marks are at most a portion and a last portion apart, and the one that is used lies a window back.
    return window + 2 * _most_taken(lanes, window)


def _most_taken(lanes: int, window: int) -> int:
    """Return the most references that one `advance` takes from the lanes."""
    # Less than a portion, then a last portion of at most `_FIRST_PORTION` and the rest of a round.
    return _portion_of(window) + _FIRST_PORTION + lanes


def _portion_of(window: int) -> int:
    return max(_FIRST_PORTION, window // 8)


class Cursor(NamedTuple):
    """A position in a group's sequence, and how to get there: a small value for a checkpoint.

    Attributes:
        position: references before it since the epoch began.
        pass_: the pass of `lanes`.
        skip: the number of references between that state and the position, including those of later passes.
        lanes: a state at least a window before the position; None for the beginning of the pass.
        done: of the shards that lanes read from that state on, the finished ones: place in the pass and
            number of samples. They aren't needed to resume.
        everything: whether that pass is over the shards of all groups.
        left_out: the samples left out before the position; None: they aren't counted.
    """

    position: int
    pass_: int
    skip: int
    lanes: LaneState | None = None
    done: tuple[tuple[int, int], ...] = ()
    everything: bool = False
    left_out: PassedOver | None = None

    @classmethod
    def at(cls, position: int) -> Cursor:
        """Return a cursor with only a position.

        Resuming from it costs O(shards) and needs the indexes of all shards that were begun before it.
        """
        return cls(position, 0, position)

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as JSON-able values."""
        value: dict[str, Any] = {"position": self.position, "pass": self.pass_, "skip": self.skip}
        if self.lanes is not None:
            state = self.lanes
            lanes = [list(lane) for lane in state.lanes]
            value["lanes"] = [state.given, state.round, state.slot, state.next, lanes]
        if self.done:
            value["done"] = [list(pair) for pair in self.done]
        if self.everything:
            value["everything"] = True
        if self.left_out is not None and (left_out := self.left_out.to_json()):
            value["left_out"] = left_out
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Cursor:
        """Parse the output of `to_json`.

        Raises:
            OptionError: the value is not a cursor.
        """
        try:
            position, pass_, skip = (_whole(value[name]) for name in ("position", "pass", "skip"))
            state = None
            if value.get("lanes") is not None:
                *head, lanes = value["lanes"]
                references, round_, slot, next_ = (_whole(number, most=_MOST_OF_A_PASS) for number in head)
                triples = tuple(
                    (_whole(o, -1, next_ - 1), _whole(t, most=references), _whole(s)) for o, t, s in lanes
                )
                state = LaneState(references, round_, slot, next_, triples)
            done = tuple((_whole(place), _whole(samples)) for place, samples in value.get("done", ()))
            if sum(samples for _, samples in done) > position:
                raise ValueError("finished shards with more samples than there were")
            left_out = PassedOver.from_json(value["left_out"]) if "left_out" in value else None
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise OptionError("Not a cursor: pass what Cursor.to_json() returned.") from exc
        return cls(position, pass_, skip, state, done, value.get("everything", False) is True, left_out)


def _whole(number: Any, least: int = 0, most: int = _MOST) -> int:
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"not a whole number from {least} to {most}")
    return number


class References(NamedTuple):
    """Samples in the order of training: three int64 arrays of equal length."""

    passes: NDArray[np.int64]
    shards: NDArray[np.int64]
    samples: NDArray[np.int64]


class _Mark(NamedTuple):
    """A state of the lanes, and the number of references before it."""

    before: int
    pass_: int
    lanes: LaneState
    everything: bool
    following: Counts | None
    carried: Mapping[int, Counts]


class _Given:
    """Counts the references given out of each shard of a pass, to find the finished shards for a cursor."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._count = np.zeros(lanes.order.size, np.int32)
        self._last = np.full(lanes.order.size, -1, np.int64)
        self._told: NDArray[np.bool_] | None = None  # by place; made at the first call of `ended`
        self.begin()

    def begin(self) -> None:
        """Start at the lanes' current state: what they gave before precedes every requested position."""
        for place, references, _ in self._lanes.state().lanes:
            if place >= 0:
                self._count[place] = references

    def give(self, position: int, references: NDArray[np.int64]) -> None:
        """Count packed references, the first of which has this position."""
        places = references >> SAMPLE_BITS
        np.add.at(self._count, places, 1)
        self._last[places] = np.arange(position, position + places.size)

    def done(self, lanes: LaneState, position: int) -> tuple[tuple[int, int], ...]:
        """Return the shards that lanes read from a state on and that give nothing from a position on.

        Each as place in the pass and number of samples.
        """
        reading = [place for place, _, _ in lanes.lanes if place >= 0]
        places = np.array([*reading, *range(lanes.next, self._lanes.begun)], np.int64)
        samples = self._lanes.samples[places]
        is_done = (samples >= 0) & (self._count[places] == samples) & (self._last[places] < position)
        return tuple(zip(places[is_done].tolist(), samples[is_done].tolist(), strict=True))

    def ended(self, done: Mapping[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the shards that have ended since the last call, but those in `done`, and their samples."""
        lanes = self._lanes
        if self._told is None:
            self._told = np.zeros(lanes.order.size, bool)
            self._told[[*done]] = True
        places = np.flatnonzero((lanes.samples[: lanes.begun] >= 0) & ~self._told[: lanes.begun])
        self._told[places] = True
        return lanes.order[places], lanes.samples[places]

    def tails(self, done: tuple[tuple[int, int], ...]) -> dict[int, Counts]:
        """Return the samples left out after the last used one of finished shards, by place."""
        tails = self._lanes.tails
        return {place: tails[place] for place, _ in done if place in tails}

    def forget_tails(self, lanes: LaneState) -> None:
        """Drop those of shards that lanes had left before a state."""
        self._lanes.forget_tails(lanes)


class GroupOrder:
    """Computes the sequence of one group, for endless passes or a number of them.

    Costs about 0.3 µs a sample if everything has arrived, up to 1 where some are left out, and a check of one
    shard if nothing new has. Deterministic; not thread-safe; create it in the process that uses it.

    Args:
        options: the same in every process.
        shard_count: of the whole data set.
        group: one of the `options.groups`.
        epoch: each epoch has another order of the same pieces.
        start: where to resume; None begins the epoch.
        passes: the number of passes; None: endless.
        pieces: of the group, if known: computing them takes O(shard_count) time and memory.
        left_out: what leaves samples out, to count them; None: they aren't counted.

    Attributes:
        position: references of the epoch given out so far, including those before `start`.
        finished: whether all passes have been given out. Without any sample in any shard there are no more.
        everything: whether the current pass is over the shards of all groups.
    """

    def __init__(
        self,
        options: OrderOptions,
        shard_count: int,
        group: int,
        epoch: int,
        start: Cursor | None = None,
        passes: int | None = None,
        pieces: Pieces | None = None,
        left_out: LeftOutOf | None = None,
    ) -> None:
        if passes is not None and passes < 1:
            raise OptionError(f"passes must be at least 1, or None for endless ones, not {passes}.")
        start = Cursor.at(0) if start is None else start
        self._options, self._group, self._epoch = options, group, epoch
        self._passes = passes
        self._shard_count = shard_count
        self._pieces = pieces_of(options, shard_count, group) if pieces is None else pieces
        self._most = _portion_of(options.window)
        # A consumer calls `advance` until its batch is known, then asks for the cursor after the batch:
        # less than one call's references back. A call gives out at most the content of the window (less
        # than `window`) and what it takes from the lanes.
        self._history = max(_HISTORY, options.window + _most_taken(options.lanes, options.window))
        # Mutable state, besides the current pass (see `_begin`).
        self.position = start.position
        self.finished = False
        self.everything = start.everything
        self._skip = start.skip
        self._portion = _FIRST_PORTION
        self._marks: deque[_Mark] = deque()
        self._given: dict[int, _Given] = {}  # by pass, back to the oldest mark
        before = start.left_out or NOTHING_LEFT_OUT
        self._left_out = None if left_out is None else LeftOutSoFar(left_out, start.position, before)
        self._start_pass, self._start_done = start.pass_, dict(start.done)
        self._begin(start.pass_, start.lanes, self._start_done, before)
        self._before_pass = start.position - start.skip - self._lanes.given
        self._mark()

    def _begin(
        self,
        pass_: int,
        state: LaneState | None = None,
        done: Mapping[int, int] | None = None,
        left_out: PassedOver = NOTHING_LEFT_OUT,
    ) -> None:
        """Set up the lanes and the window of a pass. The previous window has been given out."""
        options, group_pieces = self._options, self._pieces
        if self.everything:
            group_pieces = Pieces(np.arange(self._shard_count), {})
        order = pass_order(options, group_pieces.shards, self._group, self._epoch, pass_)
        due_key = key(options.seed, DUE, self._epoch, self._group, pass_)
        opens_slowly = options.opens_slowly and self._epoch == 0 and pass_ == 0
        is_even = opens_slowly and order.size <= EVEN_SHARDS * options.lanes
        self._pass = pass_
        self._done = {} if done is None else done
        counted: dict[str, Any] = {}
        if self._left_out is not None:
            counted = self._left_out.of_lanes(left_out)
        self._lanes = Lanes(order, group_pieces.parts, options.lanes, state, self._done, is_even, **counted)
        self._given[pass_] = _Given(self._lanes)
        self._window = ShuffleWindow(due_key, options.window, order.size, opens_slowly)
        self._following: NDArray[np.int64] | None = None

    @property
    def pass_(self) -> int:
        """The current pass of the lanes."""
        return self._pass

    @property
    def front(self) -> tuple[int, int]:
        """The current pass of the lanes, and the place in it of the next shard to begin."""
        return self._pass, self._lanes.begun

    @property
    def begun(self) -> int:
        """Shards that lanes have begun in all passes."""
        return self._pass * self._lanes.order.size + self._lanes.begun

    @property
    def read(self) -> int:
        """References of the epoch that lanes have read so far."""
        return self._before_pass + self._lanes.given

    @property
    def pass_start(self) -> int:
        """References of the epoch before the current pass of the lanes."""
        return self._before_pass

    @property
    def due(self) -> int:
        """References of the epoch that the shards have, at its end: `position`, if none is lost."""
        return self._before_pass + self._lanes.due

    def left_out(self, position: int) -> PassedOver:
        """Return the samples left out before a position of `mark_at`, without what a cursor needs of them."""
        return NOTHING_LEFT_OUT if self._left_out is None else self._left_out.at(position)

    @property
    def left_out_in_all(self) -> Tally:
        """The samples left out in the sequence, at its end."""
        return Counter() if self._left_out is None else self._left_out.total()

    @property
    def released(self) -> int:
        """Number of these that have left the window, including those that a cursor skips."""
        return self.position - self._skip

    def advance(self, arrivals: Arrivals, most: int | None = None) -> References:
        """Return the next references that are determined; none only if something has to arrive first.

        One call takes some hundred from the lanes at first, later an eighth of the window: call it
        repeatedly. At the end of a pass it also returns the rest of the window.

        Args:
            arrivals: what is known about the shards.
            most: about how many to take at most, if all of their shards can't be open at once.
        """
        parts = [_unpack(0, self._lanes.order, np.empty(0, np.int64))]
        least = _FIRST_PORTION if most is None else min(most, _FIRST_PORTION)
        before, room = self.position, self._portion if most is None else min(most, self._portion)
        while (room > 0 or self.position == before) and not self.finished and self._pass_over(arrivals):
            first, count = self._lanes.given, max(room, least)
            if most is None:  # so many give none
                count = max(count, min(self._skip, self._most))
            references = self._lanes.take(arrivals, count)
            over = self._lanes.finished
            if not references.size and not over:
                break
            self._window.push(first, references)
            ready = self._window.pop_all() if over else self._window.pop(self._lanes.given)
            self._given[self._pass].give(self.released, ready)
            skipped = min(self._skip, ready.size)
            self._skip -= skipped
            if self._left_out is not None:
                self._left_out.give(self.position, ready, skipped, self._lanes.take_passed())
            self.position += ready.size - skipped
            parts.append(_unpack(self._pass, self._lanes.order, ready[skipped:]))
            self._mark()
            room -= references.size
            if over:
                self._next_pass()
            elif references.size < count:
                break
        if room <= 0:
            self._portion = min(2 * self._portion, self._most)
        return References(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def ended(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int32]]]:
        """Yield passes, shards that have ended in each since the last call, and the group's samples in them.

        To be called as often as `mark_at`: passes are forgotten, too.
        """
        for pass_, given in self._given.items():
            yield pass_, *given.ended(self._start_done if pass_ == self._start_pass else {})

    def mark_at(self, position: int) -> Cursor:
        """Return the cursor of a position from the last `advance`, or up to 65,536 before the latest.

        Raises:
            ValueError: the position has not been given out yet, or is too old.
        """
        if position <= self.position:
            for mark in reversed(self._marks):
                if self._precedes(mark, position):
                    done = self._given[mark.pass_].done(mark.lanes, position)
                    skip, left_out = position - mark.before, None
                    if self._left_out is not None:
                        following = mark.following if mark.before == position else None
                        tails = self._given[mark.pass_].tails(done)
                        left_out = self._left_out.at(position, following, mark.carried, tails)
                    return Cursor(position, mark.pass_, skip, mark.lanes, done, mark.everything, left_out)
        raise ValueError(
            f"No cursor for position {position}: positions up to {self.position} are given out, and cursors "
            f"are kept for the last {self._history} of them. Take it when the batch is handed out."
        )

    def open_shards(self) -> list[int]:
        """Return the shards that must stay readable: by references in the window, then those in lanes.

        A consumer adds the shards of references that it has received and not read yet.
        """
        if self.finished:
            return []
        reading = self._lanes.reading()
        first = int(reading.min()) if reading.size else self._lanes.begun
        waiting = self._window.waiting(first, self._lanes.begun)
        places = dict.fromkeys([*waiting.tolist(), *reading.tolist()])
        for place in places.keys() & self._done.keys():
            del places[place]
        shards: list[int] = self._lanes.order[[*places]].tolist() if places else []
        return shards

    def coming_shards(self, count: int) -> NDArray[np.int64]:
        """Return the next shards that lanes will begin, up to `count`: of this pass, then of the next one.

        Across the end of the last pass of an epoch see `plan.pass_order`.
        """
        if self.finished:
            return np.empty(0, np.int64)
        coming = self._lanes.order[self._lanes.coming(count)]
        if len(coming) < count and self._pass + 1 != self._passes:
            if self._following is None:
                self._following = self._order_of(self._pass + 1)
            coming = np.concatenate([coming, self._following[: count - len(coming)]])
        return coming

    def blocked(self, arrivals: Arrivals | None = None) -> list[int]:
        """Return the shards whose next samples the lanes lack, one per lane, most urgent first.

        Args:
            arrivals: checked for every lane. Without it the urgency is that of the last `advance`, which
                checked only lanes that ran dry.
        """
        if self.finished:
            return []
        if arrivals is not None:
            self._lanes.refresh(arrivals)
        return [int(shard) for shard in self._lanes.order[self._lanes.lacking()]]

    def _order_of(self, pass_: int) -> NDArray[np.int64]:
        return pass_order(self._options, self._pieces.shards, self._group, self._epoch, pass_)

    def _next_pass(self) -> None:
        gave_nothing = self._lanes.given == 0
        if self._left_out is not None and not self._skip:
            self._left_out.end_pass(self._lanes.carried())
        if self._pass + 1 == self._passes or (
            gave_nothing and (self.everything or self._options.groups == 1)
        ):
            self.finished = True
            return
        self.everything = gave_nothing
        self._before_pass += self._lanes.given
        self._begin(self._pass + 1)
        self._mark()

    def _pass_over(self, arrivals: Arrivals) -> bool:
        """Run the lanes to about a window before the cursor's position. Return whether they got there.

        Everything skipped is due before that position, and the window is still empty.
        """
        window, lanes = self._options.window, self._options.lanes
        while self._skip - window >= lanes and not self.finished:
            self._skip -= self._lanes.pass_over(arrivals, self._skip - window)
            self._given[self._pass].begin()
            self._mark()
            if self._lanes.finished:
                self._next_pass()
            elif self._skip - window >= lanes:
                return False
        return not self.finished

    def _mark(self) -> None:
        """Save the state of the lanes from time to time, and drop states that are too old."""
        before = self.read
        if not self._marks or before - self._marks[-1].before >= self._most:
            state, carried = self._lanes.state(), self._lanes.carried()
            following = None if self._left_out is None else self._left_out.following
            self._marks.append(_Mark(before, self._pass, state, self.everything, following, carried))
        while len(self._marks) > 1 and self._precedes(self._marks[1], self.position - self._history):
            self._marks.popleft()
        for pass_ in [pass_ for pass_ in self._given if pass_ < self._marks[0].pass_]:
            del self._given[pass_]
        if self._left_out is not None:
            self._left_out.forget(self.position - self._history)
            self._given[self._marks[0].pass_].forget_tails(self._marks[0].lanes)

    def _precedes(self, mark: _Mark, position: int) -> bool:
        """Return whether all references before the mark are given out before the position."""
        return mark.before + (self._options.window if mark.lanes.given else 0) <= position


def _unpack(pass_: int, order: NDArray[np.int64], packed: NDArray[np.int64]) -> References:
    return References(np.full(packed.size, pass_), order[packed >> SAMPLE_BITS], packed & SAMPLE_MASK)
