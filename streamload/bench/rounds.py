"""Rounds in turn: each contender once a round, the order rotated; what is read of them are medians.

So what the machine does at some moment falls on all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, Any]


def rotated(contenders: Sequence[T], round_: int) -> list[T]:
    """The contenders in the order of a round: each next one begins one place later."""
    start = round_ % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def medians(rows: Sequence[Row]) -> dict[str, Row]:
    """Of each number, its median over the rounds, for the rows of each label."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["label"], []).append(row)
    return {label: _medians_of(group) for label, group in groups.items()}


def _medians_of(rows: Sequence[Row]) -> Row:
    numbers = [key for key, value in rows[0].items() if isinstance(value, (int, float)) and key != "round"]
    return {key: statistics.median(row[key] for row in rows) for key in numbers}
