"""Clock of the training loop: its waits for data and its own steps, counted as they pass (step K)."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from streamload.ipc import ControlBlock, spent_ns
from streamload.metrics import Counters
from streamload.worker import Batch, bytes_by_modality


class LoopClock:
    """Counts the time of one training loop.

    Args:
        control: shared with the workers.
        counts: of this process.
        has_workers: whether batches come from other processes.

    Attributes:
        wait_began_ns: of the current wait, by the monotonic clock; 0: none.
    """

    def __init__(self, control: ControlBlock, counts: Counters, has_workers: bool) -> None:
        self._control, self._counts, self._has_workers = control, counts, has_workers
        self.wait_began_ns = 0
        self._returned_ns = 0  # when the training loop got its last batch; 0: it has asked since
        self._counted_until_ns = 0  # up to here the time in `next` is counted
        self._waited_ns = 0  # of the batch that is asked for
        self._features_ns = 0  # for which features had been computed when it was asked for
        self._spent_ns = 0

    def start_epoch(self) -> None:
        """An epoch begins."""
        self._returned_ns, self._spent_ns = 0, spent_ns()

    def asked(self) -> None:
        """The training loop asks for its next batch: from here on it waits."""
        self._counted_until_ns, self._waited_ns = time.monotonic_ns(), 0
        self._features_ns = self._counts.value("feature_compute_ns")
        if self._returned_ns:
            self._counts.add("step_ns", self._counted_until_ns - self._returned_ns)
            self._returned_ns = 0

    def wait_began(self, since: float) -> None:
        """The training loop waits for its workers, since then by the monotonic clock."""
        self._count_own_work()
        self._control.want(True)
        self.wait_began_ns = int(since * 1e9)

    def wait_ended(self, since: float) -> int:
        """It waits no longer; returns for how many nanoseconds it did."""
        self._control.want(False)
        self.wait_began_ns, waited_ns = 0, int((time.monotonic() - since) * 1e9)
        self._counted_until_ns, self._waited_ns = time.monotonic_ns(), self._waited_ns + waited_ns
        self._counts.add("data_wait_ns", waited_ns)
        if not self._counts.value("batches_yielded"):
            self._counts.add("first_batch_ns", waited_ns)
        return waited_ns

    def copying(self) -> AbstractContextManager[None]:
        """Count a block as a wait for a batch's copy to the device."""
        return self._counts.timed("device_ns")

    def took(self, batch: Batch, waited_ns: int) -> None:
        """The training loop gets a batch.

        Args:
            batch: as its worker made it.
            waited_ns: the data wait for it.
        """
        counts = self._counts
        counts.add("ready_batches", -1)
        for name, size in bytes_by_modality(batch.values).items():
            counts.add(name, -size)
        if batch.blocked:
            counts.add("blocked_wait_ns", min(waited_ns, sum(ns for _, ns in batch.blocked)))
        before, self._spent_ns = self._spent_ns, spent_ns()
        if self._has_workers:
            counts.add("hand_over_ns", self._spent_ns - before)

    def returned(self) -> None:
        """The training loop has its batch, and does its own work from here on."""
        self._count_own_work()
        self._counts.observe_wait(self._waited_ns)
        self._returned_ns = self._counted_until_ns

    def _count_own_work(self) -> None:
        """Count the time since the last wait, in which `next` passed a batch on, as data wait, too."""
        before, self._counted_until_ns = self._counted_until_ns, time.monotonic_ns()
        own_ns = self._counted_until_ns - before
        computed_ns, self._features_ns = self._features_ns, self._counts.value("feature_compute_ns")
        self._counts.add("data_wait_ns", own_ns)
        self._counts.add("hand_over_ns", max(0, own_ns - (self._features_ns - computed_ns)))
        self._waited_ns += own_ns
