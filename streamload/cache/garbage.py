"""Take out of a tier what is of no use, what is too much, or all that nobody uses; safe beside trainings.

Each directory is taken by the tier's own rules: under its lock, only while no reader and no filler holds one
of the directory's, out of sight by one rename before its files are deleted. What isn't the tier's stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamload.cache import demand
from streamload.cache.directory import bytes_below
from streamload.cache.eviction import HeldShard
from streamload.cache.inventory import Foreign, foreign, foreign_in, is_filled, is_read, url_of
from streamload.cache.locks import FileLock, exclusive
from streamload.cache.takeover import can_be_taken_up
from streamload.cache.tier import Tier

_ROUNDS = 4
_HALF_RECORD = "tier.json.new"
_IN_USE = {
    "shards": "a process has it open",
    "bare": "a process has it open",
    "parts": "a process fills or reads it",
    "gone": "a process heeds its tombstone",
    "trash": "a process has it open still; it goes once that is through",
}


@dataclass(frozen=True, slots=True)
class Item:
    """Something in a tier's directory.

    Attributes:
        path: as seen from the tier's directory.
        url: of the shard, without secrets; empty if unknown.
        size_bytes: what it takes from the budget.
        why: for what reason it was removed, or stayed.
    """

    path: str
    url: str
    size_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Removal:
    """What was removed from a tier (or would be), and what stayed though it was to go.

    Attributes:
        used_bytes, limit_bytes: of the tier afterwards.
        foreign: what the tier did not make, and so was not touched.
    """

    dry_run: bool
    removed: tuple[Item, ...]
    kept: tuple[Item, ...]
    used_bytes: int
    limit_bytes: int
    foreign: tuple[Foreign, ...]

    @property
    def removed_bytes(self) -> int:
        """What all that was removed took from the budget."""
        return sum(item.size_bytes for item in self.removed)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON."""
        found = [{"path": str(one.path), "what": one.what} for one in self.foreign]
        return {**asdict(self), "removed_bytes": self.removed_bytes, "foreign": found}


def collect_garbage(
    tier: Tier, *, all_parts: bool = False, limit_bytes: int | None = None, dry_run: bool = False
) -> Removal:
    """Remove what no run can use: orphaned parts, trash, files of dead runs, tombstones that nobody heeds.

    An orphaned part goes if its shard is published meanwhile, or if a fill would not go on behind it; a bare
    index if its shard is published.

    Args:
        all_parts: remove the other orphaned parts, too: their shards will be fetched from the first byte.
        limit_bytes: the tier's new limit; what is over it is evicted by the tier's rule, never what is open.
        dry_run: only say what would be removed.
    """
    broom = _Broom(tier, dry_run)
    for shard in list(tier.shards()):
        if shard.kind == "gone":
            broom.take(shard, "a tombstone that nobody heeds", silent=True)
        elif shard.kind == "bare" and tier.published(shard.digest).exists():
            broom.take(shard, "its shard is published", silent=True)
        elif shard.kind == "parts" and not is_filled(shard.path):
            why = _why_useless(tier, shard) or ("a part without a filler" if all_parts else "")
            if why:
                broom.take(shard, why, silent=True)
    broom.take_the_rest()
    if limit_bytes is not None:
        broom.evict(limit_bytes)
    return broom.report()


def clear(tier: Tier, *, dry_run: bool = False) -> Removal:
    """Remove all that no process uses; the directory itself stays a tier, with its limit.

    Args:
        dry_run: only say what would be removed.
    """
    broom = _Broom(tier, dry_run)
    for shard in list(tier.shards()):
        broom.take(shard, "cleared")
    broom.take_the_rest()
    return broom.report()


def unused(shard: HeldShard) -> contextlib.AbstractContextManager[bool]:
    """Hold off readers and fillers of a shard for a block; gives False if there are any already."""
    return _unused(shard.path, ("index", "names") if shard.kind == "parts" else ("names",))


@contextlib.contextmanager
def _unused(path: Path, names: Iterable[str]) -> Iterator[bool]:
    with contextlib.ExitStack() as locks:
        is_unused = True
        for name in names:
            try:
                lock = FileLock.acquire(path / name)
                is_unused = is_unused and (lock is not None or not (path / name).exists())
            except OSError:  # it can't be known
                lock, is_unused = None, False
            if lock is not None:
                locks.callback(lock.close)
        yield is_unused


class _Broom:
    """One removal: what it has taken, and what it had to leave."""

    def __init__(self, tier: Tier, dry_run: bool):
        self._tier = tier
        self._limit_bytes = tier.limit_bytes
        self._dry_run = dry_run
        self._removed: list[Item] = []
        self._kept: list[Item] = []
        self._taken: set[Path] = set()

    def take(self, shard: HeldShard, why: str, *, silent: bool = False) -> None:
        """Remove a directory that nobody uses; others are noted as kept, unless that goes without saying."""
        item = self._item(shard, why)
        if foreign_in(shard.path):
            if not silent:
                self._keep(item, "it holds what the tier did not make")
            return
        target = None
        with exclusive(self._tier.root / "lock"), unused(shard) as is_unused:
            if is_unused and not self._dry_run:
                with contextlib.suppress(FileNotFoundError):
                    target = self._tier.out_of_sight(shard.path)
        if not is_unused:
            if not silent:
                self._keep(item, _IN_USE[shard.kind])
        elif self._dry_run or target is not None:
            self._taken.add(shard.path)
            self._delete(target, item)

    def take_the_rest(self) -> None:
        """Remove trash, files of dead runs, and halves of the tier's record."""
        for path in list(self._tier.own("trash")):
            item = Item(self._name(path), url_of(path), bytes_below(path), "was being deleted")
            if path.exists():  # else whoever was deleting it is through
                self._taken.add(path)
                self._delete(path, item)
        with exclusive(self._tier.root / "lock"):
            for path in [
                *demand.own(self._tier.root / "runs"),
                *demand.version_logs(self._tier.root / "runs"),
            ]:
                dead = FileLock.acquire(path)
                if dead is not None:
                    self._unlink(path, "its process is dead")
                    dead.close()
            half = self._tier.root / _HALF_RECORD
            if half.is_file() and not half.is_symlink():
                self._unlink(half, "was being written")

    def evict(self, limit_bytes: int) -> None:
        """Set the tier's limit, and evict what is over it: first what the live runs need last."""
        self._limit_bytes = limit_bytes
        if not self._dry_run:
            self._tier.budget.set_limit(limit_bytes)
        for _ in range(_ROUNDS):
            chosen = self._tier.budget.excess(limit_bytes, _may_go, self._taken)
            for shard in chosen:
                self.take(shard, "over the limit", silent=True)
            if not chosen or self._dry_run:
                break

    def report(self) -> Removal:
        """What was done."""
        would_go = sum(item.size_bytes for item in self._removed) if self._dry_run else 0
        return Removal(
            self._dry_run,
            tuple(self._removed),
            tuple(self._kept),
            self._tier.used_bytes - would_go if self._dry_run else self._tier.budget.count(),
            self._limit_bytes,
            tuple(foreign(self._tier)),
        )

    def _delete(self, path: Path | None, item: Item) -> None:
        """Delete what is out of sight, as far as nobody reads it still; until then it takes its room."""
        if path is not None and is_read(path):
            self._taken.discard(path)
            self._keep(item, _IN_USE["trash"])
            return
        if path is not None and not self._dry_run:
            self._tier.delete(path)
        self._removed.append(item)

    def _unlink(self, path: Path, why: str) -> None:
        self._removed.append(Item(self._name(path), "", 0, why))
        if not self._dry_run:
            path.unlink(missing_ok=True)

    def _keep(self, item: Item, why: str) -> None:
        self._kept.append(Item(item.path, item.url, item.size_bytes, why))

    def _item(self, shard: HeldShard, why: str) -> Item:
        return Item(self._name(shard.path), url_of(shard.path), shard.size_bytes, why)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._tier.root))


def _why_useless(tier: Tier, part: HeldShard) -> str:
    """Why nobody will go on behind an orphaned part; empty if somebody may."""
    if tier.published(part.digest).exists():
        return "its shard is published"
    if foreign_in(part.path):
        return ""  # it isn't read, and stays
    return "" if can_be_taken_up(part.path) else "a fill would begin anew"


def _may_go(shard: HeldShard) -> bool:
    with unused(shard) as is_unused:
        return is_unused and not foreign_in(shard.path)
