"""Values of a fingerprint's parts, which are descriptions as JSON, as text."""

import json
from typing import Any

_PLAIN = ("int", "complex", "range", "slice", "ellipsis", "dtype", "device", "path", "code", "layout")
_BRACKETS = {
    **dict.fromkeys(("list", "deque"), ("[", "]")),
    **dict.fromkeys(("tuple", "Size"), ("(", ")")),
    **dict.fromkeys(("set", "frozenset"), ("{", "}")),
}
_MAPPINGS = ("dict", "OrderedDict", "defaultdict", "mappingproxy")


def text_of(described: Any) -> str:
    """A value as it would be written in Python, where that is short; else the description itself."""
    kind, what = described if isinstance(described, list) and len(described) == 2 else ("", None)
    if isinstance(what, str):
        if kind == "float":
            return repr(float.fromhex(what))
        if kind in _PLAIN:
            return what
    if isinstance(what, list):
        if kind in _BRACKETS:
            left, right = _BRACKETS[kind]
            comma = "," if left == "(" and len(what) == 1 else ""
            return f"{left}{', '.join(map(text_of, what))}{comma}{right}"
        if kind in _MAPPINGS:
            return f"{{{', '.join(f'{text_of(key)}: {text_of(value)}' for key, value in what)}}}"
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
