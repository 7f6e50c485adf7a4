"""Which JPEG files a device's engine decodes well, by their headers; no device is needed to tell."""

from __future__ import annotations

from streamload.errors import ImageTooLarge
from streamload.transforms.decode import jpeg_size
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS

File = bytes | memoryview

_START = b"\xff\xd8"
_END = b"\xff\xd9"
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
"""Baseline, extended and progressive, all Huffman coded."""
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN = 0xDA
_SAMPLINGS = frozenset((b"\x11", b"\x22\x11\x11", b"\x21\x11\x11", b"\x12\x11\x11", b"\x11\x11\x11"))
"""Gray, and 4:2:0, 4:2:2, 4:4:0, 4:4:4: the sampling factors of each component."""


def engine_refusal(file: File, most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> str | None:
    """Return why an engine for JPEG can't decode a file, or would do it badly, by its header and its end.

    Args:
        file: whole: one without an end mark is cut, which engines don't tell.
        most_pixels: of an image.
    """
    header = _frame(file)
    if isinstance(header, str):
        return header
    precision, samplings, scan = header
    if precision != 8:
        return f"JPEG with {precision} bits"
    if samplings not in _SAMPLINGS:
        return f"JPEG with {len(samplings)} components of sampling {samplings.hex()}"
    try:
        if jpeg_size(file, most_pixels) is None:
            return "JPEG with other colours than YCbCr and gray"
    except ImageTooLarge as error:
        return str(error)
    if file[-2:] != _END and bytes(file).find(_END, scan) < 0:
        return "JPEG without an end mark"
    return None


def _frame(file: File) -> tuple[int, bytes, int] | str:
    """Read a JPEG's segments up to its first scan.

    Returns:
        Bits of a sample, sampling factors of the components and the offset of the scan; or what is wrong.
    """
    if file[:2] != _START:
        return "not a JPEG"
    frame: tuple[int, bytes] | None = None
    offset = 2
    while offset + 4 <= len(file) and file[offset] == 0xFF:
        marker = file[offset + 1]
        if marker == 0xFF:  # a fill byte
            offset += 1
            continue
        length = file[offset + 2] << 8 | file[offset + 3]
        if marker == _SCAN:
            return "JPEG without a frame" if frame is None else (*frame, offset)
        if marker in _OTHER_FRAMES or (marker in _FRAMES and frame is not None):
            return f"JPEG with frame 0x{marker:02X}: lossless, hierarchical or arithmetic"
        if marker in _FRAMES:
            payload = bytes(file[offset + 4 : offset + 2 + length])
            if len(payload) < 6 or len(payload) != 6 + 3 * payload[5]:
                return "JPEG with a damaged frame"
            frame = payload[0], payload[7::3]
        offset += 2 + length
    return "JPEG without a scan"
