"""The numbers that an augmentation draws, from the seed of the sample (part of I)."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

_LOW_32 = 0xFFFF_FFFF
_UNIT_MASK = (1 << 24) - 1
_BLOCK = 32


class Draws:
    """What torch's CPU generator and Python's `random` give after they were seeded, number for number.

    So a transform that was recognised draws what the functions that it stands for would have drawn from the
    global generators (see user.py, which seeds those alike). About 10 µs a sample, half of what torch's own
    generator takes; one thread at a time.
    """

    def __init__(self) -> None:
        # torch's CPU generator is a Mersenne Twister, and seeded by the lower half, as numpy's is.
        self._bits = np.random.MT19937()
        self._seeder = np.random.RandomState(self._bits)
        self._raw: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._taken = 0
        self._python: random.Random | None = None
        self._seed = 0

    def seed(self, seed: int) -> None:
        """Begin the numbers of a sample: uint64."""
        self._seeder.seed(seed & _LOW_32)
        self._raw = self._bits.random_raw(_BLOCK)
        self._taken = 0
        self._python = None
        self._seed = seed

    def ahead(self, count: int) -> npt.NDArray[np.uint64]:
        """The next numbers of torch's generator, 32 bits each, without taking them."""
        while self._raw.size < self._taken + count:
            self._raw = np.concatenate([self._raw, self._bits.random_raw(_BLOCK)])
        return self._raw[self._taken : self._taken + count]

    def take(self, count: int) -> None:
        """Take some of the numbers that lie ahead."""
        self._taken += count

    def torch_rand(self) -> float:
        """`torch.rand(1).item()`."""
        raw = int(self.ahead(1)[0])
        self._taken += 1
        return (raw & _UNIT_MASK) / (_UNIT_MASK + 1)

    def python_random(self) -> float:
        """`random.random()`."""
        if self._python is None:
            self._python = random.Random(self._seed)
        return self._python.random()
