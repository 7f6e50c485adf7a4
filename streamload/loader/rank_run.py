"""The run of a loader in its rank, its extensions' parts, and its events (steps B, E and K).

`RankRun` has all that lasts as long as the loader, and `Run` is its side for one extension's part. An event
is set in mid-epoch, sent to the workers, and part of the state. It holds from the first step on that no
worker of any rank can have begun.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from streamload.errors import OptionError
from streamload.extension import Event, Extension, RankPart, RecordedEvents
from streamload.extension.rank import INFO_FIELDS
from streamload.loader.options import LoaderOptions
from streamload.loader.position import Position
from streamload.loader.rank_process import RankProcess
from streamload.loader.schedule import RunSchedule
from streamload.metrics import Counters, Snapshot
from streamload.order.events import BATCH_SIZE, WEIGHTS, joined, of_kind
from streamload.order.steps import StepOptions
from streamload.ranks.distributed import can_compare, gather
from streamload.worker.messages import Batch, EpochChange

if TYPE_CHECKING:
    from streamload.extension import BatchInfo
    from streamload.ranks.agreement import Agreement

logger = logging.getLogger("streamload")

V = TypeVar("V")
D = TypeVar("D")
_REPORTS = "streamload.reports"
"""The name of the part that takes reports where no extension does."""


class Run:
    """The run, for the part of one extension in the rank: agreement of the ranks, events, what steers it.

    Args:
        name: of the extension.
        run: of the loader.

    Attributes:
        options: of the loader.
    """

    def __init__(self, name: str, run: RankRun):
        self.options = run.options
        self._name, self._run, self._schedule, self._process = name, run, run.schedule, run.process
        self._agreement: Agreement | None = None

    @property
    def counts(self) -> Counters:
        """Counters of the rank."""
        return self._process.counts

    @property
    def rank(self) -> int:
        """This rank, of those that share the samples."""
        return self._schedule.topology.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share the samples."""
        return self._schedule.topology.world_size

    @property
    def position(self) -> Position:
        """The position after the last batch, or at the start of the next epoch."""
        self._schedule.settle()
        return self._schedule.tracker.now()

    @property
    def next_epoch(self) -> Position:
        """The start of the epoch that `iter()` starts next."""
        return self._schedule.tracker.next()

    def state(self) -> dict[str, Any]:
        """The state of the rank after the last batch; see Loader.state_dict."""
        return self._run.state()

    @property
    def counts_groups(self) -> bool:
        """True if this rank reads groups that no lower rank reads: it tells of them for all."""
        return self._schedule.reports_shards

    @property
    def identity(self) -> dict[str, Any]:
        """Inputs of the samples of each step, apart from the changes of a run; JSON-able."""
        return self._schedule.identity()

    def source_samples(self, source: int) -> int | None:
        """The samples of a source by sizes.json; None if nothing says.

        Raises:
            OriginError: a sizes.json can't be read.
        """
        return self._schedule.source_samples(source)

    def stats(self) -> Snapshot:
        """Counters of all of the rank's processes so far."""
        return replace(self._process.stats(), samples_left_out=self._schedule.left_out)

    @property
    def can_agree(self) -> bool:
        """True if the ranks are joined, or there is only one."""
        return self.world_size == 1 or can_compare(self.world_size)

    def join(self) -> None:
        """Make sure that the ranks can agree.

        Raises:
            OptionError: nothing joins them.
        """
        if self._agreement is None:
            from streamload.ranks.agreement import Agreement

            self._agreement = Agreement(self.world_size)

    def agree(
        self,
        subject: str,
        value: V,
        decide: Callable[[list[V]], D],
        patience_seconds: float | None = None,
    ) -> D:
        """Rank 0's decision from the values of all ranks, which have to ask for it at the same step.

            total = run.agree("samples left out", count, sum)

        Args:
            subject: of the decision, for errors; the same on all ranks.
            value: of this rank; JSON-able.
            decide: takes the values by rank; what it returns is JSON-able.
            patience_seconds: the longest wait for a rank that is alive; None: two hours.

        Raises:
            RankFailed: a rank failed or ended.
        """
        self.join()
        assert self._agreement is not None
        decision: D = self._agreement.decide(subject, value, decide, patience_seconds)
        return decision

    def send(self, value: object) -> Event:
        """Send an event to the workers; all ranks have to send the same after the same step.

        Args:
            value: JSON-able.

        Returns:
            The event, with the first step that no worker of any rank can have begun.
        """
        return self._run.send(self._name, value)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the sources, as set last."""
        weights: tuple[float, ...] = self._schedule.weights({}).value["weights"]
        return weights

    @property
    def own_weights(self) -> tuple[float, ...]:
        """The weights that the sources were given, before any change."""
        return self._schedule.own_weights

    def add_weights(self, weights: Event, steps: int) -> Event:
        """Set weights that all ranks agree on, from so many steps on, which no worker has begun."""
        return self._run.add_weights(weights, steps)

    @property
    def rows(self) -> int:
        """Samples of a step of this rank, as set last."""
        return self._schedule.rows

    @property
    def most_rows(self) -> int:
        """The most samples of a step of this rank by the sizes of now: another one may be set already."""
        return self._schedule.most_rows

    @property
    def step_options(self) -> StepOptions:
        """Options of the steps of the run."""
        return self._schedule.step_options

    def set_batch_size(self, rows: int, reason: Mapping[str, Any]) -> int:
        """Set the size of a rank's batch, and return the step of the epoch from which it holds.

        Args:
            rows: of a rank in a step; see Loader.set_batch_size.
            reason: for the log of decisions; JSON-able.
        """
        return self._run.set_batch_size(rows, reason)

    def refuse_batch_size(self, rows: int) -> None:
        """Refuse a size of a rank's batch that steps can't have.

        Raises:
            OptionError: it says why.
        """
        self._run.refuse_batch_size(rows)

    def replay(self, recorded: RecordedEvents) -> None:
        """Go by the events of a recorded run; none can be set then."""
        self._schedule.tracker.recorded = recorded

    def decided(self, step: int) -> None:
        """Tell the workers the step of the run up to which decisions are made: `WorkerProcess.decided`."""
        self._process.control.decided = step


class RankParts:
    """All parts of a loader's extensions in its rank: each hook of `extension.RankPart`, for all of them.

    Args:
        run: of the loader.
        reports: makes the part that takes the training's reports where no other does.

    Attributes:
        by_name: the parts; empty in a plain loader.
    """

    def __init__(self, run: RankRun, reports: Callable[[LoaderOptions], RankPart]):
        self.by_name: dict[str, RankPart] = {}  # never changed, but replaced: another thread asks for metrics
        self._reports = reports
        self._run = run
        self._failed: set[str] = set()  # extensions whose metrics() has failed, which is logged
        self._shown: Collection[str] = ()  # names of the numbers that the page has
        self.add(run.options.extensions)

    def add(self, extensions: Sequence[Extension], state: Mapping[str, Any] | None = None) -> None:
        """Add the parts of more extensions, in place of those of their names.

        Args:
            state: of all parts; those that replace others go on with it.
        """
        made = (
            (extension.name, extension.in_rank(Run(extension.name, self._run))) for extension in extensions
        )
        parts = {name: part for name, part in made if part is not None}
        for name, part in parts.items():
            if name in self.by_name and state is not None:
                part.load(state)
        self.by_name = self.by_name | parts

    @property
    def reported(self) -> Sequence[Mapping[str, Any]]:
        """The means of the training's reports by source, as they were read last."""
        return next((part.reported for part in self.by_name.values() if part.takes_reports), ())

    def start_epoch(self, start: int) -> list[Event]:
        """Return the events of all parts for an epoch that starts at a position."""
        return [event for part in self.by_name.values() for event in part.start_epoch(start)]

    def before_batch(self) -> None:
        """Let parts decide: the training loop asks for a batch, and doesn't wait for it yet."""
        for part in self.by_name.values():
            part.before_batch()

    def taken(self, batch: Batch) -> None:
        """Pass a batch on that was taken from its worker."""
        for part in self.by_name.values():
            part.taken(batch)

    def yielded(self, messages: Mapping[str, bytes], values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a batch's info that follow from its messages.

        Args:
            messages: of the parts in the worker, by name.
            values: of the batch.
        """
        fields: dict[str, Any] = {}
        for name, part in self.by_name.items():
            part_fields: Any = part.yielded(messages.get(name, b""), values)
            if not isinstance(part_fields, Mapping) or not part_fields.keys() <= INFO_FIELDS:
                raise OptionError(
                    f"yielded() of the extension {name!r} returned {part_fields!r:.100}; expected {{}}, or "
                    f"fields of info ({', '.join(sorted(INFO_FIELDS))}): values of batches go into values()"
                )
            fields.update(part_fields)
        return fields

    def values(self, info: BatchInfo) -> dict[str, Any]:
        """Return the values that parts add to a batch, by name; refuse two of one name."""
        added: dict[str, Any] = {}
        for extension, part in self.by_name.items():
            part_values = part.values(info)
            if not added.keys().isdisjoint(part_values):
                raise OptionError(
                    f"the extension {extension!r} and one before it both add "
                    f"{sorted(added.keys() & part_values)} to a batch: give one of them another name"
                )
            added.update(part_values)
        return added

    def metrics(self) -> dict[str, float]:
        """Return the parts' numbers for the published page, named `extension.number`.

        A number that the page had, and no part has now, is NaN, by which the page drops it. A part's error is
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
        """Return a batch's values as the training loop gets them."""
        for part in self.by_name.values():
            values = part.shaped(values)
        return values

    def end_epoch(self) -> None:
        """End an epoch."""
        for part in self.by_name.values():
            part.end_epoch()

    def close(self) -> None:
        """Close the loader."""
        for part in self.by_name.values():
            part.close()

    def state(self, position: int) -> dict[str, Any]:
        """Return the parts' keys of a state."""
        parts = [part.state(position) for part in self.by_name.values()]
        return {key: value for part in parts for key, value in part.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue all parts after a state."""
        for part in self.by_name.values():
            part.load(state)

    def gathered(self, state: Mapping[str, Any], position: int) -> dict[str, Any]:
        """Return the parts' keys of the state of all ranks."""
        parts = [part.gathered(state, position) for part in self.by_name.values()]
        return {key: value for part in parts for key, value in part.items()}

    def event_set(self, event: Event, reason: Mapping[str, Any]) -> None:
        """Tell parts that weights or a batch size were set."""
        for part in self.by_name.values():
            part.event_set(event, reason)

    def report(self, values: Mapping[str, Any], info: BatchInfo, rows: Any) -> None:
        """Pass on what the training reports of rows of a batch; the first report makes a part for them."""
        if not any(part.takes_reports for part in self.by_name.values()):
            self.by_name = {**self.by_name, _REPORTS: self._reports(self._run.options)}
        for part in self.by_name.values():
            part.report(values, info, rows)

    def report_eval(self, values: Mapping[str, Any]) -> None:
        """Pass on losses on held-out data, by source."""
        for part in self.by_name.values():
            part.report_eval(values)


class CurrentEpoch:
    """The epoch that a training loop iterates, as its run knows it; `epoch.Epoch` is one.

    Args:
        steps: how many batches it has; None: until the data ends.
        expected: how many it should have by the known sizes of shards; None: unknown.

    Attributes:
        done: no more batches come.
        steps, expected: the same.
    """

    def __init__(self, steps: int | None, expected: int | None):
        self.done = False
        self.steps, self.expected = steps, expected
        self._count = 0  # of batches so far

    @property
    def ahead(self) -> int:
        """Steps after the last one yielded that may have been begun, the same on all ranks."""
        raise NotImplementedError

    def plan(self, left: int | None) -> None:
        """Steps have another size: so many are left, None until the data ends."""
        self.steps = None if left is None else self._count + left

    def expect(self, left: int | None) -> None:
        """So many batches should be left by the known sizes of shards; None: unknown."""
        self.expected = None if left is None else self._count + left

    def close(self, why: str) -> None:
        """Yield nothing more."""
        raise NotImplementedError


class RankRun:
    """The run of one loader in its rank: all that lasts from the making of the loader on.

    It sets weights, batch sizes and other events, which the workers read before each step.

    Args:
        options: of the loader.
        count: counts the samples of an epoch's pass; see RunSchedule.
        check_size: raises an OptionError if there is no room for a batch of so many rows.
        reports: makes the part that takes the training's reports where no extension does.

    Attributes:
        options: the same; with the device, once that is known.
        schedule: the order, the length and the position of its epochs.
        process: the control block, counters, checks and clock of this process.
        parts: of its extensions.
    """

    def __init__(
        self,
        options: LoaderOptions,
        count: Callable[[LoaderOptions, Counters, int], int | None],
        check_size: Callable[[LoaderOptions, int], object],
        reports: Callable[[LoaderOptions], RankPart],
    ):
        self.options = options
        self.schedule = RunSchedule(options, lambda epoch: count(self.options, self.process.counts, epoch))
        self.process = RankProcess(options)
        self._check_size = check_size
        self._sent: list[Event] = []  # in this epoch
        self._current: weakref.ref[CurrentEpoch] | None = None
        self.parts = RankParts(self, reports)

    @property
    def epoch(self) -> CurrentEpoch | None:
        """The current epoch; None: there is none, and no worker has begun the next step."""
        epoch = None if self._current is None else self._current()
        return None if epoch is None or epoch.done else epoch

    def start_epoch(self, epoch: CurrentEpoch) -> None:
        """The workers were started on an epoch: events that are set from now on are sent to them."""
        self._current, self._sent = weakref.ref(epoch), []

    def end_epoch(self, why: str) -> None:
        """End the current epoch, if there is one: its iterator says why."""
        if (epoch := self.epoch) is not None:
            epoch.close(why)
        self._current = None

    @functools.cached_property
    def fingerprint(self) -> dict[str, str]:
        """What makes the rows of this loader."""
        from streamload.loader.fingerprint import rows_fingerprint

        return rows_fingerprint(self.options)

    def state(self) -> dict[str, Any]:
        """The state of this rank after the last batch that was yielded."""
        return self.schedule.state(
            self.process.state(self.schedule.topology), self.fingerprint, self.part_states()
        )

    def part_states(self) -> dict[str, Any]:
        """Return the extensions' keys of a state."""
        if not self.parts.by_name:
            return {}
        self.schedule.settle()
        return self.parts.state(self.schedule.tracker.saved().position)

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """Set weights by the sources' names, and return the step of the epoch from which they hold."""
        self._refuse_recorded("set_weights()")
        schedule, epoch, current = self.schedule, self.epoch, self._now()
        steps = schedule.steps_from(current)
        position = steps.begin(0 if epoch is None else epoch.ahead)
        by_rank = gather((dict(weights), schedule.next_block(position)), schedule.topology.world_size)
        position = max(position for _, position in by_rank)
        event = schedule.weights(by_rank[0][0], position)  # an error is raised on all ranks
        step = schedule.step_of(current, position)
        schedule.tracker.add(event)
        self._send()
        self.parts.event_set(event, {"reason": "set_weights"})
        return step

    def add_weights(self, weights: Event, steps: int) -> Event:
        """Set weights that all ranks agree on, from so many steps on, which no worker has begun."""
        schedule = self.schedule
        position = schedule.next_block(schedule.steps_from(self._now()).begin(steps))
        event = weights._replace(position=position)
        schedule.tracker.add(event)
        self._send()
        return event

    def set_batch_size(self, rows: int, reason: Mapping[str, Any]) -> int:
        """Set the size of a rank's batch, and return the step of the epoch from which it holds.

        Args:
            rows: of a rank in a step.
            reason: for the log of decisions; JSON-able.
        """
        self._refuse_recorded("set_batch_size()")
        schedule, epoch, current = self.schedule, self.epoch, self._now()
        by_rank = gather((rows, self._first_free()), schedule.topology.world_size)
        rows = by_rank[0][0]
        split, position = schedule.split(), max(position for _, position in by_rank)
        event = self.refuse_batch_size(rows, position)  # an error is raised on all ranks
        batch, since = split.batch, current.position
        for size in current.batch_sizes[-1:]:
            batch, since = size.value["batch"], max(current.position, size.position)
        if event.value["batch"] == batch:
            return schedule.step_of(current, since)
        schedule.tracker.add(event, split.batch, schedule.step_of(current))
        current = schedule.tracker.now()
        if epoch is not None:
            epoch.plan(schedule.steps(current))
            epoch.expect(schedule.expected(current))
        self._send()
        self.parts.event_set(event, reason)
        return schedule.step_of(current, position)

    def refuse_batch_size(self, rows: int, position: int = 0) -> Event:
        """The event that sets a batch size of a rank.

        Raises:
            OptionError: steps can't have this size.
        """
        event = self.schedule.resized(rows, position)
        self._check_size(self.options, rows)
        return event

    def send(self, extension: str, value: Any) -> Event:
        """Send an event of an extension to the workers of the current epoch."""
        by_rank = gather(self._first_free(), self.schedule.topology.world_size)
        event = Event(max(by_rank), extension, value)
        self._send(event)
        return event

    def _refuse_recorded(self, call: str) -> None:
        """Refuse other weights and sizes than those of a recorded run."""
        recorded = self.schedule.tracker.recorded
        if recorded is not None:
            raise OptionError(f"mixing={recorded!r} has all decisions: leave out {call}")

    def _now(self) -> Position:
        self.schedule.settle()
        return self.schedule.tracker.now()

    def _first_free(self) -> int:
        """The first position at which a step may have another size: at the epoch's end at the latest.

        A worker that has made its last batch of an epoch makes no more, so the epoch isn't longer for it.
        """
        schedule, epoch, current, number = self.schedule, self.epoch, self._now(), 0
        if epoch is not None:
            left, number = schedule.steps(current), epoch.ahead
            number = number if left is None else min(number, left)
        return schedule.next_block(schedule.steps_from(current).begin(number))

    def _send(self, sent: Event | None = None) -> None:
        """Write all events of the current epoch for its workers, also one of an extension.

        A worker that makes its next batch late reads only the latest message, and needs what was in effect
        for the batches of the others since its last one.
        """
        epoch = self.epoch
        if epoch is None:
            return
        events = joined(self._sent, self.schedule.tracker.now().events)
        if sent is not None:
            events.append(sent)
        most = 2 + 2 * epoch.ahead
        for kind in (WEIGHTS, BATCH_SIZE):
            for event in of_kind(events, kind)[:-most]:
                events.remove(event)
        self._sent = events
        self.process.control.changes.write(EpochChange(events, epoch.steps).to_json())
