"""Values of JSON that anybody may have written: each is what it has to be, or an error that names it."""

from __future__ import annotations

import re
from typing import Any

_MOST = 1 << 53


def listed(value: Any) -> list[Any]:
    """A list; else TypeError."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.100} is no list")
    return value


def whole(value: Any) -> int:
    """A whole number from 0 to 2⁵³; else ValueError, as of the others."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r:.60} is no whole number from 0")
    return value


def number(value: Any) -> float:
    """A number from 0 to 2⁵³."""
    if type(value) not in (int, float) or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r:.60} is no number from 0")
    return float(value)


def flag(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise ValueError(f"{value!r:.60} is neither true nor false")
    return value


def matched(pattern: re.Pattern[str], value: Any, what: str) -> str:
    """A text that matches as a whole; `what` it is to be is for the error."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r:.60} is no {what}")
    return value
