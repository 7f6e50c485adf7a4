"""How much memory may be taken up by what lies in a tmpfs: of the machine, of the container, of the tmpfs.

It looks and changes nothing. A container's limit is that of its cgroup and of all cgroups above it (version 1
and 2): pages of a tmpfs count there like any other memory of the processes that wrote them, and whoever goes
beyond is killed, not refused.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PLACE = Path("/dev/shm")
"""The tmpfs that every Linux has."""
_UNLIMITED_BYTES = 1 << 60
"""Version 1 has no word for "no limit": it gives a number that no machine has."""
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Free:
    """What is free, and what it is that sets the bound.

    Attributes:
        free_bytes: may be written until something gives way.
        bound: "memory", "the container's memory (memory.max of /sys/fs/cgroup/…)", "/dev/shm".
    """

    free_bytes: int
    bound: str


class MemoryUsage(NamedTuple):
    """How large a tmpfs is, and how much of it may be written now, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How a version of cgroups calls its files."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]
    """Lines of memory.stat, the first that is there: cached pages that nobody has used lately."""


_VERSIONS = {
    "cgroup2": _Dialect(("memory.max", "memory.high"), "memory.current", ("inactive_file",)),
    "cgroup": _Dialect(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "inactive_file")
    ),
}


def free_memory(place: Path = PLACE, root: Path = Path("/")) -> Free:
    """What may be written into a tmpfs at `place`, which need not exist yet.

    Args:
        place: a directory in it.
        root: where `proc` and the mount points of cgroups are looked for.

    Raises:
        OSError: nobody can say how large the tmpfs is.
    """
    nearest = next(path for path in (place, *place.absolute().parents) if path.exists())
    tmpfs = Free(shutil.disk_usage(nearest).free, str(place))
    return min(tmpfs, available(root), key=lambda one: one.free_bytes)


def usage(place: Path) -> MemoryUsage:
    """What a tier in a tmpfs goes by, as `shutil.disk_usage` is for one on a disk.

    Raises:
        OSError: nobody can say how large the tmpfs is.
    """
    return MemoryUsage(shutil.disk_usage(place).total, free_memory(place).free_bytes)


def available(root: Path = Path("/")) -> Free:
    """The same without a look at any tmpfs: what the machine has and the container allows."""
    found = [Free(_UNLIMITED_BYTES, "memory"), *_of_machine(root), *_of_cgroups(root)]
    return min(found, key=lambda one: one.free_bytes)


def _of_machine(root: Path) -> Iterator[Free]:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield Free(int(line.split()[1]) * 1024, "memory")


def _of_cgroups(root: Path) -> Iterator[Free]:
    """What each cgroup leaves to this process, from its own up to the highest that can be seen."""
    for kind, top, own in _hierarchies(root):
        directory = own if own.is_dir() else top
        while True:
            yield from _of_cgroup(directory, _VERSIONS[kind], root)
            if directory == top:
                break
            directory = directory.parent


def _hierarchies(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Of each hierarchy that accounts for memory: its version, its mount point, this process's directory."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}
    for line in memberships:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.partition(" ")
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(" ")[-1].split(",")):
            continue
        shown, mount_point = (
            _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), field) for field in fields.split(" ")[3:5]
        )
        top = root / mount_point.lstrip("/")
        # A container may be shown only its own part of the hierarchy, mounted as if it were all.
        inner = paths[kind]
        if ".." in Path(inner).parts:  # of a namespace that lies beside
            inner = ""
        elif inner.startswith(shown):
            inner = inner[len(shown) :]
        yield kind, top, top / inner.lstrip("/")


def _of_cgroup(directory: Path, dialect: _Dialect, root: Path) -> Iterator[Free]:
    with contextlib.suppress(OSError, ValueError):  # the highest has no such files
        used = int((directory / dialect.used).read_text()) - _reclaimable_bytes(directory, dialect)
        for name in dialect.limits:
            text = (directory / name).read_text().strip()
            limit = _UNLIMITED_BYTES if text == "max" else int(text)
            if limit < _UNLIMITED_BYTES:
                where = f"/{(directory / name).relative_to(root)}"
                yield Free(max(0, limit - used), f"the container's memory ({where})")


def _reclaimable_bytes(directory: Path, dialect: _Dialect) -> int:
    counts: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / "memory.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            counts[name] = int(number)
    return next((counts[name] for name in dialect.reclaimable if name in counts), 0)
