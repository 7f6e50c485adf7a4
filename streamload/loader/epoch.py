"""One epoch: its batches in order, with the next one on its way to the device (steps K and L).

Batches arrive in any order; InOrder keeps early ones until their turn. If the next one has arrived by the
time that a batch is yielded, its transfer to the device starts then and overlaps with the training step. The
state counts it when it is yielded, not before.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from streamload.device import Feed
from streamload.errors import (
    LoaderClosed,
    OrderDiverged,
    PassMismatch,
    StreamloadError,
    WorkerDied,
    as_failure,
)
from streamload.loader.options import MAIN_GUARD
from streamload.loader.output import Collector
from streamload.loader.rank_run import CurrentEpoch
from streamload.torch_internals import next_batch, next_if_arrived
from streamload.worker.messages import Batch, Ended, Failed, Message

if TYPE_CHECKING:
    from streamload.loader.dataloader import AccelerateEpoch
    from streamload.ranks.monitor import RankMonitor

_END = object()
"""In place of a batch: there is none."""


class _Pending(NamedTuple):
    """The next batch, on its way to the device."""

    batch: Batch | None
    """As the worker made it; None: there is none."""
    arrive: Callable[[], dict[str, Any]]
    """Waits for its values on the device; raises what kept a worker from making it."""


_END_OF_DATA = _Pending(None, dict)


class StepCount(NamedTuple):
    """Number of an epoch's batches."""

    steps: int | None
    """The epoch's batches; None: until the data ends."""
    expected: int | None
    """Its batches by the known sizes of shards; None: unknown."""


class Epoch(CurrentEpoch):
    """The batches of one epoch.

    Args:
        collector: takes each batch.
        close_loader: ends the workers; the epoch keeps the loader alive by it.
        batches: those of the workers, as they arrive.
        feed: moves them to the device.
        started: the time of `iter()`.
        count: of its batches.
        accelerate: is told of the last batch; None: Accelerate isn't used.
        monitor: of the other ranks; it ends with the epoch. None: there are none.
    """

    def __init__(
        self,
        collector: Collector,
        close_loader: Callable[[], object],
        batches: Iterator[Message],
        feed: Feed,
        started: float,
        count: StepCount,
        accelerate: AccelerateEpoch | None,
        monitor: RankMonitor | None,
    ):
        super().__init__(*count)
        self._collector, self._close_loader = collector, close_loader
        self._clock = collector.clock
        self._batches = InOrder(batches)
        self._feed = feed
        self._received = 0  # also one that was looked ahead
        self._accelerate = accelerate
        self._started = started
        self._pending: _Pending | None = None  # looked ahead
        self._pending_waited_ns = 0  # the data wait for it
        self._closed = ""  # why
        self._monitor = monitor
        if monitor is not None:
            weakref.finalize(self, monitor.close)

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StreamloadError: from the data, the origin or the cache; the loader is closed then. At the end of
                the epoch also in place of the last batch, or of StopIteration.
            WorkerDied: a worker process was killed.
            RankFailed: another rank of the run ended with an error.
            LoaderClosed: the loader was closed or iterated again in the middle of this epoch.
        """
        self._refuse_if_closed()
        if self.done:
            self._release()
            raise StopIteration
        self._clock.asked()
        self._collector.observer.tick()
        try:
            output = self._next_output()
        except Exception as exc:
            self._refuse_if_closed()
            error = as_failure(exc)
            self._fail(error)
            if error is not exc:
                raise error from exc
            raise
        except BaseException as exc:
            if (
                self._collector.options.num_workers
            ):  # Ctrl-C in a notebook: the workers stay for the next epoch
                self.close(f"{type(exc).__name__} was raised")
            else:
                self._fail(exc)
            raise
        if output is _END:
            self._release()
            raise StopIteration
        self._clock.returned()
        return output

    @property
    def ahead(self) -> int:
        """Steps after the last one yielded that may have been begun, the same on all ranks."""
        options = self._collector.options
        looks = self._feed.runs_ahead or self._accelerate is not None or self._pending is not None
        return options.workers.prefetch_factor * options.num_workers + looks

    def _next_output(self) -> Any:
        """The next batch that has samples, in its output form; or _END."""
        if self._monitor is not None:
            self._monitor.check()
        if self._count == 0 and self._accelerate is not None:
            self._accelerate.start()
        self._collector.before_batch()
        while True:
            since = self._started if self._count == 0 else time.monotonic()
            with self._collector.waiting(since):
                (batch, arrive), self._pending = self._pending or self._next_pending(), None
                with self._clock.copying():
                    values = arrive()
            if batch is None:
                self._refuse_if_closed()  # closed by a signal handler while this waited for a batch
                self._finish()
                return _END
            waited_ns, self._pending_waited_ns = self._pending_waited_ns + self._collector.waited_ns, 0
            self._count += 1
            is_last = self._count == self.steps
            if not is_last and (self._accelerate is not None or self._count == self.expected):
                with self._collector.waiting(time.monotonic()):
                    ahead = self._look_ahead(self._collector.observer.tick)
                self._pending_waited_ns = self._collector.waited_ns
                is_last = ahead is _END_OF_DATA
                self._pending = None if is_last else ahead
            elif self._feed.runs_ahead and not is_last:
                self._pending = self._look_ahead()
            output = self._collector.accept(batch, values, waited_ns)
            if is_last:
                if self._count == self.expected and self.steps is None:
                    self._collector.before_batch()  # as ranks do that find the end when they ask for more
                self._finish()
            if batch.rows.samples:
                return output
            if is_last:
                return _END

    def _fail(self, error: BaseException) -> None:
        """End the epoch, and the workers, by an error.

        Raises:
            WorkerDied: the error says that a worker was killed.
        """
        self.done = True
        self._pending = None
        died = None
        if is_worker_death(error):
            died = WorkerDied(f"{error}{self._advice_on_death()}")
        reported = error if died is None else died
        if self._monitor is not None and isinstance(reported, Exception):
            self._monitor.fail(reported)
        self._release()
        self._close_loader()
        if died is not None:
            raise died from error

    def _advice_on_death(self) -> str:
        """Handle the death of a worker."""
        method = self._collector.options.start_method
        if self._received or method == "fork":
            return "; what it had fetched is kept: iterate again"
        return (
            f" before the first batch: its own error is above. Workers that are started by {method!r} import "
            f"the main script: {MAIN_GUARD}"
        )

    def close(self, why: str = "its iterator was closed") -> None:
        """Yield nothing more, and drop a batch that was sent to the device but not yielded.

        Python calls it without a reason when a generator that has this epoch in `yield from` is closed.
        """
        self.done, self._closed = True, why
        self._pending, self._batches = None, InOrder(iter(()))
        self._release()

    def _finish(self) -> None:
        """The last batch was accepted, or there is none.

        Raises:
            PassMismatch: these aren't all of the epoch's batches or samples.
        """
        if self.steps is not None and self._count != self.steps:
            raise PassMismatch(f"an epoch of {self.steps} batches has ended after {self._count}")
        end = self._batches.end
        self.done = True
        self._batches = InOrder(iter(()))
        self._collector.finish_epoch(end)
        if self._monitor is not None:
            self._monitor.close()
        if self._accelerate is not None:
            self._accelerate.mark_last()

    def _release(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        if self._accelerate is not None:
            self._accelerate.end()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LoaderClosed(
                f"{self._closed} in the middle of the epoch, which ended this iterator: iterate the loader "
                f"again; to resume this epoch, load its state_dict() first"
            ) from None

    def _next_pending(self) -> _Pending:
        batch = self._batches.next(self._collector.observer.tick)
        return _END_OF_DATA if batch is None else self._send(batch)

    def _send(self, batch: Batch) -> _Pending:
        self._received += 1
        self._collector.received(self._received)
        return _Pending(batch, self._feed.send(batch.values) if batch.rows.samples else dict)

    def _look_ahead(self, while_waiting: Callable[[], object] | None = None) -> _Pending | None:
        """Send the next batch (as `InOrder.next`); None if it hasn't come. Errors are raised in its turn."""
        try:
            batch = self._batches.next(while_waiting)
            if batch is None:
                return None if self._batches.end is None else _END_OF_DATA
            return self._send(batch)
        except Exception as exc:
            # Its traceback refers to this frame, and would keep the epoch alive.
            return _Pending(None, functools.partial(_raise, as_failure(exc).with_traceback(None)))


class InOrder:
    """Keeps batches that arrive early until their turn.

    Args:
        batches: torch's iterator, in the order in which they arrive.

    Attributes:
        end: of the epoch, once all batches were returned; None: it isn't reached.
    """

    def __init__(self, batches: Iterator[Message]):
        self._batches = batches
        self.end: Ended | None = None
        self._early: dict[int, Batch | Failed] = {}
        self._ends: dict[int, Ended] = {}  # of the workers
        self._number = 0  # of the next one

    def next(self, while_waiting: Callable[[], object] | None = None) -> Batch | None:
        """The next batch; None at the end, or if it isn't waited for and hasn't arrived.

        Args:
            while_waiting: called about once a second until it arrives; None: don't wait.

        Raises:
            Exception: what kept a worker from making it.
        """
        while self._number not in self._early:
            try:
                if while_waiting is None:
                    message = next_if_arrived(self._batches)
                else:
                    message = next_batch(self._batches, while_waiting)
            except StopIteration as exc:  # torch's own: that of a user's function is a RuntimeError by now
                self._refuse_gap(exc)
                return None
            if message is None:
                return None
            if isinstance(message, Ended):
                self._ends[message.number] = message
            else:
                self._early[message.number] = message
        batch = self._early.pop(self._number)
        self._number += 1
        if isinstance(batch, Failed):
            batch.error.reraise()  # type: ignore[no-untyped-call]
        assert isinstance(batch, Batch)
        return batch

    def _refuse_gap(self, stop: StopIteration) -> None:
        if self._early:
            raise OrderDiverged(
                f"the workers ended without batch {self._number} of the epoch, but made later ones: they "
                f"disagree on where the data ends"
            )
        self.end = self._ends.get(self._number)
        if self.end is None:
            raise PassMismatch(
                f"the workers ended before batch {self._number} of the epoch, and none of them says that the "
                f"data ends there{f': {stop}' if stop.args else ''}"
            ) from stop


def is_worker_death(error: BaseException) -> bool:
    """True if this is the DataLoader's error for a killed worker."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, StreamloadError)
        and "DataLoader worker" in str(error)
        and "Caught" not in str(error)
    )


def _raise(error: Exception) -> NoReturn:
    raise error
