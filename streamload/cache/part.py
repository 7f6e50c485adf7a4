"""A shard that this process is filling, and what another left of one when it was killed or stopped (F)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from streamload.cache.budget import LAST_BLOCKS_BYTES, Budget
from streamload.cache.directory import Directory
from streamload.cache.locks import FileLock
from streamload.errors import CacheError


class Part:
    """A shard that this process is filling: a directory, alive while its index is locked."""

    def __init__(
        self,
        tier: Directory,
        budget: Budget,
        digest: str,
        path: Path,
        alive: FileLock,
        orphan: Orphan | None,
    ):
        self.tier = tier
        self.budget = budget
        self.digest = digest
        self.path = path
        self.orphan = orphan
        self.reserved_bytes = 0
        self._alive = alive

    def reserve(self, size_bytes: int, next_use: float) -> bool:
        """Make room for `size_bytes` in all; see `Budget.reserve`."""
        granted = self.budget.reserve(self.path, size_bytes, next_use)
        if not granted and self.orphan is not None:
            self.forget_orphan()  # no room for both: begin anew
            granted = self.budget.reserve(self.path, size_bytes, next_use)
        if granted:
            self.reserved_bytes = size_bytes
        return granted

    def touch(self) -> None:
        """Show that this process is not stopped; to be done again and again."""
        with contextlib.suppress(OSError):  # published, taken away, or a disk that may do better next time
            os.utime(self.path / "index")

    def make_way(self, next_use: float) -> bool:
        """The disk is full although there was room: see `Budget.make_way`."""
        return self.budget.make_way(max(self.reserved_bytes, LAST_BLOCKS_BYTES), next_use)

    def publish(self) -> None:
        """Hand the finished part over to the readers, by one rename."""
        self._move("shards")
        self.tier.trash(self.tier.index_only(self.digest))

    def publish_bare(self) -> None:
        """Hand a finished index over, without data."""
        self._move("bare")

    def give_up(self) -> FileLock | None:
        """Leave a tombstone in place of the shard; it stands while the lock that is returned is held."""
        tombstone = FileLock.acquire(self.path / "names", shared=True, create=True)
        try:
            self._move("gone")
        except BaseException:
            if tombstone is not None:
                tombstone.close()
            raise
        return tombstone

    def leave(self) -> None:
        """Stop here; what was filled stays for whoever takes it up, unless the shard is published."""
        if self.tier.published(self.digest).exists():
            self.tier.trash(self.path)
        self._let_go()

    def discard(self) -> None:
        """Stop here and remove what was filled, of use to nobody."""
        self.tier.trash(self.path)
        self._let_go()

    def forget_orphan(self) -> None:
        """Remove the dead filler's part, not a stopped one's; what was of use in it has been copied."""
        if self.orphan is not None:
            self.orphan.remove(self.tier)
            self.orphan = None

    def _move(self, kind: str) -> None:
        target = self.tier.root / kind / self.digest
        try:
            with self.budget.leaving(self.path, target):
                (self.path / "reserved").unlink(missing_ok=True)
                self.path.rename(target)
        except OSError as exc:
            if not target.exists() and not self.was_taken_away:
                raise CacheError(f"could not publish a shard as {target}: {exc}") from exc
            self.tier.trash(self.path)  # somebody was first: theirs is as good
        self._let_go()

    def _let_go(self) -> None:
        self.forget_orphan()
        self._alive.close()

    @property
    def was_taken_away(self) -> bool:
        """Whether somebody cleared the tier while this part was being filled."""
        return self.tier.root.is_dir() and not self.path.exists()


class Orphan(NamedTuple):
    """A part that nobody goes on with: its filler is dead, or stopped."""

    path: Path
    lock: FileLock | None
    """Of a dead filler, held by whoever looks at the part; a stopped one has it still."""

    @property
    def index_bytes(self) -> int:
        """How much there is of it, measured by its entries."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / "index").stat().st_size
        return 0

    def remove(self, tier: Directory) -> None:
        """Take it away, unless it is a stopped filler's, who may go on with it."""
        if self.lock is not None:
            tier.trash(self.path)
        self.let_go()

    def let_go(self) -> None:
        """Leave it as it is, for others."""
        if self.lock is not None:
            self.lock.close()
