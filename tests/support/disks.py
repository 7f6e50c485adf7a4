"""Disks that are full, read-only or broken, without harm to the machine's own.

A small disk is a tmpfs in mounts that belong to one process alone: nobody else sees it, and it is gone with
the process, however that ends. So these are for a forked process, such as a `Child` of kills.py.
Linux only. What a machine doesn't allow is `NotPossibleHere`, with the reason, and not a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.kills import Child

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18

__all__ = [
    "NotPossibleHere",
    "failing_calls",
    "limited_file_size",
    "read_only",
    "resize_disk",
    "shown_instead",
    "small_disk",
    "why_no_small_disk",
    "why_no_strace",
]


class NotPossibleHere(RuntimeError):
    """This machine doesn't allow a fault; says what is missing."""


def small_disk(place: Path, size_bytes: int, inodes: int | None = None) -> None:
    """Put an empty disk at `place`, for this process and those that it starts, until they end.

    Args:
        place: a directory; made if it is missing.
        size_bytes: in all, rounded up to pages; beyond it is ENOSPC.
        inodes: of files and directories together; beyond it is ENOSPC as well.

    Raises:
        NotPossibleHere: mounting isn't allowed, not even in a namespace of its own.
    """
    place.mkdir(parents=True, exist_ok=True)
    _own_mounts()
    options = f"size={size_bytes},mode=700" + (f",nr_inodes={inodes}" if inodes else "")
    _mount("tmpfs", place, 0, options)


def resize_disk(place: Path, size_bytes: int, inodes: int | None = None) -> None:
    """Give a small disk another size."""
    _mount("tmpfs", place, _REMOUNT, f"size={size_bytes}" + (f",nr_inodes={inodes}" if inodes else ""))


def shown_instead(file: Path, of: Path) -> None:
    """Let this process, and those that it starts, see `file` where `of` is: /etc/hosts, say.

    Raises:
        NotPossibleHere: mounting isn't allowed.
    """
    _own_mounts()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(file), os.fsencode(of), None, ctypes.c_ulong(_BIND), None) != 0:
        raise NotPossibleHere(f"{of} can't be hidden: {os.strerror(ctypes.get_errno())}")


def read_only(place: Path) -> None:
    """Make a small disk read-only: writing is EROFS. No file on it may be open for writing."""
    _mount("tmpfs", place, _REMOUNT | _READ_ONLY, "")


@contextlib.contextmanager
def limited_file_size(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: writing there is EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failing_calls(
    command: Sequence[str], calls: str, error: str, *, when: str, path: Path | None = None, log: Path
) -> list[str]:
    """A command under strace, some of whose system calls fail without being made.

    Args:
        command: the program and its arguments.
        calls: of strace: "pread64", "write,pwrite64", "close".
        error: "EIO", "ENOSPC", "EDQUOT".
        when: which of them: "3" (the third), "3+" (from there on), "1+2" (each second).
        path: only calls on this file; it has to exist.
        log: where strace writes the calls; those that failed by it end with "(INJECTED)".

    Raises:
        NotPossibleHere: there is no strace, or it isn't allowed.
    """
    reason = why_no_strace()
    if reason:
        raise NotPossibleHere(reason)
    only = ["-P", str(path)] if path is not None else []
    inject = f"inject={calls}:error={error}:when={when}"
    return ["strace", "-f", "-qq", "-o", str(log), *only, "-e", f"trace={calls}", "-e", inject, *command]


@functools.cache
def why_no_small_disk() -> str:
    """Why a small disk can't be had here; empty if it can."""
    with Child(lambda stage: small_disk(Path("/tmp"), 1 << 16)) as child:
        child.join(10.0)
        if child.status == 0:
            return ""
        return f"a small disk can't be mounted here: {child.error.strip().rpartition(': ')[2] or 'no answer'}"


@functools.cache
def why_no_strace() -> str:
    """Why system calls can't be traced here; empty if they can."""
    if shutil.which("strace") is None:
        return "strace isn't installed"
    tried = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True, check=False)
    said = tried.stderr.decode("utf-8", "replace").strip()
    return f"strace isn't allowed to trace: {said}" if tried.returncode else ""


def _own_mounts() -> None:
    """Give this process mounts of its own, as root or as a user who is root only there."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_MOUNTS) == 0:
        _mount("none", Path("/"), _RECURSIVE | _PRIVATE, "")
        return
    if libc.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
        raise NotPossibleHere(f"no mounts of its own: {os.strerror(ctypes.get_errno())}")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", Path("/"), _RECURSIVE | _PRIVATE, "")


def _mount(kind: str, place: Path, flags: int, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.mount(
        kind.encode(), os.fsencode(place), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    if answer != 0:
        error = ctypes.get_errno()
        raise NotPossibleHere(f"{place} can't be mounted: {os.strerror(error)}")
