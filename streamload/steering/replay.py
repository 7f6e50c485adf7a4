"""Replay: the weights and batch sizes of a recorded run, from its log of decisions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamload.errors import DecisionsError
from streamload.order.mixing import UNIT, Change
from streamload.order.steps import Resize
from streamload.steering.decisions import BATCH_SIZE, SEQUENCE, WEIGHTS, read_lines


class Recorded(NamedTuple):
    """Weights and sizes in effect from a position of a sequence on."""

    position: int
    shares: tuple[int, ...]
    weights: tuple[float, ...]


class _Sequence(NamedTuple):
    """The weights and sizes of a sequence, from the position on at which the log has it."""

    number: int
    position: int
    weights: list[Recorded]
    sizes: list[Resize]


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

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that can't share a step of the run evenly.

        Raises:
            DecisionsError: it says which.
        """
        for sequence in self._sequences:
            for size in sequence.sizes:
                if size.batch % ranks:
                    raise DecisionsError(
                        f"{self.path}: its run had steps of {size.batch} samples, which {ranks} ranks can't "
                        f"share evenly: replay it on a number of ranks that divides that"
                    )

    def weights(self, sequence: int, position: int) -> list[Recorded]:
        """Changes of the weights of a sequence, the first of them in effect at a position.

        Of a sequence that the log doesn't have, the weights that were set last.

        Raises:
            DecisionsError: the log begins after that position.
        """
        recorded = self._sequence(sequence)
        if recorded is None:
            return [self._sequences[-1].weights[-1]._replace(position=0)]
        if position < recorded.position:
            raise DecisionsError(
                f"{self.path} begins at step {self.run['since']['step']}, where its run was resumed without "
                f"the file: load a state of that step or a later one, or give the log from its beginning"
            )
        weights = recorded.weights
        first = max((i for i, change in enumerate(weights) if change.position <= position), default=0)
        return weights[first:]

    @property
    def base_batch(self) -> int:
        """Samples of a step over all ranks, by the options of the run."""
        return int(self.run["order"]["batch"])

    def sizes(self, sequence: int, position: int) -> list[Resize]:
        """The sizes of a sequence's steps from a position on, where they are others than by the options.

        Of a sequence that the log doesn't have, the size that was set last.
        """
        recorded = self._sequence(sequence)
        if recorded is None:
            return [size._replace(position=0) for size in self._sequences[-1].sizes[-1:]]
        sizes = recorded.sizes
        first = max((i for i, size in enumerate(sizes) if size.position <= position), default=0)
        return sizes[first:]

    def _sequence(self, number: int) -> _Sequence | None:
        return next((recorded for recorded in self._sequences if recorded.number == number), None)

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """The lines of one kind, in the order in which they were written."""
        return [line for line in self.lines if line["kind"] == kind]


def changes_of(recorded: Sequence[Recorded]) -> tuple[Change, ...]:
    """Changes of shares."""
    return tuple(Change(weights.position, weights.shares) for weights in recorded)


def _sequences(path: Path, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Iterator[_Sequence]:
    """The sequences of a log, in the order in which they began.

    Raises:
        DecisionsError: a line lacks something.
    """
    try:
        current = _begun(run["since"])
        for line in lines:
            if line["kind"] == SEQUENCE:
                yield current
                current = _begun(line)
            elif line["kind"] == WEIGHTS and line["shares"] is not None:
                weights = _recorded(line["position"], line["shares"], line["weights"])
                kept = [earlier for earlier in current.weights if earlier.position < weights.position]
                current = current._replace(weights=[*kept, weights])
            elif line["kind"] == BATCH_SIZE:
                size = _resize(line["position"], line["batch"], line["block"])
                earlier_sizes = [earlier for earlier in current.sizes if earlier.position < size.position]
                current = current._replace(sizes=[*earlier_sizes, size])
        yield current
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise DecisionsError(f"{path} isn't a log of decisions: {exc!r:.200}") from None


def _begun(line: Mapping[str, Any]) -> _Sequence:
    weights = [_recorded(position, shares, line["weights"]) for position, shares in line["changes"]]
    sizes = [_resize(*size) for size in line.get("batch_sizes", ())]
    return _Sequence(line["sequence"], line["position"], [weights[0], *weights[1:]], sizes)


def _resize(position: int, batch: int, block: int) -> Resize:
    if min(batch, block) < 1:
        raise ValueError(f"steps of {batch} samples")
    return Resize(int(position), int(batch), int(block))


def _recorded(position: int, shares: Sequence[int], weights: Sequence[float]) -> Recorded:
    if sum(shares) != UNIT or len(shares) != len(weights):
        raise ValueError(f"shares {shares!r:.80}")
    return Recorded(int(position), tuple(shares), tuple(weights))
