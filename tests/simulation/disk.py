"""What the files of a tier take at each moment, unlinked but open ones too; and who made each of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BLOCK_BYTES = 4096
ROOMS = ("parts", "shards", "bare", "gone", "columns", "trash")
"""What counts against the limit: all that isn't of a fixed small size."""


@dataclass
class File:
    path: str
    maker: str
    """The process that made it."""
    size_bytes: int = 0
    is_linked: bool = True
    opened: int = 0

    @property
    def taken_bytes(self) -> int:
        return -(-self.size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


class Disk:
    """The files below a tier's rooms, by inode.

    Args:
        root: of the tier.
        limit_bytes: what they may take together.
        fail: told when they take more, or when a process writes into a file that another one made.
    """

    def __init__(self, root: Path, limit_bytes: int, fail: Callable[[str], None]):
        self.taken_bytes = 0
        self.most_bytes = 0
        self._limit_bytes = limit_bytes
        self._fail = fail
        self._rooms = tuple(f"{root / room}/" for room in ROOMS)
        self._files: dict[int, File] = {}
        self._opened: dict[int, int] = {}

    def opened(self, descriptor: int, path: object, maker: str, status: os.stat_result) -> bool:
        """A file was opened; True if it is a new one in one of the rooms."""
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not stat.S_ISREG(status.st_mode) or not isinstance(name, str) or not name.startswith(self._rooms):
            return False
        is_new = status.st_ino not in self._files
        file = self._files.setdefault(status.st_ino, File(name, maker))
        file.opened += 1
        self._opened[descriptor] = status.st_ino
        self._resize(file, status.st_size)
        return is_new

    def written(self, descriptor: int, writer: str, size_bytes: int) -> None:
        """A file was written to, and has this size now."""
        inode = self._opened.get(descriptor)
        if inode is None:
            return
        file = self._files[inode]
        if file.maker != writer:
            self._fail(f"{writer} writes into {file.path}, which is {file.maker}'s")
        self._resize(file, size_bytes)

    def closed(self, descriptor: int) -> None:
        inode = self._opened.pop(descriptor, None)
        if inode is not None:
            self._files[inode].opened -= 1
            self._forget(inode)

    def unlinked(self, inode: int) -> None:
        if inode in self._files:
            self._files[inode].is_linked = False
            self._forget(inode)

    def told(self) -> str:
        """All files that take room, for a message."""
        lines = []
        for file in self._files.values():
            state = "" if file.is_linked else " (unlinked, open)"
            lines.append(f"  {file.taken_bytes:9,}{state} {file.path} of {file.maker}")
        return "\n".join(lines)

    def _resize(self, file: File, size_bytes: int) -> None:
        before = file.taken_bytes
        file.size_bytes = size_bytes
        self.taken_bytes += file.taken_bytes - before
        self.most_bytes = max(self.most_bytes, self.taken_bytes)
        if self.taken_bytes > self._limit_bytes and file.taken_bytes > before:
            self._fail(
                f"the tier takes {self.taken_bytes:,} bytes, its limit is {self._limit_bytes:,}; "
                f"files, as they were opened:\n{self.told()}"
            )

    def _forget(self, inode: int) -> None:
        file = self._files[inode]
        if not file.is_linked and not file.opened:
            self.taken_bytes -= file.taken_bytes
            del self._files[inode]
