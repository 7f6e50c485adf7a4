"""Caption bytes → str (step I): the text of a `txt` member, or a field of a `json` one."""

from __future__ import annotations

import json

from streamload.errors import CaptionError

MAX_CAPTION_BYTES = 4 << 20
"""A larger member is no caption; parsed as JSON it could take a hundred times its size."""


def read_caption(data: bytes | memoryview, field: str | None = None) -> str:
    """Read a caption.

    Args:
        data: the member's payload, UTF-8.
        field: of the JSON object which the payload is; None: the payload is the caption.

    Returns:
        The caption as it stands there, spaces and line ends included; it may be empty.

    Raises:
        CaptionError: not UTF-8, too large, no JSON object, or its field is missing or not a string.
    """
    if len(data) > MAX_CAPTION_BYTES:
        raise CaptionError(f"caption member of {len(data):,} bytes; at most {MAX_CAPTION_BYTES:,} are read")
    if field is not None:
        return _json_field(data, field)
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as exc:
        raise CaptionError(
            f"caption of {len(data)} bytes is not UTF-8 at byte {exc.start}: {exc.reason}"
        ) from exc


def _json_field(data: bytes | memoryview, field: str) -> str:
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as exc:
        raise CaptionError(f"caption member of {len(data)} bytes can't be read as JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise CaptionError(f"caption member is JSON, but a {type(value).__name__}; expected an object")
    if field not in value:
        raise CaptionError(f"caption member has no field {field!r}; it has {sorted(value)!a:.200}")
    caption = value[field]
    if not isinstance(caption, str):
        raise CaptionError(f"caption field {field!r} is a {type(caption).__name__}; expected a string")
    if not _is_unicode(caption):
        raise CaptionError(f"caption field {field!r} has half of a surrogate pair")
    return caption


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: a JSON escape can be half a character; tokenizers fail on that."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
