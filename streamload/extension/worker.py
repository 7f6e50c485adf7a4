"""An extension's part in a worker process, and what it sees there: rows, shards' facts, the steps ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from streamload.order.events import Event
from streamload.order.steps import Steps, StepStart
from streamload.shards.samples import Entry, Sample


class ShardRows(Protocol):
    """The rows of a batch whose samples are in one shard."""

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """Of the rows in the batch: int64[N]."""
        ...

    def facts(self, names: Sequence[str]) -> Mapping[str, npt.NDArray[np.float64]]:
        """Facts of the samples by name: float64[N], NaN where unknown."""
        ...

    def entries(self) -> list[Entry]:
        """The samples' index entries, with the facts of the user's columns."""
        ...


class RowsStep(Protocol):
    """A rank's part of the step that has a batch's rows (worker.sampler.RankStep).

    Attributes:
        position: the global position where it begins.
        passes: by source the latest pass of its samples; empty: there is one source.
    """

    position: int
    passes: dict[int, int]

    @property
    def size(self) -> int:
        """The number of samples that this rank computes."""
        ...

    @property
    def seats(self) -> npt.NDArray[np.int64]:
        """The source of each sample: int64[size]."""
        ...


class BatchRows(Protocol):
    """The rows of a batch in a worker, replacements included."""

    def __len__(self) -> int: ...

    @property
    def step(self) -> RowsStep:
        """The step that has them."""
        ...

    def by_shard(self) -> Iterator[ShardRows]:
        """The rows of each shard."""
        ...


class SampleReader(Protocol):
    """Reader of a process's samples, of which the shard's index has come so far (worker.reader.Reader)."""

    def facts(
        self, shard: int, numbers: Sequence[int] | npt.NDArray[np.int64], names: Sequence[str]
    ) -> Mapping[str, npt.NDArray[np.float64]]:
        """Facts of a shard's samples by name: float64[N], NaN where unknown."""
        ...

    def entries(self, shard: int, numbers: Sequence[int]) -> list[Entry]:
        """The index entries of a shard's samples."""
        ...


class ReadProgress(NamedTuple):
    """Progress of a process in reading.

    Attributes:
        epoch: of the order.
        fronts: by group and source of the rank, where reading has begun: the current pass, and the index in
            it of the next shard to open.
        shards_ahead: how many of the next shards the process fetches itself.
        mean_bytes: the mean size of its shards; 0: unknown.
    """

    epoch: int
    fronts: Mapping[tuple[int, int], tuple[int, int]]
    shards_ahead: int
    mean_bytes: float


class StepsAhead(Protocol):
    """The steps of an epoch that workers begin before the training loop takes them, by their numbers."""

    def rows(self, number: int) -> int:
        """Rows of this rank in a step."""
        ...

    def seq_len(self, number: int) -> int:
        """The most patches of an image in a step; 0: it has none."""
        ...

    def taken(self, number: int) -> int:
        """Steps that the training loop has taken, or won't get before this one as the data ends."""
        ...

    def stop_if_superseded(self) -> None:
        """Raise if the rank has started another epoch, or has died."""
        ...


class WorkerProcess(Protocol):
    """A worker process, for an extension's part in it."""

    @property
    def number(self) -> int:
        """Among the rank's workers; 0 where the rank reads itself."""
        ...

    @property
    def workers(self) -> int:
        """Number of the rank's workers; 0: the rank reads itself, step by step."""
        ...

    @property
    def reader(self) -> SampleReader:
        """Reader of its samples."""
        ...

    @property
    def steps_ahead(self) -> StepsAhead | None:
        """The steps of the current epoch; None: none was started."""
        ...

    @property
    def decided(self) -> int:
        """The step of the run up to which the rank has made its decisions."""
        ...

    def progress(self) -> ReadProgress:
        """Progress of the process in reading."""
        ...


class StepsStart(Protocol):
    """Start and end of an epoch's steps (worker.messages.EpochStart)."""

    @property
    def start(self) -> StepStart:
        """Of the steps; an epoch that resumes another is of the same sequence."""
        ...

    @property
    def steps(self) -> int | None:
        """Number of steps; None: to the end of the pass."""
        ...

    @property
    def events(self) -> Sequence[Event]:
        """Events of the run that hold from its position on, and later ones."""
        ...


class StepSampler(Protocol):
    """The steps of an epoch, in ascending order: a subclass of worker.sampler.Sampler."""

    steps: Steps

    def receive(self, events: Sequence[Event]) -> None:
        """Go by events of later steps; those of earlier ones may be left out."""
        ...

    def at(self, position: int) -> RowsStep:
        """The step at a global position."""
        ...

    def coming(self, position: int) -> list[tuple[int, int]]:
        """This rank's samples of a later step, by shard and number, as far as they are known."""
        ...


class BatchColumn(Protocol):
    """Values of a batch that aren't decoded from its samples, each of which is parsed and then added."""

    def parse(self, sample: Sample, image: str, is_prepared: bool, seed: int) -> Any:
        """Do what can be done before the sample's pixels.

        Args:
            sample: its bytes have to stay valid until it has been added.
            image: the extension of its image.
            is_prepared: whether that is a prepared image.
            seed: uint64, of the sample's random choices in this pass.
        """
        ...

    def add(self, parsed: Any) -> None:
        """Add a sample, given the result of `parse`.

        Raises:
            SampleError: it can't be used; the batch is unchanged.
        """
        ...

    def drop_last(self) -> None:
        """Remove the sample that was added last."""
        ...

    def finish(self, texts: Any) -> dict[str, Any]:
        """The values of the samples that were added.

        Args:
            texts: of the batch: a tensor of ids that isn't cut, or a list; None: it has none.
        """
        ...

    def close(self) -> None:
        """Restore the random generators. Idempotent."""
        ...


class WorkerPart:
    """An extension in a worker process; it lasts from epoch to epoch.

    What it makes of a step follows from the epoch's events and the step's rows alone. By default nothing.
    """

    def start_epoch(self) -> None:
        """Forget the events of the epoch before."""

    def apply(self, event: Event) -> None:
        """Go by an event from now on; events come in order, each before the first step for which it holds.

        Those that hold at the start of the epoch come before its first step is asked for.
        """

    def may_begin(self, number: int) -> bool:
        """True if a step may be begun; asked again and again until it is, before later events are read.

        Args:
            number: of the step, from 0 at the start of the epoch.
        """
        return True

    def sampler(self, start: StepsStart) -> StepSampler | None:
        """The steps of an epoch, if they aren't those of the plain order.

        Args:
            start: of the epoch.
        """
        return None

    def before_step(self, number: int) -> None:
        """Return when a step may begin, by its number in the epoch; its events are known by now."""

    def columns(self, size: int, allocate: Callable[..., Any]) -> Sequence[BatchColumn]:
        """Values of an empty batch that aren't decoded from its samples.

        Args:
            size: its capacity, in samples.
            allocate: makes their tensors, by shape and torch.dtype.
        """
        return ()

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        """Message to the rank's part with a batch.

        Args:
            values: of the batch by name; the part may add some.
            rows: of the batch.
        """
        return b""

    def close(self) -> None:
        """End with the process. Idempotent."""
