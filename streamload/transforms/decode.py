"""Image bytes → RGB pixels (part of I), those of Pillow's `convert("RGB")`; nothing is rotated or scaled.

A sound 8-bit JPEG is decoded by libjpeg-turbo with the GIL released. Everything else, a JPEG that makes the
decoder warn included, is Pillow's, so that what is accepted and what is refused is Pillow's decision too.
Pixels that were stored as they are (binary PPM, as prepared shards have them) aren't decoded at all.
"""

from __future__ import annotations

import re
import struct
import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    IcoImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from streamload.errors import DecodeError, ImageTooLarge
from streamload.transforms import kernel
from streamload.transforms.limits import (
    DEFAULT_MAX_IMAGE_PIXELS,
    MeteredFile,
    check_pixels,
    check_run_lengths,
    check_scans,
)

Pixels = npt.NDArray[np.uint8]
_Result = TypeVar("_Result")

# What `*.jpg`, `*.png`, `*.jpeg` and `*.webp` hold on the web, names that lie included. The plugins are
# imported so that Pillow needn't import all of its own to know these.
_PLUGINS = (
    JpegImagePlugin.JpegImageFile,
    PngImagePlugin.PngImageFile,
    WebPImagePlugin.WebPImageFile,
    GifImagePlugin.GifImageFile,
    BmpImagePlugin.BmpImageFile,
    AvifImagePlugin.AvifImageFile,
    TiffImagePlugin.TiffImageFile,
    Jpeg2KImagePlugin.Jpeg2KImageFile,
    IcoImagePlugin.IcoImageFile,
)
FORMATS = tuple(plugin.format for plugin in _PLUGINS)

_SCRATCH_BYTES = 16 << 20
_JPEG_START = b"\xff\xd8\xff"
_HEADER_BYTES = 4096
"""Of a JPEG: what is seldom exceeded; of a longer header all of the file is looked at."""
_STRIP_PIXELS = 1 << 20
"""How many of Pillow's pixels are converted at once, so that there is no second copy of a large image."""
_TILE_WIDTH, _TILE_HEIGHT = 322, 323
_ICON_START = b"\0\0\1\0"
_PPM_START = b"P6"
_PPM_HEADER = re.compile(rb"P6\s([0-9]{1,8})\s([0-9]{1,8})\s255\s")
"""Of binary PPM the plain form, 8 bits and no comments: what Pillow, OpenCV and netpbm write."""
_PPM_HEADER_BYTES = 32
_FAST_COLOURS = frozenset(("YCbCr", "Gray"))


class _Scratch(threading.local):
    """Memory for one image at a time: fresh pages for each cost a sixth of what decoding does."""

    def __init__(self) -> None:
        # All of it at once, so that places in it stay where they are; only what images need is ever touched.
        self._memory = np.empty(_SCRATCH_BYTES, np.uint8)
        self.tensor = torch.from_numpy(self._memory)
        self.address: int = self._memory.__array_interface__["data"][0]
        self.place: Pixels | None = None
        """The one that was given last; each begins where the memory does."""

    def of(self, height: int, width: int) -> Pixels | None:
        """uint8[height, width, 3]; None for an image that is too large to keep as much for."""
        size = height * width * 3
        fits = size <= _SCRATCH_BYTES
        self.place = self._memory[:size].reshape(height, width, 3) if fits else None
        return self.place


_scratch = _Scratch()


def jpeg_size(
    data: bytes | memoryview, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
) -> tuple[int, int] | None:
    """Height and width of a JPEG by its header; None if it isn't one for libjpeg-turbo.

    Raises:
        ImageTooLarge: it has more pixels than `most_pixels`, or too many scans for its pixels.
    """
    # The kernel knows no JPEG but those of one scan, which is nothing to count.
    size = None if kernel.jpeg_size is None else kernel.jpeg_size(bytes(data[:_HEADER_BYTES]))
    if size is None:
        if data[:3] != _JPEG_START:
            return None
        whole = bytes(data)
        size = None if kernel.jpeg_size is None else kernel.jpeg_size(whole)
        if size is None:
            return _unusual_jpeg_size(whole, most_pixels)
    if size[0] * size[1] > most_pixels:
        check_pixels(*size, most_pixels, "JPEG")
    return size


def _unusual_jpeg_size(jpeg: bytes, most_pixels: int) -> tuple[int, int] | None:
    try:
        height, width, colour, _ = simplejpeg.decode_jpeg_header(jpeg)
    except ValueError:
        return None
    check_pixels(height, width, most_pixels, "JPEG")
    check_scans(jpeg, height, width, most_pixels)
    return (height, width) if colour in _FAST_COLOURS else None


def decode_jpeg_or_image(
    data: bytes | memoryview, *, in_scratch: bool = False, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
) -> Pixels:
    """Decode an image.

    Args:
        data: a whole file of one of FORMATS, or binary PPM.
        in_scratch: the pixels are needed only until this thread decodes another image.
        most_pixels: of an image; the other limits (limits.py) follow from it.

    Returns:
        uint8[H, W, 3], contiguous and writable. Of an animation, the first frame.

    Raises:
        DecodeError: cut, corrupt, or of another format.
        ImageTooLarge: decoding it would take too much memory or time, by its header.
    """
    if is_stored(data):
        return stored_pixels(data, in_scratch, most_pixels)
    size = jpeg_size(data, most_pixels)
    if size is None:
        return _by_pillow(data, most_pixels, _pixels_of)
    return decode_there(data, _scratch.of(*size) if in_scratch else None, most_pixels)


def is_stored(data: bytes | memoryview) -> bool:
    """Whether an image's pixels are stored as they are (binary PPM): there is nothing to decode."""
    return data[:2] == _PPM_START


def place_in_scratch(data: bytes | memoryview, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> Pixels | None:
    """Where `decode_there` will put the pixels of a JPEG, by its header.

    Returns:
        uint8[H, W, 3], writable, whose content is undefined until then; None where only decoding will tell.

    Raises:
        ImageTooLarge: as for `jpeg_size`.
    """
    size = jpeg_size(data, most_pixels)
    return None if size is None else _scratch.of(*size)


def memory_of(pixels: Pixels) -> torch.Tensor:
    """A tensor whose storage begins with these pixels; made already for the latest place in scratch."""
    return _scratch.tensor if pixels is _scratch.place else torch.from_numpy(pixels)


def address_of(pixels: Pixels) -> int:
    """Where these pixels begin; known already for the latest place in scratch."""
    if pixels is _scratch.place:
        return _scratch.address
    address: int = pixels.__array_interface__["data"][0]
    return address


def decode_there(
    data: bytes | memoryview, place: Pixels | None, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
) -> Pixels:
    """Decode a JPEG into the place that its header gave: `place`, needed until this thread decodes another.

    Raises:
        DecodeError: as for `decode_jpeg_or_image`.

    Returns:
        `place`; memory of its own where that is None, or where Pillow finds another size.
    """
    try:
        there: Pixels = simplejpeg.decode_jpeg(data, "RGB", buffer=place)
    except ValueError:  # strict, its default: what libjpeg only warns of is raised
        return _by_pillow(data, most_pixels, lambda image: _pixels_of(image, place))
    return there if place is None else place


def decode_to_pillow(data: bytes | memoryview, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> Image.Image:
    """Decode an image for functions that take Pillow's: `Image.open(…).convert("RGB")`, its `info` included.

    Pillow decodes all of it: putting pixels of libjpeg-turbo into its own layout costs what they save.

    Args and Raises: as for `decode_jpeg_or_image`.
    """
    if is_stored(data):
        return Image.fromarray(stored_pixels(data, False, most_pixels))
    return _by_pillow(data, most_pixels, _as_rgb)


def _by_pillow(
    data: bytes | memoryview, most_pixels: int, finish: Callable[[Image.Image], _Result]
) -> _Result:
    """Let Pillow decode an image; `finish` takes what it needs of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data, most_pixels)
        try:
            image.load()
            return finish(image)
        except (MemoryError, DecodeError):
            raise
        except Exception as exc:  # Pillow's plugins raise whatever a corrupt file makes them stumble over
            raise DecodeError(
                f"{image.format} image of {len(data)} bytes, {image.width}×{image.height}, "
                f"could not be decoded: {exc!r}"
            ) from exc


def _as_rgb(image: Image.Image) -> Image.Image:
    """`image.convert("RGB")`, which copies what is RGB already."""
    return image._new(image.im) if image.mode == "RGB" else image.convert("RGB")


def _pixels_of(image: Image.Image, place: Pixels | None = None) -> Pixels:
    """The pixels of an image that is loaded, as `image.convert("RGB")` has them, in `place` if they fit."""
    width, height = image.size
    if place is None or place.shape != (height, width, 3):
        place = np.empty((height, width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        strip = image if rows >= height else image.crop((0, top, width, bottom))
        place[top:bottom] = np.asarray(strip if strip.mode == "RGB" else strip.convert("RGB"))
    return place


def stored_pixels(
    data: bytes | memoryview, in_place: bool, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
) -> Pixels:
    """The pixels of a binary PPM.

    Args:
        data: of which `is_stored` is true.
        in_place: give them where they lie, if torch, which may write, may have them there; else a copy.
        most_pixels: that it may have.

    Raises:
        DecodeError: another PPM than of 8 bits, or cut.
        ImageTooLarge: more than `most_pixels`.
    """
    header = _PPM_HEADER.match(bytes(data[:_PPM_HEADER_BYTES]))
    if header is None:
        raise DecodeError(f"a PPM that begins with {bytes(data[:16])!r}; expected P6, width, height and 255")
    width, height = map(int, header.groups())
    check_pixels(height, width, most_pixels, "PPM")
    size = height * width * 3
    if not size or len(data) < header.end() + size:
        raise DecodeError(f"PPM of {width}×{height} with {len(data) - header.end()} bytes of pixels")
    pixels = np.frombuffer(data, np.uint8, size, header.end()).reshape(height, width, 3)
    return pixels if in_place and pixels.flags.writeable else pixels.copy()


def _open(data: bytes | memoryview, most_pixels: int) -> Image.Image:
    """Read the header, and refuse by it what would take too much."""
    if data[:4] == _ICON_START:
        _check_icon(data, most_pixels)
    try:
        image = Image.open(MeteredFile(data), formats=FORMATS)
    except (MemoryError, DecodeError):
        raise
    except Image.DecompressionBombError as exc:
        raise ImageTooLarge(f"image of {len(data)} bytes: {exc}") from exc
    except UnidentifiedImageError as exc:
        raise DecodeError(
            f"{len(data)} bytes that begin with {bytes(data[:8])!r} are not an image; "
            f"expected one of {', '.join(FORMATS)}, PPM"
        ) from exc
    except Exception as exc:
        raise DecodeError(f"image of {len(data)} bytes could not be opened: {exc!r}") from exc
    is_jpeg = data[:3] == _JPEG_START
    kind = "CMYK" if is_jpeg and image.mode == "CMYK" else image.format or ""
    check_pixels(image.height, image.width, most_pixels, kind)
    if is_jpeg:
        check_scans(bytes(data), image.height, image.width, most_pixels)
    elif isinstance(image, TiffImagePlugin.TiffImageFile):  # a tile may be larger than its image
        check_pixels(image.tag_v2.get(_TILE_HEIGHT, 0), image.tag_v2.get(_TILE_WIDTH, 0), most_pixels, kind)
    elif any(tile.codec_name == "bmp_rle" for tile in image.tile):
        check_run_lengths(image.height, image.width, most_pixels)
    return image


def _check_icon(data: bytes | memoryview, most_pixels: int) -> None:
    """Refuse an ICO file by the sizes of the images inside: Pillow decodes one when it opens the file."""
    count = int.from_bytes(data[4:6], "little")
    for entry in range(6, 6 + 16 * count, 16):
        offset = int.from_bytes(data[entry + 12 : entry + 16], "little")
        header = bytes(data[offset : offset + 24])
        if len(header) == 24:
            is_png = header.startswith(b"\x89PNG")
            width, height = struct.unpack_from(">II" if is_png else "<II", header, 16 if is_png else 4)
            check_pixels(height, width, most_pixels, "ICO")
