"""Which JPEG files a worker leaves to a device's decoder, by their segments; nothing is decoded.

An engine decodes 8 bits in gray or YCbCr, Huffman coded, with the usual sampling, and doesn't tell a cut file
from a whole one. So a file goes to it only if it is such a one, and the host's decoder would take it: damage
is then found where the worker decodes.

The host's decoder is simplejpeg where libjpeg-turbo neither fails nor warns, else Pillow, which passes over
warnings. Damage to the bits of a scan only makes libjpeg warn; it fails by what it reads of markers, and by a
file that ends before its end mark. So all segments are checked here as libjpeg and Pillow do, and that a scan
is followed by the segment that has to come.
"""

from __future__ import annotations

import bisect
import functools
import io
import warnings

import numpy as np
from PIL import Image

from streamload.errors import ImageTooLarge
from streamload.transforms import kernel
from streamload.transforms.decode import jpeg_size
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS

File = bytes | memoryview

_START = b"\xff\xd8"
_SCAN, _END = 0xDA, 0xD9
_FRAMES, _PROGRESSIVE = (0xC0, 0xC1, 0xC2), 0xC2
_HUFFMAN, _QUANTISATION, _RESTARTS, _COMMENT, _ADOBE = 0xC4, 0xDB, 0xDD, 0xFE, 0xEE
_APPLICATION = range(0xE0, 0xF0)
_PLAIN_BYTES = {0xE0: 14, _ADOBE: 12}
"""Bytes that Pillow reads of application segments which begin as JFIF's and Adobe's do."""
_READ_BY_PILLOW = {
    0xE1: (b"Exif\0\0",),
    0xE2: (b"ICC_PROFILE\0", b"MPF\0"),
    0xED: (b"Photoshop 3.0\0",),
}
"""Application segments that Pillow parses when it opens a file, and may stumble over."""
_SAMPLINGS = frozenset((b"\x11", b"\x22\x11\x11", b"\x21\x11\x11", b"\x12\x11\x11", b"\x11\x11\x11"))
"""Gray, and 4:2:0, 4:2:2, 4:4:0, 4:4:4: the sampling factors of each component."""
_LONGEST_SIDE = 65_500
_MOST_PIXELS = 1 << 26
"""Pillow warns about larger images, or refuses them."""
_DC_VALUES, _TABLES, _COEFFICIENTS, _MOST_SHIFT = 16, 4, 64, 13
_AC = 1 << 4
"""The class of a Huffman table, beside its number."""


def refusal(file: File, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> str | None:
    """Return why a worker has to decode a file itself; None: a device's decoder and the host's take it.

    Args:
        file: whole.
        most_pixels: of an image (transforms/limits.py).
    """
    size = size_for_device(file, most_pixels)
    return size if isinstance(size, str) else None


def size_for_device(file: File, most_pixels: int) -> tuple[int, int] | str:
    """Return height and width of a file that a device's decoder takes, or why not; see `refusal`."""
    if file[:2] != _START:
        return "not a JPEG"
    if not _is_plainly_sound(file) and (reason := _Jpeg(file).doubt()):
        return reason
    try:
        return jpeg_size(file, most_pixels) or "other colours than YCbCr and gray"
    except ImageTooLarge as error:
        return str(error)


def _is_plainly_sound(file: File) -> bool:
    """Return whether a JPEG is of the most usual kind and not doubted; False: only `_Jpeg` can tell."""
    if kernel.jpeg_is_sound is None:
        return False
    levels = np.frombuffer(file, np.uint8)
    return kernel.jpeg_is_sound(levels.__array_interface__["data"][0], len(levels))


class _Jpeg:
    """A file that is read segment by segment."""

    def __init__(self, file: File):
        self._file = file
        self._markers: list[int] | None = None  # offsets of those from the first scan on
        self._quantised: set[int] = set()
        self._huffman: set[int] = set()  # class and number of each table that is defined
        self._components: dict[int, int] = {}  # number of the quantisation table by component
        self._is_progressive = False
        self._scanned: set[int] = set()
        self._is_plain = True

    def doubt(self) -> str | None:
        file, offset = self._file, 2
        while True:
            if file[offset : offset + 1] != b"\xff" or len(file) < offset + 2:
                return "no marker where one has to be"
            marker = file[offset + 1]
            if marker == _END:
                break
            length = int.from_bytes(file[offset + 2 : offset + 4], "big")
            payload = bytes(file[offset + 4 : offset + 2 + length])
            if length < 2 or len(payload) != length - 2:
                return "a segment that is cut"
            if reason := self._segment(marker, payload):
                return reason
            offset += 2 + length
            if marker == _SCAN:
                after_scan = self._marker_from(offset)
                if after_scan is None:
                    return "no end mark"
                offset = after_scan
        if self._scanned != self._components.keys() or not self._components:
            return "a component without a scan"
        return None if self._is_plain else _doubt_of_pillow(file)

    def _marker_from(self, offset: int) -> int | None:
        """Return the offset of the next marker that isn't within a scan; stuffed 0xFF and restarts are."""
        if self._markers is None:
            levels = np.frombuffer(self._file, np.uint8)
            places = np.flatnonzero(levels[offset:-1] == 0xFF) + offset
            following = levels[places + 1]
            self._markers = places[(following != 0) & (following & 0xF8 != 0xD0)].tolist()
        number = bisect.bisect_left(self._markers, offset)
        return self._markers[number] if number < len(self._markers) else None

    def _segment(self, marker: int, payload: bytes) -> str | None:
        if marker == _QUANTISATION:
            return self._read_quantisation(payload)
        if marker == _HUFFMAN:
            return self._read_huffman(payload)
        if marker == _SCAN:
            return self._read_scan(payload)
        if marker in _FRAMES:
            return self._read_frame(marker, payload)
        if marker == _RESTARTS:
            return None if len(payload) == 2 else "a damaged restart interval"
        if marker == _COMMENT:
            return None
        if marker in _APPLICATION:
            return self._read_application(marker, payload)
        return f"marker 0x{marker:02X}"

    def _read_application(self, marker: int, payload: bytes) -> str | None:
        if payload[:4] == b"JFIF" or payload[:5] == b"Adobe":
            return None if len(payload) >= _PLAIN_BYTES.get(marker, 0) else "a short application segment"
        if payload.startswith(_READ_BY_PILLOW.get(marker, ())):
            self._is_plain = False
        return None

    def _read_quantisation(self, payload: bytes) -> str | None:
        while payload:
            table_bytes = 129 if payload[0] >> 4 else 65
            number = payload[0] & 15
            if len(payload) < table_bytes or number >= _TABLES:
                return "a damaged quantisation table"
            self._quantised.add(number)
            payload = payload[table_bytes:]
        return None

    def _read_huffman(self, payload: bytes) -> str | None:
        while payload:
            table_bytes = 17 + sum(payload[1:17])
            if len(payload) < max(17, table_bytes) or not _is_huffman(payload[:table_bytes]):
                return "a damaged Huffman table"
            self._huffman.add(payload[0])
            payload = payload[table_bytes:]
        return None

    def _read_frame(self, marker: int, payload: bytes) -> str | None:
        if len(payload) < 6:
            return "a damaged frame"
        height, width = (int.from_bytes(payload[place : place + 2], "big") for place in (1, 3))
        identifiers = payload[6::3]
        if self._components or len(payload) != 6 + 3 * payload[5] or len(set(identifiers)) != payload[5]:
            return "a damaged frame"
        if not (
            0 < height <= _LONGEST_SIDE and 0 < width <= _LONGEST_SIDE and height * width <= _MOST_PIXELS
        ):
            return f"an image of {width}×{height}"
        if payload[0] != 8:
            return f"{payload[0]} bits"
        if payload[7::3] not in _SAMPLINGS:
            return f"{len(identifiers)} components of sampling {payload[7::3].hex()}"
        self._components = dict(zip(identifiers, payload[8::3], strict=True))
        self._is_progressive = marker == _PROGRESSIVE
        return None

    def _read_scan(self, payload: bytes) -> str | None:
        count = payload[0] if payload else 0
        if not 0 < count <= len(self._components) or len(payload) != 4 + 2 * count:
            return "a damaged scan"
        identifiers, tables = payload[1:-3:2], payload[2:-3:2]
        if len(set(identifiers)) != count or not self._components.keys() >= set(identifiers):
            return "a scan of other components than the frame's"
        if not all(self._components[identifier] in self._quantised for identifier in identifiers):
            return "a scan without its quantisation table"
        first, last, shifts = payload[-3:]
        of_dc, of_ac = {table >> 4 for table in tables}, {table & 15 | _AC for table in tables}
        if not self._is_progressive:
            if self._scanned or count != len(self._components):
                return "a sequential image of several scans"
            needed = of_dc | of_ac
        else:
            before, after = shifts >> 4, shifts & 15
            is_band = first <= last < _COEFFICIENTS and count == 1 if first else last == 0
            if not is_band or (before and after != before - 1) or after > _MOST_SHIFT:
                return "a scan that doesn't refine"
            needed = of_ac if first else set() if before else of_dc
        if not self._huffman >= needed:
            return "a scan without its Huffman tables"
        self._scanned |= set(identifiers)
        return None


@functools.lru_cache(256)
def _is_huffman(table: bytes) -> bool:
    """Return whether libjpeg can use a table: class and number, 16 counts by length, and values."""
    kind, counts, values = table[0], table[1:17], table[17:]
    if kind & 15 >= _TABLES or kind >> 4 > 1 or len(values) > 256:
        return False
    code = 0
    for length, count in enumerate(counts, 1):
        code += count
        if code >= 1 << length:  # no room for so many codes, as none is all ones
            return False
        code <<= 1
    return bool(kind & _AC) or all(value < _DC_VALUES for value in values)


def _doubt_of_pillow(file: File) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Image.open(io.BytesIO(file), formats=("JPEG",))
    except Exception as error:  # corrupt files make Pillow's plugins raise anything
        return f"Pillow can't open it: {error!r:.100}"
    return None
