"""The record: what each case gave at first, and the changes since then that were meant.

`record/*.jsonl` is never edited. A change of what a case gives is a line of `changes.jsonl`: why, and for
each case and value the digest of the old one and what came instead. So a diff shows which runs change. The
whole record is made again only where recorded states can't be read any more; `environment.jsonl` says why.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

import streamload

PLACE = Path(__file__).parent / "record"
CHANGES = PLACE / "changes.jsonl"

Values = dict[str, Any]
"""What a case gave, by name: for a kind of value the digests of all steps in one string; or JSON."""

STEP = 8
"""The letters of a step's digest."""

OLD = "from the old state: "
"""Begins the names of values that came after the states of the record."""

_IMAGE_PACKAGES = ("numpy", "pillow", "simplejpeg", "torch")
_REST = ("keys", "ids", "labels")
"""Values that don't depend on how these packages encode and decode images."""


def environment() -> dict[str, Any]:
    """What pixels depend on, beside the package's own code."""
    kernels = sorted(Path(streamload.__file__).parent.rglob("*.so"))
    versions = {name: importlib.metadata.version(name) for name in _IMAGE_PACKAGES}
    return {**versions, "kernels": [path.name.split(".")[0] for path in kernels]}


@dataclass(frozen=True)
class Difference:
    """A value that isn't what was expected.

    Attributes:
        case: its name.
        value: its name.
        old, new: what was expected, and what came; None: nothing.
    """

    case: str
    value: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.value == "error":
            return f"{self.case}: {self.new}"
        return f"{self.case}: {self.value}: {'; '.join(_compared(self.old, self.new))}"


def _compared(old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, str) and isinstance(new, str):
        steps = range(0, max(len(old), len(new)), STEP)
        differing = [
            place // STEP for place in steps if old[place : place + STEP] != new[place : place + STEP]
        ]
        yield f"{len(differing)} of {len(steps)} steps differ, the first is step {differing[0]}"
    else:
        yield from _places(old, new, "")


def _places(old: Any, new: Any, path: str) -> Iterator[str]:
    """The places in which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                yield from _places(old.get(name), new.get(name), f"{path}.{name}" if path else name)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            if before != after:
                yield from _places(before, after, f"{path}[{place}]")
    else:
        yield f"{path or 'it'} was {json.dumps(old):.150}, is {json.dumps(new):.150}"


def digest(value: Any) -> str:
    """A digest of a value; "" of None, which stands for no value."""
    return "" if value is None else xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def read_lines(path: Path) -> list[Any]:
    """The JSON lines of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    """Write a file of JSON lines."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def expected(recorded: Mapping[str, Values], changes: Iterable[Mapping[str, Any]]) -> dict[str, Values]:
    """What cases give now: what they gave at first, with all changes that were meant.

    Raises:
        ValueError: a change isn't one of what came before it.
    """
    values = {case: {**_after_the_state(by_name), **by_name} for case, by_name in recorded.items()}
    for change in changes:
        for case, by_name in change["cases"].items():
            for name, entry in by_name.items():
                if digest(values[case].get(name)) != entry["old"]:
                    raise ValueError(f"changes.jsonl: {case}: {name}: before it was another value")
                values[case][name] = entry["new"]
    return values


def _after_the_state(values: Values) -> Values:
    """What a case gave after its state, under the names for old states."""
    if "states" not in values:
        return {}
    cut = STEP * values["numbers"]["cut"]
    strings = {name: values[name][cut:] for name in values if isinstance(values[name], str)}
    return {OLD + name: text for name, text in strings.items() if text}


def differences(case: str, old: Values, new: Values, recorded_in: Mapping[str, Any]) -> list[Difference]:
    """The differences of what a case gave and what is expected, as far as this environment can tell.

    Args:
        case: its name.
        old: expected.
        new: what came.
        recorded_in: the environment of the record.
    """
    is_alike = environment() == recorded_in
    return [
        Difference(case, name, old.get(name), new.get(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and (is_alike or name.removeprefix(OLD) in _REST)
    ]


def as_change(found: Iterable[Difference], why: str) -> dict[str, Any]:
    """A line of `changes.jsonl` for differences that are meant."""
    cases: dict[str, dict[str, Any]] = {}
    for difference in found:
        entry = {"old": digest(difference.old), "new": difference.new}
        cases.setdefault(difference.case, {})[difference.value] = entry
    return {"why": why, "cases": cases}
