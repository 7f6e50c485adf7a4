"""Replay: the weights of a recorded run, from its log of decisions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamload.errors import DecisionsError
from streamload.order.mixing import UNIT, Change
from streamload.steering.decisions import SEQUENCE, WEIGHTS, read_lines


class Recorded(NamedTuple):
    """What is in effect from a position of a sequence on."""

    position: int
    shares: tuple[int, ...]
    weights: tuple[float, ...]


class _Sequence(NamedTuple):
    """The weights of a sequence, from the position on at which the log has it."""

    number: int
    position: int
    weights: list[Recorded]


class Replay:
    """Gives every batch of a recorded run again: `mixing=Replay("decisions.jsonl")`, without what decided.

    Args:
        path: of the log that the run wrote (`Order(decisions=…)`).

    Attributes:
        path: the same.
        run: its first line.
        lines: all others, as they were written.

    Raises:
        DecisionsError: the log was altered, is cut, or isn't one.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.run: Mapping[str, Any]
        self.lines: Sequence[Mapping[str, Any]]
        self.run, *self.lines = [values for values, _ in read_lines(self.path)]
        self._sequences = list(_sequences(self.path, self.run, self.lines))

    def __repr__(self) -> str:
        return f"Replay({str(self.path)!r})"

    def check_run(self, run: Mapping[str, Any]) -> None:
        """Refuse the log of another run.

        Raises:
            DecisionsError: it says what differs.
        """
        for name, ours in run.items():
            theirs = self.run["order"].get(name)
            if theirs != ours:
                raise DecisionsError(
                    f"{self.path} is of a run with another {name}: {theirs!r}, and this is {ours!r}"
                )

    def weights(self, sequence: int, position: int) -> list[Recorded]:
        """What changes the weights of a sequence, the first of them in effect at a position.

        Of a sequence that the log doesn't have, the weights that were set last.

        Raises:
            DecisionsError: the log begins after that position.
        """
        begun = next((one for one in self._sequences if one.number == sequence), None)
        if begun is None:
            return [self._sequences[-1].weights[-1]._replace(position=0)]
        if position < begun.position:
            raise DecisionsError(
                f"{self.path} begins at step {self.run['since']['step']}, where its run was resumed without "
                f"the file: load a state of that step or a later one, or give the log from its beginning"
            )
        found = begun.weights
        first = max((i for i, one in enumerate(found) if one.position <= position), default=0)
        return found[first:]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """The lines of one kind, in the order in which they were written."""
        return [line for line in self.lines if line["kind"] == kind]


def changes_of(recorded: Sequence[Recorded]) -> tuple[Change, ...]:
    """What changes shares."""
    return tuple(Change(one.position, one.shares) for one in recorded)


def _sequences(path: Path, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Iterator[_Sequence]:
    """The sequences of a log, in the order in which they began.

    Raises:
        DecisionsError: a line lacks something.
    """
    try:
        now = _begun(run["since"])
        for line in lines:
            if line["kind"] == SEQUENCE:
                yield now
                now = _begun(line)
            elif line["kind"] == WEIGHTS and line["shares"] is not None:
                one = _recorded(line["position"], line["shares"], line["weights"])
                kept = [earlier for earlier in now.weights if earlier.position < one.position]
                now = now._replace(weights=[*kept, one])
        yield now
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise DecisionsError(f"{path} isn't a log of decisions: {exc!r:.200}") from None


def _begun(line: Mapping[str, Any]) -> _Sequence:
    weights = [_recorded(position, shares, line["weights"]) for position, shares in line["changes"]]
    return _Sequence(line["sequence"], line["position"], [weights[0], *weights[1:]])


def _recorded(position: int, shares: Sequence[int], weights: Sequence[float]) -> Recorded:
    if sum(shares) != UNIT or len(shares) != len(weights):
        raise ValueError(f"shares {shares!r:.80}")
    return Recorded(int(position), tuple(shares), tuple(weights))
