"""Paths into JSON members: `meta.caption`, `captions[0]`, `objects[*].text`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_ENTRY = re.compile(r"\[(\d{1,9}|\*)\](?:\.|(?=\[)|$)")


def at_path(value: Any, path: str) -> Iterator[Any]:
    """The values at a path into JSON: none, one, or with `[*]` several.

    Where several names of an object fit, the longest is taken: `a.b` is the field "a.b" of an object that has
    it, else the field "b" of the field "a".
    """
    if not path:
        yield value
    elif isinstance(value, dict):
        for stop in range(len(path), 0, -1):
            if (stop == len(path) or path[stop] in ".[") and path[:stop] in value:
                yield from at_path(value[path[:stop]], path[stop:].removeprefix("."))
                return
    elif isinstance(value, list) and (step := _ENTRY.match(path)) is not None:
        for entry in value if step[1] == "*" else value[int(step[1]) :][:1]:
            yield from at_path(entry, path[step.end() :])
