"""Remove from a tier what is useless, over the limit, or unused; safe while trainings run.

Each directory is removed by the rules of the tier: under its lock, only while no reader or filler holds one
of the directory's locks, and by one rename before its files are deleted. What the tier didn't make stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamload.cache import demand
from streamload.cache.directory import bytes_below
from streamload.cache.eviction import HeldShard
from streamload.cache.fill import can_be_taken_over
from streamload.cache.inventory import Foreign, foreign, foreign_in, is_filled, is_read, url_of
from streamload.cache.locks import FileLock, exclusive
from streamload.cache.tier import Tier

_ROUNDS = 4
_TEMPORARY_RECORD = "tier.json.new"
_IN_USE = {
    "shards": "a process has it open",
    "bare": "a process has it open",
    "parts": "a process fills or reads it",
    "gone": "a process has acted on this tombstone",
    "columns": "it can't be locked",
    "trash": "a process still has it open; it is deleted after that",
}


@dataclass(frozen=True, slots=True)
class Item:
    """Something in a tier's directory.

    Attributes:
        path: relative to the tier's directory.
        url: of the shard, without secrets; empty if unknown.
        size_bytes: its share of the budget.
        why: why it was removed, or stayed.
    """

    path: str
    url: str
    size_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Removal:
    """Garbage that was removed from a tier (or would be), and that could not be removed.

    Attributes:
        used_bytes, limit_bytes: of the tier afterwards.
        foreign: what the tier didn't make, and so wasn't touched.
    """

    dry_run: bool
    removed: tuple[Item, ...]
    kept: tuple[Item, ...]
    used_bytes: int
    limit_bytes: int
    foreign: tuple[Foreign, ...]

    @property
    def removed_bytes(self) -> int:
        """The budget that the removed items took."""
        return sum(item.size_bytes for item in self.removed)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON."""
        foreign = [{"path": str(entry.path), "what": entry.what} for entry in self.foreign]
        return {**asdict(self), "removed_bytes": self.removed_bytes, "foreign": foreign}


def collect_garbage(
    tier: Tier, *, all_parts: bool = False, limit_bytes: int | None = None, dry_run: bool = False
) -> Removal:
    """Remove what no run can use: orphaned parts, trash, files of dead runs, tombstones without a lock.

    An orphaned part is removed if its shard is published meanwhile, or if a fill would not continue from it;
    an index-only copy if its shard is published.

    Args:
        all_parts: also remove other orphaned parts: their shards will be fetched from the first byte.
        limit_bytes: a new limit of the tier; what exceeds it is evicted by the tier's rule, except open
            shards.
        dry_run: only report what would be removed.
    """
    sweep = _Sweep(tier, dry_run)
    for shard in list(tier.shards()):
        if shard.kind == "gone":
            sweep.remove(shard, "a tombstone of dead processes", silent=True)
        elif shard.kind == "bare" and tier.published(shard.digest).exists():
            sweep.remove(shard, "its shard is published", silent=True)
        elif shard.kind == "parts" and not is_filled(shard.path):
            why = _why_useless(tier, shard) or ("a part without a filler" if all_parts else "")
            if why:
                sweep.remove(shard, why, silent=True)
    sweep.remove_the_rest()
    if limit_bytes is not None:
        sweep.evict(limit_bytes)
    return sweep.report()


def clear(
    tier: Tier, is_asked: Callable[[HeldShard], bool] | None = None, *, dry_run: bool = False
) -> Removal:
    """Remove everything that no process uses; the directory remains a tier, with its limit.

    Args:
        is_asked: whether a shard is to go; None: all are, and columns, too.
        dry_run: only report what would be removed.
    """
    sweep = _Sweep(tier, dry_run)
    columns = tier.columns() if is_asked is None else ()
    for entry in [*filter(is_asked or (lambda shard: True), tier.shards()), *columns]:
        sweep.remove(entry, "cleared")
    sweep.remove_the_rest()
    return sweep.report()


@contextlib.contextmanager
def unused(shard: HeldShard) -> Iterator[bool]:
    """Lock out readers and fillers of a shard for a block; yields False if there are any already."""
    with contextlib.ExitStack() as locks:
        is_unused = True
        for name in ("index", "names") if shard.kind == "parts" else ("names",):
            try:
                lock = FileLock.acquire(shard.path / name)
                is_unused = is_unused and (lock is not None or not (shard.path / name).exists())
            except OSError:  # unknown
                lock, is_unused = None, False
            if lock is not None:
                locks.callback(lock.close)
        yield is_unused


class _Sweep:
    """One removal: what it has removed, and what it had to keep."""

    def __init__(self, tier: Tier, dry_run: bool):
        self._tier = tier
        self._limit_bytes = tier.limit_bytes
        self._dry_run = dry_run
        self._removed: list[Item] = []
        self._kept: list[Item] = []
        self._taken: set[Path] = set()

    def remove(self, shard: HeldShard, why: str, *, silent: bool = False) -> None:
        """Remove an unused directory; others are reported as kept, unless `silent`."""
        item = self._item(shard, why)
        if foreign_in(shard.path):
            if not silent:
                self._keep(item, "it holds files that the tier did not make")
            return
        target = None
        with exclusive(self._tier.root / "lock"), unused(shard) as is_unused:
            if is_unused and not self._dry_run:
                with contextlib.suppress(FileNotFoundError):
                    target = self._tier.move_to_trash(shard.path)
        if not is_unused:
            if not silent:
                self._keep(item, _IN_USE[shard.kind])
        elif self._dry_run or target is not None:
            self._taken.add(shard.path)
            self._delete(target, item)

    def remove_the_rest(self) -> None:
        """Remove trash, files of dead runs, and temporary records."""
        for path in list(self._tier.own("trash")):
            item = Item(self._name(path), url_of(path), bytes_below(path), "was being deleted")
            if path.exists():  # else another process has deleted it
                self._taken.add(path)
                self._delete(path, item)
        with exclusive(self._tier.root / "lock"):
            for path in demand.run_files(self._tier.root / "runs"):
                dead = FileLock.acquire(path)
                if dead is not None:
                    self._unlink(path, "its process is dead")
                    dead.close()
            temporary = self._tier.root / _TEMPORARY_RECORD
            if temporary.is_file() and not temporary.is_symlink():
                self._unlink(temporary, "was being written")

    def evict(self, limit_bytes: int) -> None:
        """Set the tier's limit, and evict what exceeds it: first what the live runs need last."""
        self._limit_bytes = limit_bytes
        if not self._dry_run:
            self._tier.budget.limit.set(limit_bytes)
        for _ in range(_ROUNDS):
            chosen = self._tier.budget.excess(limit_bytes, _may_go, self._taken)
            for shard in chosen:
                self.remove(shard, "over the limit", silent=True)
            if not chosen or self._dry_run:
                break

    def report(self) -> Removal:
        """The result."""
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
        """Delete what is in the trash, unless somebody still reads it: until then it counts."""
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
    """Why no fill would continue from an orphaned part; empty if one might."""
    if tier.published(part.digest).exists():
        return "its shard is published"
    if foreign_in(part.path):
        return ""  # not read, and kept
    return "" if can_be_taken_over(part.path) else "a fill would start over"


def _may_go(shard: HeldShard) -> bool:
    with unused(shard) as is_unused:
        return is_unused and not foreign_in(shard.path)
