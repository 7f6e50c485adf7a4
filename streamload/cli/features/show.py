"""`streamload features show` and `features why`: what a fingerprint stands for, how two differ. Read-only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.features.options import (
    SHORT,
    Directory,
    Fingerprint,
    SharedCache,
    notes_in,
    rows_as_dict,
    rows_at,
)
from streamload.cli.options import AsJson, SharedCacheOptions
from streamload.cli.terminal import format_bytes, print_json, print_table, say

if TYPE_CHECKING:
    pass

_PLAIN = ("int", "complex", "range", "slice", "ellipsis", "dtype", "device", "path", "code", "layout")
_BRACKETS = {
    **dict.fromkeys(("list", "deque"), ("[", "]")),
    **dict.fromkeys(("tuple", "Size"), ("(", ")")),
    **dict.fromkeys(("set", "frozenset"), ("{", "}")),
}
_MAPPINGS = ("dict", "OrderedDict", "defaultdict", "mappingproxy")
_MOST_CHARACTERS = 60


def show(
    fingerprint: Fingerprint,
    directory: Directory = None,
    shared_cache: SharedCache = None,
    shared_cache_options: SharedCacheOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show what a fingerprint stands for: code, arguments, weights, settings of torch; and where it has rows.

    Code, weights and tensors are shown by a digest, packages by their version.
    """
    from streamload.derived.store.sealed import flat

    notes = notes_in(shared_cache, shared_cache_options, [fingerprint.lower()])
    with rows_at(directory) as catalog:
        chosen = catalog.find(fingerprint, notes)
        parts = catalog.parts(chosen) or notes.get(chosen.hex())
        rows = [rows_as_dict(entry) for entry in catalog.fingerprints() if entry.fingerprint == chosen]
    values = None if parts is None else flat(parts)
    if as_json:
        print_json({"fingerprint": chosen.hex(), "rows": rows, "parts": values})
    else:
        _print(chosen.hex(), rows, values)


def _print(fingerprint: str, rows: list[dict[str, Any]], values: dict[str, Any] | None) -> None:
    say(fingerprint)
    for row in rows:
        size = format_bytes(row["size_bytes"])
        say(f"{row['label']}: {row['rows']:,} rows, {size}, last stored {row['last_stored']}")
    if not rows:
        say("no rows: only its note is left")
    if values is None:
        say("no note: it went to make room, or is damaged; the rows are read all the same")
    else:
        cells = ((name, value_of(name, value)) for name, value in sorted(values.items()))
        print_table(("part", "value"), cells)


def why(
    a: Annotated[str, typer.Argument(help="The first digits of a fingerprint.")],
    b: Annotated[str, typer.Argument(help="The first digits of the other.")],
    directory: Directory = None,
    shared_cache: SharedCache = None,
    shared_cache_options: SharedCacheOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show the parts in which two fingerprints differ: why rows of one aren't rows of the other."""
    from streamload.derived.store.sealed import compared
    from streamload.errors import OptionError

    notes = notes_in(shared_cache, shared_cache_options, [a.lower(), b.lower()])
    with rows_at(directory) as catalog:
        first, second = (catalog.find(prefix, notes) for prefix in (a, b))
        parts = [catalog.parts(chosen) or notes.get(chosen.hex()) for chosen in (first, second)]
        for fingerprint, described in zip((first, second), parts, strict=True):
            if described is None:
                raise OptionError(
                    f"{fingerprint.hex()} has no whole note in {catalog.root}: what it stands for isn't known"
                )
    differing = compared(*(described or {} for described in parts))
    if as_json:
        differences = [{"part": name, "a": before, "b": after} for name, before, after in differing]
        print_json({"a": first.hex(), "b": second.hex(), "differences": differences})
    elif first == second:
        print(f"{first.hex()} is both: they are equal")
    else:
        shown = [
            (name, *(shortened(value_of(name, value), _MOST_CHARACTERS) for value in values))
            for name, *values in differing
        ]
        print_table(("part", first.hex()[:SHORT], second.hex()[:SHORT]), shown)


def text_of(described: Any) -> str:
    """A value as it would be written in Python, where that is short; else the description itself."""
    kind, content = described if isinstance(described, list) and len(described) == 2 else ("", None)
    if isinstance(content, str):
        if kind == "float":
            return repr(float.fromhex(content))
        if kind in _PLAIN:
            return content
    if isinstance(content, list) and isinstance(kind, str):
        if kind in _BRACKETS:
            left, right = _BRACKETS[kind]
            comma = "," if left == "(" and len(content) == 1 else ""
            return f"{left}{', '.join(map(text_of, content))}{comma}{right}"
        if kind in _MAPPINGS:
            return f"{{{', '.join(f'{text_of(key)}: {text_of(value)}' for key, value in content)}}}"
    if described is None or isinstance(described, bool | str):
        return repr(described)
    return json.dumps(described, ensure_ascii=False)


def value_of(name: str, value: Any) -> str:
    """The value of a part: text is quoted only where it is an argument's or attribute's own."""
    if isinstance(value, str) and not name.startswith(("arguments", "attributes")):
        return value
    return text_of(value)


def shortened(text: str, most: int) -> str:
    """At most so many characters of it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
