"""Changes of a run while it goes on: weights, batch sizes, and what the training reports of its rows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from streamload.errors import OptionError
from streamload.extension import Event
from streamload.ipc import ControlBlock
from streamload.loader.batch_info import BatchInfo
from streamload.loader.batch_sizing import BatchSizing
from streamload.loader.changes import Changes
from streamload.loader.epoch import Epoch
from streamload.loader.in_flight import in_flight_of
from streamload.loader.lengths import EpochLengths
from streamload.loader.meter import Meter
from streamload.loader.options import LoaderOptions
from streamload.loader.output import Outputs
from streamload.loader.schedule import Schedule
from streamload.loader.signals import Rows
from streamload.loader.steering import Steering
from streamload.loader.worker_config import assembly_of
from streamload.worker import InFlight


class Steerable:
    """The part of a loader by which a run is steered.

    Attributes:
        options: of the loader.
    """

    options: LoaderOptions
    _schedule: Schedule
    _control: ControlBlock
    _outputs: Outputs
    _lengths: EpochLengths
    _steering: Steering
    _sizing: BatchSizing
    _current: weakref.ref[Epoch] | None
    meter: Meter

    @property
    def info(self) -> BatchInfo:
        """Record of the batch that was yielded last: its rows' sources, weights, keys, its size.

        Raises:
            OptionError: no batch was yielded yet.
        """
        if self._outputs.last is None:
            raise OptionError("loader.info is that of the last batch, and none was yielded yet")
        return self._outputs.last

    def info_of(self, batch: Any) -> BatchInfo:
        """Record of a batch that the training loop still holds.

        Args:
            batch: as this loader yielded it.

        Raises:
            OptionError: it is another one, or one without tensors.
        """
        return self._outputs.info_of(batch)

    def report(
        self,
        loss: Any = None,
        alignment: Any = None,
        *,
        tokens: Any = None,
        rows: Rows | None = None,
        batch: Any = None,
    ) -> None:
        """Report what the training found for rows of a batch, for the policy given as mixing=.

        Costs one copy on the values' device, and never waits for it. Ranks may report at other times than
        others, other rows, or nothing. Values that aren't finite are counted and left out. Without mixing=
        nothing is decided: the means by source of each 200 steps are shown by `metrics()`, `streamload top`
        and reports of the run.

        Args:
            loss: float[N], a loss for each row before its weight, on any device; or one number for all rows.
            alignment: the same for how well image and text fit, such as the cosine of their embeddings.
            tokens: the same for what a row has without padding, patches and ids; for `TokenShares`.
            rows: which rows of the batch these are: a slice such as a part's `rows`, numbers, or bool[N].
                None: all.
            batch: as this loader yielded it, or its info; None: the last one.

        Raises:
            OptionError: not one number for each of the rows; another batch.
        """
        batch = self.info if batch is None else batch
        info = batch if isinstance(batch, BatchInfo) else self.info_of(batch)
        self._steering.report(loss, alignment, tokens, info, rows)

    def report_eval(self, values: Mapping[str, Any]) -> None:
        """Report a loss on held-out data of each source, for the policy given as mixing=.

        Until the next decision the last one counts; of several ranks' values their mean.

        Args:
            values: by the sources' names, numbers or tensors of one; a source may be missing.

        Raises:
            OptionError: an unknown source.
        """
        self._steering.report_eval(values)

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """Change the sources' weights, from the first step that no worker of any rank can have started.

        With torch.distributed all ranks have to call it after the same step; the weights of rank 0 count.
        Without, every rank has to be given the same. The change is part of the state.

        Args:
            weights: by the sources' names; the other sources keep their weights.

        Returns:
            The step, counted from the start of the current epoch, or of the next one between two epochs; if
            the epoch ends before it, the change takes effect in the next.

        Raises:
            OptionError: an unknown source, a negative weight, or all weights are zero.
        """
        self._steering.refuse_changes("set_weights()")
        step = Changes(self._schedule, self._control, self._current_epoch()).set_weights(weights)
        self._steering.record_weights()
        return step

    def set_batch_size(self, rows: int) -> int:
        """Change the samples of each rank's batch, from the first step that no worker can have started.

        With torch.distributed all ranks have to call it after the same step; the number of rank 0 counts.
        Without, every rank has to be given the same. With bucketing= the change waits for the next block. It
        is part of the state: a resumed run goes on with it as long as batch_size × ranks stays as it was.
        Epochs of num_batches keep this number, those of num_samples or of all samples have more or fewer
        batches, and `len()` is that of an epoch of this size.

        Args:
            rows: samples in a batch of one rank.

        Returns:
            The step, counted from the start of the current epoch, or of the next one between two epochs; if
            the epoch ends before it, the change takes effect in the next.

        Raises:
            OptionError: fewer than one, an evaluation, steps of Patches(steps=…), a step that isn't equal
                parts of several groups, or more than Workers(memory=…) has room for.
        """
        self._steering.refuse_changes("set_batch_size()")
        return self._resize(rows, {"reason": "set_batch_size"})

    def decide(self) -> None:
        """Decide on the sources' weights and on the batch size, if that is due before the next batch."""
        self._steering.decide(self._control, self._current_epoch())
        self.meter.publisher.reported = self._steering.seen
        self._sizing.decide(self._resize)

    def send_event(self, extension: str, value: Any) -> Event:
        """Send an event of an extension to its parts in the workers; see extension.Run. For extensions."""
        return Changes(self._schedule, self._control, self._current_epoch()).send(extension, value)

    def _resize(self, rows: int, told: Mapping[str, Any]) -> int:
        """Set the batch size, with the reason for the log of decisions; see set_batch_size."""
        epoch, tracker = self._current_epoch(), self._schedule.tracker
        before = tracker.sizes
        step = Changes(self._schedule, self._control, epoch, self._in_flight()).set_batch_size(rows)
        if epoch is not None:
            epoch.expect(self._lengths.expected(tracker.now()))
        if tracker.sizes is not before:
            self._steering.record_size(told)
        return step

    def _in_flight(self) -> InFlight | None:
        """Limits that steps have to fit into; None: there are none."""
        options = self.options
        return None if options.workers.memory is None else in_flight_of(options, assembly_of(options))

    def _current_epoch(self) -> Epoch | None:
        epoch = self._current() if self._current is not None else None
        return None if epoch is None or epoch.done else epoch
