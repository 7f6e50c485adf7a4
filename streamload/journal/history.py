"""A journal as it was written: a tree of segments, and what each of them recorded.

The steps of a run are counted from its start. A restart from an older state is another segment, which counts
on from the state's step: later steps of the segment before were abandoned. A step is found by its number
among the steps that led to a segment, by default the last one.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.errors import JournalError
from streamload.journal.content import UNKNOWN
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


class Digests(NamedTuple):
    """The digests of a step; None where it has none.

    Attributes:
        samples: by shard and number.
        content: of the bytes of the samples.
    """

    samples: int | None
    content: int | None


class Mark(NamedTuple):
    """The state of a rank before a step.

    Attributes:
        origin: the step at which its sequence began, or was taken up.
        state: of the loader.
    """

    origin: int
    state: Mapping[str, Any]


class OfPass(NamedTuple):
    """A pass of a group over a source.

    Attributes:
        origin: the step at which the sequence began, or was taken up.
        group, source: their numbers.
        pass_: of the sequence.
    """

    origin: int
    group: int
    source: int
    pass_: int


class Reached(NamedTuple):
    """The place that a group had reached in a source.

    Attributes:
        pass_, shards: of a state of its lanes, the pass, and how many shards of it they had begun.
        read: references that the lanes had given by then.
        position: references that steps had used, some more.
    """

    pass_: int
    shards: int
    read: int
    position: int


@dataclass(slots=True)
class RankRecords:
    """What one rank recorded of a segment.

    Attributes:
        begin: of its first record.
        marks: by the step before which it was: the state, and the step at which its sequence began.
        events: with the steps at which they were seen, and those at which their sequences began.
        chunks: the records of steps, in their order.
        ended: of shards that have ended, with the step at which their sequence began.
        usual: of each source the number of losses and their mean, before a step.
    """

    begin: Mapping[str, Any]
    marks: dict[int, Mark] = field(default_factory=dict)
    events: list[tuple[int, int, Event]] = field(default_factory=list)
    chunks: list[Record] = field(default_factory=list)
    ended: list[tuple[int, npt.NDArray[np.int64]]] = field(default_factory=list)
    usual: list[tuple[int, Mapping[str, tuple[int, float]]]] = field(default_factory=list)

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

    @functools.cached_property
    def ranks(self) -> dict[int, RankRecords]:
        """What all ranks recorded of it whose files are there."""
        by_rank = {rank: self._history.of_rank(rank).get(self.name) for rank in range(self.world_size)}
        return {rank: records for rank, records in by_rank.items() if records is not None}

    @property
    def stop(self) -> int:
        """The step after the last one that all of its ranks have recorded."""
        return min((records.stop for records in self.ranks.values()), default=self.first)

    def marks_before(self, step: int) -> tuple[int, list[Mark]]:
        """The last marks up to a step: before which step they are, and those of the ranks that have them.

        Raises:
            JournalError: ranks that know of groups lack it.
        """
        marked = [records.marks for records in self.ranks.values() if records.marks]
        common = set.intersection(*map(set, marked)) if marked else set()
        marked_at = max((number for number in common if number <= step), default=None)
        if marked_at is None:
            raise JournalError(f"segment {self.name} of the journal has no mark before step {step}")
        return marked_at, [marks[marked_at] for marks in marked]

    @functools.cached_property
    def all_marks(self) -> dict[int, Mark]:
        """The marks of one of the ranks that have each group, by their steps."""
        return next((records.marks for records in self.ranks.values() if records.marks), {})

    def reached(self, step: int, group: int, source: int) -> Reached:
        """The place that a group had reached in a source at a mark."""
        for records in self.ranks.values():
            mark = records.marks.get(step)
            state = None if mark is None else mark.state["at"].get(str(group))
            if state is not None:
                cursor = state["sources"][source]["cursor"]
                lanes, position = cursor.get("lanes"), int(cursor["position"])
                shards = 0 if lanes is None else int(lanes[3])
                return Reached(int(cursor["pass"]), shards, position - int(cursor["skip"]), position)
        return Reached(0, 0, 0, 0)

    def passes(self, origin: int, group: int, source: int) -> range:
        """The passes of a group over a source in a sequence, as far as they were begun."""
        ended = [key.pass_ for key in self.ended if key[:3] == (origin, group, source)]
        marked = [
            self.reached(step, group, source).pass_
            for step, mark in self.all_marks.items()
            if mark.origin == origin
        ]
        return range(min(marked, default=0), max([*ended, *marked], default=-1) + 1)

    def marks_after(self, step: int, origin: int) -> Iterator[Mapping[str, Any]]:
        """The states of all ranks after a step, in a sequence, in their order."""
        for records in self.ranks.values():
            for number, mark in records.marks.items():
                if number > step and mark.origin == origin:
                    yield mark.state

    def epoch_after(self, step: int) -> int:
        """The step with which the first epoch after a step begins, or that after the last of the segment."""
        later = ((number, mark.state) for number, mark in self.all_marks.items() if number > step)
        begins = (number for number, state in later if state["position"] == state["began"])
        return min(begins, default=self.stop)

    def gave_up(self, origin: int) -> bool:
        """True if a shard couldn't be read to its end in a sequence, which may be whole now."""
        of_sequence = (shards for key, shards in self.ended.items() if key.origin == origin)
        return any(shard.record.given_up >= 0 for shards in of_sequence for shard in shards.values())

    def events(self, origin: int) -> list[Event]:
        """The events of a sequence, but those of its first mark."""
        events: list[Event] = []
        for _, sequence, event in self.rank(0).events:  # alike on all ranks
            if sequence == origin:
                events = joined(events, [event])
        return events

    @functools.cached_property
    def ended(self) -> dict[OfPass, dict[int, EndedShard]]:
        """The shards that have ended, by pass, and by their index in the source."""
        by_pass: dict[OfPass, dict[int, EndedShard]] = {}
        for records in self.ranks.values():
            for origin, rows in records.ended:
                for group, source, pass_, shard, samples, *record in rows.tolist():
                    count, is_ended, *identity = record
                    shard_end = EndedShard(samples, CheckpointShard(count, bool(is_ended), *identity))
                    by_pass.setdefault(OfPass(origin, group, source, pass_), {})[shard] = shard_end
        return by_pass

    def digests(self, step: int, ranks: Iterable[int]) -> Digests:
        """The digests of a step on some of the ranks; each is None where one of these lacks it."""
        samples = 0
        content: int | None = 0
        for rank in ranks:
            records = self._history.of_rank(rank).get(self.name)
            place_in = None if records is None else records.chunk(step)
            if place_in is None:
                return Digests(None, None)
            chunk, place = place_in
            samples += int(chunk.arrays["digest"][place])
            of_rank = int(chunk.arrays["content"][place]) if "content" in chunk.arrays else UNKNOWN
            content = None if content is None or of_rank == UNKNOWN else content + of_rank
        return Digests(samples & (1 << 64) - 1, None if content is None else content & (1 << 32) - 1)

    def losses(self, step: int, rank: int) -> Losses | None:
        """The losses of a step that a rank reported; None: it reported none."""
        place_in = self.rank(rank).chunk(step)
        if place_in is None or "loss" not in place_in[0].arrays:
            return None
        arrays, place = place_in[0].arrays, place_in[1]
        count = int(arrays["count"][place])
        worst = arrays["worst"][place, :count].astype(float).tolist()
        return Losses(float(arrays["loss"][place]), arrays["rows"][place, :count].tolist(), worst)

    def usual_loss(self, step: int, source: str) -> float | None:
        """The mean loss of a source around a step, over all ranks; None: none was reported."""
        total, count = 0.0, 0
        for records in self.ranks.values():
            later = [sources for number, sources in records.usual if number > step and source in sources]
            earlier = [sources for number, sources in records.usual if number <= step and source in sources]
            for many, mean in [later[0][source]] if later else [earlier[-1][source]] if earlier else []:
                total, count = total + many * mean, count + many
        return total / count if count else None


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
        named = next((segment for segment in self.segments if segment.name == name), None)
        if named is None:
            names = ", ".join(segment.name for segment in self.segments[-8:])
            raise JournalError(f"the journal has no segment {name!r}; the last ones are {names}")
        return named

    def branch(self, name: str | None = None) -> list[tuple[Segment, int, int]]:
        """The segments that led to one, by default the last: each with its first step and where it stopped.

        A run whose journal began later than it has no segments before that.
        """
        segment: Segment | None = self.segment(name)
        stop, parts = 1 << 62, []
        while segment is not None:
            parts.append((segment, segment.first, min(stop, segment.stop)))
            stop, parent = segment.first, segment.parent
            by_name = {other.name: other for other in self.segments}
            segment = None if parent is None else by_name.get(parent[0])
        return parts[::-1]

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
        elif current is None:
            raise JournalError(f"{path} doesn't begin with a segment")
        elif record.kind == "mark":
            current.marks[int(values["step"])] = Mark(int(values["origin"]), values["state"])
        elif record.kind == "event":
            step, origin = int(values["step"]), int(values["origin"])
            current.events += [(step, origin, event) for event in from_json([values["event"]])]
        elif record.kind == "ended":
            current.ended.append((int(values["origin"]), record.arrays["shards"]))
        elif record.kind == "usual":
            current.usual.append((int(values["step"]), values["sources"]))
        elif record.kind == "steps":
            current.chunks.append(record)
    return segments
