"""Width and height of an image from its header (step F), without decoding.

JPEG, PNG, WebP and GIF, recognised by content. Sizes are as stored: EXIF rotation is ignored.
"""

from __future__ import annotations

from struct import unpack_from

HEADER_BYTES = 64 << 10
"""Number of bytes of an image that are searched; if its size isn't in these, it is unknown."""

_FIRST_LOOK_BYTES = 1 << 10
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))  # TEM, RST0-7, SOI
_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # all start-of-frame markers


def image_size(header: bytes | memoryview) -> tuple[int, int] | None:
    """Return (width, height) of the image that begins with `header`, in pixels as stored.

    None if they aren't in these bytes, or the format is another one.
    """
    start = bytes(header[:30])
    if start[:2] == b"\xff\xd8":
        size = _jpeg_size(header)
    elif start[:8] == b"\x89PNG\r\n\x1a\n" and start[12:16] == b"IHDR" and len(start) >= 24:
        size = unpack_from(">II", start, 16)
    elif start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        size = _webp_size(start)
    elif start[:6] in (b"GIF87a", b"GIF89a") and len(start) >= 10:
        size = unpack_from("<HH", start, 6)
    else:
        size = None
    return size if size is not None and size[0] > 0 and size[1] > 0 else None


class ImageLook:
    """Collects the first bytes of one image until its size is known."""

    def __init__(self, member_bytes: int):
        self.size = (0, 0)
        self._wanted = min(member_bytes, HEADER_BYTES)
        self._next_look = _FIRST_LOOK_BYTES
        self._start = bytearray()

    def look(self, payload: memoryview) -> bool:
        """Take the next bytes. Return True once the size is known, or will never be."""
        if not self._start and (size := image_size(payload[:HEADER_BYTES])) is not None:
            self.size = size
            return True
        self._start += payload[: self._wanted - len(self._start)]
        at_end = len(self._start) == self._wanted
        if at_end or len(self._start) >= self._next_look:
            # Look again after twice as many bytes: linear time for chunks of any size.
            self._next_look = 2 * len(self._start)
            if (size := image_size(memoryview(self._start))) is not None:
                self.size = size
                return True
        return at_end


def _jpeg_size(header: bytes | memoryview) -> tuple[int, int] | None:
    """Skip the segments (EXIF, ICC profiles, …) up to the start of the frame."""
    offset, stop = 2, min(len(header), HEADER_BYTES)
    while offset + 9 <= stop:
        if header[offset] != 0xFF:
            return None
        marker = header[offset + 1]
        if marker == 0xFF:  # fill byte
            offset += 1
        elif marker in _WITHOUT_LENGTH:
            offset += 2
        elif marker in _FRAME:
            height, width = unpack_from(">HH", header, offset + 5)
            return width, height
        elif marker in (0xD9, 0xDA):  # the end, or a scan without a frame
            return None
        else:
            offset += 2 + max(2, header[offset + 2] << 8 | header[offset + 3])
    return None


def _webp_size(start: bytes) -> tuple[int, int] | None:
    """Read the first chunk: lossy, lossless or extended."""
    chunk = start[12:16]
    if chunk == b"VP8L" and len(start) >= 25 and start[20] == 0x2F:
        bits = unpack_from("<I", start, 21)[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if len(start) < 30:
        return None
    if chunk == b"VP8 " and start[23:26] == b"\x9d\x01\x2a":
        width, height = unpack_from("<HH", start, 26)
        return width & 0x3FFF, height & 0x3FFF
    if chunk == b"VP8X":
        return int.from_bytes(start[24:27], "little") + 1, int.from_bytes(start[27:30], "little") + 1
    return None
