"""Limits on the bytes of batches that are made ahead of the training loop, by modality (step J).

The bytes of a step follow from its plan, so a worker only has to know how many batches the training loop has
taken. Steps are begun in their order: the oldest one that isn't taken always fits, and none waits for a later
one. Which limits there can be is decided in loader/in_flight.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamload.extension import Extension, WorkerPart, WorkerProcess

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.0005, 0.008


@dataclass(frozen=True, slots=True)
class InFlight(Extension):
    """The limits of what is made and not yet taken, and what rows take of them.

    Attributes:
        limits: bytes by modality, over the rank's workers.
        row_bytes: of a row at most, by modality; with patches, without those of the image.
        patch_bytes: of a patch of an image.
        most_steps: how many steps of the dearest kind are in flight at most; None: unknown.
    """

    limits: Mapping[str, int]
    row_bytes: Mapping[str, int]
    patch_bytes: int = 0
    most_steps: int | None = None

    name = "in_flight"

    def in_worker(self, process: WorkerProcess) -> WorkerPart | None:
        """See Extension; a rank that reads itself makes no batch ahead."""
        return WorkerInFlight(self, process) if process.workers else None

    def step_bytes(self, rows: int, seq_len: int = 0) -> dict[str, int]:
        """Return the most bytes of a step, by modality.

        Args:
            rows: of a rank.
            seq_len: patches of each image; 0 where images aren't made into patches.
        """
        sizes = {name: rows * self.row_bytes[name] for name in self.limits}
        if seq_len and "image" in sizes:
            sizes["image"] += rows * seq_len * self.patch_bytes
        return sizes

    def steps_that_fit(self, rows: int, seq_len: int = 0) -> int:
        """Return how many steps of one kind are in flight at most; 0: not even one fits."""
        needed = self.step_bytes(rows, seq_len)
        return min(self.limits[name] // bytes_ for name, bytes_ in needed.items() if bytes_)


class WorkerInFlight(WorkerPart):
    """The worker's part.

    Args:
        in_flight: the limits.
        process: has the steps of each epoch.
    """

    def __init__(self, in_flight: InFlight, process: WorkerProcess):
        self._in_flight, self._process = in_flight, process
        self._admission: Admission | None = None  # of the epoch

    def start_epoch(self) -> None:
        """Forget the events of the epoch before."""
        self._admission = None

    def before_step(self, number: int) -> None:
        """Wait until a step fits."""
        steps = self._process.steps_ahead
        assert steps is not None
        if self._admission is None:
            self._admission = Admission(
                self._in_flight,
                lambda step: self._in_flight.step_bytes(steps.rows(step), steps.seq_len(step)),
                steps.taken,
            )
        self._admission.wait(number, steps.stop_if_superseded)


class Admission:
    """Lets one worker begin its steps of an epoch, each when it fits.

    Args:
        in_flight: the limits.
        step_bytes: gives the bytes of a step, by its number.
        taken: returns how many steps before one, by its number, the training loop has taken, or won't get
            as the data ends.
    """

    def __init__(
        self,
        in_flight: InFlight,
        step_bytes: Callable[[int], Mapping[str, int]],
        taken: Callable[[int], int],
    ):
        self._limits, self._step_bytes, self._taken = in_flight.limits, step_bytes, taken
        self._known: dict[int, Mapping[str, int]] = {}  # by step, of those that may not be taken

    def fits(self, taken: int, number: int) -> bool:
        """Return whether a step fits beside all earlier ones that aren't taken.

        Args:
            taken: how many steps the training loop has taken.
            number: of the step.
        """
        self._known = {step: bytes_ for step, bytes_ in self._known.items() if step >= taken}
        for step in range(taken, number + 1):
            if step not in self._known:
                self._known[step] = self._step_bytes(step)
        waiting = self._known.values()
        return all(sum(sizes[name] for sizes in waiting) <= limit for name, limit in self._limits.items())

    def wait(self, number: int, check: Callable[[], None]) -> None:
        """Return when a step fits.

        Args:
            number: of the step; numbers ascend.
            check: raises if the step isn't wanted any more.
        """
        pause_seconds, last = _FIRST_PAUSE_SECONDS, -1
        while True:
            taken_steps = self._taken(number)
            if taken_steps != last and self.fits(taken_steps, number):
                return
            check()
            time.sleep(pause_seconds)
            pause_seconds, last = min(2 * pause_seconds, _LAST_PAUSE_SECONDS), taken_steps
