"""A journal as it was written: a tree of segments, and what each of them recorded.

The steps of a run are counted from its start. A restart from an older state is another segment, which counts
on from the state's step: later steps of the segment before were abandoned. A step is found by its number
among the steps that led to a segment, by default the last one.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.errors import JournalError
from streamload.journal.files import Record, path_of, read_records
from streamload.order.events import Event, from_json, joined
from streamload.worker.states import CheckpointShard


class Losses(NamedTuple):
    """The losses of a step on one rank, as they were reported.

    Attributes:
        mean: of all rows; NaN: none was reported.
        rows: the rows with the highest losses, highest first.
        worst: their losses.
    """

    mean: float
    rows: list[int]
    worst: list[float]


class EndedShard(NamedTuple):
    """A shard to whose end the order has come in a pass.

    Attributes:
        samples: the group's in it.
        record: as a state has it.
    """

    samples: int
    record: CheckpointShard


@dataclass(slots=True)
class RankRecords:
    """What one rank recorded of a segment.

    Attributes:
        begin: of its first record.
        marks: by the step before which the state was.
        events: with the steps at which they were seen.
        chunks: the records of steps, in their order.
        ended: shards that have ended, by the step at which their sequence began.
    """

    begin: Mapping[str, Any]
    marks: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    events: list[tuple[int, Event]] = field(default_factory=list)
    chunks: list[Record] = field(default_factory=list)
    ended: dict[int, list[npt.NDArray[np.int64]]] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The step after the last one that is recorded."""
        if not self.chunks:
            return int(self.begin["step"])
        return int(self.chunks[-1].values["step"]) + len(self.chunks[-1].arrays["digest"])

    def chunk(self, step: int) -> tuple[Record, int] | None:
        """The record of a step, and its place in it; None: there is none."""
        number = bisect.bisect_right(self.chunks, step, key=lambda chunk: int(chunk.values["step"])) - 1
        if number < 0:
            return None
        chunk = self.chunks[number]
        place = step - int(chunk.values["step"])
        return (chunk, place) if place < len(chunk.arrays["digest"]) else None


class Segment:
    """One attempt of a run: from the loading of a state, or its start, to its end.

    Args:
        history: that it is of.
        begin: the values of its first record.

    Attributes:
        name: of it.
        first: its first step.
        parent: the segment whose state it has loaded, and the step of that; None: it began anew.
        world_size: its ranks.
        rows: of a rank in a step, by the options.
        groups: of the order.
    """

    def __init__(self, history: RunHistory, begin: Mapping[str, Any]):
        self._history, self.begin = history, begin
        self.name, self.first = str(begin["segment"]), int(begin["step"])
        self.parent: tuple[str, int] | None = None if begin["parent"] is None else tuple(begin["parent"])
        self.world_size, self.rows = int(begin["world_size"]), int(begin["rows"])
        self.groups = int(begin["order"]["groups"])

    def rank(self, rank: int) -> RankRecords:
        """What a rank recorded of it.

        Raises:
            JournalError: nothing: its file is missing.
        """
        records = self._history.of_rank(rank).get(self.name)
        if records is None:
            raise JournalError(
                f"{self._history.folder} has nothing of rank {rank} in segment {self.name}, of "
                f"{self.world_size} ranks: was its file lost?"
            )
        return records

    @property
    def ranks(self) -> dict[int, RankRecords]:
        """What all ranks recorded of it whose files are there."""
        matches = {rank: self._history.of_rank(rank).get(self.name) for rank in range(self.world_size)}
        return {rank: records for rank, records in matches.items() if records is not None}

    @property
    def stop(self) -> int:
        """The step after the last one that all of its ranks have recorded."""
        return min((records.stop for records in self.ranks.values()), default=self.first)

    def states_before(self, step: int) -> tuple[int, list[Mapping[str, Any]]]:
        """The last mark up to a step: before which step it is, and the states of the ranks that have it.

        Raises:
            JournalError: ranks that know of groups lack it.
        """
        marked = [records.marks for records in self.ranks.values() if records.marks]
        common = set.intersection(*map(set, marked)) if marked else set()
        marked_at = max((number for number in common if number <= step), default=None)
        if marked_at is None:
            raise JournalError(f"segment {self.name} of the journal has no mark before step {step}")
        return marked_at, [marks[marked_at] for marks in marked]

    def epoch_after(self, step: int) -> int:
        """The step with which the first epoch after a step begins, or that after the last of the segment."""
        marks = ((number, state) for number, state in self.rank(0).marks.items() if number > step)
        return min(
            (number for number, state in marks if state["position"] == state["began"]), default=self.stop
        )

    def events(self, step: int) -> list[Event]:
        """The events of the sequence of a step, up to the end of its epoch, but those of its first mark."""
        events: list[Event] = []
        first, stop = self.sequence_of(step), self.epoch_after(step)
        for number, event in self.rank(0).events:  # alike on all ranks
            if first <= number < stop:
                events = joined(events, [event])
        return events

    def sequence_of(self, step: int) -> int:
        """The first step of the segment that is of the sequence of a step."""
        return max(number for number in self.rank(0).ended if number <= step)

    def ended(self, step: int) -> dict[tuple[int, int, int], dict[int, EndedShard]]:
        """The shards that have ended in the sequence of a step.

        Returns:
            They, by group, source and pass, and by their index in the source.
        """
        matches: dict[tuple[int, int, int], dict[int, EndedShard]] = {}
        for records in self.ranks.values():
            for rows in records.ended.get(self.sequence_of(step), ()):
                for group, source, pass_, shard, samples, *record in rows.tolist():
                    count, is_ended, *identity = record
                    ended_shard = EndedShard(samples, CheckpointShard(count, bool(is_ended), *identity))
                    matches.setdefault((group, source, pass_), {})[shard] = ended_shard
        return matches

    def digest(self, step: int) -> int | None:
        """The digest of the samples of a step of all ranks; None: a rank lacks it."""
        total = 0
        for rank in range(self.world_size):
            digest = self.digest_of(step, rank)
            if digest is None:
                return None
            total += digest
        return total & (1 << 64) - 1

    def digest_of(self, step: int, rank: int) -> int | None:
        """The digest of the samples of a step on one rank; None: it isn't recorded."""
        records = self._history.of_rank(rank).get(self.name)
        matches = None if records is None else records.chunk(step)
        return None if matches is None else int(matches[0].arrays["digest"][matches[1]])

    def losses(self, step: int, rank: int) -> Losses | None:
        """The losses of a step that a rank reported; None: it reported none."""
        matches = self.rank(rank).chunk(step)
        if matches is None or "loss" not in matches[0].arrays:
            return None
        arrays, place = matches[0].arrays, matches[1]
        count = int(arrays["count"][place])
        worst = arrays["worst"][place, :count].astype(float).tolist()
        return Losses(float(arrays["loss"][place]), arrays["rows"][place, :count].tolist(), worst)


class RunHistory:
    """The journal of a run.

    Args:
        folder: of its files.

    Raises:
        JournalError: it has none, or they can't be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._of_rank: dict[int, dict[str, RankRecords]] = {}
        if not path_of(self.folder, 0).is_file():
            raise JournalError(
                f"{self.folder} has no journal, of files rank-00000.journal and so on: Order(journal=folder) "
                f"keeps one"
            )
        self.segments = [Segment(self, records.begin) for records in self.of_rank(0).values()]
        if not self.segments:
            raise JournalError(f"the journal {self.folder} is empty: no epoch has begun")

    def of_rank(self, rank: int) -> dict[str, RankRecords]:
        """What a rank recorded, by segment."""
        records = self._of_rank.get(rank)
        if records is None:
            path = path_of(self.folder, rank)
            records = self._of_rank[rank] = _by_segment(path) if path.is_file() else {}
        return records

    def segment(self, name: str | None = None) -> Segment:
        """A segment by its name; None: the last one.

        Raises:
            JournalError: there is no such segment.
        """
        if name is None:
            return self.segments[-1]
        matches = next((segment for segment in self.segments if segment.name == name), None)
        if matches is None:
            names = ", ".join(segment.name for segment in self.segments[-8:])
            raise JournalError(f"the journal has no segment {name!r}; the last ones are {names}")
        return matches

    def branch(self, name: str | None = None) -> list[tuple[Segment, int, int]]:
        """The segments that led to one, by default the last: each with its first step and where it stopped.

        Those that this journal doesn't have, as it was begun later, are left out.
        """
        segment: Segment | None = self.segment(name)
        stop, matches = 1 << 62, []
        while segment is not None:
            matches.append((segment, segment.first, min(stop, segment.stop)))
            stop, parent = segment.first, segment.parent
            by_name = {other.name: other for other in self.segments}
            segment = None if parent is None else by_name.get(parent[0])
        return matches[::-1]

    def at(self, step: int, name: str | None = None) -> Segment:
        """The segment that a step is of, among those that led to one, by default the last.

        Raises:
            JournalError: none recorded it.
        """
        branch = self.branch(name)
        for segment, first, stop in branch:
            if first <= step < stop:
                return segment
        covered = ", ".join(f"{first} to {stop - 1}" for _, first, stop in branch if stop > first)
        raise JournalError(f"the journal has no step {step}; it has {covered or 'none'}")


def _by_segment(path: Path) -> dict[str, RankRecords]:
    """The records of a file by segment, in their order."""
    segments: dict[str, RankRecords] = {}
    current: RankRecords | None = None
    for record in read_records(path):
        values = record.values
        if record.kind == "segment":
            current = segments[str(values["segment"])] = RankRecords(values)
            current.ended[int(values["step"])] = []
        elif current is None:
            raise JournalError(f"{path} doesn't begin with a segment")
        elif record.kind == "mark":
            current.marks[int(values["step"])] = values["state"]
            if values["state"]["position"] == 0:
                current.ended[int(values["step"])] = []
        elif record.kind == "event":
            current.events += [(int(values["step"]), event) for event in from_json([values["event"]])]
        elif record.kind == "ended":
            current.ended[max(current.ended)].append(record.arrays["shards"])
        elif record.kind == "steps":
            current.chunks.append(record)
    return segments
