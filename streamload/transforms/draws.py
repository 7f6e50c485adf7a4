"""The numbers that an augmentation draws, from the seed of the sample (part of I)."""

from __future__ import annotations

import random

import numpy as np

_LOW_32 = 0xFFFF_FFFF
_UNIT_MASK = (1 << 24) - 1
_UNIT = 1 / (1 << 24)
_BLOCK = 8


class Draws:
    """What torch's CPU generator and Python's `random` give after they were seeded, number for number.

    So a transform that was recognised draws what the functions that it stands for would have drawn from the
    global generators (see user.py, which seeds those alike), in half of the time; one thread at a time.
    """

    def __init__(self) -> None:
        # torch's CPU generator is a Mersenne Twister, and seeded by the lower half, as numpy's is.
        self._bits = np.random.MT19937()
        self._seeder = np.random.RandomState(self._bits)
        self._ahead: list[int] = []  # the next one last
        self._python: random.Random | None = None
        self._seed = 0

    def __reduce__(self) -> tuple[type[Draws], tuple[()]]:
        return Draws, ()

    def seed(self, seed: int) -> None:
        """Begin the numbers of a sample: uint64."""
        self._seeder.seed(seed & _LOW_32)
        self._ahead.clear()
        self._python = None
        self._seed = seed

    def torch_below(self, limit: int) -> int:
        """`torch.randint(limit, (1,)).item()`, for less than 2**32."""
        return self._next() % limit

    def torch_rand(self) -> float:
        """`torch.rand(1).item()`."""
        return (self._next() & _UNIT_MASK) * _UNIT

    def python_random(self) -> float:
        """`random.random()`."""
        if self._python is None:
            self._python = random.Random(self._seed)
        return self._python.random()

    def _next(self) -> int:
        """32 bits of torch's generator."""
        if not self._ahead:
            self._ahead = self._bits.random_raw(_BLOCK)[::-1].tolist()
        return self._ahead.pop()
