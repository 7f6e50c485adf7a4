"""One epoch: the batches in order, with the next one on its way to the device (K and L).

A batch that has arrived when the one before it is asked for is sent to the device then, so that it gets
there while the training works on that one. It counts as taken when it is handed out, and not before.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from streamload.device import Feed
from streamload.errors import LoaderClosed, StreamloadError, WorkerDied
from streamload.loader.options import LoaderOptions
from streamload.torch_internals import next_batch, next_if_arrived
from streamload.worker import Batch

if TYPE_CHECKING:
    from streamload.loader.dataloader import AccelerateEpoch
    from streamload.loader.distributed import Watch

_Coming = Callable[[], tuple[Batch, dict[str, Any]]]
"""Gives a batch as it came, and its values where they were asked for."""


class Owner(Protocol):
    """The part of a loader that its epoch uses (loader.Loader)."""

    options: LoaderOptions
    waited_ns: int
    """How long the last `waiting` block took."""

    def waiting(self, began: float) -> AbstractContextManager[None]:
        """Count the time since `began` as waiting for data."""
        ...

    def took(self, batch: Batch, values: dict[str, Any], waited_ns: int) -> Any:
        """Take up a batch's place in the order; what is given to the training loop, or None."""
        ...

    def ran_out(self) -> None:
        """The epoch was given to its end."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class Epoch:
    """The batches of one epoch.

    Args:
        loader: whose epoch it is.
        batches: torch's iterator over the workers' batches.
        feed: by which they go to the device.
        began: when it was asked for.
        steps: how many batches it has; None: the data says where it ends.
        expected: how many it should have by what is known of the data; None: nothing is.
        ends: is told that the last batch comes; None: nobody asks.
        watch: over the other ranks of the run; it ends with the epoch. None: there are none.

    Attributes:
        done: nothing comes any more.
    """

    def __init__(
        self,
        loader: Owner,
        batches: Iterator[Batch],
        feed: Feed,
        began: float,
        steps: int | None,
        expected: int | None,
        ends: AccelerateEpoch | None,
        watch: Watch | None,
    ):
        self.done = False
        self._loader = loader
        self._batches = batches
        self._feed = feed
        self._taken = 0
        self._steps, self._expected = steps, expected
        self._ends = ends
        self._began = began
        self._coming: _Coming | None = None  # what was there before it was asked for
        self._waited_ns = 0  # for what is coming
        self._closed = ""  # why
        self._watch = watch
        if watch is not None:
            weakref.finalize(self, watch.close)

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StreamloadError: of the data, the origin or the cache; the loader is closed then.
            WorkerDied: a worker process was killed.
            RankFailed: another rank of the run has ended by an error.
            LoaderClosed: its loader was closed in the middle of it, or iterated anew.
        """
        self._refuse_if_closed()
        if self.done:
            self._leave()
            raise StopIteration
        try:
            if self._watch is not None:
                self._watch.check()
            if self._taken == 0 and self._ends is not None:
                self._ends.begin()
            while True:
                began = self._began if self._taken == 0 else time.monotonic()
                with self._loader.waiting(began):
                    coming, self._coming = self._coming or self._sent(next_batch(self._batches)), None
                    batch, values = coming()
                waited_ns, self._waited_ns = self._waited_ns + self._loader.waited_ns, 0
                self._taken += 1
                is_last = self._taken == self._steps
                if not is_last and (self._ends is not None or self._taken == self._expected):
                    with self._loader.waiting(time.monotonic()):
                        self._coming = self._look_ahead(_next_or_none)
                    self._waited_ns = self._loader.waited_ns
                    is_last = self._coming is None
                elif self._feed.runs_ahead and not is_last:
                    self._coming = self._look_ahead(next_if_arrived)
                taken = self._loader.took(batch, values, waited_ns)
                if is_last:
                    self._finish()
                if batch.samples:
                    return taken
        except StopIteration:
            self._refuse_if_closed()  # by a signal's handler, while a batch was waited for
            self._finish()
            self._leave()
            raise
        except BaseException as exc:
            if isinstance(exc, Exception):
                self._refuse_if_closed()
            elif (
                self._loader.options.num_workers
            ):  # Ctrl-C in a notebook: the workers stay for the next epoch
                self.close(f"{type(exc).__name__} was raised")
                raise
            self.done = True
            self._coming = None
            error = exc
            if is_a_death(exc):
                error = WorkerDied(f"{exc}; what it had fetched is kept: iterate again")
            if self._watch is not None and isinstance(error, Exception):
                self._watch.fail(error)
            self._leave()
            self._loader.close()
            if error is exc:
                raise
            raise error from exc

    def close(self, why: str = "its iterator was closed") -> None:
        """Give nothing more, and let go of a batch that was sent and not handed out.

        Python itself calls it, without a reason, where a generator that has this in `yield from` is closed.
        """
        self.done, self._closed = True, why
        self._coming, self._batches = None, iter(())
        self._leave()

    def _finish(self) -> None:
        """The last batch is handed out, or there is none."""
        self.done = True
        self._batches = iter(())
        self._loader.ran_out()
        if self._watch is not None:
            self._watch.close()
        if self._ends is not None:
            self._ends.last()

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._ends is not None:
            self._ends.end()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LoaderClosed(
                f"{self._closed} in the middle of the epoch, which ended this iterator: iterate the loader "
                f"anew; load its state_dict() before to go on in this epoch"
            ) from None

    def _sent(self, batch: Batch) -> _Coming:
        ready = self._feed.send(batch.values) if batch.samples else dict
        return lambda: (batch, ready())

    def _look_ahead(self, next_: Callable[[Any], Batch | None]) -> _Coming | None:
        """Send the next batch if there is one; what goes wrong with it is said when it is asked for."""
        try:
            batch = next_(self._batches)
            return None if batch is None else self._sent(batch)
        except Exception as exc:
            # Its traceback has this frame, and so the epoch, which would outlive its last reference.
            return functools.partial(_raise, exc.with_traceback(None))


def is_a_death(error: BaseException) -> bool:
    """Whether it is the DataLoader's word that a worker was killed."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, StreamloadError)
        and "DataLoader worker" in str(error)
        and "Caught" not in str(error)
    )


def _next_or_none(batches: Any) -> Batch | None:
    try:
        batch: Batch = next_batch(batches)
        return batch
    except StopIteration:
        return None


def _raise(error: Exception) -> NoReturn:
    raise error
