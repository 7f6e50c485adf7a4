"""The user's own transform (part of I): global generators seeded per sample, errors as they come."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from PIL import Image

from streamload.transforms.decode import Pixels, decode_to_pillow
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS

_LOW_32 = 0xFFFF_FFFF


class SeededGenerators:
    """Makes functions that draw from global generators depend on a sample's seed only, unseen from outside.

    A context manager around a batch: at its exit the generators go on where they were at its entry. `seed`
    is called before each sample. Python's `random`, numpy's legacy generator and torch's CPU generator are
    seeded; one thread at a time.
    """

    def __enter__(self) -> SeededGenerators:
        self._states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        return self

    def seed(self, seed: int, torch_taken: int = 0) -> None:
        """Seed all of them from one uint64; about 20 µs.

        numpy's and torch's generators are the same Mersenne Twister, so each gets a half of the seed.

        Args:
            seed: of the sample.
            torch_taken: how many numbers of torch's generator count as drawn already (augment.Draws).
        """
        random.seed(seed)
        np.random.seed(seed >> 32)
        torch.default_generator.manual_seed(seed & _LOW_32)
        if torch_taken:
            torch.rand(torch_taken, device="cpu", dtype=torch.float32)

    def were_used(self, seed: int) -> bool:
        """Whether a number was drawn from one of them since they were seeded by `seed`."""
        after = _draw()
        self.seed(seed)
        return after != _draw()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        python, legacy, cpu = self._states
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)


def _draw() -> tuple[float, float, float]:
    """The next number of each generator."""
    return random.random(), np.random.random_sample(), torch.rand((), device="cpu").item()


class UserTransform:
    """A function of the user's from RGB Pillow image to value, on image bytes.

    An image that can't be decoded is a DecodeError; what the function itself raises is left as it is.
    """

    def __init__(
        self, function: Callable[[Image.Image], Any], most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    ) -> None:
        self._function = function
        self._most_pixels = most_pixels

    def __call__(self, data: bytes | memoryview, generators: SeededGenerators, seed: int) -> Any:
        """Decode, seed, and call the function.

        Args:
            data: an image file.
            generators: entered by the caller, around the batch.
            seed: uint64 of the sample and pass.
        """
        return self._of_image(decode_to_pillow(data, self._most_pixels), generators, seed)

    def of_pixels(self, pixels: Pixels, generators: SeededGenerators, seed: int) -> Any:
        """The same for an image that has been decoded: uint8[H, W, 3], which is copied."""
        return self._of_image(Image.fromarray(pixels.copy()), generators, seed)

    def _of_image(self, image: Image.Image, generators: SeededGenerators, seed: int) -> Any:
        generators.seed(seed)
        return self._function(image)
