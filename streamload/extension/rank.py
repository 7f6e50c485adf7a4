"""An extension's part in the rank, and what it sees there: batches as they are taken and yielded, the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from streamload.metrics import Counters, Snapshot
from streamload.order.events import Event
from streamload.order.steps import StepOptions


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


class RunPosition(Protocol):
    """A position of the run (loader.position.Position)."""

    @property
    def epoch(self) -> int:
        """Of the training loop."""
        ...

    @property
    def sequence(self) -> int:
        """The epoch in which the sequence of samples started; later epochs may continue it."""
        ...

    @property
    def position(self) -> int:
        """Global samples of the sequence before the next step."""
        ...

    @property
    def events(self) -> Sequence[Event]:
        """Events that hold from the position on, and later ones."""
        ...

    @property
    def shares(self) -> tuple[int, ...]:
        """Of the sources in the next step, in UNITs."""
        ...

    @property
    def base_batch(self) -> int | None:
        """Samples of a step by the options, if events set another size; None: they set none."""
        ...


class RecordedEvents(Protocol):
    """The events of a run, instead of those that are set."""

    @property
    def base_batch(self) -> int:
        """Samples of a step over all ranks, by the options of the run."""
        ...

    def events(self, sequence: int, position: int) -> list[Event]:
        """Return the events of a sequence that hold from a position on, and later ones."""
        ...


class Run(Protocol):
    """The run, for a rank's part: what it is, agreement of its ranks, and what steers it."""

    @property
    def options(self) -> Any:
        """Of the loader, `LoaderOptions`."""
        ...

    @property
    def counts(self) -> Counters:
        """Counters of the rank."""
        ...

    def stats(self) -> Snapshot:
        """Counters of all of the rank's processes so far."""
        ...

    @property
    def rank(self) -> int:
        """This rank, of those that share the samples."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks that share the samples."""
        ...

    @property
    def position(self) -> RunPosition:
        """The position after the last batch, or at the start of the next epoch."""
        ...

    @property
    def next_epoch(self) -> RunPosition:
        """The start of the epoch that `iter()` starts next."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """Inputs of the samples of each step, apart from the changes of a run; JSON-able."""
        ...

    def source_samples(self, source: int) -> int | None:
        """The samples of a source by sizes.json; None if nothing says.

        Raises:
            OriginError: a sizes.json can't be read.
        """
        ...

    @property
    def can_agree(self) -> bool:
        """True if the ranks are joined, or there is only one."""
        ...

    def join(self) -> None:
        """Make sure that the ranks can agree.

        Raises:
            OptionError: nothing joins them.
        """
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

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the sources, as set last."""
        ...

    @property
    def own_weights(self) -> tuple[float, ...]:
        """The weights that the sources were given, before any change."""
        ...

    def add_weights(self, weights: Event, steps: int) -> Event:
        """Set weights that all ranks agree on, from so many steps on, which no worker has begun."""
        ...

    @property
    def rows(self) -> int:
        """Samples of a step of this rank, as set last."""
        ...

    @property
    def most_rows(self) -> int:
        """The most samples of a step of this rank by the sizes of now: another one may be set already."""
        ...

    @property
    def step_options(self) -> StepOptions:
        """Options of the steps of the run."""
        ...

    def set_batch_size(self, rows: int, reason: Mapping[str, Any]) -> int:
        """Set the samples of a rank's batch; see Loader.set_batch_size.

        Args:
            rows: of a rank in a step.
            reason: for the log of decisions; JSON-able.
        """
        ...

    def refuse_batch_size(self, rows: int) -> None:
        """Refuse a size of a rank's batch that steps can't have.

        Raises:
            OptionError: it says why.
        """
        ...

    def replay(self, recorded: RecordedEvents) -> None:
        """Go by the events of a recorded run; none can be set then."""
        ...

    def decided(self, step: int) -> None:
        """Tell the workers the step of the run up to which decisions are made; see WorkerProcess.decided."""
        ...
