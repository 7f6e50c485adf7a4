"""The user's own transform, with global generators seeded per sample (step I)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from streamload.transforms.decode import decode_to_pillow
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS

_LOW_32 = 0xFFFF_FFFF


class SeededGenerators:
    """Makes functions that use global generators depend only on a sample's seed.

    A context manager around a batch, which restores the generators at its exit; call `seed` before each
    sample. Seeds Python's `random`, numpy's legacy generator and torch's CPU generator. Not thread-safe.
    """

    def __enter__(self) -> SeededGenerators:
        self._states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        return self

    def seed(self, seed: int, torch_taken: int = 0) -> None:
        """Seed all of them from one uint64; about 20 µs.

        numpy's and torch's generators are the same Mersenne Twister, so each gets a half of the seed.

        Args:
            seed: of the sample.
            torch_taken: how many numbers of torch's generator count as used (augment.Draws).
        """
        random.seed(seed)
        np.random.seed(seed >> 32)
        torch.default_generator.manual_seed(seed & _LOW_32)
        if torch_taken:
            torch.rand(torch_taken, device="cpu", dtype=torch.float32)

    def were_used(self, seed: int) -> bool:
        """Return whether any generator was used since `seed` seeded it."""
        after = _draw()
        self.seed(seed)
        return after != _draw()

    def __exit__(self, *_: object) -> None:
        python, legacy, cpu = self._states
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)


def _draw() -> tuple[float, float, float]:
    """Return the next number of each generator."""
    return random.random(), np.random.random_sample(), torch.rand((), device="cpu").item()


class UserTransform:
    """Applies a user's function on RGB Pillow images to image files.

    Raises DecodeError if the image can't be decoded; errors of the function are passed on unchanged.
    """

    def __init__(
        self, function: Callable[[Image.Image], Any], most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    ) -> None:
        self._function = function
        self._most_pixels = most_pixels

    def decoded(self, data: bytes | memoryview) -> Image.Image:
        """The image in a file."""
        return decode_to_pillow(data, self._most_pixels)

    def __call__(self, image: Image.Image, generators: SeededGenerators, seed: int) -> Any:
        """Seed, and call the function.

        Args:
            image: which the function may keep.
            generators: entered by the caller, around the batch.
            seed: uint64 of sample and pass.
        """
        generators.seed(seed)
        return self._function(image)
