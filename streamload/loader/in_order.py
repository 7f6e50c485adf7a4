"""The workers' batches in the order of their numbers, whichever worker made which (step K)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from streamload.errors import OrderDiverged
from streamload.torch_internals import next_batch, next_if_arrived
from streamload.worker import Batch, Failed


class InOrder:
    """Keeps batches that arrive early until their turn.

    Args:
        batches: torch's iterator, in the order in which they arrive.
    """

    def __init__(self, batches: Iterator[Batch | Failed]):
        self._batches = batches
        self._early: dict[int, Batch | Failed] = {}
        self._number = 0  # of the next one

    def next(self, while_waiting: Callable[[], object]) -> Batch:
        """The next batch; `while_waiting` is called about once a second until it arrives.

        Raises:
            StopIteration: there is none.
            Exception: what kept a worker from making it.
        """
        batch = self._in_turn(lambda: next_batch(self._batches, while_waiting))
        assert batch is not None
        return batch

    def next_if_arrived(self) -> Batch | None:
        """The next batch if it has arrived.

        Raises:
            Exception: as `next`.
        """
        return self._in_turn(lambda: next_if_arrived(self._batches))

    def _in_turn(self, arrived: Callable[[], Batch | Failed | None]) -> Batch | None:
        while self._number not in self._early:
            try:
                batch = arrived()
            except StopIteration:
                self._refuse_gap()
                raise
            if batch is None:
                return None
            self._early[batch.number] = batch
        batch = self._early.pop(self._number)
        self._number += 1
        if isinstance(batch, Failed):
            batch.error.reraise()  # type: ignore[no-untyped-call]
        assert isinstance(batch, Batch)
        return batch

    def _refuse_gap(self) -> None:
        if self._early:
            raise OrderDiverged(
                f"the workers ended without batch {self._number} of the epoch, but made later ones: they "
                f"disagree on where the data ends"
            )
