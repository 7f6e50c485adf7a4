"""A group's position in its order, as a small value for a checkpoint (steps B to E).

A cursor has a position, and a state of the lanes at least a window before it. Running the lanes from there
and dropping `skip` references resumes exactly. The options are saved separately.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from streamload.errors import OptionError

_MOST = 1 << 62
_MOST_OF_A_PASS = 1 << 40
"""Keeps the arithmetic of lanes.py within 64 bits."""


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


class Cursor(NamedTuple):
    """A position in a group's sequence, and how to get there.

    Attributes:
        position: references before it since the epoch began.
        pass_: the pass of `lanes`.
        skip: the number of references between that state and the position, including those of later passes.
        lanes: a state at least a window before the position; None for the beginning of the pass.
        done: of the shards that lanes read from that state on, the finished ones: place in the pass and
            number of samples. They aren't needed to resume.
        everything: whether that pass is over the shards of all groups (see group.py).
    """

    position: int
    pass_: int
    skip: int
    lanes: LaneState | None = None
    done: tuple[tuple[int, int], ...] = ()
    everything: bool = False

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
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise OptionError("Not a cursor: pass what Cursor.to_json() returned.") from exc
        return cls(position, pass_, skip, state, done, value.get("everything", False) is True)


def _whole(number: Any, least: int = 0, most: int = _MOST) -> int:
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"not a whole number from {least} to {most}")
    return number
