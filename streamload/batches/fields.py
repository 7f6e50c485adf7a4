"""Bytes → label or number (step I): a `cls` member, or a field of a `json` member.

Loaders of images and texts don't load this module.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from streamload.batches.captions import MAX_CAPTION_BYTES, too_large
from streamload.errors import LabelError, SampleError

_WHOLE_NUMBER = re.compile(rb"\s*([+-]?[0-9]{1,19})(?:\.0*)?\s*")
_EXACT = 1 << 53
"""Up to this, floating-point numbers are exact."""
_LABELS = range(-(1 << 63), 1 << 63)


def read_label(data: bytes | memoryview, field: str | None = None) -> int:
    """Read a label: a whole number of 64 bits. `7.0` is 7.

    Args:
        data: the member's payload, the number in decimal.
        field: of the JSON object in the payload, an integer or its decimal; None: the payload is the label.

    Raises:
        LabelError: not such a number, or the field is missing.
    """
    value = _label(data, field)
    if isinstance(value, bytes | memoryview):
        number = _WHOLE_NUMBER.fullmatch(value)
        value = int(number[1]) if number else bytes(value[:40])
    elif isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value not in _LABELS:
        raise LabelError(
            f"the label is {value!r:.60}; expected a whole number of 64 bits, such as 7; other numbers "
            f'need label_type="float"'
        )
    return value


def read_score(data: bytes | memoryview, field: str | None = None) -> float:
    """Read a label that may be any finite number.

    Args:
        data, field: as for `read_label`.

    Raises:
        LabelError: not such a number, or the field is missing.
    """
    value = _label(data, field)
    if isinstance(value, memoryview):
        value = bytes(value)
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise LabelError(f"the label is {value!r:.60}; expected a finite number, such as 0.5")
    return score


def _label(data: bytes | memoryview, field: str | None) -> Any:
    """The payload, or a field of it; strings as bytes."""
    value: Any = data
    if field is not None:
        value = _json_field(data, field, "label", LabelError)
        if isinstance(value, str):
            value = value.encode("utf-8", "replace")
    return value


def read_number(data: bytes | memoryview, field: str) -> float:
    """Read a number, its decimal as a string, or true or false (1 or 0); it may be NaN or infinite.

    Args:
        data: the payload of a JSON member.
        field: of the JSON object in the payload.

    Raises:
        SampleError: not such an object, or the field is missing or something else.
    """
    value = _json_field(data, field, "metadata", SampleError)
    if isinstance(value, int | float | str):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise SampleError(f"the field {field!r} is {value!r:.60}; expected a number")


def read_json(data: bytes | memoryview, kind: str, error: type[SampleError]) -> Any:
    """Read a JSON member.

    Args:
        data: the member's payload.
        kind: of value that is looked for, for errors.
        error: the class to raise.

    Raises:
        SampleError: of that class; too large, or not JSON.
    """
    if len(data) > MAX_CAPTION_BYTES:
        raise too_large(data, kind, error)
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as exc:
        raise error(f"{kind} member of {len(data)} bytes can't be read as JSON: {exc}") from exc


def no_object(value: object, kind: str, error: type[SampleError]) -> SampleError:
    """The error for a JSON member that is no object."""
    return error(f"{kind} member is JSON, but a {type(value).__name__}; expected an object")


def no_field(value: Mapping[str, Any], field: str, kind: str, error: type[SampleError]) -> SampleError:
    """The error for an object that lacks a field."""
    return error(f"{kind} member has no field {field!r}; it has {sorted(value)!a:.200}")


def _json_field(data: bytes | memoryview, field: str, kind: str, error: type[SampleError]) -> Any:
    value = read_json(data, kind, error)
    if not isinstance(value, dict):
        raise no_object(value, kind, error)
    if field not in value:
        raise no_field(value, field, kind, error)
    return value[field]
