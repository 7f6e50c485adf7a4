"""A worker process's parts of the loader's extensions, and the rows that they see (step I)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from streamload.batches.in_progress import Allocate
from streamload.extension import BatchColumn, Event, Extension, ReadProgress, WorkerPart
from streamload.ipc import ControlBlock
from streamload.order.events import of_kind
from streamload.order.steps import Steps
from streamload.shards.samples import Entry, Sample
from streamload.worker.messages import EpochStart, Visit
from streamload.worker.reader import Reader
from streamload.worker.sampler import RankStep, Sampler
from streamload.worker.states import GroupState


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of a batch whose samples are in one shard.

    Attributes:
        places: of the rows in the batch: int64[N].
        shard: the index of the shard among those of the run.
    """

    places: npt.NDArray[np.int64]
    shard: int
    _numbers: npt.NDArray[np.int64]
    _reader: Reader

    @property
    def url(self) -> str:
        """The URL of the shard."""
        return self._reader.shards[self.shard].name

    def facts(self, names: Sequence[str]) -> Mapping[str, npt.NDArray[np.float64]]:
        """Facts of the samples by name: float64[N], NaN where unknown."""
        return self._reader.facts(self.shard, self._numbers, names)

    def entries(self) -> list[Entry]:
        """The samples' index entries, with the facts of the user's columns."""
        return self._reader.entries(self.shard, self._numbers.tolist())


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a batch in a worker, replacements included.

    Attributes:
        step: that has them.
        samples: shard and number of each row's sample.
        visits: of each row, as the order has it: of another sample where that one was replaced.
        reader: has their facts and entries.
        states: of the groups after the step.
    """

    step: RankStep
    samples: Sequence[tuple[int, int]]
    visits: Sequence[Visit]
    reader: Reader
    states: Mapping[int, GroupState]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def left_out(self) -> dict[str, int]:
        """The samples left out of the pass up to the end of the step, by the extension that left them out.

        One left out before a used sample of its shard, or of its lane of shards, counts once that one is in a
        step; those at the end of a pass, after it. Each is counted by one rank: the sum over ranks has all.
        """
        counted: Counter[str] = Counter(dict.fromkeys(self.reader.config.selection.names, 0))
        for number in self.reader.config.told_groups:
            for source in self.states[number].sources if number in self.states else ():
                left_out = source.cursor.left_out
                counted.update({} if left_out is None else left_out.in_pass)
        return dict(counted)

    def by_shard(self) -> Iterator[ShardRows]:
        """The rows of each shard."""
        shards, numbers = np.array(self.samples, np.int64).reshape(-1, 2).T
        for shard in dict.fromkeys(shards.tolist()):
            places = np.flatnonzero(shards == shard)
            yield ShardRows(places, shard, numbers[places], self.reader)


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """The steps of an epoch that workers begin before the training loop takes them, by their numbers."""

    steps: Steps
    rank: int
    generation: int
    reader: Reader
    control: ControlBlock

    def rows(self, number: int) -> int:
        """Rows of this rank in a step."""
        split = self.steps.at(self.steps.begin(number))
        return (self.rank + 1) * split.batch // split.ranks - self.rank * split.batch // split.ranks

    def seq_len(self, number: int) -> int:
        """The most patches of an image in a step; 0: it has none."""
        return self.steps.seq_len(self.steps.begin(number))

    def taken(self, number: int) -> int:
        """Steps that the training loop has taken, or won't get before this one as the data ends."""
        is_past_end = self.control.is_past_end(self.generation, number)
        return number if is_past_end else self.control.taken

    def stop_if_superseded(self) -> None:
        """Raise if the rank has started another epoch, or has died."""
        self.reader.stop_if_superseded()


@dataclass(slots=True)
class WorkerProcess:
    """A worker process, for an extension's part in it.

    Attributes:
        number: among the rank's workers; 0 where the rank reads itself.
        workers: number of the rank's workers; 0: the rank reads itself, step by step.
        reader: of its samples.
        control: shared with the rank.
        steps_ahead: the steps of the current epoch; None: none was started.
    """

    number: int
    workers: int
    reader: Reader
    control: ControlBlock
    steps_ahead: StepsAhead | None = None

    @property
    def decided(self) -> int:
        """The step of the run up to which the rank has made its decisions."""
        return self.control.decided

    def progress(self) -> ReadProgress:
        """Progress of the process in reading."""
        return self.reader.progress()


class WorkerParts:
    """The parts of a process.

    Args:
        extensions: of the loader.
        process: this one.
    """

    def __init__(self, extensions: Sequence[Extension], process: WorkerProcess):
        self._process = process
        self._parts: dict[str, WorkerPart] = {}
        for extension in extensions:
            part = extension.in_worker(process)
            if part is not None:
                self._parts[extension.name] = part
        self._pending: dict[str, list[Event]] = {}
        self._received: dict[str, int] = {}  # events since the start of the epoch

    def sampler(self, start: EpochStart) -> Sampler | None:
        """The steps of an epoch; None: they are those of the plain order."""
        for part in self._parts.values():
            sampler = part.sampler(start)
            if sampler is not None:
                assert isinstance(sampler, Sampler), sampler
                return sampler
        return None

    def start_epoch(self, events: Sequence[Event], position: int, steps_ahead: StepsAhead) -> None:
        """Start an epoch at a position with the events of all extensions."""
        self._process.steps_ahead = steps_ahead
        self._pending = {name: of_kind(events, name) for name in self._parts}
        self._received = dict.fromkeys(self._parts, 0)
        for part in self._parts.values():
            part.start_epoch()
        self.begin(position)

    def may_begin(self, number: int) -> bool:
        """True if a step may be begun."""
        return all(part.may_begin(number) for part in self._parts.values())

    def receive(self, events: Sequence[Event]) -> None:
        """Take the events since the start of the epoch, known ones among them."""
        for name in self._parts:
            sent = of_kind(events, name)
            self._pending[name].extend(sent[self._received[name] :])
            self._pending[name].sort(key=itemgetter(0))  # an earlier one may have been sent on another layout
            self._received[name] = len(sent)

    def begin(self, position: int) -> None:
        """Apply the events that hold for the step at a position."""
        for name, events in self._pending.items():
            while events and events[0].position <= position:
                self._parts[name].apply(events.pop(0))

    def before_step(self, number: int) -> None:
        """Return when all parts let a step begin."""
        for part in self._parts.values():
            part.before_step(number)

    @property
    def excluding(self) -> list[Callable[[Sample], bool]]:
        """`excludes` of the parts that override it."""
        parts = self._parts.values()
        return [part.excludes for part in parts if type(part).excludes is not WorkerPart.excludes]

    def columns(self, size: int, allocate: Allocate) -> list[BatchColumn]:
        """The columns of an empty batch."""
        return [column for part in self._parts.values() for column in part.columns(size, allocate)]

    def finish(self, values: dict[str, Any], rows: BatchRows) -> dict[str, bytes]:
        """Messages of the parts with a batch; see extension.WorkerPart."""
        return {name: part.finish(values, rows) for name, part in self._parts.items()}

    def close(self) -> None:
        """Close all parts. Idempotent."""
        for part in self._parts.values():
            part.close()
