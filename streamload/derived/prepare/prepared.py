"""A shard → the same shard with its images prepared, as a stream (part of step F).

A prepared shard is a standard tar with the same samples, in the same order, under the same keys: the image of
a sample is replaced by its prepared form (`.jpg` by `.ppm`, for example); all other members are copied to the
byte, as are samples that can't be prepared. Entries of the tar that belong to no sample are dropped before an
image and at the end. A pax record of each replaced image describes the original (shards/samples.py); records
of that name in the source are voided by changing the first letter of the name.

It is an origin like any other, which a fill transfers into a tier. It is deterministic, so a fill that starts
again gets the same bytes.
"""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from streamload.errors import ShardCut
from streamload.origins.origin import Origin, Stream, Version
from streamload.shards.samples import Entry, Original, ShardScanner, border
from streamload.shards.tar import BLOCK_BYTES, NOTE

logger = logging.getLogger("streamload")

_IMAGES = ("jpg", "png", "jpeg", "webp")
"""Extensions of images, by their last part; of several in a sample the first in this order is prepared."""
_BUFFER_BYTES = 64 << 20
"""A larger sample is not prepared: its bytes pass unchanged, as it can't be buffered to its end."""
_END = bytes(2 * BLOCK_BYTES)
_VOID = ord("-")


class ImageRecipe(Protocol):
    """Preparation of images (preparation.py). Thread-safe, deterministic."""

    @property
    def name(self) -> str:
        """A name for all that the result depends on."""
        ...

    @property
    def extension(self) -> str:
        """The extension of prepared images."""
        ...

    def prepare(self, data: bytes | memoryview) -> bytes | None:
        """An image file → the prepared one; None: it stays as it is."""
        ...


class PreparedOrigin(Origin):
    """The prepared form of another origin's shard, under that shard's version.

    Args:
        origin: of the original shard.
        recipe: for its images.
    """

    def __init__(self, origin: Origin, recipe: ImageRecipe):
        self.url = origin.url
        self._origin = origin
        self._recipe = recipe

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open it at a byte of the prepared shard; the bytes before are made again and dropped."""
        return _PreparedStream(self._origin.open(0, expected), self.url, self._recipe, start)

    def version(self) -> Version:
        """The current version of the original shard."""
        return self._origin.version()

    def close(self) -> None:
        """Close the origin of the original shard."""
        self._origin.close()


class _PreparedStream:
    """The bytes of a prepared shard from one byte on; its length isn't known."""

    def __init__(self, stream: Stream, url: str, recipe: ImageRecipe, start: int):
        self.version = stream.version
        self._stream = stream
        self._url = url
        self._recipe = recipe
        self._start = start

    def chunks(self) -> Iterator[bytes]:
        """Mostly one sample a chunk."""
        to_drop = self._start
        for chunk in prepared_tar(whole(self._stream, self._url), self._recipe, self._url):
            if len(chunk) > to_drop:
                yield chunk[to_drop:]
            to_drop = max(0, to_drop - len(chunk))

    def close(self) -> None:
        """Close the stream of the original shard."""
        self._stream.close()


def whole(stream: Stream, url: str) -> Iterator[bytes]:
    """The bytes of a shard from its start: all of them, or an error.

    Raises:
        ShardCut: there are fewer or more than the version of the stream says.
    """
    received, size = 0, stream.version.size
    for chunk in stream.chunks():
        received += len(chunk)
        yield chunk
    if size is not None and received != size:
        raise ShardCut(f"{url} has {received:,} bytes instead of {size:,}")


def prepared_tar(chunks: Iterable[bytes], recipe: ImageRecipe, name: str) -> Iterator[bytes]:
    """The bytes of a tar → those of its prepared form.

    Args:
        chunks: the whole tar, in chunks of any size; consumed to the end.
        recipe: for its images.
        name: of the shard, for the log.

    Raises:
        ShardError: not a tar, damaged or cut.
    """
    samples = _SamplesOfShard(recipe)
    for chunk in chunks:
        yield from samples.feed(chunk)
    yield from samples.finish(name)
    yield _END


class Growth(NamedTuple):
    """Ratio of the sizes of a tar after and before preparing, by its first samples.

    Attributes:
        factor: prepared bytes by bytes as they are.
        sample_bytes: of a sample as it is.
    """

    factor: float
    sample_bytes: float


def growth(head: bytes, recipe: ImageRecipe, most: int) -> Growth | None:
    """Prepare the first samples of a tar to see how it grows; None: no sample is whole in it.

    Args:
        head: the first bytes of the tar.
        recipe: for its images.
        most: samples.

    Raises:
        ShardError: not a tar, or damaged.
    """
    entries = ShardScanner(checksums=False).feed(head)[:most]
    if not entries:
        return None
    stop = border(entries[-1])
    prepared_bytes = sum(map(len, prepared_tar([head[:stop], _END], recipe, ""))) - len(_END)
    return Growth(prepared_bytes / stop, stop / len(entries))


def images_of(head: bytes) -> list[bytes]:
    """The images that are whole in the first bytes of a tar.

    Raises:
        ShardError: not a tar, or damaged.
    """
    members = map(image_of, ShardScanner(checksums=False).feed(head))
    return [head[start : start + size] for _, start, size in filter(None, members)]


class _SamplesOfShard:
    """Buffers the bytes of each sample and returns them prepared."""

    def __init__(self, recipe: ImageRecipe):
        self._recipe = recipe
        self._scanner = ShardScanner(checksums=False)
        self._buffer = bytearray()
        self._start = 0  # the buffer's position in the tar
        self._border = 0  # the end of the last sample that was returned

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take the next bytes of the tar."""
        if self._scanner.ended:
            return
        self._buffer += chunk
        entries = self._scanner.feed(chunk)
        for note_at in self._scanner.notes_at:
            self._buffer[note_at - self._start] = _VOID
        for entry in entries:
            yield self._pop(entry)
        if len(self._buffer) > _BUFFER_BYTES and not self._scanner.ended:
            count = len(self._buffer) - self._scanner.header_bytes  # it may have a record to void
            yield bytes(memoryview(self._buffer)[:count])
            self._start += count
            del self._buffer[:count]

    def finish(self, name: str) -> Iterator[bytes]:
        """The tar is complete."""
        entries, warnings = self._scanner.finish()
        for entry in entries:
            yield self._pop(entry)
        if self._start > self._border:  # a part of what follows the last sample has already passed
            yield bytes(memoryview(self._buffer)[: self._scanner.stop - self._start])
        for warning in warnings:
            logger.warning("shard %s: %s", name, warning)

    def _pop(self, entry: Entry) -> bytes:
        """Remove and return a sample's bytes, from the end of the one before: headers, payloads, padding."""
        begin, self._border = self._border, border(entry)
        count = max(0, self._border - self._start)  # 0: all of it has already passed
        whole = bytes(memoryview(self._buffer)[:count])
        del self._buffer[:count]
        is_complete = self._start == begin and count <= _BUFFER_BYTES
        self._start += count
        return (self._prepared(entry, whole, begin) if is_complete else None) or whole

    def _prepared(self, entry: Entry, whole: bytes, begin: int) -> bytes | None:
        """A sample's bytes with its image replaced; None if it stays as it is."""
        image = image_of(entry)
        if image is None:
            return None
        extension, start, size = image
        stem = extension.rpartition(".")[0]
        name = f"{stem}.{self._recipe.extension}" if stem else self._recipe.extension
        if name != extension and name in entry.sizes:
            return None
        prepared = self._recipe.prepare(memoryview(whole)[start - begin : start - begin + size])
        if prepared is None:
            return None
        ends = [member_start + bytes_ + -bytes_ % BLOCK_BYTES for _, member_start, bytes_ in entry.members]
        before = max((end for end in ends if end <= start), default=begin)
        after = start + size + -size % BLOCK_BYTES
        original = Original(extension, size, entry.width, entry.height)
        header = _header(f"{entry.key}.{name}", len(prepared), original)
        padding = bytes(-len(prepared) % BLOCK_BYTES)
        return b"".join((whole[: before - begin], header, prepared, padding, whole[after - begin :]))


def image_of(entry: Entry) -> tuple[str, int, int] | None:
    """The member to prepare: extension, start and size; None if there is none."""
    kinds = [member[0].rpartition(".")[2] for member in entry.members]
    for kind in _IMAGES:
        if kind in kinds:
            return entry.members[kinds.index(kind)]
    return None


def _header(name: str, size: int, original: Original) -> bytes:
    """The header of a member, with a pax header before it; deterministic."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    info.pax_headers = {NOTE: str(original)}
    if "\0" in name:  # a plain header's name would end there
        info.pax_headers["path"] = name
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
