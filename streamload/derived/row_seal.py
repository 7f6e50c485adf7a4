"""A stored row as bytes: a head with a checksum, the layout, the body. It starts without torch.

The checksum covers the row's key, too, so that a row under another key is found out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from streamload.errors import CacheCorrupt

_HEAD = struct.Struct("<4sIQQ")
_MAGIC = b"SLr1"
_ODD, _64_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(slots=True)
class Row:
    """A stored row, checked.

    Attributes:
        stored: the row as it is stored.
        layout: what it looks like, as it is stored.
        input_digest: of the input that it was computed from; 0: unknown.
        head_bytes: what precedes its leaves in `stored`.
    """

    stored: bytes
    layout: bytes
    input_digest: int
    head_bytes: int

    @property
    def body(self) -> memoryview:
        """The bytes of its leaves."""
        return memoryview(self.stored)[self.head_bytes :]


def seal(key: bytes, layout: bytes, body: bytes, input_digest: int) -> bytes:
    """A row as it is stored under a key; `input_digest` is 0 where the input isn't known."""
    checksum = _checksum(key, len(layout), input_digest, layout + body)
    return _HEAD.pack(_MAGIC, len(layout), input_digest, checksum) + layout + body


def seal_rows(
    keys: Sequence[bytes], layout: bytes, bodies: np.ndarray[Any, Any], input_digests: Sequence[int]
) -> list[tuple[bytes, memoryview]]:
    """Rows of one layout as they are stored: each key, and what `seal` gives.

    Args:
        keys: of the rows.
        layout: of all of them.
        bodies: uint8[N, bytes].
        input_digests: of each row.
    """
    head = np.frombuffer(_HEAD.pack(_MAGIC, len(layout), 0, 0) + layout, np.uint8)
    size = len(head) + bodies.shape[1]
    sealed = np.empty((len(keys), size), np.uint8)
    sealed[:, : len(head)] = head
    sealed[:, len(head) :] = bodies
    data = memoryview(sealed.reshape(-1).data)
    found = []
    for at, (key, digest) in enumerate(zip(keys, input_digests, strict=True)):
        row = data[at * size : (at + 1) * size]
        checksum = _checksum(key, len(layout), digest, row[_HEAD.size :])
        _HEAD.pack_into(row, 0, _MAGIC, len(layout), digest, checksum)
        found.append((key, row))
    return found


def unseal(key: bytes, data: bytes) -> Row:
    """Check and read what `seal` gave.

    Raises:
        CacheCorrupt: it is no row, or not the one of this key, or not what was written.
    """
    if len(data) < _HEAD.size:
        raise CacheCorrupt(f"the row {key.hex()} has no head")
    magic, layout_bytes, input_digest, checksum = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CacheCorrupt(f"the row {key.hex()} has no head")
    if checksum != _checksum(key, layout_bytes, input_digest, memoryview(data)[_HEAD.size :]):
        raise CacheCorrupt(f"the row {key.hex()} fails its checksum")
    head_bytes = _HEAD.size + layout_bytes
    return Row(data, data[_HEAD.size : head_bytes], input_digest, head_bytes)


def _checksum(key: bytes, layout_bytes: int, input_digest: int, rest: bytes | memoryview) -> int:
    seed = xxh3_64_intdigest(key, (input_digest + layout_bytes * _ODD) & _64_BITS)
    return int(xxh3_64_intdigest(rest, seed))
