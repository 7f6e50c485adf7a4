"""The format of a shard in a shared cache: its index object, and checksums over blocks of its data object.

    magic, lengths, JSON, the tier files `index` and `names`, checksums of the blocks, a checksum of all this

The index object is written after the data that it names, and read as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from xxhash import xxh3_64_digest

from streamload.cache.shard import Shard, version_of
from streamload.cache.shard_copy import ShardCopy, verified_chunks
from streamload.errors import CacheCorrupt
from streamload.origins.origin import Version
from streamload.shards.record import read_header

BLOCK_BYTES = 64 << 10
"""8 bytes of checksum for each; reading a single sample adds less than two blocks."""

Sums = npt.NDArray[np.uint64]


class BlockSums:
    """Takes a shard's bytes in chunks of any size; the last block may be short."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self._sums: list[int] = []

    def update(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes."""
        view, offset = memoryview(chunk), 0
        while offset < len(view):
            piece = view[offset : offset + BLOCK_BYTES - self._filled]
            self._hash.update(piece)
            self._filled += len(piece)
            offset += len(piece)
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> Sums:
        """The checksums of all blocks, once there are no more bytes."""
        if self._filled:
            self._end_block()
        return np.array(self._sums, np.uint64)

    def _end_block(self) -> None:
        self._sums.append(self._hash.intdigest())
        self._hash.reset()
        self._filled = 0


def verified(chunks: Iterable[bytes], sums: Sums, start: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of chunks, each block after its checksum was verified.

    Args:
        chunks: from `start` to the end.
        start: the first byte of a block.

    Raises:
        CacheCorrupt: the bytes aren't those that were stored; what was yielded before is right.
    """
    block, position, block_hash = start // BLOCK_BYTES, start, xxhash.xxh3_64()
    waiting: list[bytes] = []
    for chunk in chunks:
        view, offset, good, is_good = memoryview(chunk), 0, 0, True
        while offset < len(view) and is_good:
            border = min((block + 1) * BLOCK_BYTES, size)
            piece = view[offset : offset + border - position]
            block_hash.update(piece)
            offset += len(piece)
            position += len(piece)
            if position == border:
                is_good = len(piece) > 0 and block_hash.intdigest() == int(sums[block])
                good = offset if is_good else good
                block_hash.reset()
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


_MAGIC = b"SLSHARE1"
_LENGTHS = Struct("<8sQQQQ")
_CHECK_BYTES = 8
_READ_BYTES = 1 << 20
_DATA = re.compile(r"[0-9a-f]{16}\.tar")


@dataclass(frozen=True, slots=True)
class SharedShard:
    """A shard that a shared cache holds.

    Attributes:
        digest: of the shard, as its index names it.
        version: at its origin.
        size: bytes of the tar.
        samples: how many it has.
        data: the name of the data object, beside the index.
        sums: uint64[blocks], checksums of the data.
        index, names: the tier files that describe its samples.
    """

    digest: str
    version: Version
    size: int
    samples: int
    data: str
    sums: Sums = field(repr=False)
    index: bytes = field(repr=False)
    names: bytes = field(repr=False)

    @classmethod
    def of(cls, shard: Shard, source: ShardCopy) -> SharedShard:
        """Describe a published shard; all of it is read and compared with its index.

        Raises:
            CacheCorrupt: it isn't complete, or doesn't match its index.
        """
        reader = source.reader
        reader.refresh()
        if not reader.is_complete or source.is_index_only or not reader.size:
            raise CacheCorrupt(f"{source.path} isn't a complete shard")
        block_sums = BlockSums()
        for chunk in verified_chunks(source, _READ_BYTES, is_prepared=bool(shard.recipe)):
            block_sums.update(chunk)
        sums = block_sums.finish()
        at_origin = version_of(reader)
        version = at_origin
        if not shard.recipe:  # a prepared shard has the version, and size, of what it was made of
            version = Version(reader.size, at_origin.etag, at_origin.last_modified)
        data = data_name(version, sums)
        return cls(shard.digest, version, reader.size, reader.count, data, sums, *index_files(source))

    def pack(self) -> bytes:
        """Serialize as an index object."""
        facts = {"size": self.size, "samples": self.samples, "data": self.data, "block_bytes": BLOCK_BYTES}
        parts = (json.dumps(facts).encode(), self.index, self.names, self.sums.astype("<u8").tobytes())
        packed = _LENGTHS.pack(_MAGIC, *map(len, parts)) + b"".join(parts)
        return packed + xxh3_64_digest(packed)

    @classmethod
    def unpack(cls, packed: bytes) -> SharedShard:
        """Parse an index object.

        Raises:
            CacheCorrupt: it is cut, damaged, or of another version.
        """
        try:
            return cls._unpacked(packed)
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise CacheCorrupt(f"its index can't be read: {exc}") from None

    @classmethod
    def _unpacked(cls, packed: bytes) -> SharedShard:
        if len(packed) < _LENGTHS.size + _CHECK_BYTES:
            raise CacheCorrupt("its index was cut")
        magic, *lengths = _LENGTHS.unpack_from(packed)
        if magic != _MAGIC:
            raise CacheCorrupt(f"its index begins with {magic!r}: another version of streamload wrote it")
        if xxh3_64_digest(packed[:-_CHECK_BYTES]) != packed[-_CHECK_BYTES:]:
            raise CacheCorrupt("its index fails its checksum")
        stops = np.cumsum([_LENGTHS.size, *lengths]).tolist()
        text, index, names, sums = (packed[start:stop] for start, stop in itertools.pairwise(stops))
        facts: dict[str, Any] = json.loads(text)
        meta: dict[str, Any] = read_header(lambda size, offset: index[offset:][:size])[0]
        shard = cls(
            str(meta["digest"]),
            Version(
                meta.get("size") if "prepared" in meta else facts["size"],
                meta.get("etag"),
                meta.get("last_modified"),
            ),
            facts["size"],
            facts["samples"],
            facts["data"],
            np.frombuffer(sums, "<u8").astype(np.uint64),
            index,
            names,
        )
        if facts["block_bytes"] != BLOCK_BYTES or len(shard.sums) != -(-shard.size // BLOCK_BYTES):
            raise CacheCorrupt(f"its index has {len(shard.sums)} checksums for {shard.size} bytes")
        if not _DATA.fullmatch(shard.data):
            raise CacheCorrupt(f"its index names {shard.data!r:.50} as its data")
        return shard


def index_files(source: ShardCopy) -> tuple[bytes, bytes]:
    """The contents of the files `index` and `names` of a shard in a tier."""
    return (source.path / "index").read_bytes(), (source.path / "names").read_bytes()


def data_name(version: Version, sums: Sums) -> str:
    """The name of a data object: equal for equal bytes of one version, on all nodes."""
    facts = json.dumps([version.size, version.etag, version.last_modified]).encode()
    return hashlib.blake2b(facts + sums.astype("<u8").tobytes(), digest_size=8).hexdigest() + ".tar"
