"""Objects as files of a folder, which may be on a network (NFS): written aside, then renamed."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from streamload.errors import SharedTierError
from streamload.options.directories import file_system

_PIECE_BYTES = 1 << 20
_INCOMING = ".incoming"
_LEFT_SECONDS = 24 * 3600.0
"""A temporary file of this age was left by a writer that was killed."""
_ONE_CLOCK = frozenset(
    {"btrfs", "ext2", "ext3", "ext4", "f2fs", "nfs", "nfs4", "overlay", "tmpfs", "xfs", "zfs"}
)
"""File systems whose times are those of one kernel: a file server's, or that of all who can write there.
Clients of Lustre, Ceph, GPFS and many FUSE file systems write times of their own clocks."""
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class SharedFolder:
    """A folder of files; it need not exist before the first write.

    Args:
        stop: ends the copying of a file.
    """

    def __init__(self, root: Path, stop: threading.Event | None = None) -> None:
        self._root = root.absolute()
        self._stop = stop or threading.Event()
        self._is_swept = False

    def target(self, name: str) -> str:
        """The path of an object."""
        return str(self._root / name)

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """Read a file, up to one byte beyond the limit."""
        try:
            with self._open(name) as file:
                return file.read(limit_bytes + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read a range of a file."""
        with self._open(name) as file:
            file.seek(start)
            return file.read(stop - start)

    def write(self, name: str, data: bytes) -> None:
        """Write a temporary file, then rename it."""
        self._place(name, lambda file: file.write(data), os.replace)

    def create(self, name: str, data: bytes) -> None:
        """Write a temporary file, then link it, which fails if the name is taken."""
        self._place(name, lambda file: file.write(data), _link)

    def put_file(self, name: str, path: Path) -> None:
        """Copy to a temporary file, then rename it."""

        def copy(file: BinaryIO) -> None:
            with path.open("rb") as source:
                for piece in iter(functools.partial(source.read, _PIECE_BYTES), b""):
                    file.write(piece)
                    if self._stop.is_set():
                        raise SharedTierError("the shared cache was closed during the copy of a file")

        self._place(name, copy, os.replace)

    def names(self, folder: str) -> list[str]:
        """List all regular files below, except temporary ones."""
        names = []
        for where, folders, files in os.walk(self._root / folder, onerror=_raise_unless_missing):
            folders[:] = [name for name in folders if not name.startswith(".")]
            folder_path = Path(where).relative_to(self._root)
            names += [(folder_path / name).as_posix() for name in files if not name.startswith(".")]
        return names

    def times(self, folder: str) -> dict[str, float | None]:
        """List all regular files below, except temporary ones, with their modification times."""
        return {name: self.modified(name) for name in self.names(folder)}

    def delete(self, name: str) -> None:
        """Unlink a file; its folder stays."""
        with contextlib.suppress(NotADirectoryError):
            (self._root / name).unlink(missing_ok=True)

    def modified(self, name: str) -> float | None:
        """The modification time of a file."""
        try:
            return (self._root / name).stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None

    def now(self) -> float | None:
        """The modification time of a temporary file; None: it may be by this node's clock."""
        temporary = self._root / _INCOMING / secrets.token_hex(8)
        if file_system(temporary).kind not in _ONE_CLOCK:
            return None
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.touch()
            return temporary.stat().st_mtime
        finally:
            temporary.unlink(missing_ok=True)

    def _open(self, name: str) -> BinaryIO:
        """Open a regular file; a FIFO doesn't block."""
        descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file")
        return open(descriptor, "rb")  # noqa: PTH123

    def _place(
        self, name: str, write: Callable[[BinaryIO], object], move: Callable[[Path, Path], None]
    ) -> None:
        target, temporary = self._root / name, self._root / _INCOMING / secrets.token_hex(8)
        for folder in (temporary.parent, target.parent):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())  # a file server may report only now that it is full
                server_time = os.fstat(file.fileno()).st_mtime
            move(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        if not self._is_swept:
            self._is_swept = True
            self._sweep(server_time)

    def _sweep(self, server_time: float) -> None:
        """Remove temporary files that were left, by the clock of the file server."""
        with os.scandir(self._root / _INCOMING) as entries:
            for left in entries:
                with contextlib.suppress(OSError):  # its writer has just moved it
                    if server_time - left.stat(follow_symlinks=False).st_mtime > _LEFT_SECONDS:
                        Path(left.path).unlink()


def _link(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        # A file system without hard links: take the name first; the bytes follow a moment later.
        with target.open("xb"):
            pass
        temporary.replace(target)


def _raise_unless_missing(exc: OSError) -> None:
    if not isinstance(exc, FileNotFoundError | NotADirectoryError):
        raise exc
