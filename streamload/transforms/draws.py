"""The numbers that an augmentation draws, from the seed of the sample (part of I)."""

from __future__ import annotations

import random

import numpy as np

_LOW_32 = 0xFFFF_FFFF
UNIT_MASK = (1 << 24) - 1
UNIT = 1 / (1 << 24)
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
        self._drawn: list[int] = []
        self._taken = 0
        self._python: random.Random | None = None
        self._seed = 0

    def __reduce__(self) -> tuple[type[Draws], tuple[()]]:
        return Draws, ()

    def seed(self, seed: int) -> None:
        """Begin the numbers of a sample: uint64."""
        self._seeder.seed(seed & _LOW_32)
        self._drawn.clear()
        self._taken = 0
        self._python = None
        self._seed = seed

    def torch_below(self, limit: int) -> int:
        """`torch.randint(limit, (1,)).item()`, for less than 2**32."""
        return self._next() % limit

    def torch_rand(self) -> float:
        """`torch.rand(1).item()`."""
        return (self._next() & UNIT_MASK) * UNIT

    def torch_ahead(self, count: int) -> list[int]:
        """The next `count` numbers that `torch_below` and `torch_rand` are made of: uint32.

        They are still to come, until as many as were used are skipped. `torch_rand` of one of them is
        `(number & UNIT_MASK) * UNIT`.
        """
        missing = self._taken + count - len(self._drawn)
        if missing > 0:
            self._drawn += self._bits.random_raw(missing).tolist()
        return self._drawn[self._taken : self._taken + count]

    def skip(self, count: int) -> None:
        """Go over numbers that were seen by `torch_ahead`."""
        self._taken += count

    @property
    def torch_taken(self) -> int:
        """How many numbers of 32 bits of torch's generator have been used since it was seeded."""
        return self._taken

    def python_random(self) -> float:
        """`random.random()`."""
        if self._python is None:
            self._python = random.Random(self._seed)
        return self._python.random()

    def _next(self) -> int:
        """32 bits of torch's generator."""
        if self._taken == len(self._drawn):
            self._drawn += self._bits.random_raw(_BLOCK).tolist()
        self._taken += 1
        return self._drawn[self._taken - 1]
