"""The deterministic part of an image's transform, done in advance (step I): decode, resize the short side.

The result depends only on the image's bytes, the recipe and the libraries. So a training has the same pixels
from a prepared shard (prepared.py) as from preparing each image itself. Without a resize ("raw") these are
the pixels of a training on the original images.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass

import numpy as np
import PIL
import simplejpeg
import torch

from streamload.derived.prepare.prepared import PreparedOrigin
from streamload.errors import DecodeError, OptionError
from streamload.origins.origin import Origin
from streamload.transforms.augment import Box
from streamload.transforms.decode import Pixels, decode_jpeg_or_image, kept_info
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.ppm import to_ppm
from streamload.transforms.resize import resize_box

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

    Attributes:
        size: of the short side; None: images aren't resized.
        quality: of the JPEG; None: binary PPM.
        most_pixels: the limit of an image that is prepared (transforms/limits.py).
    """

    size: int | None = None
    quality: int | None = None
    most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS

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
        return PreparedOrigin(origin, self)

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
