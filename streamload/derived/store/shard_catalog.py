"""The derived shards of rows that a tier or a shared cache holds: to list, check and delete them.

For commands. What is open on this node or being made is never deleted; whoever reads one that has gone from a
shared cache computes its rows. It starts without torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamload import limits
from streamload.cache import garbage
from streamload.cache.eviction import HeldShard
from streamload.cache.inventory import meta_of, url_of
from streamload.cache.shard import Shard, is_of
from streamload.cache.shared.leases import Leases
from streamload.cache.shared.objects import Objects
from streamload.cache.shared.tier import SharedTier
from streamload.cache.tier import Tier
from streamload.derived.store.catalog import stale_of
from streamload.derived.store.shard import RowShard, fingerprint_in, rows_in, rows_recipe
from streamload.errors import (
    CacheCorrupt,
    OriginError,
    OriginNotFound,
    SharedTierError,
    StreamloadError,
    is_shortage,
)
from streamload.metrics import Counters
from streamload.node import is_dead_or_stopped
from streamload.shards.index import IndexReader

_OBJECT = re.compile(r"prepared/(rows-[0-9a-f]{32})/([0-9a-f]{32})/(index|[0-9a-f]{16}\.tar)")
_REQUESTS = 8
"""To a shared cache, at once."""
UNREADABLE = (OSError, StreamloadError, ValueError, TypeError, LookupError, ArithmeticError)
"""Exceptions from reading files with valid checksums and malicious content."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """A derived shard that is held somewhere."""

    fingerprint: str  # of its rows, 32 hex digits
    digest: str  # its name
    url: str  # of the shard it was made of, without secrets; "": unknown
    rows: int  # how many it has, by its index
    size_bytes: int  # what it takes
    used_at: float  # in a tier, when it was last opened; in a shared cache, when it was stored
    cause: str = ""  # why its index can't be read; "": it can
    directory: HeldShard | None = None  # in a tier; None: it is in a shared cache
    objects: tuple[str, ...] = ()  # in a shared cache, its index first

    @property
    def form(self) -> Shard:
        """The derived shard as a tier's shard."""
        return Shard("", self.url, self.digest, recipe=rows_recipe(self.fingerprint))


@dataclass(frozen=True, slots=True)
class FingerprintShards:
    """The derived shards of one fingerprint in one place."""

    where: str
    fingerprint: str
    label: str  # what its rows are listed by; "": none of the shards can be read
    parts: dict[str, Any] | None  # of the fingerprint; None: none of the shards can be read
    shards: tuple[HeldRows, ...]

    @property
    def rows(self) -> int:
        """Number of rows in all of them."""
        return sum(shard.rows for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes that they take."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def used_at(self) -> float:
        """The last use of any."""
        return max(shard.used_at for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Removed:
    """Deleted entries (or those that would be), and why others had to stay."""

    shards: tuple[HeldRows, ...]
    kept: tuple[tuple[HeldRows, str], ...]


class RowShards(ABC):
    """The derived shards of rows in one place."""

    where: str  # the directory, or the URL without secrets

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
    def _opened(self, held: HeldRows) -> contextlib.AbstractContextManager[RowShard | None]:
        """Open one, all of its bytes; None if it has gone."""

    @abstractmethod
    def _has_gone(self, held: HeldRows) -> bool:
        """True if it isn't there any more."""

    @abstractmethod
    def _about(self, held: HeldRows) -> dict[str, Any]:
        """Header of a derived shard."""

    def fingerprints(self) -> list[FingerprintShards]:
        """All of them by label, then by the last use."""
        by_fingerprint: dict[str, list[HeldRows]] = {}
        for shard in self.held():
            by_fingerprint.setdefault(shard.fingerprint, []).append(shard)
        described = [self._described(fingerprint, shards) for fingerprint, shards in by_fingerprint.items()]
        return sorted(described, key=lambda shard: (shard.label, shard.used_at, shard.fingerprint))

    def stale(self) -> list[FingerprintShards]:
        """All but the newest of each label, arguments and transform, as far as these are known."""
        described = [shards for shards in self.fingerprints() if shards.parts is not None]
        return stale_of(described, lambda shards: shards.parts)

    def check(self, held: HeldRows) -> tuple[int, tuple[str, ...]] | None:
        """Read all of one, and compare it with its checksums.

        Returns:
            how many rows it has, and what is wrong, such as a row that fails its checksum; None: it has gone.

        Raises:
            SharedTierError, OriginError: the shared cache doesn't answer.
            OSError: there is no room for a temporary copy.
        """
        if held.cause:
            return held.rows, (held.cause,)
        try:
            with self._opened(held) as shard:
                if shard is None:
                    return None
                if not is_of(shard.copy.reader, held.form):
                    return held.rows, ("it is another shard",)
                keys = shard.damaged_keys()
                return len(shard), tuple(f"row {key!r} fails its checksum" for key in keys)
        except UNREADABLE as exc:
            is_unknown = isinstance(exc, SharedTierError | OriginError) and not isinstance(
                exc, OriginNotFound
            )
            if is_unknown or (isinstance(exc, OSError) and is_shortage(exc)):
                raise
            if self._has_gone(held):
                return None
            cause = str(exc) if isinstance(exc, StreamloadError) else f"{type(exc).__name__}: {exc}"
            return held.rows, (cause,)

    def _described(self, fingerprint: str, shards: list[HeldRows]) -> FingerprintShards:
        about: dict[str, Any] = {}
        for shard in shards:
            with contextlib.suppress(*UNREADABLE):
                about = {} if shard.cause else self._about(shard)
            if about:
                break
        parts = about.get("parts")
        parts = parts if isinstance(parts, dict) else None
        label = about.get("label") or (parts or {}).get("class") or ""
        return FingerprintShards(self.where, fingerprint, str(label), parts, tuple(shards))


class NodeRowShards(RowShards):
    """The derived shards in a tier of this node. Parts that are being filled aren't among them."""

    def __init__(self, tier: Tier):
        self.where = str(tier.root)
        self._tier = tier

    def held(self) -> list[HeldRows]:
        """All of them, by URL. Reads some bytes of each index."""
        rows_held = []
        for shard in self._tier.shards():
            recipe = meta_of(shard.path).get("prepared") if shard.kind == "shards" else None
            if (fingerprint := fingerprint_in(recipe)) is not None:
                url = url_of(shard.path).removesuffix(f"#{rows_recipe(fingerprint)}")
                rows, cause = _rows_in(shard.path)
                held = fingerprint, shard.digest, url, rows, shard.size_bytes, shard.used_at
                rows_held.append(HeldRows(*held, cause, shard))
        return sorted(rows_held, key=lambda item: (item.url, item.digest))

    def remove(self, shards: Sequence[HeldRows], why: str, *, dry_run: bool = False) -> Removed:
        """Evict by the rules of the tier (see RowShards)."""
        by_name = {f"shards/{shard.digest}": shard for shard in shards}
        directories = [shard.directory for shard in shards if shard.directory is not None]
        done = garbage.remove(self._tier, directories, why, dry_run=dry_run)
        return Removed(
            tuple(by_name[item.path] for item in done.removed),
            tuple((by_name[item.path], item.why) for item in done.kept),
        )

    @contextlib.contextmanager
    def _opened(self, held: HeldRows) -> Iterator[RowShard | None]:
        path = self._tier.published(held.digest)
        shard = RowShard.open(path, held.form) if path.exists() else None
        with contextlib.nullcontext() if shard is None else contextlib.closing(shard):
            yield shard

    def _has_gone(self, held: HeldRows) -> bool:
        return not self._tier.published(held.digest).exists()

    def _about(self, held: HeldRows) -> dict[str, Any]:
        with self._opened(held) as shard:
            return {} if shard is None else shard.about


class SharedRowShards(RowShards):
    """The derived shards in a shared cache, whoever has stored them."""

    def __init__(self, objects: Objects):
        self.where = objects.url
        self._objects = objects
        self._tier = SharedTier(objects, Counters())

    def held(self) -> list[HeldRows]:
        """All of them, by URL. Reads all of their indexes."""
        if not self._tier.check_format():
            raise SharedTierError(f"there is no shared cache at {self.where}")
        objects: dict[tuple[str, str], list[str]] = {}
        for name in self._objects.names("prepared"):
            if match := _OBJECT.fullmatch(name):
                objects.setdefault((match[1], match[2]), []).append(name)
        # without an index it is being stored, or was given up
        whole = [
            (recipe, digest, names)
            for (recipe, digest), names in objects.items()
            if f"prepared/{recipe}/{digest}/index" in names
        ]
        with limits.Threads(_REQUESTS, "streamload-list") as pool:
            rows_held = [item for item in pool.map(lambda item: self._look(*item), whole) if item is not None]
        return sorted(rows_held, key=lambda item: (item.url, item.digest))

    def remove(self, shards: Sequence[HeldRows], why: str, *, dry_run: bool = False) -> Removed:
        """Remove derived shards that no maker has a lease on (see RowShards)."""
        gone, kept = [], []
        leases = Leases(self._objects, has_gone=is_dead_or_stopped)
        for shard in shards:
            if leases.is_held(shard.digest):
                kept.append((shard, "a process has its lease"))
                continue
            for name in () if dry_run else shard.objects:
                self._objects.delete(name)
            gone.append(shard)
        return Removed(tuple(gone), tuple(kept))

    def _look(self, recipe: str, digest: str, names: list[str]) -> HeldRows | None:
        fingerprint, index = recipe.removeprefix("rows-"), f"prepared/{recipe}/{digest}/index"
        ordered = (index, *(name for name in names if name != index))
        stored_at = self._objects.modified(index)
        if stored_at is None:
            return None
        unread = HeldRows(fingerprint, digest, "", 0, 0, stored_at, objects=ordered)
        try:
            held = self._tier.look(unread.form)
        except CacheCorrupt as exc:
            return replace(unread, cause=str(exc))
        if held is None:
            return None
        size = held.size + len(held.index) + len(held.names) + held.sums.nbytes
        with _unpacked(held.index, held.names) as path:
            url = url_of(path).removesuffix(f"#{recipe}")
            rows, cause = _rows_in(path)
        return replace(unread, url=url, rows=rows, size_bytes=size, cause=cause)

    @contextlib.contextmanager
    def _opened(self, held: HeldRows) -> Iterator[RowShard | None]:
        stored = self._tier.look(held.form)
        if stored is None:
            yield None
            return
        with _unpacked(stored.index, stored.names) as path:
            with (path / "data").open("xb") as data:
                stream = self._tier.stream(held.form, stored, 0, threading.Event())
                with contextlib.closing(stream):
                    for chunk in stream.chunks():
                        data.write(chunk)
            shard = RowShard.open(path, held.form)
            assert shard is not None
            with contextlib.closing(shard):
                yield shard

    def _has_gone(self, held: HeldRows) -> bool:
        return not self._tier.has(held.form)

    def _about(self, held: HeldRows) -> dict[str, Any]:
        """Read `rows.json` alone."""
        stored = self._tier.look(held.form)
        if stored is None:
            return {}
        with _unpacked(stored.index, stored.names) as path, contextlib.closing(IndexReader(path)) as reader:
            members = reader.entry(0).members
        start, size = next((start, size) for extension, start, size in members if extension == "json")
        about: dict[str, Any] = json.loads(self._tier.read(held.form, stored, start, start + size))
        return about if about.get("fingerprint") == held.fingerprint else {}


@contextlib.contextmanager
def _unpacked(index: bytes, names: bytes) -> Iterator[Path]:
    """A temporary directory with the files of a shard's index."""
    with tempfile.TemporaryDirectory(prefix="streamload-") as folder:
        path = Path(folder)
        (path / "index").write_bytes(index)
        (path / "names").write_bytes(names)
        yield path


def _rows_in(directory: Path) -> tuple[int, str]:
    """The number of rows by an index, and why it can't be read."""
    try:
        with contextlib.closing(IndexReader(directory)) as reader:
            return rows_in(reader.entry(0)), ""
    except FileNotFoundError:
        return 0, "a file is missing"
    except UNREADABLE as exc:
        return 0, str(exc) or type(exc).__name__
