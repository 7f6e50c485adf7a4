"""The deterministic part of an image's transform done in advance (step I), and shards of it (step F).

A recipe decodes and resizes the short side. The result depends only on the image's bytes, the recipe and the
libraries. So a training has the same pixels from a prepared shard as from preparing each image itself.
Without a resize ("raw") these are the pixels of a training on the original images.

A prepared shard is a standard tar with the same samples, in the same order, under the same keys: the image of
a sample is replaced by its prepared form (`.jpg` by `.ppm`, for example); all other members are copied to the
byte, as are samples that can't be prepared. Entries of the tar that belong to no sample are dropped before an
image and at the end. A pax record of each replaced image describes the original (shards/samples.py); records
of that name in the source are voided by changing the first letter of the name.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import PIL
import simplejpeg
import torch

from streamload.errors import DatasetChanged, DecodeError, OptionError, ShardCut
from streamload.origins.origin import Origin, Stream, Version
from streamload.shards.originals import Original
from streamload.shards.samples import Entry, ShardScanner, border
from streamload.shards.tar import BLOCK_BYTES, NOTE, TarParser
from streamload.transforms.augment import Box
from streamload.transforms.by_pillow import kept_info
from streamload.transforms.decode import Pixels, decode_jpeg_or_image
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.ppm import to_ppm
from streamload.transforms.resize import resize_box
from streamload.urls import redact

RAW = "raw"
AUTO = "auto"
"""In place of a recipe: a loader chooses one (choice.py)."""
_RECIPE = re.compile(r"(?:raw-([0-9]{1,4})|jpeg-([0-9]{1,4})-q([0-9]{1,3}))")
SIZES = range(16, 4097)
_QUALITIES = range(1, 101)
_ARITHMETIC = 2
"""Version of this module's arithmetic, part of the recipes' names; to be raised when pixels change."""
_LARGEST_BYTES = 48 << 20
"""Larger raw pixels aren't stored: well below the limit of a member (cache/selection.py)."""
_JPEG_LONGEST = 65_500


@dataclass(frozen=True, slots=True)
class Preparation:
    """A recipe: images resized to a short side of `size` pixels, stored as raw pixels or as JPEG.

    Smaller images aren't enlarged. Thread-safe.
    """

    size: int | None = None  # of the short side; None: images aren't resized
    quality: int | None = None  # of the JPEG; None: binary PPM
    most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    """The limit of an image that is prepared (transforms/limits.py)."""

    @classmethod
    def parse(cls, text: str, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> Preparation:
        """Read "raw", "raw-256" or "jpeg-256-q90".

        Raises:
            OptionError: another form, or numbers out of range.
        """
        if text == RAW:
            return cls(most_pixels=most_pixels)
        match = _RECIPE.fullmatch(text)
        size, quality = (0, None) if match is None else (int(match[1] or match[2]), match[3])
        if size not in SIZES or (quality is not None and int(quality) not in _QUALITIES):
            raise OptionError(
                f"{text!r} is not a recipe for prepared images: give {RAW}, raw-SIZE or jpeg-SIZE-qQUALITY, "
                f"such as raw-256 or jpeg-256-q90, with a short side of {SIZES[0]} to {SIZES[-1]} pixels; "
                f"or, for a loader, {AUTO}"
            )
        return cls(size, None if quality is None else int(quality), most_pixels)

    def __str__(self) -> str:
        if self.is_exact:
            return RAW
        return f"raw-{self.size}" if self.quality is None else f"jpeg-{self.size}-q{self.quality}"

    @property
    def is_exact(self) -> bool:
        """True if prepared images have the pixels of the original ones, all of them."""
        return self.size is None

    @property
    def name(self) -> str:
        """The recipe with all that its images depend on: images of the same name can be mixed."""
        return f"{self}-{_libraries()}-{_digest_of_example(self)}-of{self.most_pixels}"

    @property
    def extension(self) -> str:
        """The extension of members that hold prepared images."""
        return "ppm" if self.quality is None else "jpg"

    def derive(self, origin: Origin) -> Origin:
        """The prepared form of an origin's shard."""
        return DerivedOrigin(origin, lambda stream, url: prepared_tar(whole(stream, url), self, url))

    def prepare(self, data: bytes | memoryview) -> bytes | None:
        """An image file → the prepared one.

        Returns:
            None for an image that stays as it is: it can't be decoded, is too large for raw pixels or too
            long for a JPEG, or small enough that encoding it again would only lose quality.
        """
        try:
            pixels = self._decoded(data)
            info = kept_info(data, self.most_pixels) if self.is_exact else {}
        except DecodeError:
            return None
        if not self._is_changed(pixels):
            return None
        small = self._shrunk(pixels)
        return to_ppm(small, info) if self.quality is None else self._encoded(small)

    def pixels(self, data: bytes | memoryview) -> Pixels:
        """The pixels of `prepare(data)`, for an image that isn't prepared.

        Returns:
            uint8[H, W, 3], writable; valid until this thread decodes another image.

        Raises:
            DecodeError: as decode_jpeg_or_image.
        """
        pixels = self._decoded(data)
        if not self._is_changed(pixels):
            return pixels
        small = self._shrunk(pixels)
        return small if self.quality is None else self._decoded(self._encoded(small))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size of a prepared image, given that of the original."""
        short = min(height, width)
        if self.size is None or short <= self.size:
            return height, width
        return height * self.size // short, width * self.size // short

    def _decoded(self, data: bytes | memoryview) -> Pixels:
        return decode_jpeg_or_image(data, in_scratch=True, most_pixels=self.most_pixels)

    def _is_changed(self, pixels: Pixels) -> bool:
        height, width = self.resized(*pixels.shape[:2])
        if self.quality is None:
            return height * width * 3 <= _LARGEST_BYTES
        return (height, width) != pixels.shape[:2] and max(height, width) <= _JPEG_LONGEST

    def _shrunk(self, pixels: Pixels) -> Pixels:
        height, width = pixels.shape[:2]
        resized = self.resized(height, width)
        if resized == (height, width):
            return pixels
        image = resize_box(pixels, Box(0, 0, height, width), *resized)[0]
        return np.ascontiguousarray(image.permute(1, 2, 0).numpy())

    def _encoded(self, pixels: Pixels) -> bytes:
        assert self.quality is not None
        data: bytes = simplejpeg.encode_jpeg(pixels, self.quality, "RGB", "420", fastdct=False)
        return data


def pixels_name() -> str:
    """A name of all that decoded and resized pixels depend on beside the image, on this machine."""
    return f"{_libraries()}-{_digest_of_example(Preparation(256))}"


@functools.cache
def _libraries() -> str:
    torch_version = torch.__version__.partition("+")[0]
    return f"v{_ARITHMETIC}-torch{torch_version}-pillow{PIL.__version__}-simplejpeg{simplejpeg.__version__}"


@functools.cache
def _digest_of_example(preparation: Preparation) -> str:
    """A digest of one image as this machine prepares it: other builds of a library may differ."""
    across, down = np.meshgrid(np.arange(313), np.arange(419))
    wave = np.stack([across * 5 + down * 3, across * down // 7, across * across // 11 + down * 9], axis=-1)
    picture = np.abs(wave % 510 - 255).astype(np.uint8)
    size = None if preparation.size is None else min(preparation.size, 256)
    small = Preparation(size, preparation.quality)
    digest = hashlib.blake2b(digest_size=4)
    for quality in (75, 95):
        jpeg = simplejpeg.encode_jpeg(picture, quality, "RGB", "420", fastdct=False)
        digest.update(small.pixels(jpeg).tobytes())
    return digest.hexdigest()


logger = logging.getLogger("streamload")

_IMAGES = ("jpg", "png", "jpeg", "webp")
"""Extensions of images, by their last part; of several in a sample the first in this order is prepared."""
_BUFFER_BYTES = 64 << 20
"""A larger sample is not prepared: its bytes pass unchanged, as it can't be buffered to its end."""
_END = bytes(2 * BLOCK_BYTES)
_VOID = ord("-")


class DerivedOrigin(Origin):
    """A shard that is made of another origin's shard, under that shard's version.

    Args:
        origin: of the shard itself.
        make: returns the bytes of the derived shard, given a stream of the shard from its first byte, and its
            URL.
        is_repeatable: whether another call of `make` returns the same bytes.
    """

    def __init__(
        self, origin: Origin, make: Callable[[Stream, str], Iterator[bytes]], *, is_repeatable: bool = True
    ):
        self.url = origin.url
        self._origin = origin
        self._make = make
        self._is_repeatable = is_repeatable

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open it at a byte of the derived shard; the bytes before are made again and dropped.

        Raises:
            DatasetChanged: these may be others now.
        """
        if start and not self._is_repeatable:
            raise DatasetChanged(f"what is made of {redact(self.url)} is made from the first byte on")
        return _DerivedStream(self._origin.open(0, expected), self.url, self._make, start)

    def version(self) -> Version:
        """The current version of the shard itself."""
        return self._origin.version()

    def close(self) -> None:
        """Close the origin of the shard itself."""
        self._origin.close()


class _DerivedStream:
    """The bytes of a derived shard from one byte on; its length isn't known."""

    def __init__(self, stream: Stream, url: str, make: Callable[[Stream, str], Iterator[bytes]], start: int):
        self.version = stream.version
        self._stream = stream
        self._chunks = make(stream, url)
        self._start = start

    def chunks(self) -> Iterator[bytes]:
        """The chunks as they are made; empty ones, too, so that a fill can be stopped meanwhile."""
        to_drop = self._start
        for chunk in self._chunks:
            yield chunk[to_drop:]
            to_drop = max(0, to_drop - len(chunk))

    def close(self) -> None:
        """Close the stream of the shard itself."""
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


def prepared_tar(chunks: Iterable[bytes], recipe: Preparation, name: str) -> Iterator[bytes]:
    """The bytes of a tar → those of its prepared form.

    Args:
        chunks: the whole tar, in chunks of any size; consumed to the end.
        name: of the shard, for the log.

    Raises:
        ShardError: not a tar, damaged or cut.
    """
    for entry, begin, data, is_whole in parts_of(chunks, ShardScanner(checksums=False), name):
        prepared = _prepared(entry, data, begin, recipe) if entry is not None and is_whole else None
        yield data if prepared is None else prepared
    yield _END


class TarPart(NamedTuple):
    """Bytes of a tar, up to the end of a sample: headers, payloads, padding."""

    entry: Entry | None  # of the sample, if its payloads are here; None: it is too large, or there is none
    begin: int  # the first byte's position in the tar
    data: bytes
    is_whole: bool = False  # whether all is here that follows the sample before


def parts_of(chunks: Iterable[bytes], scanner: ShardScanner, name: str) -> Iterator[TarPart]:
    """The bytes of a tar, sample by sample; records of originals in it are voided.

    Args:
        chunks: the whole tar, in chunks of any size; consumed to the end.
        scanner: at its start.
        name: of the shard, for the log.

    Raises:
        ShardError: not a tar, damaged or cut.
    """
    buffer, start, border_before = bytearray(), 0, 0  # start: the buffer's position in the tar

    def take(count: int) -> bytes:
        nonlocal start
        data = bytes(memoryview(buffer)[:count])
        del buffer[:count]
        start += count
        return data

    def part(entry: Entry) -> TarPart:
        nonlocal border_before
        begin, stop_before, border_before = start, border_before, border(entry)
        data = take(max(0, border_before - start))  # nothing, if all of it has already passed
        is_here = begin <= entry.start and entry.stop - entry.start <= _BUFFER_BYTES
        is_whole = begin == stop_before and len(data) <= _BUFFER_BYTES
        return TarPart(entry if is_here else None, begin, data, is_whole)

    for chunk in chunks:
        if scanner.ended:
            continue
        buffer += chunk
        entries = scanner.feed(chunk)
        for note_at in scanner.notes_at:
            buffer[note_at - start] = _VOID
        yield from map(part, entries)
        if len(buffer) > _BUFFER_BYTES and not scanner.ended:
            # The header may have a record to void.
            yield TarPart(None, start, take(len(buffer) - scanner.header_bytes))
    entries, warnings = scanner.finish()
    yield from map(part, entries)
    if start > border_before:  # a part of what follows the last sample has already passed
        yield TarPart(None, start, take(scanner.stop - start))
    for warning in warnings:
        logger.warning("shard %s: %s", name, warning)


def _prepared(entry: Entry, data: bytes, begin: int, recipe: Preparation) -> bytes | None:
    """A sample's bytes with its image replaced; None if it stays as it is."""
    image = image_of(entry)
    linked = () if entry.span is None else [ext for ext, at, _ in entry.members if at < entry.start]
    # A linked image is that of another sample: it is found there, by its name, in the prepared shard.
    if image is None or any(extension.rpartition(".")[2] in _IMAGES for extension in linked):
        return None
    extension, start, size = image
    stem = extension.rpartition(".")[0]
    name = f"{stem}.{recipe.extension}" if stem else recipe.extension
    if name != extension and name in entry.sizes:
        return None
    prepared = recipe.prepare(memoryview(data)[start - begin : start - begin + size])
    if prepared is None:
        return None
    ends = [member_start + bytes_ + -bytes_ % BLOCK_BYTES for _, member_start, bytes_ in entry.members]
    before = max((end for end in ends if end <= start), default=begin)
    if entry.span is not None:  # the headers of links lie between
        before = _header_start(data, begin, start)
    after = start + size + -size % BLOCK_BYTES
    original = Original(extension, size, *entry.images[extension])
    header = _header(f"{entry.key}.{name}", len(prepared), original)
    padding = bytes(-len(prepared) % BLOCK_BYTES)
    return b"".join((data[: before - begin], header, prepared, padding, data[after - begin :]))


def _header_start(data: bytes, begin: int, start: int) -> int:
    """Return where the member before the one with its payload at `start` ends."""
    parser, end = TarParser(begin), begin
    while parser.position < start:
        at = parser.position - begin
        if parser.feed(data[at : at + BLOCK_BYTES]) and parser.position < start:
            parser.skip(parser.skippable)
            end = parser.position
    return end


class Growth(NamedTuple):
    """Ratio of the sizes of a tar after and before preparing, by its first samples."""

    factor: float  # prepared bytes by bytes as they are
    sample_bytes: float  # of a sample as it is


def growth(head: bytes, recipe: Preparation, most: int) -> Growth | None:
    """Prepare the first samples of a tar, at `most` so many; None: no sample is whole in its first bytes.

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
