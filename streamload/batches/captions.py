"""Bytes → caption (step I): the text of a member.

Captions within JSON, and those of several places, are in caption_choice.py.
"""

from __future__ import annotations

from streamload.errors import CaptionError, SampleError

MAX_CAPTION_BYTES = 4 << 20
"""The largest member that is read; parsed as JSON it could take a hundred times its size."""


def read_caption(data: bytes | memoryview) -> str:
    """Read a caption.

    Args:
        data: the member's payload, UTF-8.

    Returns:
        The caption as stored, spaces and line ends included; it may be empty.

    Raises:
        CaptionError: not UTF-8, or too large.
    """
    if len(data) > MAX_CAPTION_BYTES:
        raise too_large(data, "caption", CaptionError)
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as exc:
        raise CaptionError(
            f"caption of {len(data)} bytes is not UTF-8 at byte {exc.start}: {exc.reason}"
        ) from exc


def too_large(data: bytes | memoryview, kind: str, error: type[SampleError]) -> SampleError:
    """The error for a member that isn't read."""
    return error(f"{kind} member of {len(data):,} bytes; at most {MAX_CAPTION_BYTES:,} are read")
