"""An extension's part in the rank, and what it sees there: batches as they are taken and yielded, the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.order.events import Event

if TYPE_CHECKING:
    from streamload.extension.kernel import Batch, BatchInfo, Bounds, torch


INFO_FIELDS = frozenset(
    {"widths", "source_weights", "row_weights", "run_step", "importance", "loss_weight", "cells", "planned"}
)
"""Arguments of `BatchInfo` that a part may return from `yielded`."""


class RowWidths(NamedTuple):
    """The columns that each row of a batch needs; kept in host memory, so that no device is asked for them.

    Attributes:
        bounds: int32[N, 2]: the most tokens and the most patches of each row.
        full: the most that any row of any batch can have of both.
        varies: of which of both rows may have fewer.
        texts: the values of the batch whose columns are tokens.
        pads_left: whether captions are padded on the left.
    """

    bounds: Bounds
    full: tuple[int, int]
    varies: tuple[bool, bool]
    texts: tuple[str, ...]
    pads_left: bool

    def with_room(self, bounds: Bounds | None) -> RowWidths:
        """The same with room for rows of other ranks."""
        return self if bounds is None else self._replace(bounds=np.maximum(self.bounds, bounds))


class CellSize(NamedTuple):
    """What goes through a device at once, or several of these, where cells are packed by budgets.

    Attributes:
        rows: its samples.
        text, image: what they cost together, by `cost=`; image is 0 where one cost is given.
    """

    rows: int
    text: int
    image: int


@dataclass(slots=True)
class Yielded:
    """A batch as the training loop got it.

    Attributes:
        step: its number in the epoch, from 0.
        samples: its rows.
        names: of the elements, if it is a tuple.
        widths: the columns that each row needs; None: all.
        keys: of its samples.
        cells: the rows of each cell; None: it has none.
    """

    step: int
    samples: int
    names: tuple[str, ...]
    widths: RowWidths | None
    keys: Sequence[str]
    cells: Sequence[int] | None = None


class RecordedEvents(NamedTuple):
    """The events of a run, instead of those that are set.

    Attributes:
        base_batch: samples of a step over all ranks, by the options of the run.
        events: returns the events of a sequence that hold from a position on, and later ones.
    """

    base_batch: int
    events: Callable[[int, int], list[Event]]


class RankPart:
    """An extension in the rank, for as long as its loader lasts. Its defaults add nothing.

    Attributes:
        by_rank: its keys of a state whose values are dicts with parts of each rank: those of several ranks'
            states are joined. All its other values are alike on all ranks.
        takes_reports: whether it makes something of the training's reports.
        reported: the means of these that it saw last, by source: the source's "name", "loss", "alignment",
            and "loss_weight" where one was decided.
    """

    by_rank: ClassVar[tuple[str, ...]] = ()
    takes_reports: bool = False
    reported: Sequence[Mapping[str, object]] = ()

    def start_epoch(self, start: int) -> Sequence[Event]:
        """The events that hold from the start of an epoch on, and later ones.

            return [event for event in self.events if event.position >= start]

        Args:
            start: its position; at 0 a sequence begins anew, and all events so far hold.

        Raises:
            StreamloadError: the epoch can't begin.
        """
        return ()

    def before_batch(self) -> None:
        """The training loop asks for a batch, and doesn't wait for it yet: decisions are made here.

        if self.losses_have_settled():
            self.events.append(self.run.send({"limit": 2 * self.limit}))
        """

    def taken(self, batch: Batch) -> None:
        """A batch is taken from its worker, or one without samples: `self.position = batch.step.stop`."""

    def yielded(self, part: bytes, values: dict[str, object]) -> Mapping[str, object]:
        """Take what the worker's part returned of the batch that is yielded now.

            self.scripts = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            return {}

        Args:
            part: what it returned.
            values: of the batch; what the worker's part left there for this one may be taken out.

        Returns:
            Fields of the batch's info, `INFO_FIELDS`; as a rule {}. Values of the batch are for `values`.
        """
        return {}

    def values(self, info: BatchInfo) -> Mapping[str, object]:
        """The values that it adds to a batch, by name, on the batch's device.

            return {"script": self.scripts.to(info.device or "cpu")}

        Args:
            info: of the batch.
        """
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Numbers by name for the page that the rank publishes: gauges that are read about once a second.

            return {"cyrillic": self.counts[CYRILLIC]}

        Cheap: the training's next() or, where that stands still, another thread of its process calls it. What
        it raises is logged once, and the page goes on without its numbers.
        """
        return {}

    def shaped(self, values: dict[str, object]) -> dict[str, object]:
        """A batch's values by name as the training loop gets them, in order.

        return {name: value for name, value in values.items() if name != "text"}
        """
        return values

    def end_epoch(self) -> None:
        """End an epoch, after its last batch was yielded: `self.log.flush()`."""

    def close(self) -> None:
        """The loader is closed, perhaps within an epoch; it can be iterated again: `self.log.flush()`."""

    def state(self, position: int) -> Mapping[str, object]:
        """Its keys of the loader's state: JSON-able, alike on all ranks.

            return {"count_scripts": self.counts}

        Args:
            position: at which the state resumes. Workers are ahead: events for later steps belong to it.
        """
        return {}

    def load(self, state: Mapping[str, object]) -> None:
        """Continue after a state of the loader, which may be of one without this extension.

            self.counts = counts_in(state.get("count_scripts", {}))

        Args:
            state: of a rank, or of several, joined.

        Raises:
            StateMismatch: its part of the state can't be read.
        """

    def gathered(self, state: Mapping[str, object], position: int) -> Mapping[str, object]:
        """Its keys of the state of all ranks: `return {"times": state["times"]}`.

        Args:
            state: of all ranks, joined.
            position: at which it resumes.
        """
        return self.state(position)

    def event_set(self, event: Event, reason: Mapping[str, object]) -> None:
        """Weights or a batch size were set, by the training or another part: `self.log.add(event, reason)`.

        Args:
            event: has them.
            reason: for a log; JSON-able.
        """

    def report(
        self,
        values: Mapping[str, object],
        info: BatchInfo,
        rows: slice | Sequence[int] | npt.NDArray[np.generic] | torch.Tensor | None,
    ) -> None:
        """Take what the training reports of rows of a batch: `self.losses.append(values["loss"])`.

        Args:
            values: by name ("loss", "alignment", "tokens"): one for each row, or a number for all; or None.
            info: of the batch.
            rows: of it; None: all.
        """

    def report_eval(self, values: Mapping[str, object]) -> None:
        """Take losses on held-out data, by the names of the sources: `self.held_out = dict(values)`."""
