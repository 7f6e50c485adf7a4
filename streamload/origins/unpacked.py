"""Compressed shards (`.tar.gz`, `.tgz`, `.tar.zst`), unpacked while they arrive (part of step F).

The compressed bytes come from another origin, which resumes them by range as always. The tar itself has no
ranges, and its size is known at its end only: a shard that was filled in part is unpacked again from its
first byte, and the bytes that are there already are dropped.

The name alone doesn't decide: what doesn't begin as compressed data passes unchanged, such as the output of
`pipe:gzip -dc a.tar.gz`.
"""

from __future__ import annotations

import importlib
import logging
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from streamload.errors import ShardCut, ShardFormatError
from streamload.origins.protocol import Origin, Stream, Unproven, Version
from streamload.urls import ZSTD_MODULES, Compression, zstd_module

_logger = logging.getLogger("streamload")

_OUTPUT_BYTES = 512 << 10
_MAGIC_BYTES = 4
_FREE_BYTES = 64 << 20
_MOST_RATIO = 256
"""A tar may be this many times as large as its compressed form, and `_FREE_BYTES` beside that. Images hardly
shrink, texts to a tenth; gzip reaches 1032 and zstd 30,000 with data that were made for that.
"""


class _Decompressor(Protocol):
    """One gzip member or zstd frame, as bz2, lzma and compression.zstd have it."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Format(NamedTuple):
    """A compressed format.

    Attributes:
        name: for messages.
        piece_bytes: the input of one call. What is in the damaged piece is lost, and the outcome of a damaged
            shard must not depend on how its bytes were split in transfer: so pieces have one size.
        begins: whether bytes are the beginning of a member or frame.
        open: returns the decompressor of a member.
        failures: what that raises for damaged data.
    """

    name: str
    piece_bytes: int
    begins: Callable[[bytes], bool]
    open: Callable[[], _Decompressor]
    failures: tuple[type[Exception], ...]


class UnpackedOrigin(Origin):
    """The tar in another origin's compressed shard, under that shard's version without its size.

    Args:
        origin: of the compressed shard; it retries.
        packed_by: as the shard's name says.
    """

    def __init__(self, origin: Origin, packed_by: Compression) -> None:
        self.url = origin.url
        self._origin = origin
        self._packed_by = packed_by

    def __repr__(self) -> str:
        return f"UnpackedOrigin({self._origin!r})"

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open it at a byte of the tar; those before are unpacked again and dropped."""
        if start and expected is not None and not expected.is_traceable:
            raise Unproven(f"{self.url}: nothing tells its versions apart")
        expected = None if expected is None else _without_size(expected)
        return _UnpackedStream(self._origin.open(0, expected), self.url, self._packed_by, start)

    def version(self) -> Version:
        """Return the current version of the compressed shard, without its size."""
        return _without_size(self._origin.version())

    def close(self) -> None:
        """Close the origin of the compressed shard."""
        self._origin.close()


class _UnpackedStream:
    def __init__(self, stream: Stream, url: str, packed_by: Compression, start: int) -> None:
        self.version = _without_size(stream.version)
        self._stream, self._url = stream, url
        self._packed_by, self._start = packed_by, start

    def chunks(self) -> Iterator[bytes]:
        to_drop = self._start
        for chunk in unpacked(self._stream.chunks(), self._packed_by, self._url):
            if len(chunk) > to_drop:
                yield chunk[to_drop:]
            to_drop = max(0, to_drop - len(chunk))

    def close(self) -> None:
        self._stream.close()


def unpacked(chunks: Iterable[bytes], packed_by: Compression, name: str) -> Iterator[bytes]:
    """Decompress a shard; what isn't compressed by this format passes unchanged.

    Args:
        chunks: all of its bytes, in chunks of any size; consumed to the end.
        packed_by: the format of its data.

    Yields:
        At most 512 KiB at a time, of gzip data; at most 32 MiB by the package zstandard.

    Raises:
        ShardCut: the data end early.
        ShardFormatError: they are damaged, unpack to far more than they are, or can't be unpacked here.
    """
    codec = _FORMATS[packed_by]()
    pieces = _pieces(chunks, codec.piece_bytes)
    first = next(pieces, b"")
    if not codec.begins(first):
        yield first
        yield from pieces
        return
    yield from _Unpacking(codec, name).run(first, pieces)


class _Unpacking:
    """Unpacks one shard: its members one after the other, as gzip and zstd do."""

    def __init__(self, codec: _Format, name: str) -> None:
        self._codec, self._name = codec, name
        self._read_bytes = self._unpacked_bytes = 0

    def run(self, first: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
        member: _Decompressor | None = None
        piece: bytes | None = first
        between = b""  # what follows a member
        while piece is not None:
            self._read_bytes += len(piece)
            if member is not None:
                between = yield from self._of_member(member, piece)
            elif len(between) < _MAGIC_BYTES:  # otherwise it is no member
                between = (between + piece).lstrip(b"\0")  # a tape's padding
            while (member is None or member.eof) and self._codec.begins(between):
                member = self._codec.open()
                between = yield from self._of_member(member, between)
            member = None if member is not None and member.eof else member
            piece = next(pieces, None)
        if member is not None:
            raise ShardCut(f"{self._name}: its {self._codec.name} data are cut at byte {self._read_bytes:,}")
        if between:
            _logger.warning("shard %s: what follows its %s data was not read", self._name, self._codec.name)

    def _of_member(self, member: _Decompressor, data: bytes) -> Generator[bytes, None, bytes]:
        """Yield what a piece of a member unpacks to; return what follows the member, without padding."""
        while not member.eof and (data or not member.needs_input):
            try:
                tar_bytes = member.decompress(data, _OUTPUT_BYTES)
            except self._codec.failures as exc:
                raise ShardFormatError(
                    f"{self._name}: its {self._codec.name} data are damaged before byte "
                    f"{self._read_bytes:,}: {exc}"
                ) from exc
            data = b""
            self._unpacked_bytes += len(tar_bytes)
            if self._unpacked_bytes > _FREE_BYTES + _MOST_RATIO * self._read_bytes:
                raise ShardFormatError(
                    f"{self._name}: {self._read_bytes:,} bytes of {self._codec.name} data unpack to "
                    f"{self._unpacked_bytes:,} or more; up to {_MOST_RATIO} times as many are accepted, as "
                    f"more is usually meant to fill a disk. If you trust it, store the unpacked .tar"
                )
            if tar_bytes:
                yield tar_bytes
        return member.unused_data.lstrip(b"\0") if member.eof else b""


class _Gzip:
    """A gzip member; zlib checks its length and its CRC."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        tar_bytes = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        self.needs_input = len(tar_bytes) < max_length
        return tar_bytes


class _Zstandard:
    """A zstd frame by the package zstandard, which doesn't limit its output: give it little at a time."""

    needs_input = True

    def __init__(self, module: Any) -> None:
        self._frame = module.ZstdDecompressor().decompressobj()

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return bytes(self._frame.decompress(data))


def _gzip() -> _Format:
    return _Format("gzip", 16 << 10, lambda data: data.startswith(b"\x1f\x8b\x08"), _Gzip, (zlib.error,))


def _zstd() -> _Format:
    name = zstd_module()
    if name is None:
        return _Format("zstd", 16 << 10, _begins_zstd_frame, _refuse_zstd, ())
    module = importlib.import_module(name)
    if name == "zstandard":  # 1 KiB holds at most 256 blocks, of at most 128 KiB each
        return _Format("zstd", 1 << 10, _begins_zstd_frame, lambda: _Zstandard(module), (module.ZstdError,))
    return _Format(
        "zstd", 16 << 10, _begins_zstd_frame, module.ZstdDecompressor, (module.ZstdError, EOFError)
    )


def _refuse_zstd() -> _Decompressor:
    raise ShardFormatError(
        f"zstd data need Python 3.14 or one of {', '.join(ZSTD_MODULES[1:])}; or unpack the shard "
        f"(zstd -d), or read it through `pipe:… | zstd -dc`"
    )


def _begins_zstd_frame(data: bytes) -> bool:
    """Return whether data begin as a frame of zstd, or as a skippable one, which pzstd writes first."""
    return data.startswith(b"\x28\xb5\x2f\xfd") or (data[1:4] == b"\x2a\x4d\x18" and 0x50 <= data[0] <= 0x5F)


_FORMATS: dict[Compression, Callable[[], _Format]] = {"gzip": _gzip, "zstd": _zstd}


def _pieces(chunks: Iterable[bytes], piece_bytes: int) -> Iterator[bytes]:
    """Split bytes into pieces of one size; the last may be shorter, and none is empty."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        whole = len(buffer) - len(buffer) % piece_bytes
        for start in range(0, whole, piece_bytes):
            yield bytes(buffer[start : start + piece_bytes])
        del buffer[:whole]
    if buffer:
        yield bytes(buffer)


def _without_size(version: Version) -> Version:
    return Version(None, version.etag, version.last_modified)
