"""Images that libjpeg-turbo doesn't decode, by Pillow (step I); imported by the first of them."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from typing import TypeVar

import numpy as np
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
from streamload.transforms.limits import (
    DEFAULT_MAX_IMAGE_PIXELS,
    JPEG_START,
    MeteredFile,
    check_pixels,
    check_run_lengths,
    check_scans,
)
from streamload.transforms.ppm import MOST_INFO_BYTES, PPM_START, Info, Pixels, ppm_info, ppm_pixels

_Result = TypeVar("_Result")

# The formats found in `*.jpg`, `*.png`, `*.jpeg` and `*.webp` on the web, including wrong extensions.
# Importing these plugins saves Pillow from importing all of them.
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

_STRIP_PIXELS = 1 << 20
"""Pillow's pixels are converted in strips of this size, to avoid a second copy of a large image."""
_TILE_WIDTH, _TILE_HEIGHT = 322, 323
_ICON_START = b"\0\0\1\0"
_KEPT_INFO = ("exif", "Raw profile type exif", "icc_profile", "xmp", "XML:com.adobe.xmp")
"""Display metadata in Pillow's `info`: orientation and colours."""
_JPEG_INFO_MARKS = (b"Exif\0", b"ICC_PROFILE\0", b"http://ns.adobe.com/xap/")


def decode_to_pillow(data: bytes | memoryview, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> Image.Image:
    """Decode to a Pillow image, as `Image.open(…).convert("RGB")`, including `info`.

    Pillow decodes it: converting libjpeg-turbo's pixels to its layout would cost as much as they save.

    Args and Raises: as for `decode_jpeg_or_image` (decode.py).
    """
    if data[:2] == PPM_START:
        pixels = ppm_pixels(data, False, most_pixels)
        image = Image.fromarray(pixels)
        for key, value in ppm_info(data, pixels.size).items():
            image.info[key] = value
        return image
    return _decoded(data, most_pixels, _as_rgb)


def kept_info(data: bytes | memoryview, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> Info:
    """Return what a function of Pillow images may need to know besides pixels: EXIF, colour profile, XMP.

    Args:
        data: an image that `decode_jpeg_or_image` has decoded.
        most_pixels: as there.

    Raises:
        DecodeError: Pillow can't read it, or it is too much to keep.
    """
    is_jpeg = data[:3] == JPEG_START
    if is_jpeg and not any(mark in bytes(data) for mark in _JPEG_INFO_MARKS):
        return {}
    if is_jpeg:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            info = _open(data, most_pixels).info
    else:  # other formats may have it behind the pixels
        info = decode_to_pillow(data, most_pixels).info
    kept = {key: info[key] for key in _KEPT_INFO if isinstance(info.get(key), bytes | str)}
    if sum(map(len, kept.values())) > MOST_INFO_BYTES:
        raise DecodeError(f"image with more than {MOST_INFO_BYTES:,} bytes of {', '.join(kept)}")
    return kept


def pixels_of(data: bytes | memoryview, most_pixels: int, place: Pixels | None = None) -> Pixels:
    """The pixels of `Image.open(…).convert("RGB")`, in `place` if they fit.

    Raises:
        DecodeError, ImageTooLarge: see decode.py.
    """
    return _decoded(data, most_pixels, lambda image: _pixels_in(image, place))


def _decoded(data: bytes | memoryview, most_pixels: int, finish: Callable[[Image.Image], _Result]) -> _Result:
    """Decode an image by Pillow; `finish` converts it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data, most_pixels)
        try:
            image.load()
            return finish(image)
        except (MemoryError, DecodeError):
            raise
        except Exception as exc:  # corrupt files make Pillow's plugins raise anything
            raise DecodeError(
                f"{image.format} image of {len(data)} bytes, {image.width}×{image.height}, "
                f"could not be decoded: {exc!r}"
            ) from exc


def _as_rgb(image: Image.Image) -> Image.Image:
    """Return `image.convert("RGB")`, without its copy if the image is RGB already."""
    return image._new(image.im) if image.mode == "RGB" else image.convert("RGB")


def _pixels_in(image: Image.Image, place: Pixels | None) -> Pixels:
    """Return the pixels of `image.convert("RGB")` for a loaded image, in `place` if they fit."""
    width, height = image.size
    if place is None or place.shape != (height, width, 3):
        place = np.empty((height, width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        strip = image if rows >= height else image.crop((0, top, width, bottom))
        place[top:bottom] = np.asarray(strip if strip.mode == "RGB" else strip.convert("RGB"))
    return place


def _open(data: bytes | memoryview, most_pixels: int) -> Image.Image:
    """Read the header, and refuse an image that would take too much memory or time."""
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
    is_jpeg = data[:3] == JPEG_START
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
    """Refuse an ICO file by the sizes of its images: Pillow decodes one when it opens the file."""
    count = int.from_bytes(data[4:6], "little")
    for entry in range(6, 6 + 16 * count, 16):
        offset = int.from_bytes(data[entry + 12 : entry + 16], "little")
        header = bytes(data[offset : offset + 24])
        if len(header) == 24:
            is_png = header.startswith(b"\x89PNG")
            width, height = struct.unpack_from(">II" if is_png else "<II", header, 16 if is_png else 4)
            check_pixels(height, width, most_pixels, "ICO")
