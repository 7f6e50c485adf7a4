"""The choice of a training's decoder by its first steps: `Images(decode="auto")`.

Workers decode until then. The choice is one for all ranks, an event of the run: it holds from the first step
on that no worker has begun, and is part of the state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from streamload.errors import OptionError, StateMismatch
from streamload.extension import Event, WorkerPart
from streamload.pixels.decoders import decoder_for

if TYPE_CHECKING:
    from streamload.extension import Run

logger = logging.getLogger("streamload")

NAME = "decode"
"""Name of the extension, and key of the choice in a state."""
DEVICE, HOST = "device", "host"
FIRST_STEP, LAST_STEP = 16, 48
"""Steps of a run between which is measured: in the first ones, workers and kernels start."""
_MOST_WAITING = 0.05
_LEAST_DECODING = 0.5
"""Least share of the workers' time in decoding; below it something else than images keeps them busy."""


@dataclass(slots=True)
class Switch:
    """Decides if the workers of a process leave images to the device, from the next batch on."""

    is_on: bool


class SwitchInWorker(WorkerPart):
    """The worker's part: turns the switch by the run's choice.

    Args:
        switch: of this process.
    """

    def __init__(self, switch: Switch):
        self._switch = switch

    def start_epoch(self) -> None:
        """Decode here, unless the events of the epoch say otherwise."""
        self._switch.is_on = False

    def apply(self, event: Event) -> None:
        """Go by the run's choice."""
        self._switch.is_on = event.value["decode"] == DEVICE


class DecodingLoad(NamedTuple):
    """Measurements of a rank.

    Attributes:
        lacks: why its device can't decode; "": it can.
        waiting: the share of its time for which the training waited for data.
        decoding: the share of its workers' time that images took.
    """

    lacks: str
    waiting: float
    decoding: float


class _Times(NamedTuple):
    """Seconds so far, of a rank.

    Attributes:
        seconds: that passed.
        waiting: in which the training waited for data.
        images: that workers spent on images.
    """

    seconds: float = 0.0
    waiting: float = 0.0
    images: float = 0.0

    def and_between(self, began: _Times, ended: _Times) -> _Times:
        """Add what passed between two times; the first wait of an epoch has begun before them."""
        seconds, waiting, images = (end - start for start, end in zip(began, ended, strict=True))
        return _Times(self.seconds + seconds, self.waiting + min(waiting, seconds), self.images + images)


def choose(by_rank: Sequence[DecodingLoad]) -> tuple[str, str]:
    """Return where images are decoded, and why.

    Args:
        by_rank: measurements of each rank.
    """
    for rank, measured in enumerate(by_rank):
        if measured.lacks:
            return HOST, f"rank {rank} has no decoder on its device: {measured.lacks}"
    rank = max(range(len(by_rank)), key=lambda number: by_rank[number].waiting)
    _, waiting, decoding = by_rank[rank]
    reason = (
        f"the training waited for data for {waiting:.0%} of its time, and images took {decoding:.0%} of the "
        f"workers' (rank {rank}, steps {FIRST_STEP} to {LAST_STEP})"
    )
    return (DEVICE if waiting > _MOST_WAITING and decoding > _LEAST_DECODING else HOST), reason


def why_no_engine(device: torch.device | None) -> str:
    """Return why images can't be decoded on a device by its engine; "": they can."""
    if device is None or device.type == "cpu":
        return "batches are in host memory"
    try:
        decoder_for(device)
    except OptionError as error:
        return str(error)
    except Exception as error:  # of the engine's library, whichever it raises
        return f"{type(error).__name__}: {error}"
    return ""


class DecoderChoice:
    """The choice in the rank.

    Args:
        run: of the loader.
        clock: seconds.

    Attributes:
        device: of the images so far.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic):
        self.device: torch.device | None = None
        self._run, self._clock = run, clock
        self._event: Event | None = None  # the choice, once it is made
        self._steps = 0  # since the run began or was continued
        self._is_begun = False  # measuring, on all ranks at the same step
        self._measured_before = _Times()  # in earlier epochs
        self._began: _Times | None = None  # what is measured of this epoch
        self._last: _Times | None = None

    @property
    def is_made(self) -> bool:
        """True once the run has chosen."""
        return self._event is not None

    def start_epoch(self, start: int) -> Sequence[Event]:
        """Go on measuring, or with the choice; the time between epochs isn't measured.

        Raises:
            OptionError: nothing joins the ranks.
        """
        if self._event is None:
            if self._began is not None and self._last is not None:
                self._measured_before = self._measured_before.and_between(self._began, self._last)
            self._began = self._last = None
            if not self._run.can_agree:
                raise OptionError(
                    "Images(decode='auto') is one choice for all ranks, and nothing joins these: initialise "
                    "torch.distributed before the loader is iterated, or give decode='device' or 'host'"
                )
            return ()
        if start == 0:  # a sequence begins anew
            self._event = self._event._replace(position=0)
        return (self._event,)

    def took(self) -> None:
        """A step was taken."""
        self._steps += 1
        if self._began is not None:
            self._last = self._times()

    def before_batch(self) -> None:
        """Measure, and choose after the last of the steps."""
        if self._event is not None or self._steps < FIRST_STEP:
            return
        if self._steps >= LAST_STEP and self._is_begun:
            self._event = self._run.send(
                self._run.agree("where images are decoded", self._measured(), _decided)
            )
            self._began = self._last = None
        elif self._began is None:
            self._began, self._is_begun = self._times(), True

    def _times(self) -> _Times:
        counted = self._run.stats()
        image_seconds = counted.decode_seconds + counted.resize_seconds
        return _Times(self._clock(), counted.data_wait_seconds, image_seconds)

    def _measured(self) -> DecodingLoad:
        measured = self._measured_before
        if self._began is not None:
            measured = measured.and_between(self._began, self._times())
        seconds = max(measured.seconds, 1e-9)
        worker_seconds = seconds * max(1, self._run.options.num_workers)
        return DecodingLoad(
            why_no_engine(self.device),
            min(1.0, measured.waiting / seconds),
            min(1.0, measured.images / worker_seconds),
        )

    def state(self) -> dict[str, Any]:
        """Its part of a state."""
        return {} if self._event is None else {NAME: [self._event.position, self._event.value]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the choice of a state, or choose anew where it has none.

        Raises:
            StateMismatch: it is damaged.
        """
        self._event, self._steps, self._is_begun = None, 0, False
        self._measured_before, self._began, self._last = _Times(), None, None
        if (saved := state.get(NAME)) is not None:
            try:
                position, value = saved
                is_sound = type(position) is int and position >= 0 and value["decode"] in (DEVICE, HOST)
            except (KeyError, TypeError, ValueError):
                is_sound = False
            if not is_sound:
                raise StateMismatch(f"not a valid state of a loader: {saved!r:.100} as {NAME}")
            self._event = Event(position, NAME, value)


def _decided(by_rank: list[Any]) -> dict[str, str]:
    """On rank 0, the choice for all ranks."""
    decode, reason = choose([DecodingLoad(*values) for values in by_rank])
    logger.info("decode: auto chose %s: %s", decode, reason)
    return {"decode": decode, "reason": reason}
