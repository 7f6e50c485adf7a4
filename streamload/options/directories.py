"""The default cache directory, and the kind of file system that a path is on."""

import contextlib
import functools
import logging
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

logger = logging.getLogger("streamload")

# File systems whose data is on another machine. So are all FUSE kinds but those that show local files.
_REMOTE = (
    "9p acfs afs beegfs ceph cifs davfs glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb3 "
    "smbfs vboxsf virtiofs wekafs"
)
_LOCAL_FUSE = (
    "archivemount bindfs dwarfs encfs erofsfuse fuse-archive fuse-overlayfs fuse-zip gocryptfs lxcfs "
    "mergerfs ratarmount securefs squashfuse squashfuse_ll unionfs unionfs-fuse"
)
_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs"})
_MOST_LINKS = 40
"""Links that the kernel follows in one path."""

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system: its mount point, and its kind as named by the kernel ("ext4", "nfs4", …).

    Attributes:
        device: the same for all mounts of one file system.
        upper: of an overlay, the folder that takes what is written.
    """

    mount_point: str
    kind: str
    device: str = field(default="", compare=False)
    upper: str = field(default="", compare=False)

    @property
    def is_elsewhere(self) -> bool:
        """True if its data is on another machine."""
        family, _, program = self.kind.partition(".")
        return self.kind in _REMOTE.split() or (family == "fuse" and program not in _LOCAL_FUSE.split())

    @property
    def is_memory(self) -> bool:
        """True if its files are in memory."""
        return self.kind in _MEMORY


def default_cache_dir(environ: Mapping[str, str], mounts: str | None = None) -> Path:
    """A directory for the tier on a local disk.

    `$XDG_CACHE_HOME/streamload` or `~/.cache/streamload`; if that is on a network or in memory,
    `/var/tmp/streamload-<uid>`, which is on disk and survives a reboot. The same, with one warning in the
    log, if this user has no home (a user ID without a passwd entry) or may not write there; if /var/tmp can't
    be written either, the directory for temporary files.
    """
    home, problem = _cache_home(environ)
    name = f"streamload-{os.getuid()}"
    directory = Path("/var/tmp") / name
    if home is not None and not problem:
        place = file_system(home, mounts)
        if not place.is_elsewhere and not place.is_memory:
            return home / "streamload"
    elif not _is_writable(directory) and _is_writable(temporary := Path(tempfile.gettempdir()) / name):
        directory = temporary
    if problem:
        _warn_once(problem, directory)
    return directory


def _cache_home(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The directory of this user's caches, and why it can't be used, or ""."""
    cache_home = environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(cache_home) if cache_home.startswith("/") else Path("~/.cache").expanduser()
    except RuntimeError:
        return None, f"user {os.getuid()} has no home directory"
    if not home.is_absolute():
        return None, f"the home directory {str(home.parent)!r} isn't an absolute path"
    return home, "" if _is_writable(home / "streamload") else f"{home} can't be written"


def _is_writable(directory: Path) -> bool:
    """True if this user may write to a directory, or make it. Creates nothing."""
    for path in (directory, *directory.parents):
        if os.path.exists(path):  # noqa: PTH110  (Path's raises where it may not look)
            return os.access(path, os.W_OK | os.X_OK)
    return False


@functools.cache
def _warn_once(problem: str, directory: Path) -> None:
    logger.warning(
        "%s, so the cache is in %s: set STREAMLOAD_CACHE_DIR to have it elsewhere", problem, directory
    )


def own_directory(path: Path) -> Path:
    """The directory of this user's tier if `path` was given: `path` itself, or a directory in it.

    A directory of root's that others may write to (a pod's volume, /scratch) can't be a tier itself: the tier
    is in its `streamload-<uid>`, made with mode 0700.
    """
    try:
        status = path.stat()
        is_of_all = stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and bool(status.st_mode & 0o022)
        if is_of_all and not (os.geteuid() == 0 and (path / "tier.json").exists()):
            return path / f"streamload-{os.geteuid()}"
    except OSError:  # reported when the directory is used
        pass
    return path


def file_system(path: Path, mounts: str | None = None) -> FileSystem:
    """The file system on which `path` is, or would be created; an overlay over memory counts as memory.

    Touches no file system that is elsewhere: it may hang.

    Args:
        path: need not exist yet; links are followed.
        mounts: the text of a mountinfo file (proc(5)); by default this process's own. Without one the kind is
            "unknown", which counts as local.
    """
    absolute = os.path.abspath(path)  # noqa: PTH100  (links stay)
    table = _parsed(_own_mounts() if mounts is None else mounts)
    place = _place_of(absolute, table)
    if mounts is None and place.kind == "autofs":  # it was mounted on the way
        table = _parsed(_own_mounts())
        place = _place_of(absolute, table)
    under = _longest(place.upper, table) if place.upper.startswith("/") else place
    return replace(place, kind=under.kind) if under.is_memory else place


def _own_mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""


def _parsed(mounts: str) -> list[FileSystem]:
    """The file systems of a mountinfo file; one that hides another comes later."""
    parsed: list[FileSystem] = []
    for line in mounts.splitlines():
        # A line ends with " - kind source options".
        fields, _, source = line.partition(" - ")
        device, _, mount_point = fields.split(" ")[2:5]
        kind, _, options = [*source.split(" "), "", ""][:3]
        upper = next((text[9:] for text in options.split(",") if text.startswith("upperdir=")), "")
        mount_point = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), mount_point)
        parsed.append(FileSystem(mount_point, kind, device, upper if kind == "overlay" else ""))
    return parsed


def _place_of(path: str, table: list[FileSystem]) -> FileSystem:
    """The file system of an absolute path, whose links are followed up to one that is elsewhere."""
    left, real, links = path.split("/")[::-1], "/", 0
    while left:
        real = os.path.normpath(os.path.join(real, left.pop()))  # noqa: PTH118
        if _longest(real, table).is_elsewhere:
            return _longest("/".join((real, *reversed(left))), table)
        with contextlib.suppress(OSError):
            target = os.readlink(real)  # noqa: PTH115  (text, to be split)
            links += 1
            if links > _MOST_LINKS:
                break
            left += target.split("/")[::-1]
            real = "/" if target.startswith("/") else os.path.dirname(real)  # noqa: PTH120
    return _longest(real, table)


def _longest(real: str, table: list[FileSystem]) -> FileSystem:
    """The file system of a path without links."""
    place = FileSystem("/", "unknown")
    for mounted in table:
        is_above = f"{real}/".startswith(f"{mounted.mount_point.rstrip('/')}/")
        if is_above and len(mounted.mount_point) >= len(place.mount_point):
            place = mounted
    return place


def nearest(path: Path) -> Path:
    """A path, or the nearest directory above it that exists."""
    parents = (path, *path.absolute().parents)
    return next(parent for parent in parents if os.path.exists(parent))  # noqa: PTH110  (Path's raises)
