"""The contract of an extension: a feature that adds to batches, without the kernel's knowledge of it.

An `Extension` is made of options (loader/registered.py) and is picklable. It has a part in the rank and one
in each worker; their hooks are called once a batch. A loader without extensions has no parts and calls none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from streamload.metrics import Counts
from streamload.order.events import Event as Event
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
    """Where the steps of an epoch begin and end (worker.messages.EpochStart)."""

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


class TakenBatch(Protocol):
    """A batch as it is taken from its worker, before the position of the rank is behind it."""

    @property
    def position(self) -> int:
        """The position of its step."""
        ...

    @property
    def stop(self) -> int:
        """The position after its step."""
        ...

    @property
    def passes(self) -> Sequence[int]:
        """The latest pass of each source that its rows are of; empty: there is one source."""
        ...


class Widths(Protocol):
    """The columns that each row of a batch needs (batching.padding.RowWidths)."""

    @property
    def bounds(self) -> npt.NDArray[np.int32]:
        """int32[N, 2]: the most tokens and the most patches of each row."""
        ...

    @property
    def full(self) -> tuple[int, int]:
        """The most that any row of any batch can have of both."""
        ...

    @property
    def varies(self) -> tuple[bool, bool]:
        """Of which of both rows may have fewer."""
        ...

    @property
    def texts(self) -> tuple[str, ...]:
        """The values of the batch whose columns are tokens."""
        ...

    @property
    def pads_left(self) -> bool:
        """True if captions are padded on the left."""
        ...


@dataclass(slots=True)
class Yielded:
    """A batch as the training loop got it.

    Attributes:
        step: its number in the epoch, from 0.
        samples: its rows.
        names: of the elements, if it is a tuple.
        widths: the columns that each row needs; None: all.
        keys: of its samples.
    """

    step: int
    samples: int
    names: tuple[str, ...]
    widths: Widths | None
    keys: Sequence[str]


class YieldedInfo(Protocol):
    """The record of a batch that the training loop gets, as far as parts need it (`BatchInfo`).

    Attributes:
        step: its number in the epoch, from 0.
        rows: its number of rows.
        sources: the names of all sources; `seats` has their indexes.
        seat_bytes: `seats` as bytes; empty: there is one source.
        run_step: its number in the run, from 0; None where steps of the run aren't counted.
        yielded: its rows, and the columns that each needs.
        device: the torch.device of its tensors; None: they are in host memory.
    """

    step: int
    rows: int
    sources: tuple[str, ...]
    seat_bytes: bytes
    run_step: int | None
    yielded: Yielded
    device: Any

    @property
    def seats(self) -> npt.NDArray[np.int32]:
        """The source of each row, in host memory: int32[N]."""
        ...

    @property
    def source(self) -> Any:
        """The source of each row: a tensor int64[N], on the batch's device."""
        ...

    @property
    def weight(self) -> Any:
        """The weight of each row in the loss: a tensor float32[N], on the batch's device."""
        ...

    @property
    def keys(self) -> Sequence[str]:
        """The `__key__` of each row; an OptionError if they weren't asked for."""
        ...

    @property
    def tokens(self) -> dict[str, int]:
        """Lengths of rows without padding: ids as "text", patches as "image"; unknown ones are left out."""
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


class RankPart:
    """An extension in the rank, for as long as its loader lasts. Its defaults add nothing.

    Attributes:
        adds: the names of the values that it adds to batches.
        by_rank: its keys of a state whose values are dicts with parts of each rank: those of several ranks'
            states are joined. All its other values are alike on all ranks.
        takes_reports: whether it makes something of the training's reports.
        reported: the means of these that it saw last, by source: the source's "name", "loss", "alignment".
    """

    adds: ClassVar[tuple[str, ...]] = ()
    by_rank: ClassVar[tuple[str, ...]] = ()
    takes_reports: bool = False
    reported: Sequence[Mapping[str, Any]] = ()

    def start_epoch(self, start: int) -> Sequence[Event]:
        """The events that hold from the start of an epoch on, and later ones.

        Args:
            start: its position; at 0 a sequence begins anew, and all events so far hold.

        Raises:
            StreamloadError: the epoch can't begin.
        """
        return ()

    def before_batch(self) -> None:
        """The training loop asks for a batch, and doesn't wait for it yet: decisions are made here."""

    def taken(self, batch: TakenBatch) -> None:
        """A batch is taken from its worker, also one without any sample, which isn't yielded."""

    def yielded(self, part: bytes, values: dict[str, Any]) -> dict[str, Any]:
        """Take what the worker's part returned of the batch that is yielded now.

        Args:
            part: what it returned.
            values: of the batch; what the worker's part left there for this one may be taken out.

        Returns:
            The fields of the batch's info (`BatchInfo`) that follow from it.
        """
        return {}

    def values(self, info: YieldedInfo) -> dict[str, Any]:
        """The values that it adds to a batch, by name, on the batch's device.

        Args:
            info: of the batch.
        """
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Numbers by name for the page that the rank publishes: gauges that are read about once a second.

        Cheap: the training's next() or, where that stands still, another thread of its process calls it. What
        it raises is logged once, and the page goes on without its numbers.
        """
        return {}

    def shaped(self, values: dict[str, Any]) -> dict[str, Any]:
        """A batch's values by name as the training loop gets them, in order."""
        return values

    def end_epoch(self) -> None:
        """End an epoch, after its last batch was yielded."""

    def state(self, position: int) -> dict[str, Any]:
        """Its keys of the loader's state: JSON-able, alike on all ranks.

        Args:
            position: at which the state resumes. Workers are ahead: events for later steps belong to it.
        """
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue after a state of the loader, which may be of one without this extension.

        Args:
            state: of a rank, or of several, joined.

        Raises:
            StateMismatch: its part of the state can't be read.
        """

    def gathered(self, state: Mapping[str, Any], position: int) -> dict[str, Any]:
        """Its keys of the state of all ranks.

        Args:
            state: of all ranks, joined.
            position: at which it resumes.
        """
        return self.state(position)

    def event_set(self, event: Event, reason: Mapping[str, Any]) -> None:
        """Weights or a batch size were set, by the training or by another part.

        Args:
            event: has them.
            reason: for a log; JSON-able.
        """

    def report(self, values: Mapping[str, Any], info: YieldedInfo, rows: Any) -> None:
        """Take what the training reports of rows of a batch.

        Args:
            values: by name ("loss", "alignment", "tokens"): one for each row, or a number for all; or None.
            info: of the batch.
            rows: of it; None: all.
        """

    def report_eval(self, values: Mapping[str, Any]) -> None:
        """Take losses on held-out data, by the names of the sources."""


class Run(Protocol):
    """The run, for a rank's part."""

    @property
    def options(self) -> Any:
        """Of the loader, `LoaderOptions`."""
        ...

    @property
    def counts(self) -> Counts:
        """Counters of the rank."""
        ...

    @property
    def can_agree(self) -> bool:
        """True if the ranks are joined, or there is only one."""
        ...

    def agree(self, subject: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Rank 0's decision from the values of all ranks, which have to ask for it at the same step.

        Raises:
            RankFailed: a rank failed or ended.
        """
        ...

    def send(self, value: Any) -> Event:
        """Send an event to the workers; all ranks have to send the same after the same step.

        Args:
            value: JSON-able.

        Returns:
            The event, with the first step that no worker of any rank can have begun.
        """
        ...


class Extension:
    """A feature of a loader: picklable, as it goes to the workers. Its defaults add nothing.

    Attributes:
        name: the key of its part of messages.
        most_steps: how many steps of a rank its workers make ahead at most; None: any number.
    """

    name: ClassVar[str]
    most_steps: int | None = None

    @property
    def facts(self) -> Collection[str]:
        """The names of the built-in facts that it needs."""
        return ()

    def refuse_unusable(self, options: Any) -> None:
        """Refuse options with which it can't be used.

        Args:
            options: of the loader, `LoaderOptions`.

        Raises:
            OptionError: it says which, and what to give instead.
        """

    def in_worker(self, process: WorkerProcess) -> WorkerPart | None:
        """Its part in a worker process; None: it has none there."""
        return None

    def in_rank(self, run: Run) -> RankPart | None:
        """Its part in the rank; None: it has none."""
        return None
