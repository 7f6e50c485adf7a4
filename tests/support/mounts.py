"""A network file system for tests: a FUSE mount that shows a folder, counts what is read, stalls and fails.

`python -m tests.support.mounts SOURCE MOUNT CONTROL` serves one; `CountingMount` starts and steers it. It
needs /dev/fuse, libfuse and the right to mount; where these are missing, a test that asks for one is skipped.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_KIND = "counting"


class CountingMount:
    """A mounted folder; a context manager.

    Args:
        source: the folder that it shows.
        folder: where its mount point and its control files are made.
    """

    def __init__(self, source: Path, folder: Path):
        self.source, self.path, self._control = source, folder / "mount", folder / "control"
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> CountingMount:
        why = why_not()
        if why:
            pytest.skip(why)
        self.path.mkdir(parents=True)
        self._control.mkdir()
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        self.unmount()

    def mount(self) -> None:
        """Mount it, again after `kill` or `unmount`."""
        command = [
            sys.executable,
            "-m",
            "tests.support.mounts",
            *map(str, (self.source, self.path, self._control)),
        ]
        self._server = subprocess.Popen(command)
        while not os.path.ismount(self.path):
            if self._server.poll() is not None:
                pytest.skip(f"a FUSE file system can't be mounted here: status {self._server.returncode}")
            time.sleep(0.01)

    @property
    def is_served(self) -> bool:
        """True unless it was killed or unmounted."""
        return self._server is not None

    def unmount(self) -> None:
        """Take it away; idempotent."""
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        self.kill()

    def kill(self) -> None:
        """Kill its server: whoever asks gets ENOTCONN."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def stall(self, name: str = "") -> None:
        """From now on reads don't return: of the file of that name, or of all."""
        (self._control / "stall").write_text(name)

    def fail(self, code: int, name: str = "") -> None:
        """From now on reads and opens fail with an errno: of the file of that name, or of all."""
        (self._control / "fail").write_text(f"{code} {name}")

    def go_on(self) -> None:
        """Answer all requests again."""
        for name in ("stall", "fail"):
            (self._control / name).unlink(missing_ok=True)

    def read_bytes(self) -> int:
        """The bytes that were read so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self._control / "reads").stat().st_size
        return 0

    def stalled(self) -> int:
        """The number of reads that had to wait so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self._control / "stalled").stat().st_size
        return 0


def why_not() -> str:
    """Return why no FUSE file system can be mounted here, or ""."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    if os.geteuid() or shutil.which("umount") is None:
        return "mounting needs root and umount"
    try:
        importlib.import_module("mfusepy")
    except (ImportError, OSError, AttributeError) as exc:
        return f"mfusepy or libfuse is missing: {exc}"
    return ""


def _serve(source: str, mount: str, control: str) -> None:
    mfusepy: Any = importlib.import_module("mfusepy")

    class Shown(mfusepy.Operations):  # type: ignore[misc]
        """The files of a folder, read-only."""

        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            try:
                status = os.lstat(source + path)
            except OSError as exc:
                raise mfusepy.FuseOSError(exc.errno) from exc
            names = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid")
            times = {"st_mtime": status.st_mtime_ns, "st_ctime": status.st_ctime_ns, "st_atime": 0}
            return {name: getattr(status, name) for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(source + path)]

        def open(self, path: str, flags: int) -> int:
            self._check(path)
            return os.open(source + path, flags)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            self._check(path)
            data = os.pread(fh, size, offset)
            _extend(f"{control}/reads", len(data))
            return data

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def _check(self, path: str) -> None:
            if _told(f"{control}/stall", path) is not None:
                _extend(f"{control}/stalled", 1)
                while _told(f"{control}/stall", path) is not None:
                    time.sleep(0.01)
            code = _told(f"{control}/fail", path)
            if code is not None:
                raise mfusepy.FuseOSError(int(code) if code else errno.EIO)

    shown_at_once = {"attr_timeout": 0, "entry_timeout": 0}
    mfusepy.FUSE(Shown(), mount, foreground=True, ro=True, fsname="test", subtype=_KIND, **shown_at_once)


def _told(control: str, path: str) -> str | None:
    """The first word of a control file that is about a path; None: there is none."""
    try:
        *words, name = Path(control).read_text().split(" ")
    except FileNotFoundError:
        return None
    return (words[0] if words else "") if not name or path.endswith(name) else None


def _extend(path: str, count: int) -> None:
    """Make a sparse file longer: its size is a counter."""
    import fcntl

    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(os.fstat(file.fileno()).st_size + count)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
