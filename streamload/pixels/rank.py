"""The images of a batch in the rank: made of files on their device, ahead of the step (steps K, L).

`files.py` makes the values that come here. Also the part of the run that says by which decoder pixels were
made: in states, and on the run's page.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from streamload.errors import DecodeError
from streamload.extension import Event, RankPart
from streamload.pixels.auto import DecoderChoice
from streamload.pixels.decoders import HostDecoder, ImageDecoder, decoder_for
from streamload.pixels.pipeline import DeviceImages
from streamload.transforms.augment import Box
from streamload.transforms.normalise import normalise_into, normalise_levels_into
from streamload.transforms.plan import Choices, ImagePlan

if TYPE_CHECKING:
    from streamload.extension import Batch

logger = logging.getLogger("streamload")

CHOICES, FILES, MADE = "image_choices", "image_files", "image_made"
"""The values of a batch from a worker: int64[N, 8], `packed`; uint8, all files one after the other; and
uint8[M, 3, H, W], the images of rows without a file."""
NO_FILE = -1
"""In place of a file's bytes, in a row that the worker made."""
DECODING = " decoding"
"""The key of a batch's Decoding, which the rank takes out of it."""
STATE_KEY = "decoder"


def packed(file_bytes: int, choices: Choices) -> tuple[int, ...]:
    """A row of `CHOICES`: bytes of the file; box (without one its height is 0); colour steps; seed; draws."""
    colour = 0
    for place, is_done in enumerate(choices.colour):
        colour |= is_done << place
    seed = choices.seed - (choices.seed >> 63 << 64)  # as int64
    return (file_bytes, *(choices.box or (0, 0, 0, 0)), colour, seed, choices.torch_taken)


def unpacked(row: list[int], steps: int) -> Choices:
    """Return the choices of a row of `CHOICES`, for a plan with so many colour steps."""
    _, *box, colour, seed, draws = row
    is_done = tuple(bool(colour >> place & 1) for place in range(steps))
    return Choices(Box(*box) if box[2] else None, is_done, seed % (1 << 64), draws)


class Decoding(NamedTuple):
    """Record of a batch's decoding.

    Attributes:
        decoder: its name.
        rows: with an image.
        by_workers: of these, rows that workers decoded.
        by_rank: rows that the device's decoder failed at, so that the rank decoded them on the host.
    """

    decoder: str
    rows: int
    by_workers: int
    by_rank: int


class ImagesOfFiles:
    """Makes the images of a batch on their device. Not thread-safe; called where batches are moved there.

    Where batches stay in host memory, images are what workers would make, to the bit.

    Args:
        plan: of the transform.
        as_bytes: leave images as uint8, to be normalised later.
        device: of the images.
        most_pixels: of an image (transforms/limits.py).
        decoder: of the device; None: its own.

    Raises:
        OptionError: the device has no decoder, or its library is missing.
    """

    def __init__(
        self,
        plan: ImagePlan,
        as_bytes: bool,
        device: torch.device,
        most_pixels: int,
        decoder: ImageDecoder | None = None,
    ):
        decoder = decoder_for(device, most_pixels) if decoder is None else decoder
        self._plan, self._device = plan, device
        self._statistics = None if as_bytes else plan.statistics
        self._images = DeviceImages(plan, device, decoder, most_pixels)
        self._decoder_name = decoder.name
        host = torch.device("cpu")
        self._of_host = DeviceImages(plan, host, HostDecoder(most_pixels), most_pixels)
        logger.info("images are decoded on %s by %s", device, decoder.name)
        if device.type == "cpu":
            logger.warning(
                "decode='device' without a device: the training's process decodes all images itself, one by "
                "one. Give make_loader(device='cuda'), or decode='host'"
            )

    def __call__(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a batch's values with `image` in place of files and choices, which stay as they are.

        Args:
            values: from a worker that has left its images to the rank.

        Raises:
            DecodeError: neither decoder takes an image that its worker took for sound.
            torch.OutOfMemoryError: the images don't fit into the device's memory.
        """
        images, decoding = self._made(values)
        with_images: dict[str, Any] = {}
        for name, value in values.items():
            if name == CHOICES:
                with_images["image"] = self._normalised(images)
            elif name not in (FILES, MADE):
                with_images[name] = value
        return {**with_images, DECODING: decoding}

    def _made(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, Decoding]:
        """Return uint8[N, 3, H, W] on the device, in channels-last memory."""
        rows: list[list[int]] = values[CHOICES].tolist()
        with_file = [row for row, (file_bytes, *_) in enumerate(rows) if file_bytes != NO_FILE]
        without = [row for row, (file_bytes, *_) in enumerate(rows) if file_bytes == NO_FILE]
        choices = [unpacked(rows[row], len(self._plan.colour)) for row in with_file]
        files, start = [], 0
        whole = memoryview(values[FILES].numpy()) if with_file else memoryview(b"")
        for row in with_file:
            files.append(whole[start : start + rows[row][0]])
            start += rows[row][0]
        decoded = self._images.images(files, choices) if files else None
        failed = {} if decoded is None else decoded.failed
        decoding = Decoding(self._decoder_name, len(rows), len(without), len(failed))
        if decoded is not None and not (failed or without):
            return decoded.images, decoding
        height, width = self._plan.size
        images = torch.empty((len(rows), height, width, 3), dtype=torch.uint8, device=self._device)
        images = images.permute(0, 3, 1, 2)
        if decoded is not None:
            images.index_copy_(0, self._numbers(with_file), decoded.images)
        if without:
            images.index_copy_(0, self._numbers(without), values[MADE].to(self._device))
        for place, reason in failed.items():
            images[with_file[place]] = self._by_host(files[place], choices[place], reason)
        return images, decoding

    def _by_host(self, file: memoryview, choices: Choices, reason: str) -> torch.Tensor:
        """Return uint8[3, H, W] as a worker makes it."""
        decoded = self._of_host.images([file], [choices])
        if decoded.failed:
            raise DecodeError(
                f"an image of {len(file)} bytes looked sound to its worker, but {self._decoder_name} can't "
                f"decode it ({reason}), nor can the host ({decoded.failed[0]}): decode='host' leaves it out. "
                f"Please report it with the image"
            )
        return decoded.images[0]

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        if self._statistics is None:
            return images
        floats = torch.empty(images.shape, dtype=torch.float32, device=images.device)
        normalise = normalise_levels_into if self._plan.on_tensors else normalise_into
        normalise(images, floats, *self._statistics)
        return floats

    def _numbers(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device="cpu").to(self._device)


class DecodingRecord(RankPart):
    """The rank's part: who decoded.

    Args:
        choice: of a run that chooses who does.
    """

    def __init__(self, choice: DecoderChoice | None = None) -> None:
        self._choice = choice
        self._decoder: str | None = None  # of the images so far, also of the run that is continued
        self._is_loaded = False
        self._rows = self._by_workers = self._by_rank = 0

    def start_epoch(self, start: int) -> Sequence[Event]:
        """The choice, if it was made."""
        return () if self._choice is None else self._choice.start_epoch(start)

    def before_batch(self) -> None:
        """The place to choose."""
        if self._choice is not None:
            self._choice.before_batch()

    def taken(self, batch: Batch) -> None:
        """A step was taken."""
        if self._choice is not None:
            self._choice.took()

    def yielded(self, part: bytes, values: dict[str, Any]) -> dict[str, Any]:
        """Count a batch's rows; takes out what `ImagesOfFiles` left."""
        decoding: Decoding | None = values.pop(DECODING, None)
        if decoding is not None:
            self._rows += decoding.rows
            self._by_workers += decoding.by_workers
            self._by_rank += decoding.by_rank
        if "image" in values:
            decoder = None if decoding is None else decoding.decoder
            if self._is_loaded:
                warn_of_other(self._decoder, decoder)
            self._decoder, self._is_loaded = decoder, False
            if self._choice is not None:
                self._choice.device = values["image"].device
        return {}

    def metrics(self) -> Mapping[str, float]:
        """The shares of images that the device's decoder didn't make."""
        rows = max(1, self._rows)
        return {"by_workers_share": self._by_workers / rows, "by_rank_share": self._by_rank / rows}

    def state(self, position: int) -> dict[str, Any]:
        """The decoder's name, unless workers decode, and the choice."""
        decoder = {} if self._decoder is None else {STATE_KEY: self._decoder}
        return decoder if self._choice is None else {**decoder, **self._choice.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Remember the decoder of the run that is continued; without images there was none."""
        decoder = state.get(STATE_KEY)
        self._decoder = None if decoder is None else str(decoder)
        self._is_loaded = bool(state["position"] or state["epoch"])
        if self._choice is not None:
            self._choice.load(state)
            if self._choice.is_made and self._decoder is None:
                self._is_loaded = False  # workers decode up to a step after the choice


def warn_of_other(before: str | None, after: str | None) -> None:
    """Warn where a run goes on with another decoder.

    Args:
        before: the decoder's name in the state; None: images were decoded by workers.
        after: of the run that continues it.
    """
    host = HostDecoder().name
    if (before or host) != (after or host):
        logger.warning(
            "this run's images were decoded by %s, and are by %s from here on, whose pixels differ a little "
            "(docs/guides/device-decoding.md)",
            before or host,
            after or host,
        )
