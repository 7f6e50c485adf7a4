"""A shard → the same shard with its images prepared, as it streams (part of F).

A prepared shard is a standard tar with the samples of the one that it is made of, in their order, under
their keys: what is the image of a sample is replaced by what a recipe makes of it (`.jpg` by `.ppm`, say),
all other members are there to the byte, and so is any sample that can't be prepared. What is part of no
sample isn't carried over where it stands before an image, or at the end. A pax record of each image that was
replaced says what it stands for (shards/samples.py). Records by that name that its source has already are
made void: each loses the first letter of its name, whatever it says.

Here it is an origin like any other, which a fill brings into a tier: all that holds of shards holds of it.
The same bytes come of the same bytes, so a fill that begins anew gives the same ones.
"""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Iterable, Iterator
from typing import Protocol

from streamload.errors import ShardCut
from streamload.origins.origin import Origin, Stream, Version
from streamload.shards.samples import Entry, Original, ShardScanner, border
from streamload.shards.tar import BLOCK_BYTES, NOTE

logger = logging.getLogger("streamload")

_IMAGES = ("jpg", "png", "jpeg", "webp")
"""What is prepared, by the last part of its extension: in a sample with several, the first in this order."""
_HELD_BYTES = 64 << 20
"""A sample that takes more is not prepared: what isn't known to its end is let through."""
_END = bytes(2 * BLOCK_BYTES)
_VOID = ord("-")


class Recipe(Protocol):
    """What is done to images (preparation.py). Thread-safe, deterministic."""

    @property
    def name(self) -> str:
        """With all that the result depends on."""
        ...

    @property
    def extension(self) -> str:
        """Of what it makes."""
        ...

    def prepare(self, data: bytes | memoryview) -> bytes | None:
        """An image file → the prepared one; None: it stays as it is."""
        ...


class PreparedOrigin(Origin):
    """The prepared form of what another origin gives, under the version of that.

    Args:
        origin: of the shard as it is.
        recipe: what is done to its images.
    """

    def __init__(self, origin: Origin, recipe: Recipe):
        self.url = origin.url
        self._origin = origin
        self._recipe = recipe

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open it at a byte of the prepared shard; what comes before that is made again, and dropped."""
        return _PreparedStream(self._origin.open(0, expected), self.url, self._recipe, start)

    def version(self) -> Version:
        """Which version of the shard it would be made of now."""
        return self._origin.version()

    def close(self) -> None:
        """Close the other one."""
        self._origin.close()


class _PreparedStream:
    """The bytes of a prepared shard from one byte on, of which the length isn't known."""

    def __init__(self, stream: Stream, url: str, recipe: Recipe, start: int):
        self.version = stream.version
        self._stream = stream
        self._url = url
        self._recipe = recipe
        self._start = start

    def chunks(self) -> Iterator[bytes]:
        """A sample at a time, most of them."""
        to_drop = self._start
        for piece in prepared_tar(self._arriving(), self._recipe, self._url):
            if len(piece) > to_drop:
                yield piece[to_drop:]
            to_drop = max(0, to_drop - len(piece))

    def close(self) -> None:
        """Close the stream of the shard as it is."""
        self._stream.close()

    def _arriving(self) -> Iterator[bytes]:
        """The bytes as they are; all of them, or an error."""
        arrived, size = 0, self.version.size
        for chunk in self._stream.chunks():
            arrived += len(chunk)
            yield chunk
        if size is not None and arrived != size:
            raise ShardCut(f"{self._url} has {arrived:,} bytes instead of {size:,}")


def prepared_tar(chunks: Iterable[bytes], recipe: Recipe, name: str) -> Iterator[bytes]:
    """The bytes of a tar → those of its prepared form.

    Args:
        chunks: all of the tar, in chunks of any size; they are gone over to the end.
        recipe: what is done to images.
        name: of the shard, for the log.

    Raises:
        ShardError: it is no tar, damaged or cut.
    """
    samples = _Samples(recipe)
    for chunk in chunks:
        yield from samples.feed(chunk)
    yield from samples.finish(name)
    yield _END


class _Samples:
    """Collects the bytes of each sample and gives them out prepared."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self._scanner = ShardScanner(checksums=False)
        self._held = bytearray()
        self._start = 0  # of what is held, in the tar
        self._border = 0  # up to which samples are done with

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take the next bytes of the tar."""
        if self._scanner.ended:
            return
        self._held += chunk
        entries = self._scanner.feed(chunk)
        for at in self._scanner.notes_at:
            self._held[at - self._start] = _VOID
        for entry in entries:
            yield self._give_out(entry)
        if len(self._held) > _HELD_BYTES and not self._scanner.ended:
            count = len(self._held) - self._scanner.header_bytes  # which may have a note
            yield bytes(memoryview(self._held)[:count])
            self._start += count
            del self._held[:count]

    def finish(self, name: str) -> Iterator[bytes]:
        """There are no more bytes."""
        entries, warnings = self._scanner.finish()
        for entry in entries:
            yield self._give_out(entry)
        if self._start > self._border:  # of what follows the last sample a part has been let through
            yield bytes(memoryview(self._held)[: self._scanner.stop - self._start])
        for warning in warnings:
            logger.warning("shard %s: %s", name, warning)

    def _give_out(self, entry: Entry) -> bytes:
        """The bytes of a sample, from the end of the one before it on: headers, payloads, padding."""
        begin, self._border = self._border, border(entry)
        count = max(0, self._border - self._start)  # all of it may have gone already
        whole = bytes(memoryview(self._held)[:count])
        del self._held[:count]
        is_complete = self._start == begin and count <= _HELD_BYTES
        self._start += count
        return (self._prepared(entry, whole, begin) if is_complete else None) or whole

    def _prepared(self, entry: Entry, whole: bytes, begin: int) -> bytes | None:
        """A sample's bytes with its image replaced; None if it stays as it is."""
        image = _image_of(entry)
        if image is None:
            return None
        extension, start, size = image
        stem = extension.rpartition(".")[0]
        name = f"{stem}.{self._recipe.extension}" if stem else self._recipe.extension
        if name != extension and name in entry.sizes:
            return None
        made = self._recipe.prepare(memoryview(whole)[start - begin : start - begin + size])
        if made is None:
            return None
        ends = [at + bytes_ + -bytes_ % BLOCK_BYTES for _, at, bytes_ in entry.members]
        before = max((end for end in ends if end <= start), default=begin)
        behind = start + size + -size % BLOCK_BYTES
        head = _header(f"{entry.key}.{name}", len(made), Original(extension, size, entry.width, entry.height))
        padding = bytes(-len(made) % BLOCK_BYTES)
        return b"".join((whole[: before - begin], head, made, padding, whole[behind - begin :]))


def _image_of(entry: Entry) -> tuple[str, int, int] | None:
    """The member that is prepared: extension, start and size; None if there is none."""
    kinds = [member[0].rpartition(".")[2] for member in entry.members]
    for kind in _IMAGES:
        if kind in kinds:
            return entry.members[kinds.index(kind)]
    return None


def _header(name: str, size: int, original: Original) -> bytes:
    """The header of a member, with a pax header in front of it; the same for the same arguments."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    info.pax_headers = {NOTE: str(original)}
    if "\0" in name:  # a plain header's name would end there
        info.pax_headers["path"] = name
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
