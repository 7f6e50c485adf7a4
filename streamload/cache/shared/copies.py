"""What the index object of a shared cache says of a shard: its version, its entries, its blocks' checksums.

    magic, lengths, JSON, a tier's files `index` and `names`, checksums of the blocks, a check of all this

It is written and read as a whole, after the data that it names.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from xxhash import xxh3_64_digest

from streamload.cache.shard import Shard, version_of
from streamload.cache.shard_copy import ShardCopy
from streamload.cache.shared.blocks import BLOCK_BYTES, BlockSums, Sums
from streamload.errors import CacheCorrupt, ShardError
from streamload.origins.origin import Version
from streamload.shards.record import HEADER_START, header_lengths, unpack_meta
from streamload.shards.samples import Entry, ShardScanner

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
        version: which one it is at its origin.
        size: bytes of the tar.
        samples: how many it has.
        data: the name of its bytes, beside the index.
        sums: uint64[blocks], of its bytes.
        index, names: the files of a tier that say what its samples are.
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
        """What is to be said of a shard that a tier holds; all of it is read and compared with its index.

        Raises:
            CacheCorrupt: it isn't whole, or isn't what its index says.
        """
        reader = source.reader
        reader.refresh()
        if not reader.is_complete or source.is_index_only or not reader.size:
            raise CacheCorrupt(f"{source.path} isn't a whole shard")
        sums = _compared(source, bool(shard.recipe))
        at_origin = version_of(reader)
        version = at_origin
        if not shard.recipe:  # of a prepared one it is that of what it was made of, size and all
            version = Version(reader.size, at_origin.etag, at_origin.last_modified)
        data = data_name(version, sums)
        return cls(shard.digest, version, reader.size, reader.count, data, sums, *index_files(source))

    def write_index(self, directory: Path) -> None:
        """Write `index` and `names` into a directory, for an IndexReader."""
        (directory / "names").write_bytes(self.names)
        (directory / "index").write_bytes(self.index)

    def pack(self) -> bytes:
        """The index object."""
        facts = {"size": self.size, "samples": self.samples, "data": self.data, "block_bytes": BLOCK_BYTES}
        parts = (json.dumps(facts).encode(), self.index, self.names, self.sums.astype("<u8").tobytes())
        packed = _LENGTHS.pack(_MAGIC, *map(len, parts)) + b"".join(parts)
        return packed + xxh3_64_digest(packed)

    @classmethod
    def unpack(cls, packed: bytes) -> SharedShard:
        """What an index object says.

        Raises:
            CacheCorrupt: it is cut, damaged, or another version's.
        """
        try:
            return cls._unpacked(packed)
        except CacheCorrupt:
            raise
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
        meta: dict[str, Any] = _meta_of(index)
        found = cls(
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
        if facts["block_bytes"] != BLOCK_BYTES or len(found.sums) != -(-found.size // BLOCK_BYTES):
            raise CacheCorrupt(f"its index has {len(found.sums)} checksums for {found.size} bytes")
        if not _DATA.fullmatch(found.data):
            raise CacheCorrupt(f"its index names {found.data!r:.50} as its data")
        return found


def index_files(source: ShardCopy) -> tuple[bytes, bytes]:
    """The files `index` and `names` of a shard in a tier."""
    return (source.path / "index").read_bytes(), (source.path / "names").read_bytes()


def data_name(version: Version, sums: Sums) -> str:
    """How the bytes of a shard are called: equal for equal bytes of one version, whoever stores them."""
    facts = json.dumps([version.size, version.etag, version.last_modified]).encode()
    return hashlib.blake2b(facts + sums.astype("<u8").tobytes(), digest_size=8).hexdigest() + ".tar"


def _compared(source: ShardCopy, is_prepared: bool) -> Sums:
    """Read a published shard, and compare it with its index; the checksums of its blocks."""
    scanner, sums, reader = ShardScanner(prepared=is_prepared), BlockSums(), source.reader
    size = number = 0
    try:
        with (source.path / "data").open("rb", buffering=0) as data:
            for chunk in iter(functools.partial(data.read, _READ_BYTES), b""):
                sums.update(chunk)
                size += len(chunk)
                number = _compare(scanner.feed(chunk), source, number)
        number = _compare(scanner.finish()[0], source, number)
    except ShardError as exc:
        raise CacheCorrupt(f"{source.path}: {exc}") from exc
    if (number, size) != (reader.count, reader.size):
        raise CacheCorrupt(f"{source.path}: {number} samples in {size} bytes, its index says otherwise")
    return sums.finish()


def _compare(entries: list[Entry], source: ShardCopy, number: int) -> int:
    """Compare entries with those of the index from a number on; the number behind them."""
    for entry in entries:
        if number >= source.reader.count or entry != source.reader.entry(number):
            raise CacheCorrupt(f"{source.path}: sample {number} ({entry.key}) isn't what its index says")
        number += 1
    return number


def _meta_of(index: bytes) -> dict[str, Any]:
    start = index[: HEADER_START.size]
    _, meta_bytes = header_lengths(start)
    return unpack_meta(start, index[HEADER_START.size :][:meta_bytes])
