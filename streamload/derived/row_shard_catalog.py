"""The derived shards of rows that a tier or a shared cache holds: to list, check and delete them.

For commands; row_shard_places.py has both kinds of places. What isn't a derived shard of rows isn't opened or
deleted. It starts without torch.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamload.cache.eviction import HeldShard
from streamload.cache.shard import Shard, is_of
from streamload.derived.parts import kind_of
from streamload.derived.row_shard import RowShard, rows_recipe
from streamload.errors import (
    OriginError,
    OriginNotFound,
    SharedTierError,
    StreamloadError,
    is_shortage,
    printable,
)

UNREADABLE = (OSError, StreamloadError, ValueError, TypeError, LookupError, ArithmeticError)
"""Exceptions from reading files with valid checksums and malicious content."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """A derived shard that is held somewhere.

    Attributes:
        fingerprint: of its rows, 32 hex digits.
        digest: its name.
        url: of the shard it was made of, without secrets; "": unknown.
        rows: how many it has, by its index.
        size_bytes: what it takes.
        used_at: in a tier, when it was last opened; in a shared cache, when it was stored.
        cause: why its index can't be read; "": it can.
        directory: in a tier; None: it is in a shared cache.
        objects: in a shared cache, its index first.
    """

    fingerprint: str
    digest: str
    url: str
    rows: int
    size_bytes: int
    used_at: float
    cause: str = ""
    directory: HeldShard | None = None
    objects: tuple[str, ...] = ()

    @property
    def form(self) -> Shard:
        """It, as tiers know it."""
        return Shard("", self.url, self.digest, recipe=rows_recipe(self.fingerprint))


@dataclass(frozen=True, slots=True)
class FingerprintShards:
    """The derived shards of one fingerprint in one place.

    Attributes:
        where: see RowShards.
        label: what its rows are listed by; "": none of the shards can be read.
        parts: of the fingerprint; None: none of the shards can be read.
    """

    where: str
    fingerprint: str
    label: str
    parts: dict[str, Any] | None
    shards: tuple[HeldRows, ...]

    @property
    def rows(self) -> int:
        """How many there are."""
        return sum(one.rows for one in self.shards)

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(one.size_bytes for one in self.shards)

    @property
    def used_at(self) -> float:
        """The last use of any."""
        return max(one.used_at for one in self.shards)


@dataclass(frozen=True, slots=True)
class Checked:
    """A derived shard that was read.

    Attributes:
        rows: how many it has.
        causes: what is wrong, such as a row that fails its checksum; empty: nothing.
    """

    rows: int
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """What was deleted, or would be, and why others had to stay."""

    shards: tuple[HeldRows, ...]
    kept: tuple[tuple[HeldRows, str], ...]


class RowShards(ABC):
    """The derived shards of rows in one place.

    Attributes:
        where: the directory, or the URL without secrets.
    """

    where: str

    @abstractmethod
    def held(self) -> list[HeldRows]:
        """All of them, by URL.

        Raises:
            SharedTierError: the shared cache doesn't answer, or there is none.
        """

    @abstractmethod
    def remove(self, shards: Sequence[HeldRows], why: str, *, dry_run: bool = False) -> Removed:
        """Delete these, except those that a process has open or is making.

        Raises:
            SharedTierError: the shared cache doesn't answer, or refuses.
        """

    @abstractmethod
    def _opened(self, one: HeldRows) -> contextlib.AbstractContextManager[RowShard | None]:
        """Open one, all of its bytes; None if it has gone."""

    @abstractmethod
    def _has_gone(self, one: HeldRows) -> bool:
        """Whether it isn't there any more."""

    @abstractmethod
    def _about(self, one: HeldRows) -> dict[str, Any]:
        """What one says of itself."""

    def fingerprints(self) -> list[FingerprintShards]:
        """All of them by label, then by the last use."""
        by_fingerprint: dict[str, list[HeldRows]] = {}
        for one in self.held():
            by_fingerprint.setdefault(one.fingerprint, []).append(one)
        found = [self._described(of, shards) for of, shards in by_fingerprint.items()]
        return sorted(found, key=lambda one: (one.label, one.used_at, one.fingerprint))

    def check(self, one: HeldRows) -> Checked | None:
        """Read all of one, and compare it with its checksums; None if it has gone.

        Raises:
            SharedTierError, OriginError: the shared cache doesn't answer.
            OSError: there is no room for a temporary copy.
        """
        if one.cause:
            return Checked(one.rows, (one.cause,))
        try:
            with self._opened(one) as shard:
                if shard is None:
                    return None
                if not is_of(shard.copy.reader, one.form):
                    return Checked(one.rows, ("it is another shard",))
                keys = shard.damaged_keys()
                return Checked(len(shard), tuple(f"row {key!r} fails its checksum" for key in keys))
        except UNREADABLE as exc:
            is_unknown = isinstance(exc, SharedTierError | OriginError) and not isinstance(
                exc, OriginNotFound
            )
            if is_unknown or (isinstance(exc, OSError) and is_shortage(exc)):
                raise
            if self._has_gone(one):
                return None
            cause = str(exc) if isinstance(exc, StreamloadError) else f"{type(exc).__name__}: {exc}"
            return Checked(one.rows, (cause,))

    def _described(self, fingerprint: str, shards: list[HeldRows]) -> FingerprintShards:
        about: dict[str, Any] = {}
        for one in shards:
            with contextlib.suppress(*UNREADABLE):
                about = {} if one.cause else self._about(one)
            if about:
                break
        parts = about.get("parts")
        parts = parts if isinstance(parts, dict) else None
        label = about.get("label") or (parts or {}).get("class") or ""
        return FingerprintShards(self.where, fingerprint, printable(str(label)), parts, tuple(shards))


def stale_of(found: Sequence[FingerprintShards]) -> list[FingerprintShards]:
    """All but the newest of each label, arguments and transform in a place, as far as these are known."""
    known = [one for one in found if one.parts is not None]
    newest = {
        (one.where, one.label, kind_of(one.parts)): one
        for one in sorted(known, key=lambda one: (one.used_at, one.fingerprint))
    }
    return [one for one in known if newest[one.where, one.label, kind_of(one.parts)] is not one]
