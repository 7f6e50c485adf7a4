"""The extensions' parts in the rank, and the run as they see it (step K)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from streamload.extension import Event, Extension, RankPart, TakenBatch, YieldedInfo
from streamload.loader.agreement import Agreement
from streamload.loader.distributed import can_compare
from streamload.loader.options import LoaderOptions
from streamload.loader.rank_process import RankProcess
from streamload.loader.run_events import RunEvents
from streamload.loader.schedule import RunSchedule
from streamload.metrics import Counts

logger = logging.getLogger("streamload")

_REPORTS = "streamload.reports"
"""The name of the part that takes reports where no extension does."""


class RankRun:
    """The run, for one part (extension.Run). The loader's own extensions use more of it.

    Args:
        name: of the extension.
        options: of the loader.
        schedule: of its epochs.
        process: counts, and has the control block.
        events: of the run.

    Attributes:
        options, schedule, process, events: the same.
    """

    def __init__(
        self,
        name: str,
        options: LoaderOptions,
        schedule: RunSchedule,
        process: RankProcess,
        events: RunEvents,
    ):
        self.options, self.schedule, self.process, self.events = options, schedule, process, events
        self._name = name
        self._agreement: Agreement | None = None

    @property
    def counts(self) -> Counts:
        """Counters of the rank."""
        return self.process.counts

    @property
    def can_agree(self) -> bool:
        """True if the ranks are joined, or there is only one."""
        world_size = self.schedule.topology.world_size
        return world_size == 1 or can_compare(world_size)

    def join(self) -> None:
        """Make sure that the ranks can agree.

        Raises:
            OptionError: nothing joins them.
        """
        if self._agreement is None:
            self._agreement = Agreement(self.schedule.topology.world_size)

    def agree(self, subject: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Rank 0's decision from the values of all ranks."""
        self.join()
        assert self._agreement is not None
        return self._agreement.decide(subject, value, decide)

    def send(self, value: Any) -> Event:
        """Send an event to the extension's parts in the workers."""
        return self.events.send(self._name, value)


class RankParts:
    """The parts of a loader in its rank.

    Args:
        extensions: of the loader.
        run: gives the run as the extension of a name sees it.
        reports: makes the part that takes the training's reports where no other does.

    Attributes:
        by_name: the parts; empty in a plain loader.
    """

    def __init__(
        self,
        extensions: Sequence[Extension],
        run: Callable[[str], RankRun],
        reports: Callable[[], RankPart],
    ):
        self.by_name: dict[str, RankPart] = {}  # never changed, but replaced: another thread asks for metrics
        self._reports = reports
        self._run = run
        self._failed: set[str] = set()  # extensions whose metrics() has failed, which is logged
        self._shown: Collection[str] = ()  # names of the numbers that the page has
        self.add(extensions)

    def add(self, extensions: Sequence[Extension]) -> None:
        """Add the parts of more extensions, in place of those of their names."""
        parts = {extension.name: extension.in_rank(self._run(extension.name)) for extension in extensions}
        self.by_name = self.by_name | {name: part for name, part in parts.items() if part is not None}

    @property
    def reported(self) -> Sequence[Mapping[str, Any]]:
        """The means of the training's reports by source, as they were read last."""
        return next((part.reported for part in self.by_name.values() if part.takes_reports), ())

    def start_epoch(self, start: int) -> list[Event]:
        """The events of an epoch that starts at a position; see extension.RankPart."""
        return [event for part in self.by_name.values() for event in part.start_epoch(start)]

    def before_batch(self) -> None:
        """A batch is asked for, and not yet waited for: parts decide."""
        for part in self.by_name.values():
            part.before_batch()

    def taken(self, batch: TakenBatch) -> None:
        """A batch is taken from its worker."""
        for part in self.by_name.values():
            part.taken(batch)

    def yielded(self, messages: Mapping[str, bytes], values: dict[str, Any]) -> dict[str, Any]:
        """The fields of a batch's info that follow from its messages.

        Args:
            messages: of the parts in the worker, by name.
            values: of the batch.
        """
        fields: dict[str, Any] = {}
        for name, part in self.by_name.items():
            fields |= part.yielded(messages.get(name, b""), values)
        return fields

    def values(self, info: YieldedInfo) -> dict[str, Any]:
        """The values that they add to a batch."""
        return {name: value for part in self.by_name.values() for name, value in part.values(info).items()}

    def metrics(self) -> dict[str, float]:
        """Their numbers for the published page, each by its name after that of its extension.

        A name that the page had, and no part has now, is NaN, which takes it away. What a part raises is
        logged once: the training goes on, and so does the page, without the part's numbers.
        """
        numbers = dict.fromkeys(self._shown, math.nan)
        for extension, part in self.by_name.items():
            try:
                numbers |= {f"{extension}.{name}": float(value) for name, value in part.metrics().items()}
            except Exception:
                if extension not in self._failed:
                    self._failed.add(extension)
                    logger.exception("metrics() of extension %r failed, which is logged once", extension)
        self._shown = numbers.keys()
        return numbers

    def shaped(self, values: dict[str, Any]) -> dict[str, Any]:
        """A batch's values as the training loop gets them."""
        for part in self.by_name.values():
            values = part.shaped(values)
        return values

    def end_epoch(self) -> None:
        """End an epoch."""
        for part in self.by_name.values():
            part.end_epoch()

    def state(self, position: int) -> dict[str, Any]:
        """Their keys of a state."""
        parts = [part.state(position) for part in self.by_name.values()]
        return {key: value for part in parts for key, value in part.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue after a state."""
        for part in self.by_name.values():
            part.load(state)

    def gathered(self, state: Mapping[str, Any], position: int) -> dict[str, Any]:
        """Their keys of the state of all ranks."""
        parts = [part.gathered(state, position) for part in self.by_name.values()]
        return {key: value for part in parts for key, value in part.items()}

    def event_set(self, event: Event, reason: Mapping[str, Any]) -> None:
        """Weights or a batch size were set."""
        for part in self.by_name.values():
            part.event_set(event, reason)

    def report(self, values: Mapping[str, Any], info: YieldedInfo, rows: Any) -> None:
        """Take what the training reports of rows of a batch."""
        if not any(part.takes_reports for part in self.by_name.values()):
            self.by_name = {**self.by_name, _REPORTS: self._reports()}
        for part in self.by_name.values():
            part.report(values, info, rows)

    def report_eval(self, values: Mapping[str, Any]) -> None:
        """Take losses on held-out data, by source."""
        for part in self.by_name.values():
            part.report_eval(values)
