"""Memory that a tier in a tmpfs may take, by the limits of machine, container and tmpfs. Changes nothing.

A container's limit is that of its cgroup and of all cgroups above it (version 1 and 2). Pages of a tmpfs
count there like other memory of the processes that wrote them; a process that exceeds the limit is killed,
not refused.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from streamload.options import nearest

PLACE = Path("/dev/shm")
"""The tmpfs of every Linux."""
MOST_SHARE = 0.9
"""The most of the free memory that a tier may take, whatever is asked for."""
_UNLIMITED_BYTES = 1 << 60
"""Version 1 expresses "no limit" as a huge number."""
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free memory, and the limit that determines it.

    Attributes:
        free_bytes: what may be written.
        bound: "memory", "the container's memory (memory.max of /sys/fs/cgroup/…)", "/dev/shm".
    """

    free_bytes: int
    bound: str


class DiskUsage(NamedTuple):
    """The size of a disk or tmpfs, and how much may be written to it now, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class _Dialect:
    """The file names of a version of cgroups."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]
    """Lines of memory.stat, of which the first found counts: cached pages that weren't used lately."""


_VERSIONS = {
    "cgroup2": _Dialect(("memory.max", "memory.high"), "memory.current", ("inactive_file",)),
    "cgroup": _Dialect(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "inactive_file")
    ),
}


def free_memory(place: Path = PLACE, root: Path = Path("/")) -> FreeMemory:
    """Bytes that may be written into a tmpfs at `place`, which need not exist yet.

    Args:
        root: where `proc` and the mount points of cgroups are looked for.

    Raises:
        OSError: the size of the tmpfs can't be read.
    """
    tmpfs = FreeMemory(shutil.disk_usage(nearest(place)).free, str(place))
    return min(tmpfs, available(root), key=lambda place_free: place_free.free_bytes)


def usage(place: Path) -> DiskUsage:
    """The usage of a tier in a tmpfs.

    Raises:
        OSError: the size of the tmpfs can't be read.
    """
    return DiskUsage(shutil.disk_usage(place).total, free_memory(place).free_bytes)


def available(root: Path = Path("/")) -> FreeMemory:
    """Memory that the machine has and the container allows, without a look at any tmpfs."""
    limits = [FreeMemory(_meminfo(root).get("MemAvailable", _UNLIMITED_BYTES), "memory")]
    for directory, dialect in _cgroups(root):
        with contextlib.suppress(OSError, ValueError):  # the root cgroup has no such files
            used = int((directory / dialect.used).read_text()) - _page_bytes(directory, dialect.reclaimable)
            for name in dialect.limits:
                limit = _limit_bytes(directory / name)
                if limit < _UNLIMITED_BYTES:
                    where = f"/{(directory / name).relative_to(root)}"
                    limits.append(FreeMemory(max(0, limit - used), f"the container's memory ({where})"))
    return min(limits, key=lambda limit: limit.free_bytes)


def taken_ratio(root: Path = Path("/")) -> float:
    """Share of the memory that is taken, 0 to 1: of the machine or of a container, whichever has less left.

    Pages of files don't count, as they can be dropped. 0 where nothing tells.
    """
    ratios = [0.0]
    meminfo = _meminfo(root)
    if total := meminfo.get("MemTotal"):
        ratios.append(1.0 - meminfo.get("MemAvailable", total) / total)
    for directory, dialect in _cgroups(root):
        with contextlib.suppress(OSError, ValueError):
            active = tuple(name.replace("inactive", "active") for name in dialect.reclaimable)
            dropped = _page_bytes(directory, dialect.reclaimable) + _page_bytes(directory, active)
            limit = min(_limit_bytes(directory / name) for name in dialect.limits)
            if 0 < limit < _UNLIMITED_BYTES:
                ratios.append((int((directory / dialect.used).read_text()) - dropped) / limit)
    return min(1.0, max(ratios))


def _meminfo(root: Path) -> dict[str, int]:
    """The bytes of /proc/meminfo, by name; none where it can't be read."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    return {}


def _cgroups(root: Path) -> Iterator[tuple[Path, _Dialect]]:
    """The cgroups of this process, from its own up to the topmost visible one."""
    for kind, top, group in _hierarchies(root):
        directory = group if group.is_dir() else top
        while True:
            yield directory, _VERSIONS[kind]
            if directory == top:
                break
            directory = directory.parent


def _hierarchies(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """For each hierarchy that accounts for memory: its version, its mount point, this process's directory."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}
    for line in memberships:
        number, _, remainder = line.partition(":")
        controllers, _, path = remainder.partition(":")
        if number == "0" and not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in mounts:
        fields, _, remainder = line.partition(" - ")
        kind, _, options = remainder.partition(" ")
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(" ")[-1].split(",")):
            continue
        shown, mount_point = (
            _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), field) for field in fields.split(" ")[3:5]
        )
        top = root / mount_point.lstrip("/")
        # A container may see only its own part of the hierarchy, mounted as if it were the whole.
        inner = paths[kind]
        if ".." in Path(inner).parts:  # of a sibling namespace
            inner = ""
        elif inner.startswith(shown):
            inner = inner[len(shown) :]
        yield kind, top, top / inner.lstrip("/")


def _limit_bytes(file: Path) -> int:
    text = file.read_text().strip()
    return _UNLIMITED_BYTES if text == "max" else int(text)


def _page_bytes(directory: Path, names: tuple[str, ...]) -> int:
    """The first of these lines of a cgroup's memory.stat; 0 where there is none."""
    counts: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / "memory.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            counts[name] = int(number)
    return next((counts[name] for name in names if name in counts), 0)
