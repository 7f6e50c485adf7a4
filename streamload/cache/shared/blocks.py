"""Checksums over blocks of a shard's bytes: each is compared before any byte of it is handed on (step F)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from streamload.errors import CacheCorrupt

BLOCK_BYTES = 64 << 10
"""8 bytes of checksum for each; a sample that is read alone takes less than two of them more than it has."""

Sums = npt.NDArray[np.uint64]


class BlockSums:
    """Takes a shard's bytes, in chunks of any size; the last block may be short."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self._sums: list[int] = []

    def update(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes."""
        view, at = memoryview(chunk), 0
        while at < len(view):
            piece = view[at : at + BLOCK_BYTES - self._filled]
            self._hash.update(piece)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> Sums:
        """There are no more: the sums of all blocks."""
        if self._filled:
            self._end_block()
        return np.array(self._sums, np.uint64)

    def _end_block(self) -> None:
        self._sums.append(self._hash.intdigest())
        self._hash.reset()
        self._filled = 0


def verified(chunks: Iterable[bytes], sums: Sums, start: int, size: int) -> Iterator[bytes]:
    """The bytes of chunks, those of a block once all of it is as it should be.

    Args:
        chunks: from `start` to the end.
        sums: of all blocks of the shard.
        start: the first byte of a block.
        size: of the whole shard.

    Raises:
        CacheCorrupt: what comes isn't what was stored; what was given before it is.
    """
    block, position, begun = start // BLOCK_BYTES, start, xxhash.xxh3_64()
    waiting: list[bytes] = []
    for chunk in chunks:
        view, at, good, is_good = memoryview(chunk), 0, 0, True
        while at < len(view) and is_good:
            border = min((block + 1) * BLOCK_BYTES, size)
            piece = view[at : at + border - position]
            begun.update(piece)
            at += len(piece)
            position += len(piece)
            if position == border:
                is_good = len(piece) > 0 and begun.intdigest() == int(sums[block])
                good = at if is_good else good
                begun.reset()
                block += 1
        if good:
            yield from waiting
            waiting = []
            yield chunk if good == len(chunk) else bytes(view[:good])
        if not is_good:
            raise CacheCorrupt(f"block {block - 1} of {len(sums)} fails its checksum")
        if good < len(view):
            waiting.append(bytes(view[good:]))
    if position != size:
        raise CacheCorrupt(f"there are {position:,} bytes instead of {size:,}")
