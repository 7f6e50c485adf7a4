"""The default cache directory, and the kind of file system that a path is on."""

import functools
import logging
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("streamload")

# File systems whose data is on another machine. All FUSE kinds count, too, except fuseblk: a local disk.
_REMOTE = (
    "9p acfs afs beegfs ceph cifs davfs glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb3 "
    "smbfs vboxsf virtiofs wekafs"
)
_LOCAL_FUSE = frozenset({"fuseblk"})
_MEMORY = frozenset({"tmpfs", "ramfs"})

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system: its mount point, and its kind as named by the kernel ("ext4", "nfs4", …)."""

    mount_point: str
    kind: str

    @property
    def is_elsewhere(self) -> bool:
        """True if its data is on another machine."""
        return self.kind in _REMOTE.split() or (self.kind.startswith("fuse") and self.kind not in _LOCAL_FUSE)

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
    """The file system on which `path` is, or would be created.

    Args:
        path: need not exist yet; links are followed.
        mounts: the text of a mountinfo file (proc(5)); by default this process's own. Without one the kind is
            "unknown", which counts as local.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return FileSystem("/", "unknown")
    real = Path(os.path.realpath(path))
    file_system = FileSystem("/", "unknown")
    for line in mounts.splitlines():
        # A line ends with " - kind source options"; a mount over another comes later and hides it.
        fields, _, source = line.partition(" - ")
        mount_point = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])
        if real.is_relative_to(mount_point) and len(mount_point) >= len(file_system.mount_point):
            file_system = FileSystem(mount_point, source.split(" ", 1)[0])
    return file_system


def nearest(path: Path) -> Path:
    """A path, or the nearest directory above it that exists."""
    parents = (path, *path.absolute().parents)
    return next(parent for parent in parents if os.path.exists(parent))  # noqa: PTH110  (Path's raises)
