"""make_loader with the fields of its groups side by side, so that tests merge options by name."""

import dataclasses
from typing import Any

import streamload
from streamload.loader.groups import GROUPS
from streamload.options import options as rows

_PLACE_OF = {
    entry.name: (name, entry.name) for name, group in GROUPS.items() for entry in dataclasses.fields(group)
}
# Options that have variables also by their names, as `warm` and the command line have them.
_PLACE_OF |= {row.name: tuple(row.argument.split(".")) for row in rows() if "." in row.argument}
_PLACE_OF["shared_cache_options"] = ("cache", "shared_options")


def make_loader(urls: Any, tokenizer: Any = None, **options: Any) -> streamload.Loader:
    """streamload.make_loader; a field's name such as `lanes=` stands for `order=Order(lanes=…)`."""
    return streamload.make_loader(urls, tokenizer, **grouped(options))


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the fields of groups put into the groups."""
    found = {}
    fields: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name in _PLACE_OF and not isinstance(value, tuple(GROUPS.values())):
            group, field = _PLACE_OF[name]
            fields.setdefault(group, {})[field] = value
        else:
            found[name] = value
    for group, given in fields.items():
        found[group] = dataclasses.replace(found.get(group, GROUPS[group]()), **given)
    return found
