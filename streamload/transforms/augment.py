"""Random numbers of a sample's seed (step I), of global generators or without them; boxes of random crops."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from streamload.transforms import kernel

if TYPE_CHECKING:
    from streamload.transforms.generators import OwnGenerator

CLIP_SCALE = (0.9, 1.0)
CLIP_RATIO = (3 / 4, 4 / 3)
_TRIES = 10
_LOW_32 = 0xFFFF_FFFF
_APART, _LOW_64 = 0x9E37_79B9_7F4A_7C15, 0xFFFF_FFFF_FFFF_FFFF
UNIT_MASK = (1 << 24) - 1
UNIT = 1 / (1 << 24)
_BLOCK = 8


class SeededGenerators:
    """Makes functions that use random generators depend only on a sample's seed.

    A context manager around a batch, which restores the generators at its exit; call `seed` before each
    sample. Seeds Python's `random`, numpy's legacy generator and torch's CPU generator. Not thread-safe.

    Args:
        generators: those of the functions themselves, each of which gets numbers of its own.
    """

    def __init__(self, generators: Sequence[OwnGenerator] = ()) -> None:
        self.generators = generators
        self._seeds = [(generator.seed, (k + 1) * _APART & _LOW_64) for k, generator in enumerate(generators)]

    def __enter__(self) -> SeededGenerators:
        self._states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._own_states = [generator.save() for generator in self.generators]
        return self

    def seed(self, seed: int, torch_taken: int = 0) -> None:
        """Seed all of them from one uint64; about 20 µs.

        numpy's and torch's generators are the same Mersenne Twister, so each gets a half of the seed.

        Args:
            seed: of the sample.
            torch_taken: how many numbers of torch's generator count as used (`Draws`).
        """
        random.seed(seed)
        np.random.seed(seed >> 32)
        torch.default_generator.manual_seed(seed & _LOW_32)
        if torch_taken:
            torch.rand(torch_taken, device="cpu", dtype=torch.float32)
        for seed_own, apart in self._seeds:
            seed_own(seed ^ apart)

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
        for generator, state in zip(self.generators, self._own_states, strict=True):
            generator.restore(state)


class Draws:
    """The same random numbers as torch's CPU generator and Python's `random` after seeding.

    So a compiled transform draws exactly what the original functions would draw from the global generators
    (`SeededGenerators` seeds those alike), in half of the time. Not thread-safe.
    """

    def __init__(self) -> None:
        # torch's CPU generator is a Mersenne Twister like numpy's, seeded by the lower half.
        self._bits = np.random.MT19937()
        self._seeder = np.random.RandomState(self._bits)
        self._drawn: list[int] = []
        self._taken = 0
        self._python: random.Random | None = None
        self._seed = 0

    def __reduce__(self) -> tuple[type[Draws], tuple[()]]:
        return Draws, ()

    def seed(self, seed: int) -> None:
        """Start the numbers of a sample, by its uint64 seed."""
        self._seeder.seed(seed & _LOW_32)
        self._drawn.clear()
        self._taken = 0
        self._python = None
        self._seed = seed

    def torch_below(self, limit: int) -> int:
        """Return `torch.randint(limit, (1,)).item()`, for less than 2**32."""
        return self._next() % limit

    def torch_rand(self) -> float:
        """Return `torch.rand(1).item()`."""
        return (self._next() & UNIT_MASK) * UNIT

    def torch_ahead(self, count: int) -> list[int]:
        """Peek at the next `count` uint32 numbers from which `torch_below` and `torch_rand` are computed.

        Then `skip` as many as were used. `torch_rand` of a number is `(number & UNIT_MASK) * UNIT`.
        """
        missing = self._taken + count - len(self._drawn)
        if missing > 0:
            self._drawn += self._bits.random_raw(missing).tolist()
        return self._drawn[self._taken : self._taken + count]

    def skip(self, count: int) -> None:
        """Skip numbers that were used from `torch_ahead`."""
        self._taken += count

    @property
    def torch_taken(self) -> int:
        """Count of 32-bit numbers of torch's generator that were used since seeding."""
        return self._taken

    def python_random(self) -> float:
        """Return `random.random()`."""
        return self.python().random()

    def python(self) -> random.Random:
        """Return a generator with the numbers of the module `random`."""
        if self._python is None:
            self._python = random.Random(self._seed)
        return self._python

    def _next(self) -> int:
        """Return 32 bits of torch's generator."""
        if self._taken == len(self._drawn):
            self._drawn += self._bits.random_raw(_BLOCK).tolist()
        self._taken += 1
        return self._drawn[self._taken - 1]


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class RandomBox:
    """Boxes of random area and aspect ratio, identical to torchvision's `RandomResizedCrop.get_params`.

    Args:
        scale: minimum and maximum area of a box, as a share of the image.
        ratio: minimum and maximum width / height of a box.
    """

    def __init__(
        self, scale: tuple[float, float] = CLIP_SCALE, ratio: tuple[float, float] = CLIP_RATIO
    ) -> None:
        self._scale, self._ratio = scale, ratio
        scales, ratios = (torch.tensor(bounds, device="cpu") for bounds in (scale, ratio))
        low, high = torch.stack([scales, torch.log(ratios)]).double().T
        self._low, self._span = low.tolist(), (high - low).tolist()
        self._bounds = self._low[0], self._span[0], self._low[1], self._span[1]
        self._least_share = min(self._low[0], self._low[0] + self._span[0])
        self._drawn = np.empty(2, np.float32)
        self._drawn_ratio = torch.from_numpy(self._drawn)[1:]

    def __reduce__(self) -> tuple[type[RandomBox], tuple[Any, ...]]:
        return RandomBox, (self._scale, self._ratio)

    def draw_seeded(self, height: int, width: int, seed: int) -> tuple[Box, int] | None:
        """Return the box that `draw` gives right after seeding, and how many numbers it takes.

        None: call `draw` instead; _before.c isn't built, or can't decide.
        """
        if kernel.random_box is None:
            return None
        drawn = kernel.random_box(seed, height, width, *self._bounds)
        if drawn is None:
            return None
        box, draws = drawn
        return (Box._make(box) if box else self._central(height, width)), draws

    def draw(self, height: int, width: int, draws: Draws) -> Box:
        """Draw the box for an image of this size."""
        area = height * width
        low_share, low_log_ratio = self._low
        span, log_span = self._span[0] * UNIT, self._span[1] * UNIT
        # Most boxes of OpenCLIP's scale don't fit: reject early those that are too long by a whole pixel.
        # Most of these have a ratio with which not even the minimum area fits.
        most_across, most_down = (width + 1) ** 2, (height + 1) ** 2
        least = area * self._least_share
        flattest = math.log(most_across / least) if least else math.inf
        steepest = math.log(least / most_down) if least else -math.inf
        numbers = draws.torch_ahead(2 * _TRIES + 2)
        for place in range(0, 2 * _TRIES, 2):
            log_ratio = (numbers[place + 1] & UNIT_MASK) * log_span + low_log_ratio
            if not steepest <= log_ratio <= flattest:
                continue
            share = (numbers[place] & UNIT_MASK) * span + low_share
            ratio = math.exp(log_ratio)
            if area * share * ratio > most_across or area * share > most_down * ratio:
                continue
            across, down = math.sqrt(area * share * ratio), math.sqrt(area * share / ratio)
            if _is_near_half(across) or _is_near_half(down):
                share, ratio = self._in_float32(share, log_ratio)
                across, down = math.sqrt(area * share * ratio), math.sqrt(area * share / ratio)
            box_height, box_width = round(down), round(across)
            if 0 < box_width <= width and 0 < box_height <= height:
                draws.skip(place + 4)
                top = numbers[place + 2] % (height - box_height + 1)
                return Box(top, numbers[place + 3] % (width - box_width + 1), box_height, box_width)
        draws.skip(2 * _TRIES)
        return self._central(height, width)

    def _in_float32(self, share: float, log_ratio: float) -> tuple[float, float]:
        """Return the share of the area and the ratio with torch's rounding."""
        self._drawn[:] = share, log_ratio
        self._drawn_ratio.exp_()
        share, ratio = self._drawn.tolist()
        return share, ratio

    def _central(self, height: int, width: int) -> Box:
        low, high = self._ratio
        box_height, box_width = height, width
        if width / height < low:
            box_height = round(width / low)
        elif width / height > high:
            box_width = round(height * high)
        return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def _is_near_half(length: float) -> bool:
    """Return whether float32 rounding, far less than a millionth, could change the number of pixels."""
    return abs(length % 1.0 - 0.5) <= 1e-6 * length


def _draw() -> tuple[float, float, float]:
    """Return the next number of each generator."""
    return random.random(), np.random.random_sample(), torch.rand((), device="cpu").item()
