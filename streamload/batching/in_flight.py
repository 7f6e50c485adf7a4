"""Limits on the bytes of batches that workers make ahead, by modality: `Workers(memory=…)` (step J).

The bytes of a step follow from its plan, so a worker only has to know how many batches the training loop has
taken. Steps are begun in their order: the oldest one that isn't taken always fits, and none waits for a later
one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamload.batches.assembly import BatchAssembly
from streamload.batches.images import ImageAssembly, ImageMaker
from streamload.batching.costs import LONG_TEXT
from streamload.errors import OptionError
from streamload.extension import Extension, WorkerPart
from streamload.metrics import format_bytes
from streamload.options.values import parse_size
from streamload.order.steps import Split
from streamload.patches.images import PatchImages
from streamload.transforms.plan import ImagePlan

if TYPE_CHECKING:
    from streamload.extension import LoaderOptions, Run, WorkerConfig, WorkerProcess

logger = logging.getLogger("streamload")

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.0005, 0.008


@dataclass(frozen=True)
class MemoryLimits(Extension):
    """The extension of a loader whose batches in flight have limits; a run has `InFlight`.

    Attributes:
        limits: bytes by modality, over the rank's workers.
    """

    limits: Mapping[str, int]

    name = "in_flight"

    def refuse_rows(self, rows: int, options: LoaderOptions, assembly: Callable[[], BatchAssembly]) -> None:
        """Refuse a batch that there is no room for; with Patches(steps=…), each step says its own."""
        self._of(assembly()).check(options.step_options(Split(rows, 1, 1), None).kinds(rows))

    def in_run(self, options: LoaderOptions, config: WorkerConfig, plain: BatchAssembly) -> InFlight:
        """The extension of a run, which knows what rows take."""
        in_flight = self._of(config.assembly)
        return replace(in_flight, most_steps=in_flight.check(config.steps.kinds(options.batch_size)))

    def _of(self, assembly: BatchAssembly) -> InFlight:
        """The limits with what rows take of them.

        Raises:
            OptionError: the bytes of a row aren't known before it is made.
        """
        row_bytes, patch_bytes = {}, 0
        if "text" in self.limits:
            row_bytes["text"] = _text_bytes(assembly)
        if "image" in self.limits:
            row_bytes["image"], patch_bytes = _image_bytes(assembly.images)
        return InFlight(self.limits, row_bytes, patch_bytes)


def memory_limits(options: LoaderOptions) -> MemoryLimits:
    """The extension of a loader, by its options, `LoaderOptions`, with `Workers(memory=…)`."""
    memory = options.workers.memory or {}
    return MemoryLimits({name: parse_size(value, f"memory[{name!r}]") for name, value in memory.items()})


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

    name = MemoryLimits.name

    def in_worker(self, process: WorkerProcess) -> WorkerPart | None:
        """Its part in a worker process; None: a rank that reads itself makes no batch ahead."""
        return WorkerInFlight(self, process) if process.workers else None

    def in_rank(self, run: Run) -> None:
        """None: it logs what is in flight at most, and has no part in the rank."""
        workers, kinds = run.options.workers, run.step_options.kinds(run.most_rows)
        self.report(kinds, max(1, workers.prefetch_factor * run.options.num_workers))

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

    def check(self, kinds: Collection[tuple[int, int]]) -> int:
        """Largest number of steps in flight, of the dearest kind.

        Args:
            kinds: of steps: the patches of each image, and the rows of a rank.

        Raises:
            OptionError: a step is larger than a limit.
        """
        for seq_len, rows in kinds:
            for name, needed in self.step_bytes(rows, seq_len).items():
                if needed > self.limits[name]:
                    fits = self.limits[name] * rows // needed
                    smaller = f", or a batch_size of at most {fits}" if fits else ""
                    raise OptionError(
                        f"memory={{{name!r}: …}}: the {name} of a batch of {rows} rows has "
                        f"{format_bytes(needed)}, more than the {format_bytes(self.limits[name])} allowed: "
                        f"give at least {needed}{smaller}"
                    )
        return min(self.steps_that_fit(rows, seq_len) for seq_len, rows in kinds)

    def report(self, kinds: Collection[tuple[int, int]], steps_ahead: int) -> None:
        """Log what is in flight at most.

        Args:
            kinds: as for `check`; those of all steps that come.
            steps_ahead: how many steps workers make ahead at most, by their number.
        """
        fitting = min(steps_ahead, self.check(kinds))
        seq_len, rows = (max(numbers) for numbers in zip(*kinds, strict=True))
        most = self.step_bytes(rows, seq_len)
        shown = []
        for name, limit in self.limits.items():
            most_bytes = min(limit, (steps_ahead if len(kinds) > 1 else fitting) * most[name])
            shown.append(f"{name} {format_bytes(most_bytes)} of {format_bytes(limit)}")
        count = f"{fitting} or more" if len(kinds) > 1 and fitting < steps_ahead else str(fitting)
        logger.info(
            "memory: batches in flight have at most %s (%s of %d)", ", ".join(shown), count, steps_ahead
        )


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


def _text_bytes(assembly: BatchAssembly) -> int:
    """Of the ids of a caption that is as long as it may be, and of what comes with them."""
    if assembly.tokenizer is None or assembly.map_sample is not None:
        raise OptionError('memory={"text": …} is for ids: give a tokenizer, or leave "text" out')
    texts = assembly.tokenizer([LONG_TEXT], [0])
    text_bytes = texts.ids.nbytes
    if assembly.as_model_inputs:
        text_bytes += sum(value.nbytes for value in texts.others.values())
    if assembly.trim is not None:
        text_bytes += sum(value.nbytes for value in assembly.trim.beside(texts).values())
    return text_bytes


def _image_bytes(images: ImageAssembly | None) -> tuple[int, int]:
    """Of an image, and of each patch of one."""
    if images is None:
        raise OptionError('memory={"image": …} is for batches with images: leave "image" out')
    preprocess, item_bytes = images.preprocess, 4
    if isinstance(preprocess, ImagePlan):
        if images.as_bytes or preprocess.statistics is None:
            item_bytes = 1
        return 3 * math.prod(preprocess.size) * item_bytes, 0
    if isinstance(preprocess, PatchImages):
        if images.unnormalised is not None:
            item_bytes = 1
        values = 3 * math.prod(preprocess.transform.patch_size)
        return 0, values * item_bytes + 2 * 8 + 1  # with place and mask
    row_bytes = preprocess.row_bytes(images.as_bytes) if isinstance(preprocess, ImageMaker) else None
    if row_bytes is not None:
        return row_bytes, 0
    raise OptionError(
        'memory={"image": …} is for images whose size is known before they are made: give a preprocess= that '
        'can be compiled (docs/guides/transforms.md), or patches=, or leave "image" out'
    )
