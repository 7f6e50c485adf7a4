"""Replay: the weights and batch sizes of a recorded run, from its log of decisions."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamload.errors import DecisionsError
from streamload.order.events import (
    BATCH_SIZE,
    UNIT,
    WEIGHTS,
    Event,
    in_effect,
    joined,
    new_batch_size,
    new_weights,
    of_kind,
)
from streamload.steering.decisions import SEQUENCE, read_lines


class _Sequence(NamedTuple):
    """The events of a sequence, from the position on at which the log has it."""

    number: int
    position: int
    events: list[Event]


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
        weighed = [line for line in (self.run["since"], *self.lines) if line.get("loss_weights")]
        self._loss_weights = [(line["step"], tuple(line["loss_weights"])) for line in weighed]

    def __repr__(self) -> str:
        return f"Replay({str(self.path)!r})"

    def check_run(self, run: Mapping[str, Any]) -> None:
        """Refuse the log of another run.

        Raises:
            DecisionsError: it says what differs.
        """
        for name in {**run, **self.run["order"]}:
            ours, theirs = run.get(name), self.run["order"].get(name)
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
            for size in of_kind(sequence.events, BATCH_SIZE):
                batch = size.value["batch"]
                if batch % ranks:
                    raise DecisionsError(
                        f"{self.path}: its run had steps of {batch} samples, which {ranks} ranks can't "
                        f"share evenly: replay it on a number of ranks that divides that"
                    )

    def loss_weights(self, step: int) -> tuple[float, ...] | None:
        """The weights of the sources in the loss at a step of the run; None: 1."""
        after = bisect.bisect_right(self._loss_weights, step, key=lambda change: change[0])
        return self._loss_weights[after - 1][1] if after else None

    @property
    def base_batch(self) -> int:
        """Samples of a step over all ranks, by the options of the run."""
        return int(self.run["order"]["batch"])

    def events(self, sequence: int, position: int) -> list[Event]:
        """The events of a sequence that hold from a position on, and later ones.

        Of a sequence that the log doesn't have, the weights and the size that were set last.

        Raises:
            DecisionsError: the log begins after that position.
        """
        recorded = next((recorded for recorded in self._sequences if recorded.number == sequence), None)
        if recorded is None:
            last = {event.kind: event._replace(position=0) for event in self._sequences[-1].events}
            return list(last.values())
        if position < recorded.position:
            raise DecisionsError(
                f"{self.path} begins at step {self.run['since']['step']}, where its run was resumed without "
                f"the file: load a state of that step or a later one, or give the log from its beginning"
            )
        return in_effect(recorded.events, position)


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
                current.events[:] = joined(current.events, [_weights(line["position"], line["shares"], line)])
            elif line["kind"] == BATCH_SIZE:
                current.events[:] = joined(
                    current.events, [_size(line["position"], line["batch"], line["block"])]
                )
        yield current
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise DecisionsError(f"{path} isn't a log of decisions: {exc!r:.200}") from None


def _begun(line: Mapping[str, Any]) -> _Sequence:
    weights = [_weights(position, shares, line) for position, shares in line["changes"]]
    sizes = [_size(*size) for size in line.get("batch_sizes", ())]
    return _Sequence(line["sequence"], line["position"], [weights[0], *weights[1:], *sizes])


def _size(position: int, batch: int, block: int) -> Event:
    if min(batch, block) < 1:
        raise ValueError(f"steps of {batch} samples")
    return new_batch_size(int(position), int(batch), int(block))


def _weights(position: int, shares: Sequence[int], line: Mapping[str, Any]) -> Event:
    if sum(shares) != UNIT or len(shares) != len(line["weights"]):
        raise ValueError(f"shares {shares!r:.80}")
    return new_weights(int(position), shares, line["weights"])
