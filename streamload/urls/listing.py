"""`UrlList`: a lazy list of URLs, each built when it is asked for (step A). Pure.

A pattern of a million shards is kept as a tree of texts and ranges: some hundred bytes in each process and
in a pickle. One URL costs about a microsecond.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, overload

from streamload.urls.identity import SCHEME, is_local
from streamload.urls.redaction import redact


class UrlList(Sequence[str]):
    """The expanded and checked URLs of shards, in order. Immutable, and small whatever its length.

    Equal to a list of the same strings. Slices and sums are lazy, too.

    Args:
        node: root of the tree; `expand_urls` builds it from patterns.
    """

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def node(self) -> Node:
        """The root of the tree."""
        return self._node

    def __len__(self) -> int:
        return len(self._node)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> UrlList: ...
    def __getitem__(self, place: int | slice) -> str | UrlList:
        chosen = range(len(self._node))[place]
        return UrlList(Stretch(self._node, chosen)) if isinstance(chosen, range) else self._node[chosen]

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __add__(self, other: UrlList) -> UrlList:
        return UrlList(chained([self._node, other._node]))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, UrlList) and self._node == other._node:
            return True
        if not isinstance(other, (UrlList, list)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((len(self), self[0], self[-1]) if len(self) else 0)

    def __repr__(self) -> str:
        first = f" from {redact(self[0])!r}" if len(self) else ""
        return f"<UrlList of {len(self):,}{first}>"

    def anchored(self) -> UrlList:
        """Return the list with relative paths as seen from the current folder, wherever they are read.

        Names in a cache, which are those of absolute paths, and the fingerprint stay the same.
        """
        if not any(_is_relative(url) for url in self.kinds()):
            return self
        return UrlList(Anchored(str(Path.cwd()), self._node))

    def given(self, place: int) -> str:
        """Return a URL as the user gave it, before it was anchored."""
        return _given(self._node, range(len(self._node))[place])

    def kinds(self) -> Iterator[str]:
        """Yield URLs that represent all others for `check` and `scheme`, in order.

        Every URL, except that of a numeric range only the first and last number are used if the range is in a
        command, after the '/' that ends a host (or begins a path), or in a file name. No check depends on the
        number there: scheme, host, bucket, user, home directory and first character come before it, a number
        is never empty, and digits and '-' form neither a blank, a control character nor '://'. So the first
        URL here that is refused is the first of the list.
        """
        return _kinds((self._node,), "")

    def fingerprint(self) -> str:
        """Return 32 hex characters that identify the list; equal for equal patterns."""
        spelled = _spelled(self._node).encode(errors="surrogatepass")
        return hashlib.blake2b(spelled, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, repr=False)
class TextNode:
    """A list of texts."""

    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, place: int) -> str:
        return self.texts[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)


@dataclass(frozen=True, slots=True, repr=False)
class NumberNode:
    """The numbers of a range, padded with zeros to a width."""

    numbers: range
    width: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> str:
        return f"{self.numbers[place]:0{self.width}d}"

    def __iter__(self) -> Iterator[str]:
        return (f"{number:0{self.width}d}" for number in self.numbers)


@dataclass(frozen=True, slots=True, repr=False)
class Product:
    """All combinations of the parts, joined; the last part varies fastest."""

    parts: tuple[Node, ...]

    def __len__(self) -> int:
        return math.prod(map(len, self.parts))

    def __getitem__(self, place: int) -> str:
        texts = []
        for part in reversed(self.parts):
            place, inner = divmod(place, len(part))
            texts.append(part[inner])
        return "".join(reversed(texts))

    def __iter__(self) -> Iterator[str]:
        return _joined(self.parts)


@dataclass(frozen=True, slots=True, repr=False)
class ChainNode:
    """Concatenated sequences.

    Attributes:
        stops: for each of them, the number of texts up to its end.
    """

    nodes: tuple[Node, ...]
    stops: tuple[int, ...]

    def __len__(self) -> int:
        return self.stops[-1] if self.stops else 0

    def __getitem__(self, place: int) -> str:
        part, inner = self.part(place)
        return part[inner]

    def part(self, place: int) -> tuple[Node, int]:
        """Return the sequence that has a place, and the place in it."""
        which = bisect.bisect_right(self.stops, place)
        return self.nodes[which], place - (self.stops[which - 1] if which else 0)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.nodes)


@dataclass(frozen=True, slots=True, repr=False)
class Stretch:
    """A slice of a sequence."""

    node: Node
    places: range

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: int) -> str:
        return self.node[self.places[place]]

    def __iter__(self) -> Iterator[str]:
        return (self.node[place] for place in self.places)


@dataclass(frozen=True, slots=True, repr=False)
class Anchored:
    """A sequence with relative paths as seen from a folder."""

    folder: str
    node: Node

    def __len__(self) -> int:
        return len(self.node)

    def __getitem__(self, place: int) -> str:
        return self._seen(self.node[place])

    def __iter__(self) -> Iterator[str]:
        return map(self._seen, self.node)

    def _seen(self, url: str) -> str:
        if not _is_relative(url):
            return url
        return os.path.join(self.folder, url.removeprefix("file:"))  # noqa: PTH118  (spelled as it was given)


Node: TypeAlias = TextNode | NumberNode | Product | ChainNode | Stretch | Anchored


def joined(parts: Iterable[Node]) -> Node:
    """Return all combinations of parts; single texts are merged with their neighbours."""
    kept: list[Node] = []
    single: list[str] = []
    flat = itertools.chain.from_iterable(
        part.parts if isinstance(part, Product) else (part,) for part in parts
    )
    for part in flat:
        if len(part) == 1:
            single.append(part[0])
            continue
        kept += [TextNode((text,)) for text in ("".join(single),) if text]
        kept.append(part)
        single = []
    if any(single) or not kept:
        kept.append(TextNode(("".join(single),)))
    return kept[0] if len(kept) == 1 else Product(tuple(kept))


def chained(nodes: Iterable[Node]) -> Node:
    """Concatenate sequences; adjacent lists of texts are merged."""
    flat = itertools.chain.from_iterable(
        node.nodes if isinstance(node, ChainNode) else (node,) for node in nodes
    )
    kept: list[Node] = []
    for are_texts, run in itertools.groupby(flat, lambda node: isinstance(node, TextNode)):
        neighbours = list(run)
        kept += [TextNode(tuple(itertools.chain.from_iterable(neighbours)))] if are_texts else neighbours
    if len(kept) == 1:
        return kept[0]
    return ChainNode(tuple(kept), tuple(itertools.accumulate(map(len, kept))))


def segments(node: Node) -> Iterator[tuple[str, range | None, int, str]]:
    """Yield the segments of a list, in order: texts, and ranges of numbers between texts."""
    if isinstance(node, NumberNode):
        yield "", node.numbers, node.width, ""
    elif isinstance(node, ChainNode):
        for inner in node.nodes:
            yield from segments(inner)
    elif isinstance(node, Product):
        last = max((place for place, part in enumerate(node.parts) if len(part) > 1), default=0)
        tail = "".join(part[0] for part in node.parts[last + 1 :])
        for heads in itertools.product(*node.parts[:last]):
            for before, numbers, width, after in segments(node.parts[last]):
                yield "".join(heads) + before, numbers, width, after + tail
    else:
        for text in node:
            yield text, None, 0, ""


def around(first: str, low: str, last: str, high: str) -> tuple[str, str] | None:
    """Return what is before and after a number, by texts with its first and last value; None: they differ."""
    start = first.find(low)
    while start >= 0:
        before, after = first[:start], first[start + len(low) :]
        if before + high + after == last:
            return before, after
        start = first.find(low, start + 1)
    return None


def _spelled(node: Node) -> str:
    """Return an unambiguous description, the same wherever the list is read."""
    if isinstance(node, TextNode):
        return repr(node.texts)
    if isinstance(node, NumberNode):
        return f"{node.numbers!r}:{node.width}"
    if isinstance(node, Product):
        return f"({'*'.join(map(_spelled, node.parts))})"
    if isinstance(node, ChainNode):
        return f"[{'+'.join(map(_spelled, node.nodes))}]"
    return f"{_spelled(node.node)}@{node.places!r}" if isinstance(node, Stretch) else _spelled(node.node)


def _joined(parts: tuple[Node, ...]) -> Iterator[str]:
    if len(parts) == 1:
        yield from parts[0]
        return
    for head in parts[0]:
        for tail in _joined(parts[1:]):
            yield head + tail


def _kinds(nodes: tuple[Node, ...], before: str) -> Iterator[str]:
    """Yield the kinds of all combinations of nodes, after the text `before`."""
    if not nodes:
        yield before
        return
    node, later = nodes[0], nodes[1:]
    if isinstance(node, Anchored):
        yield from _kinds((node.node, *later), before)
    elif isinstance(node, Product):
        yield from _kinds((*node.parts, *later), before)
    elif isinstance(node, ChainNode):
        for inner in node.nodes:
            yield from _kinds((inner, *later), before)
    else:
        ends_suffice = (
            isinstance(node, NumberNode) and len(node) > 2 and (_is_place(before) or _is_file(before, later))
        )
        for text in (node[0], node[len(node) - 1]) if ends_suffice else node:
            yield from _kinds(later, before + text)


def _is_place(text: str) -> bool:
    """Return whether a number after this text is in a command, or in the path of a URL."""
    if text.startswith("pipe:"):
        return True
    match = SCHEME.match(text)
    return "/" in text[match.end() if match else 0 :]


def _is_file(text: str, later: tuple[Node, ...]) -> bool:
    """Return whether a number between them is in a file name in the working directory: there is no scheme."""
    return text[:1].isalpha() and ":" not in text and not any(map(_has_colon, later))


def _has_colon(node: Node) -> bool:
    if isinstance(node, TextNode):
        return any(":" in text for text in node.texts)
    if isinstance(node, Product):
        return any(map(_has_colon, node.parts))
    if isinstance(node, ChainNode):
        return any(map(_has_colon, node.nodes))
    return isinstance(node, (Stretch, Anchored)) and _has_colon(node.node)


def _given(node: Node, place: int) -> str:
    if isinstance(node, Anchored):
        return node.node[place]
    if isinstance(node, Stretch):
        return _given(node.node, node.places[place])
    if isinstance(node, ChainNode):
        which, inner = node.part(place)
        return _given(which, inner)
    return node[place]


def _is_relative(url: str) -> bool:
    """Return whether a URL is a path from the current folder."""
    return not url.startswith(("/", "~", "file:/", "file:~")) and is_local(url)
