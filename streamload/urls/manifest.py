"""A list of URLs for other processes to read: written without secrets, read as untrusted input (step A).

The format is a list of texts and ranges ``[before, start, stop, step, width, after]``, so that a pattern of a
million URLs stays some hundred bytes. Commands, paths and other URLs that work on one machine only are
neither written nor accepted: they come only from the user's own command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from streamload.errors import UrlError
from streamload.urls.checks import check
from streamload.urls.identity import request_of, scheme
from streamload.urls.listing import Node, NumberNode, TextNode, UrlList, around, chained, joined, segments
from streamload.urls.redaction import redact

SCHEMES = frozenset({"http", "https", "s3", "gs", "az", "abfs", "hf"})
"""The schemes allowed in a manifest: the same from every machine."""
_PLACE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]+/")
_MOST_ENTRIES = 1 << 20
_MOST_SHARDS = 1 << 23
_LONGEST = 4096
_WIDEST = 32
_LARGEST = 10**18

Entry: TypeAlias = "str | list[str | int]"


def write_down(urls: UrlList) -> list[Entry]:
    """Return a list as JSON-able values, without users, passwords and queries.

    Raises:
        UrlError: a URL that works on this machine only, or whose host depends on a number.
    """
    return [entry for segment in segments(urls.node) for entry in _entries(*segment)]


def read_down(value: Any) -> UrlList:
    """Parse the untrusted output of `write_down`. Opens nothing.

    Raises:
        UrlError: it is malformed, or contains a URL that isn't allowed.
    """
    if not isinstance(value, list) or not value or len(value) > _MOST_ENTRIES:
        raise UrlError("not a list of shards: expected texts and ranges")
    nodes = [_node(entry) for entry in value]
    valid_places: set[str] = set()
    total = 0
    for node in nodes:
        total += len(node)
        for url in {node[0], node[len(node) - 1]}:
            _refuse_foreign(url)
            check(url, valid_places)
    if total > _MOST_SHARDS:
        raise UrlError(f"a list of {total:,} shards; {_MOST_SHARDS:,} at most")
    return UrlList(chained(nodes))


def _entries(before: str, numbers: range | None, width: int, after: str) -> Iterable[Entry]:
    """Return the public form of a text or a range; every text if a range can't express them."""
    if numbers is None:
        return [_public(before)]
    low, high = f"{numbers[0]:0{width}d}", f"{numbers[-1]:0{width}d}"
    texts = around(_public(before + low + after), low, _public(before + high + after), high)
    if texts is not None and _PLACE.match(texts[0]) and min(numbers[0], numbers[-1]) >= 0:
        return [[texts[0], numbers.start, numbers.stop, numbers.step, width, texts[1]]]
    return [_public(f"{before}{number:0{width}d}{after}") for number in numbers]


def _public(url: str) -> str:
    """Return the public form of a URL; for a pipe the URL that its command requests, if that is all."""
    if scheme(url) == "pipe":
        request = request_of(url)
        if request is None or not request.named_by_url or request.storage_options:
            raise UrlError(f"a command is run only where it was given: {redact(url)!r}")
        url = request.url
    shown = redact(url)
    _refuse_foreign(shown)
    return shown


def _refuse_foreign(url: str) -> None:
    if scheme(url) not in SCHEMES:
        raise UrlError(
            f"{redact(url)!r:.200} is of no use on another machine; expected {', '.join(sorted(SCHEMES))}"
        )
    if len(url) > _LONGEST or not _PLACE.match(url) or redact(url) != url:
        raise UrlError(f"{redact(url)!r:.200} can't be taken from a list: a place, a path, and nothing else")


def _node(entry: Any) -> Node:
    if isinstance(entry, str):
        return TextNode((entry,))
    try:
        before, start, stop, step, width, after = entry
        texts, numbers = (before, after), (start, stop, step, width)
        is_fit = all(type(text) is str for text in texts) and all(type(number) is int for number in numbers)
        places = range(start, stop, step) if is_fit else range(0)
    except (TypeError, ValueError):
        places = range(0)
    if not places or not (min(places[0], places[-1]) >= 0 and max(start, stop) <= _LARGEST):
        raise UrlError(f"not a range of shards: {entry!r:.200}")
    if not 0 <= width <= _WIDEST or not _PLACE.match(before):
        raise UrlError(f"a range of shards needs a place in front of its number: {entry!r:.200}")
    return joined([TextNode((before,)), NumberNode(places, width), TextNode((after,))])
