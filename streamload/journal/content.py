"""Digests of a step: whether it has the same samples again, and these the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from streamload.order.hashing import key, stream

if TYPE_CHECKING:
    from streamload.shards.samples import Sample

CONTENT = "__content__"
"""The value of a batch that `Content` adds, for the worker's parts. There is none with `map_sample`."""
UNKNOWN = 0
"""The digest where there is none."""
_SAMPLES_KEY, _CONTENT_KEY = key(0, 0x6A), key(0, 0x6B)


def digest_of(samples: Sequence[tuple[int, int]]) -> int:
    """A digest of samples, by shard and number: the sum modulo 2^64 of a hash of each.

    So the digest of a global step is the sum of those of its ranks, on any layout.
    """
    shards, numbers = np.array(samples, np.int64).reshape(-1, 2).T
    return int(stream(_SAMPLES_KEY, shards << 32 | numbers).sum(dtype=np.uint64))


class Content:
    """A digest of the bytes of a batch's samples; see BatchColumn.

    It is the sum modulo 2^32 of a hash of each sample's checksum. Files that are read in place have no
    checksums in an index: computing one costs a few microseconds.
    """

    def __init__(self) -> None:
        self._checksums: list[int] = []

    def parse(self, sample: Sample, image: str, is_prepared: bool, seed: int) -> int:
        """The checksum of a sample as its shard has it."""
        if sample.checksum is not None:
            return sample.checksum
        digest = xxhash.xxh3_64()
        for payload in sample.members.values():
            digest.update(payload)
        return digest.intdigest()

    def add(self, parsed: Any) -> None:
        """Add one."""
        self._checksums.append(parsed)

    def drop_last(self) -> None:
        """Remove the last one."""
        self._checksums.pop()

    def finish(self, texts: Any) -> dict[str, object]:
        """The digest."""
        hashes = stream(_CONTENT_KEY, np.array(self._checksums, np.uint64).view(np.int64))
        return {CONTENT: int(hashes.sum(dtype=np.uint64)) & 0xFFFFFFFF}

    def close(self) -> None:
        """Nothing is open."""
