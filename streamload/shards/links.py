"""Links within one tar: where the payloads so far are, and which of them a link gives (steps F and G).

A link gives the payload that its target has when the link comes, as in an extraction of the tar so far. Each
is resolved at once, so there are no chains and no cycles, and nothing outside the tar is ever read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from streamload.errors import ShardCut
from streamload.shards.tar import (
    BLOCK_BYTES,
    MEMBERS_LIMIT,
    SPARSE,
    SYMBOLIC_LINK,
    Member,
    Payload,
    TarParser,
    normal_path,
)

LINKED_LIMIT_BYTES = 1 << 38
"""Limit for the payloads that all links of a tar give together."""

_OUTSIDE, _LATER = "a link to something outside the tar", "a link to a later member"
_LEFT_OUT = "a link to a member that is left out"
_TOO_MANY = f"a link after {MEMBERS_LIMIT:,} members"
_TOO_LARGE = f"a link after links to {LINKED_LIMIT_BYTES >> 30} GiB"
_SPARSE = "a sparse file"
_SHOWN_CHARACTERS = 60


def members_before(stop: int, read_back: Callable[[int, int], bytes]) -> Iterator[Member]:
    """Yield the members before a position of a tar, by reading their headers again.

    Raises:
        ShardCut: they can't be read.
    """
    parser = TarParser()
    while parser.position < stop:
        parser.skip(min(parser.skippable, stop - parser.position))
        block = read_back(parser.position, min(BLOCK_BYTES, stop - parser.position))
        if len(block) < min(BLOCK_BYTES, stop - parser.position):
            raise ShardCut(f"the tar can't be read again at byte {parser.position}")
        yield from (member for member, _ in parser.feed(block))


class Links:
    """The places of a tar's members by name, in the order of the tar.

    Args:
        seen: hash of the path, start and size of each member so far; its owner appends later ones.
    """

    def __init__(self, seen: array[int]) -> None:
        self._new = seen  # size -1: there is no payload
        self._places: dict[int, tuple[int, int]] = {}  # by hash of the path; filled by the first link
        self._notes: dict[int, str] = {}
        self._linked_bytes = 0
        self._is_full = False
        self._unresolved = array("q")  # hashes of paths that no member had
        self._left_out: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def add(self, name: str, start: int, size: int, note: str = "") -> None:
        """Note the next member's place; size -1: its payload can't be used."""
        path = normal_path(name)
        if path is not None:
            self._new.extend((hash(path), start, size))
            if note or self._notes:
                self._notes[hash(path)] = note

    def resolve(self, member: Member) -> Payload | None:
        """Return the payload that a link gives; None: it is left out, as a sparse file is."""
        place = self._resolve(member)
        if isinstance(place, Payload):
            self.add(member.name, *place)
            return place
        self.add(member.name, 0, -1)
        cause = place
        self._left_out[cause] = self._left_out.get(cause, 0) + 1
        if cause not in self._examples:
            target = f" -> {_shown(member.target)}" if member.kind != SPARSE else ""
            self._examples[cause] = f" ({_shown(member.name)}{target})"
        return None

    def left_out(self) -> str:
        """Return the members that were left out, by cause; empty: none. Call it at the end of the tar."""
        causes = dict(self._left_out)
        later = sum(self._find(path) is not None for path in self._unresolved)
        if later:
            causes[_LATER] = later
            causes[_OUTSIDE] -= later
            self._examples.setdefault(_LATER, "" if causes[_OUTSIDE] else self._examples[_OUTSIDE])
        return "; ".join(
            f"{count:,} × {cause}{self._examples.get(cause, '')}" for cause, count in causes.items() if count
        )

    def _resolve(self, member: Member) -> Payload | str:
        """Return the payload of a member, or the cause for which it is left out."""
        if member.kind == SPARSE:
            return _SPARSE
        self._is_full = self._is_full or len(self._places) + len(self._new) // 3 >= MEMBERS_LIMIT
        if self._is_full:
            return _TOO_MANY
        path: str | None = member.target
        if member.kind == SYMBOLIC_LINK:
            link = normal_path(member.name)
            is_inside = link is not None and not member.target.startswith("/")
            path = f"{link.rpartition('/')[0]}/{member.target}" if link is not None and is_inside else None
        path = None if path is None else normal_path(path)
        if path is None:
            return _OUTSIDE
        place = self._find(hash(path))
        if place is None:
            if hash(path) in self._places:
                return _LEFT_OUT
            self._unresolved.append(hash(path))
            return _OUTSIDE
        self._linked_bytes += place.size
        return place if self._linked_bytes <= LINKED_LIMIT_BYTES else _TOO_LARGE

    def _find(self, path: int) -> Payload | None:
        fields = iter(self._new)
        for digest, start, size in zip(fields, fields, fields, strict=True):
            self._places[digest] = (start, size)
        del self._new[:]
        start, size = self._places.get(path, (0, -1))
        return None if size < 0 else Payload(start, size, self._notes.get(path, ""))


def _shown(name: str) -> str:
    return ascii(name[:_SHOWN_CHARACTERS]) + "…" * (len(name) > _SHOWN_CHARACTERS)
