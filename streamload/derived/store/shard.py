"""A derived shard of rows: what a module computed from the samples of a shard, as a tar of numpy files.

    rows.json            the fingerprint and its parts, the source, the layout, and each leaf's file and dtype
    rows.keys.json       the samples' keys, in the order of the rows
    rows.samples.npy     uint64[N]: xxh3_64 of each sample's payloads, as in the index of its shard
    rows.checksums.npy   uint64[N]: xxh3_64 of each row's bytes, leaf after leaf
    leaf-0.npy           [N, …]: a tensor or array of the results; bfloat16 and its like as unsigned integers

The tier holds it like a prepared shard. Its index has a checksum of the four `rows.` files together; rows are
checked one by one, when they are read. It starts without torch.

Another node made it, which may have another version or be anybody's: rows are tensors, arrays, numbers, text
and containers of these, and name no class; what is read at once is bounded.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from streamload.cache.shard import Shard, prepared_form
from streamload.cache.shard_copy import ShardCopy
from streamload.derived.store.sealed import LeafFiles, Row, class_in, leaf_name, leaves_in, npy_head
from streamload.errors import CacheCorrupt, FeatureNotCacheable
from streamload.shards.samples import Entry
from streamload.shards.tar import BLOCK_BYTES

SampleKey = tuple[str, int]
"""The key of a sample, and the checksum of its payloads."""
_RECIPE = re.compile(r"rows-([0-9a-f]{32})")
_PIECE_BYTES = 1 << 20
_IN_MEMORY_BYTES = 64 << 20
_MOST_HEAD_BYTES = 16 << 20
"""Of the four `rows.` files: some 100,000 rows."""


def rows_recipe(fingerprint: str) -> str:
    """The recipe (`Shard.recipe`) of derived shards with the rows of a fingerprint."""
    return f"rows-{fingerprint}"


def fingerprint_in(recipe: object) -> str | None:
    """The fingerprint that a recipe is of; None: it isn't one of derived shards of rows."""
    match = _RECIPE.fullmatch(recipe) if isinstance(recipe, str) else None
    return None if match is None else match[1]


def rows_in(entry: Entry) -> int:
    """The number of rows, from the first entry of a derived shard's index; reads nothing."""
    head_bytes = len(_numbers(()))
    sizes = [size for extension, _, size in entry.members if extension == "samples.npy"]
    return (sizes[0] - head_bytes) // 8 if sizes else 0


def rows_form(shard: Shard, fingerprint: str) -> Shard:
    """The derived shard with the rows of a shard."""
    return prepared_form(shard, rows_recipe(fingerprint))


class RowShardWriter(ExitStack):
    """Collects the rows of a shard, then gives the bytes of its derived shard. A context manager.

    Leaves larger than 64 MiB are collected in temporary files.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[SampleKey] = []
        self._checksums: list[int] = []
        self._leaves: LeafFiles | None = None

    def add(self, layout: bytes, keys: Sequence[SampleKey], bodies: Sequence[bytes]) -> None:
        """Add rows.

        Raises:
            FeatureNotCacheable: they have another layout than the rows before, or a class in it.
        """
        if self._leaves is None:
            if (name := class_in(layout)) is not None:
                raise FeatureNotCacheable(
                    f"the results have a {name} in them: derived shards hold tensors, arrays, numbers and "
                    f"text in lists, tuples and dicts; let the module return one of these"
                )
            files = LeafFiles(layout, lambda _: tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES))  # noqa: SIM115
            self._leaves = self.enter_context(files)
        if layout != self._leaves.layout:
            raise FeatureNotCacheable(
                "rows of this shard have different shapes, so they can't be one derived shard: make them "
                "without a shared cache"
            )
        self._keys += keys
        for body in bodies:
            self._checksums.append(xxh3_64_intdigest(body))
            self._leaves.add(body)

    def chunks(self, about: Mapping[str, Any]) -> Iterator[bytes]:
        """The bytes of the tar; equal for equal rows.

        Args:
            about: what `rows.json` says beside layout and leaves: "fingerprint", and more.
        """
        content = {"rows": 0, "layout": None, "leaves": []} if self._leaves is None else self._leaves.finish()
        yield _member("rows.json", json.dumps({**about, **content}, indent=1).encode())
        yield _member("rows.keys.json", json.dumps([key for key, _ in self._keys]).encode())
        yield _member("rows.samples.npy", _numbers([sample for _, sample in self._keys]))
        yield _member("rows.checksums.npy", _numbers(self._checksums))
        for number, file in enumerate([] if self._leaves is None else self._leaves.files):
            file.seek(0, io.SEEK_END)
            size = file.tell()
            yield _tar_header(leaf_name(number), size)
            file.seek(0)
            while piece := file.read(_PIECE_BYTES):
                yield piece
            yield bytes(-size % BLOCK_BYTES)
        yield bytes(2 * BLOCK_BYTES)


class RowShard:
    """The rows of a derived shard, open for reading. For one thread.

    Attributes:
        copy: in a tier; closed with this.
        about: what `rows.json` says.
        layout: of all rows; b"": there are none.
        damaged: rows so far that failed their checksum or couldn't be read.

    Raises:
        CacheCorrupt: it is incomplete or damaged, or has rows of another fingerprint.
    """

    def __init__(self, copy: ShardCopy, fingerprint: str | None):
        self.damaged = 0
        self.copy = copy
        members = self._head()
        try:
            about, keys = (json.loads(bytes(members[name])) for name in ("json", "keys.json"))
            samples, checksums = (
                np.load(io.BytesIO(members[name]), allow_pickle=False).astype("<u8", casting="equiv")
                for name in ("samples.npy", "checksums.npy")
            )
            if about.get("fingerprint") != fingerprint or not all(type(key) is str for key in keys):
                raise ValueError(f"of rows of {about.get('fingerprint')!r}")
            if not samples.shape == checksums.shape == (len(keys),):
                raise ValueError(f"{len(keys)} keys for {samples.shape} samples and {checksums.shape} rows")
            layout = json.dumps(about.get("layout"), separators=(",", ":")).encode() if keys else b""
            if keys and (name := class_in(layout)) is not None:
                raise ValueError(f"of a layout that names the class {name}")
        except Exception as exc:  # numpy's reader raises what its parsers do
            raise CacheCorrupt(
                f"{copy.path} isn't a derived shard of rows of {fingerprint}: {exc!r:.300}"
            ) from exc
        self.about: dict[str, Any] = about
        self.layout = layout
        self._checksums = checksums.tolist()
        self._places = dict(zip(zip(keys, samples.tolist(), strict=True), range(len(keys)), strict=True))
        self._leaves = self._find_leaves(len(keys)) if keys else []

    @classmethod
    def open(cls, path: Path, form: Shard) -> RowShard | None:
        """Open the derived shard of a form in a tier; None while it is being removed.

        Raises:
            OSError: as `ShardCopy.open`.
            CacheCorrupt: it is incomplete or damaged, or has rows of another fingerprint.
        """
        copy = ShardCopy.open(path, form)
        if copy is None:
            return None
        try:
            return cls(copy, fingerprint_in(form.recipe))
        except BaseException:
            copy.close()
            raise

    def __contains__(self, key: tuple[str, int | None]) -> bool:
        return key in self._places

    def read(self, keys: Sequence[SampleKey]) -> list[Row | None]:
        """The rows of samples; None where there is none of that key and checksum, or it is damaged."""
        places, row_of = self._places, self._row
        return [None if (place := places.get(key)) is None else row_of(key, place) for key in keys]

    def damaged_keys(self) -> list[str]:
        """The keys of all rows that fail their checksum or can't be read; reads all of them."""
        return [key[0] for key in list(self._places) if self.read([key]) == [None]]

    def __len__(self) -> int:
        return len(self._checksums)

    def release(self) -> int:
        """Close nothing: it is closed as a whole. See `Holder`."""
        return 0

    def rest(self) -> int:
        """Close it unless it is damaged, which only this object knows; returns how many files were closed."""
        if self.damaged:
            return 0
        closed = self.copy.open_files
        self.close()
        return closed

    def close(self) -> None:
        """Close it: it may be evicted from now on."""
        self.copy.close()

    def _row(self, key: SampleKey, place: int) -> Row | None:
        bytes_at = self.copy.bytes_at
        parts = [bytes_at(first + place * size, size) for first, size in self._leaves]
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if xxh3_64_intdigest(body) != self._checksums[place]:
            return self._damaged(key)
        return Row(self.layout, bytes(body), 0)

    def _damaged(self, key: SampleKey) -> Row | None:
        self.damaged += 1
        del self._places[key]
        return None

    def _head(self) -> dict[str, memoryview]:
        """The members of the first sample of the tar."""
        reader, path = self.copy.reader, self.copy.path
        if not reader.is_complete or not reader.count:
            raise CacheCorrupt(f"{path} isn't a complete derived shard")
        head_bytes = sum(size for *_, size in reader.entry(0).members)
        if head_bytes > _MOST_HEAD_BYTES:
            raise CacheCorrupt(f"{path} begins with {head_bytes:,} bytes; allowed: {_MOST_HEAD_BYTES:,}")
        read = self.copy.sample(reader.entry(0), None)
        if read is None or read[0].checksum is None:
            raise CacheCorrupt(f"{path} fails its checksum")
        entry, data = read
        return entry.payloads(data)

    def _find_leaves(self, rows: int) -> list[tuple[int, int]]:
        """Offset of each leaf's first row in the tar, and the bytes of a row."""
        places, reader = [], self.copy.reader
        for number, leaf in enumerate(leaves_in(self.layout)):
            size = leaf.stop - leaf.start
            entry = reader.entry(number + 1) if number + 1 < reader.count else None
            first = -1 if entry is None else entry.stop - rows * size
            if entry is None or f"{entry.key}.npy" != leaf_name(number) or first < entry.start:
                raise CacheCorrupt(f"{self.copy.path} has no {leaf_name(number)} of {rows} rows")
            places.append((first, size))
        return places


def _numbers(numbers: Sequence[int]) -> bytes:
    array = np.array(numbers, "<u8")
    return npy_head(array.dtype, array.shape) + array.tobytes()


def _member(name: str, data: bytes) -> bytes:
    return _tar_header(name, len(data)) + data + bytes(-len(data) % BLOCK_BYTES)


def _tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.PAX_FORMAT)
