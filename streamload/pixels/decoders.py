"""Decoders of image files for a device: a small contract, and its form on the CPU, which tests use."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol

import torch

from streamload.errors import DecodeError
from streamload.pixels.segments import File
from streamload.transforms.decode import decode_jpeg_or_image
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS


class ImageDecoder(Protocol):
    """Decodes files to pixels on one device. Not thread-safe.

    Attributes:
        name: of the decoder and its library with version: its pixels are those of this name alone.
    """

    name: str

    def decode(self, files: Sequence[File]) -> list[torch.Tensor | DecodeError]:
        """Decode files that workers left to it (segments.refusal).

        Returns:
            For each file uint8[H, W, 3] on the device, or an error if the decoder fails or has doubts.

        Raises:
            torch.OutOfMemoryError: they don't fit into the device's memory.
        """
        ...


class HostDecoder:
    """Decodes as workers do, by libjpeg-turbo and Pillow; for tests, and trainings on the CPU.

    Args:
        most_pixels: of an image (transforms/limits.py).
    """

    def __init__(self, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> None:
        self.name = f"libjpeg-turbo (simplejpeg {version('simplejpeg')})"
        self._most_pixels = most_pixels

    def decode(self, files: Sequence[File]) -> list[torch.Tensor | DecodeError]:
        """Decode files one after another, on the CPU."""
        return [self._decoded(file) for file in files]

    def _decoded(self, file: File) -> torch.Tensor | DecodeError:
        try:
            return torch.from_numpy(decode_jpeg_or_image(file, most_pixels=self._most_pixels))
        except DecodeError as error:
            return error.with_traceback(None)


def decoder_for(device: torch.device, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> ImageDecoder:
    """Return the decoder of a device.

    Raises:
        OptionError: there is none for this kind of device, or its library is missing.
    """
    if device.type == "cpu":
        return HostDecoder(most_pixels)
    from streamload.pixels.engine import EngineDecoder  # its library is an extra

    return EngineDecoder(device, most_pixels)
