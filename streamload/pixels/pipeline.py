"""Files and random choices → the images of a batch on a device, behind `Images(decode="device")` (step L)."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from streamload.errors import DecodeError, OptionError
from streamload.pixels.colour import Whole, draw_all, steps_of
from streamload.pixels.decoders import ImageDecoder
from streamload.pixels.resample import Fit, resize_images
from streamload.pixels.segments import File
from streamload.transforms.augment import Box, Draws
from streamload.transforms.decode import jpeg_size
from streamload.transforms.plan import Choices, ImagePlan, NotRecognised, PlannedTransform, fitted
from streamload.transforms.resize import Place

DECODED_BYTES = 128 << 20
"""Most bytes of pixels that are decoded at a time."""
MOST_BYTES = DECODED_BYTES + (500 << 20)
"""Most device memory of a batch beside its images; the second part is for resizing, as computed."""


class Decoded(NamedTuple):
    """The images of a batch.

    Attributes:
        images: on the device, uint8[N, 3, H, W] in channels-last memory.
        failed: the reasons of rows that the decoder refused or warned of; their images are undefined.
    """

    images: torch.Tensor
    failed: Mapping[int, str]


class DeviceImages:
    """Decodes, crops, resizes, flips and colours the images of a batch on a device.

    On the CPU images are transformed one by one, as workers do (PlannedTransform); on other devices together
    (resample.py). Both give the same levels for the same pixels. Files are decoded some at a time, so that
    memory is bounded. Work is queued on the current stream; decoding may wait for it. Not thread-safe.

    Args:
        plan: of the transform; `why_not` must be None.
        device: of the result.
        decoder: of that device.
        most_pixels: of an image (transforms/limits.py).
        decoded_bytes: limit of the pixels that are decoded at a time; a larger image is decoded by itself.

    Raises:
        OptionError: the plan has no form on a device.
    """

    def __init__(
        self,
        plan: ImagePlan,
        device: torch.device,
        decoder: ImageDecoder,
        most_pixels: int,
        decoded_bytes: int = DECODED_BYTES,
    ) -> None:
        reason = why_not(plan)
        if reason is not None:
            raise OptionError(reason)
        self._plan, self._device = plan, device
        self._decoder, self._most_pixels, self._decoded_bytes = decoder, most_pixels, decoded_bytes
        self._steps, self._draws = steps_of(plan.given), Draws()
        compiled = dataclasses.replace(plan, given=())
        self._transform = OneByOne(compiled) if device.type == "cpu" else Together(compiled)

    def images(self, files: Sequence[File], choices: Sequence[Choices]) -> Decoded:
        """Decode and transform the images of a batch.

        Args:
            files: whole image files that workers left to a device (segments.refusal).
            choices: made by PlannedTransform.draw for their sizes.

        Raises:
            torch.OutOfMemoryError: they don't fit into the device's memory.
        """
        levels = torch.empty((len(files), *self._plan.size, 3), dtype=torch.uint8, device=self._device)
        failed: dict[int, str] = {}
        try:
            with torch.no_grad():
                for rows in self._chunks(files):
                    self._fill(rows, files, choices, levels, failed)
                self._colour(choices, levels)
                return Decoded(levels.permute(0, 3, 1, 2), failed)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # these hold the tensors that did fit
            raise torch.OutOfMemoryError(
                f"the device's memory is full in decoding {len(files)} images, which takes up to "
                f"{MOST_BYTES >> 20} MiB beside them: lower batch_size= or microbatch=, or give "
                f"Images(decode='host'), which takes none for it. {error}"
            ) from None

    def _chunks(self, files: Sequence[File]) -> Iterator[list[int]]:
        """Yield rows whose pixels take no more than the limit."""
        rows: list[int] = []
        chunk_bytes = 0
        for row, file in enumerate(files):
            image_bytes = self._pixel_bytes(file)
            if rows and chunk_bytes + image_bytes > self._decoded_bytes:
                yield rows
                rows, chunk_bytes = [], 0
            rows.append(row)
            chunk_bytes += image_bytes
        if rows:
            yield rows

    def _pixel_bytes(self, file: File) -> int:
        try:
            size = jpeg_size(file, self._most_pixels)
        except DecodeError:  # too large: the decoder refuses it
            return 0
        return self._most_pixels * 3 if size is None else size[0] * size[1] * 3

    def _fill(
        self,
        rows: Sequence[int],
        files: Sequence[File],
        choices: Sequence[Choices],
        levels: torch.Tensor,
        failed: dict[int, str],
    ) -> None:
        """Decode and transform some images into their rows of uint8[N, H, W, 3]."""
        decoded: dict[int, torch.Tensor] = {}
        for row, pixels in zip(rows, self._decoder.decode([files[row] for row in rows]), strict=True):
            if isinstance(pixels, DecodeError):
                failed[row] = str(pixels)
            elif not _holds(pixels, choices[row].box):
                failed[row] = f"image of {pixels.shape[1]}×{pixels.shape[0]}, not of the size by its header"
            else:
                decoded[row] = pixels
        if decoded:
            failed |= self._transform(decoded, {row: choices[row] for row in decoded}, levels)

    def _colour(self, choices: Sequence[Choices], levels: torch.Tensor) -> None:
        """Do what functions of Pillow images would, to uint8[N, H, W, 3]."""
        if self._steps and choices:
            drawn = [draw_all(self._steps, choice, self._draws) for choice in choices]
            for step, drawn_for_step in zip(self._steps, zip(*drawn, strict=True), strict=True):
                step.apply(levels, drawn_for_step)


def why_not(plan: ImagePlan) -> str | None:
    """Return why a plan can't run on a device, and what to do; None: it can."""
    try:
        steps_of(plan.given)
    except NotRecognised as exc:
        return (
            f"preprocess= calls {exc} on Pillow images, which has no form on a device: leave it out, or give "
            f"Images(decode='host')"
        )
    return None


def _holds(pixels: torch.Tensor, box: Box | None) -> bool:
    """Return whether a box that was drawn lies within an image."""
    height, width, _ = pixels.shape
    return box is None or (box.top + box.height <= height and box.left + box.width <= width)


class OneByOne:
    """Transforms as workers do."""

    def __init__(self, plan: ImagePlan) -> None:
        self._transform = PlannedTransform(plan)

    def __call__(
        self, decoded: Mapping[int, torch.Tensor], choices: Mapping[int, Choices], levels: torch.Tensor
    ) -> dict[int, str]:
        """Write images into their rows, one after another.

        Args:
            decoded: uint8[H, W, 3] by row.
            choices: by row.
            levels: uint8[N, height, width, 3].

        Returns:
            The reasons of rows that can't be transformed.
        """
        images = levels.permute(0, 3, 1, 2)
        failed: dict[int, str] = {}
        for row, pixels in decoded.items():
            try:
                put = self._transform.put(pixels.numpy(), choices[row])
            except DecodeError as error:
                failed[row] = str(error)
            else:
                put(out=Place.of(images[row : row + 1]))
        return failed


class Together:
    """Transforms images of unlike size together, on their device."""

    def __init__(self, plan: ImagePlan) -> None:
        self._plan = plan

    def __call__(
        self, decoded: Mapping[int, torch.Tensor], choices: Mapping[int, Choices], levels: torch.Tensor
    ) -> dict[int, str]:
        """Write images into their rows, all that fit together; arguments and result are those of OneByOne."""
        fits: dict[int, Fit] = {}
        failed: dict[int, str] = {}
        for row, pixels in decoded.items():
            try:
                height, width, _ = pixels.shape
                fits[row] = fitted(self._plan, height, width, choices[row].box)
            except DecodeError as error:
                failed[row] = str(error)
        if fits:
            resized = resize_images([decoded[row] for row in fits], list(fits.values()), self._plan)
            for number, step in enumerate(self._plan.colour):
                Whole(step).apply(resized, [choices[row].colour[number] for row in fits])
            levels.index_copy_(0, torch.tensor(list(fits), device=levels.device), resized)
        return failed
