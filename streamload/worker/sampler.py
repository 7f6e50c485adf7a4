"""The sampler: this rank's samples of each step, and the state of the order after it (B to E)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from streamload.batches.in_progress import Bounds
from streamload.errors import NoValidSamples
from streamload.order.events import BATCH_SIZE, WEIGHTS, Event, in_effect, joined, of_kind
from streamload.order.steps import Portion, Portions, Share, Steps
from streamload.worker.messages import Ended, EpochStart, Span, Visit, WorkerConfig
from streamload.worker.reader import Reader
from streamload.worker.states import GroupState


class RankStep(Protocol):
    """A rank's part of one step. Its references can be taken once; seats and passes are valid after `visits`.

    Attributes:
        position: the global position where it begins.
        passes: by source the latest pass of its samples; empty: there is one source.
        bounds: the most tokens and patches of each row on any rank; None: unknown. Valid after `visits`.
    """

    position: int
    passes: dict[int, int]
    bounds: Bounds | None

    @property
    def size(self) -> int:
        """The number of samples that this rank computes."""
        ...

    @property
    def seats(self) -> npt.NDArray[np.int64]:
        """The source of each sample: int64[size]."""
        ...

    @property
    def parts(self) -> Sequence[int] | None:
        """The rows of each part that `collate=` gets by itself; None: it gets all at once."""
        ...

    def visits(self) -> Iterator[list[Visit] | None]:
        """The samples, in parts as they become known; fewer where the sequence ends.

        In training a step that isn't full on all ranks is skipped by all: then the last item is None.
        """
        ...

    def states(self) -> dict[int, GroupState]:
        """The state of each group after the step; valid after `visits`."""
        ...

    def spans(self) -> dict[str, Span]:
        """The hashes before and after the step, by group and source; valid after `visits`."""
        ...


class Sampler:
    """The steps of one epoch, in ascending order, each by its own part of the order.

    Args:
        config: what is read.
        reader: has the reference streams.
        start: where the epoch begins.

    Attributes:
        steps: of the epoch.
    """

    def __init__(self, config: WorkerConfig, reader: Reader, start: EpochStart):
        self._config = config
        self._reader = reader
        self._start = start
        self._events: Sequence[Event] = start.events
        self._groups = config.split.groups_of(config.rank)
        self.steps: Steps = config.steps.steps(start.start, of_kind(start.events, BATCH_SIZE))
        self._mixtures: dict[int, Portions] = {}

    def receive(self, events: Sequence[Event]) -> None:
        """Go by events of later steps; those of earlier ones may be left out."""
        sizes = of_kind(events, BATCH_SIZE)
        self._events = joined(self._events, [*of_kind(events, WEIGHTS), *sizes])
        self.steps.resize(sizes)
        for mixture in self._mixtures.values():
            mixture.events = self._events

    def at(self, position: int) -> RankStep:
        """The step at a global position."""
        parts = [_Part(share, self._mixture(share.group).at(position)) for share in self._shares(position)]
        return Step(self._config, self._reader, position, parts)

    def coming(self, position: int) -> list[tuple[int, int]]:
        """This rank's samples of a later step, by shard and number, as far as they are known."""
        samples: list[tuple[int, int]] = []
        if position not in self.steps:
            return samples
        for share in self.steps.at(position).shares(position, self._config.rank, self._groups):
            # A copy, as weights may still change before that step.
            part = _Part(share, copy.copy(self._mixture(share.group)).at(position))
            for source in _sources(part.seats):
                first = part.first[source]
                stop = first + int(np.count_nonzero(part.seats == source))
                rows = self._reader.peek(share.group, source, first, stop)
                samples += [(int(shard), int(number)) for _, shard, number in rows]
        return samples

    def fits(self, visit: Visit, shard: int, number: int) -> bool:
        """True if a sample isn't longer than the place of a visit is wide."""
        return True

    def leaves_out(self, visit: Visit) -> bool:
        """True if nothing takes the place of a sample of the current step that turned out to be bad."""
        return False

    def ended(self, number: int, position: int) -> Ended:
        """The message that the sequence ends before a step.

        Args:
            number: of the step in the epoch.
            position: where it would begin.
        """
        batch = self.steps.at(position).batch
        return Ended(number, position, batch, self._reader.due(), self._reader.left_out())

    def _shares(self, position: int) -> list[Share]:
        """This rank's shares of the groups' parts of a step, which is the next one."""
        if len(self._config.sources) > 1:
            self._reader.give_shares(in_effect(of_kind(self._events, WEIGHTS), position))
        return self.steps.at(position).shares(position, self._config.rank, self._groups)

    def _mixture(self, group: int) -> Portions:
        mixture = self._mixtures.get(group)
        if mixture is None:
            start, zeros = self._start, (0,) * len(self._config.sources)
            state = start.groups.get(self._config.first_group + group)
            positions = zeros if state is None else [source.cursor.position for source in state.sources]
            owed = zeros if state is None else state.owed
            block = self.steps.block(start.position)
            position = start.position if block is None else block.begin
            portions: type[Portions] = Portions
            if self._config.draws.sources != "mixed":
                from streamload.order.parts import PortionsInParts

                portions = PortionsInParts
            mixture = self._mixtures[group] = portions(
                self.steps, group, position, self._events, positions, owed, self._config.draws
            )
        return mixture


class _Part:
    """A rank's part of a step, from one group.

    Attributes:
        seats: the source of each sample.
        first: for each source, the position in its sequence where the part begins.
    """

    def __init__(self, share: Share, portion: Portion):
        self.group = share.group
        self.portion = portion
        seats = portion.seats()
        self.seats = seats[share.first - share.begin : share.stop - share.begin]
        before = np.bincount(seats[: share.first - share.begin], minlength=len(portion.take))
        self.first = (before + portion.first).tolist()


@dataclass(slots=True)
class Step:
    """The part of one step that consists of parts of groups; see RankStep."""

    config: WorkerConfig
    reader: Reader
    position: int
    shares: list[_Part]
    bounds: Bounds | None = None
    parts: None = None
    passes: dict[int, int] = field(default_factory=dict)
    _before: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of samples that this rank computes."""
        return sum(part.seats.size for part in self.shares)

    @property
    def seats(self) -> npt.NDArray[np.int64]:
        """The source of each sample: int64[size]."""
        return np.concatenate([part.seats for part in self.shares])

    def visits(self) -> Iterator[list[Visit] | None]:
        """The samples, in parts as they become known; fewer where the sequence ends.

        In training a step that isn't full on all ranks is skipped by all: then the last item is None.
        """
        for part in self.shares:
            for source in _sources(part.seats):
                self.reader.references(part.group, source).begin_at(part.first[source])
        for part in self.shares:
            yield from self._known(part)
        if self.config.train and not self._is_whole():
            yield None

    def states(self) -> dict[int, GroupState]:
        """The state of each group after the step; valid after `visits`."""
        states = {}
        for part in self.shares:
            sources = [
                self.reader.references(part.group, source).state(stop)
                for source, stop in enumerate(part.portion.stop)
            ]
            states[self.config.first_group + part.group] = GroupState(part.portion.owed, tuple(sources))
        return states

    def spans(self) -> dict[str, Span]:
        """The hashes before and after the step, by group and source; valid after `visits`."""
        spans = {}
        for part in self.shares:
            for source, stop in enumerate(part.portion.stop):
                behind = self.reader.references(part.group, source).digest(stop)
                before = self._before.get((part.group, source), behind)
                begin = part.portion.first[source]
                spans[f"{part.group}.{source}"] = Span(begin, before, stop, behind)
        return spans

    def _known(self, part: _Part) -> Iterator[list[Visit]]:
        """The visits of a part, in the order of its seats."""
        remaining, first = part.seats, list(part.first)
        while remaining.size and self.reader.has(part.group, int(remaining[0]), first[remaining[0]] + 1):
            many = remaining.size
            for source in _sources(remaining):
                seats = np.flatnonzero(remaining == source)
                stream = self.reader.references(part.group, source)
                ready = max(0, stream.known(first[source] + seats.size) - first[source])
                if ready < seats.size:
                    many = min(many, int(seats[ready]))
            yield self._take(part, remaining[:many], first)
            remaining = remaining[many:]

    def _take(self, part: _Part, seats: npt.NDArray[np.int64], first: list[int]) -> list[Visit]:
        """The visits of seats whose references are all known."""
        rows = np.empty((seats.size, 3), np.int64)
        for source in _sources(seats):
            self._note(part, source)
            are_of_source = seats == source
            stop = first[source] + int(np.count_nonzero(are_of_source))
            references = self.reader.references(part.group, source).take(first[source], stop)
            rows[are_of_source], first[source] = references, stop
            self.passes[source] = max(self.passes.get(source, 0), int(references[-1, 0]))
        return [
            Visit(source, pass_, shard, number)
            for source, (pass_, shard, number) in zip(seats.tolist(), rows.tolist(), strict=True)
        ]

    def _note(self, part: _Part, source: int) -> None:
        """Keep the hash of the references before the step."""
        if (part.group, source) not in self._before:
            stream = self.reader.references(part.group, source)
            self._before[part.group, source] = stream.digest(part.portion.first[source])

    def _is_whole(self) -> bool:
        """Wait until all samples of the step are known, for all ranks; False if there are fewer.

        Raises:
            NoValidSamples: one of several sources, which are read again and again, has no usable sample.
        """
        for part in self.shares:
            for source, stop in enumerate(part.portion.stop):
                if not self.reader.has(part.group, source, stop):
                    if len(self.config.sources) > 1:
                        name = self.config.sources[source].name
                        raise NoValidSamples(
                            f"no usable sample in source {name!r}, which has a share of a step"
                        )
                    return False
                self._note(part, source)
        return True


def _sources(seats: npt.NDArray[np.int64]) -> list[int]:
    """The distinct sources of some seats, sorted (np.unique would import numpy.ma: 5 MB in each worker)."""
    sources: list[int] = np.flatnonzero(np.bincount(seats)).tolist()
    return sources
