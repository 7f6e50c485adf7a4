"""Keyed hashes and permutations: the only randomness of order and augmentation (steps B to E, I).

Everything is splitmix64 over integers: the same on every machine and in every numpy version. Random access:
value *i* of a stream is computed without the ones before it. No state, no I/O.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Purposes of keys. Two purposes never share a stream.
PIECES: Final = 1
PASS_ORDER: Final = 3
DUE: Final = 4
SAMPLE: Final = 5
REPLACEMENT: Final = 6
SOURCE: Final = 7
BUCKETS: Final = 8
SEQ_LEN: Final = 9
REPEAT: Final = 10
CAPTION: Final = 11
PARTS: Final = 12

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_BLOCK = 1 << 14
_BUCKET_BITS = 12


def mix(value: int) -> int:
    """Hash one integer (taken modulo 2**64) to 64 bits: the next output of splitmix64 from that state."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """Combine integers to one 64-bit key; their order matters."""
    value = 0
    for part in parts:
        value = mix(value ^ (part & _MASK))
    return value


def stream(key_: int, indexes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the values at `indexes` of the endless stream of a key, uint64, in the shape of `indexes`.

    Value *i* is ``mix(key + i * gamma)``, a bijection of *i*: no two values are equal.
    """
    value = indexes.astype(np.uint64)
    value *= np.uint64(_GAMMA)
    value += np.uint64((key_ + _GAMMA) & _MASK)
    value ^= value >> np.uint64(30)
    value *= np.uint64(_FIRST)
    value ^= value >> np.uint64(27)
    value *= np.uint64(_SECOND)
    value ^= value >> np.uint64(31)
    return value


def hash32(key_: int, indexes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the high 32 bits of the stream of a key at `indexes`, as uint64."""
    high: NDArray[np.uint64] = stream(key_, indexes) >> np.uint64(32)
    return high


def permutation(key_: int, count: int) -> NDArray[np.int64]:
    """Return the numbers 0 to `count` - 1, sorted by their values in the key's stream, int64[count]."""
    # The values are distinct, so every sorting algorithm gives the same order.
    return np.argsort(stream(key_, np.arange(count)))


def permutation_stretch(key_: int, count: int, first: int, last: int) -> NDArray[np.int64]:
    """Return the places `first` to `last` of `permutation(key, count)`, int64[last - first].

    Takes the same time for any stretch, less than for the whole permutation, and the memory of the stretch:
    about 10 ms and some blocks for 8,000 of 10**6.
    """
    # The values are evenly distributed, so their high bits select one of many buckets of places.
    bits = _BUCKET_BITS
    sizes = np.zeros(1 << bits, np.int64)
    for indexes in _blocks(count):
        sizes += np.bincount(_bucket(key_, indexes, bits), minlength=sizes.size)
    stops = np.cumsum(sizes)
    low, high = np.searchsorted(stops, [first, max(first, last - 1)], "right")
    chosen = []
    for indexes in _blocks(count):
        bucket = _bucket(key_, indexes, bits)
        chosen.append(indexes[(bucket >= low) & (bucket <= high)])
    inside = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    before = int(stops[low - 1]) if low else 0
    return inside[np.argsort(stream(key_, inside))[first - before : last - before]]


def _blocks(count: int) -> Iterator[NDArray[np.int64]]:
    return (np.arange(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))


def _bucket(key_: int, indexes: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    high: NDArray[np.uint64] = stream(key_, indexes) >> np.uint64(64 - bits)
    return high.astype(np.int64)


def sample_seed(seed: int, epoch: int, pass_: int, shard: int, sample: int) -> int:
    """Return the 64-bit seed for the augmentation of a sample in a pass, the same for any layout."""
    return mix(_visit_key(seed, epoch, pass_, shard) ^ (sample & _MASK))


@functools.lru_cache(1 << 9)
def _visit_key(seed: int, epoch: int, pass_: int, shard: int) -> int:
    """Return the part of the seed that is common to the samples of a shard."""
    return key(seed, SAMPLE, epoch, pass_, shard)


def pick(sample_seed_: int, attempt: int, count: int) -> int:
    """Pick one of `count`, from 0: the earlier sample that replaces one that can't be used.

    Args:
        sample_seed_: of the sample that can't be used, in this pass.
        attempt: 0 for the first pick, 1 if that one can't be used either, and so on.
        count: the number of candidates, at least 1.
    """
    if count < 1:
        raise ValueError(f"Cannot pick one of {count}; there must be at least one.")
    return (key(sample_seed_, REPLACEMENT, attempt) >> 32) * count >> 32
