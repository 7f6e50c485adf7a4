"""What the user may set from outside: STREAMLOAD_* variables and arguments, as one frozen value.

The only reader of those variables. Arguments win over variables, variables over defaults, and each value
knows where it came from (`streamload doctor` prints it). Nothing is created and no space is measured here:
a share of the disk stays a share until the tier asks for its bytes.
"""

import contextlib
import difflib
import functools
import math
import os
import re
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from streamload.errors import OptionError

VARIABLES = {
    "cache_dir": "STREAMLOAD_CACHE_DIR",
    "cache_size": "STREAMLOAD_CACHE_SIZE",
    "ahead": "STREAMLOAD_AHEAD",
    "revalidate": "STREAMLOAD_REVALIDATE",
    "eviction": "STREAMLOAD_EVICTION",
    "free_disk": "STREAMLOAD_FREE_DISK",
    "cache": "STREAMLOAD_CACHE",
    "memory_size": "STREAMLOAD_MEMORY_SIZE",
    "shared_cache": "STREAMLOAD_SHARED_CACHE",
    "write_back": "STREAMLOAD_SHARED_WRITE_BACK",
    "shared_wait": "STREAMLOAD_SHARED_WAIT",
    "origin_wait": "STREAMLOAD_ORIGIN_WAIT",
    "max_image_pixels": "STREAMLOAD_MAX_IMAGE_PIXELS",
}

Revalidate = Literal["never", "start", "always"]
Eviction = Literal["plan", "lru"]
_Choice = TypeVar("_Choice", bound=str)

Where = Literal["auto", "disk", "memory"]
"""On what a tier lies; "auto" leaves that to the data's size and to the disk."""

DEFAULT_CACHE_SIZE = "80%"
DEFAULT_MEMORY_SIZE = "50%"
DEFAULT_AHEAD = "1GiB"
DEFAULT_SHARED_WAIT_SECONDS = 120.0
"""In that time another node fetches and stores a shard of 300 MB at 3 MB/s, or one of 1 GB at 10 MB/s. A wait
ends long before where that node is quick, or dead; for one that is slower nobody waits twice."""
DEFAULT_ORIGIN_WAIT_SECONDS = 300.0
"""Half of what the other ranks of a training wait for one in a collective operation, by NCCL's default."""
DEFAULT_MAX_IMAGE_PIXELS = 20_000_000
"""An image of so many takes 240 MB at most to decode (transforms/limits.py)."""
_LEAST_FREE_BYTES = 1_000_000_000
_LEAST_FREE_SHARE = 0.02
_MOST_KEPT_FREE_SHARE = 0.2

# Kinds of file systems whose bytes are somewhere else: a copy there is not near. Every FUSE kind counts as
# elsewhere too, except the one that is a local disk in another format.
_ELSEWHERE = frozenset(
    {
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "davfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
    }
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs"}
)
_LOCAL_FUSE = frozenset({"fuseblk"})
_MEMORY = frozenset({"tmpfs", "ramfs"})

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("I", 1024), ("IB", 1024))
}
_SIZE = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_SWITCH = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The most that a tier may hold: a number of bytes, or a share of the disk.

    Exactly one of the two fields is set. A share is taken of what is free plus what the tier already holds,
    so that it means the same on an empty tier and on a full one.
    """

    size_bytes: int | None = None
    share: float | None = None

    def limit_bytes(self, free_bytes: int, held_bytes: int) -> int:
        """The limit in bytes on a disk with `free_bytes` free, when the tier holds `held_bytes`."""
        if self.size_bytes is not None:
            return self.size_bytes
        return int((free_bytes + held_bytes) * (self.share or 0.0))

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes" if self.size_bytes is not None else f"{100 * (self.share or 0):g}%"


@dataclass(frozen=True, slots=True)
class FreeDisk:
    """What a tier leaves free on its disk, whatever its limit: a number of bytes, or a share of the disk.

    With neither it is the default: the larger of 1 GB and 2 % of the disk, but never more than a fifth of
    what is free or held by the tier, so that a small disk is of use too.
    """

    size_bytes: int | None = None
    share: float | None = None

    def floor_bytes(self, total_bytes: int, available_bytes: int) -> int:
        """The floor on a disk of `total_bytes`, of which `available_bytes` are free or the tier's."""
        if self.size_bytes is not None:
            return self.size_bytes
        if self.share is not None:
            return int(total_bytes * self.share)
        floor = max(_LEAST_FREE_BYTES, int(total_bytes * _LEAST_FREE_SHARE))
        return min(floor, int(available_bytes * _MOST_KEPT_FREE_SHARE))

    def __str__(self) -> str:
        if self.size_bytes is not None:
            return f"{self.size_bytes} bytes"
        return "1 GB or 2% of the disk" if self.share is None else f"{100 * self.share:g}%"


DEFAULT_FREE_DISK = FreeDisk()


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Where a path lives: the mount point, and the kind that the kernel gives it ("ext4", "nfs4", …)."""

    mount_point: str
    kind: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether reading from it goes over a network."""
        return self.kind in _ELSEWHERE or (self.kind.startswith("fuse") and self.kind not in _LOCAL_FUSE)

    @property
    def is_memory(self) -> bool:
        """Whether what it holds takes up memory."""
        return self.kind in _MEMORY


@dataclass(frozen=True, slots=True)
class Settings:
    """Every value with which streamload can be set from outside, resolved.

    Attributes:
        cache_dir: the directory of the tier on disk.
        cache_size: the most that it may hold.
        ahead_bytes: how far ahead of the cursor shards are prefetched.
        revalidate: when the origin of a shard in the tier is asked whether it has changed.
        eviction: which shards go when room is needed.
        free_disk: what stays free on the tier's disk.
        cache: whether the tier is on disk or in memory.
        memory_size: the most that a tier in memory may hold: bytes, or a share of what memory is free.
        shared_cache: the URL of what is asked before the origins; None: nothing is. It may hold secrets.
        write_back: whether what was fetched from origins is stored there.
        shared_wait_seconds: the longest wait for a shard that another node is fetching; 0: none.
        origin_wait_seconds: how long a server or bucket that is away is waited for; 0: as a shard that fails.
        max_image_pixels: of an image that is decoded.
        sources: of each name in VARIABLES: "argument", its variable's name, or "default".
    """

    cache_dir: Path
    cache_size: CacheSize
    ahead_bytes: int
    revalidate: Revalidate
    eviction: Eviction
    free_disk: FreeDisk
    cache: Where
    memory_size: CacheSize
    shared_cache: str | None = field(repr=False)
    write_back: bool
    shared_wait_seconds: float
    origin_wait_seconds: float
    max_image_pixels: int
    sources: Mapping[str, str]


def read_settings(
    cache_dir: str | os.PathLike[str] | None = None,
    cache_size: str | int | None = None,
    ahead: str | int | None = None,
    revalidate: str | None = None,
    eviction: str | None = None,
    free_disk: str | int | None = None,
    cache: str | None = None,
    memory_size: str | int | None = None,
    shared_cache: str | os.PathLike[str] | None = None,
    write_back: bool | None = None,
    shared_wait: float | None = None,
    origin_wait: float | None = None,
    max_image_pixels: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Resolve the settings from arguments, then the environment, then defaults.

    Args:
        cache_dir: directory of the tier; `~` is expanded and a relative path made absolute. See
            `own_directory`.
        cache_size: bytes, or text such as "500GB", "1.5TiB" or "80%".
        ahead: bytes, or text with a unit.
        revalidate: "never", "start" or "always".
        eviction: "plan" or "lru".
        free_disk: bytes (0: nothing), text with a unit, or a percentage of the disk.
        cache: "auto", "disk" or "memory".
        memory_size: as cache_size; a share is of the memory that is free.
        shared_cache: a folder that fsspec can open, or a path; "" is none, whatever the variable says.
        write_back: whether to store there what was fetched; of the variable "1" or "0".
        shared_wait: how many seconds to wait there for what another node is fetching; 0: not at all.
        origin_wait: how many seconds to wait for a server or bucket that gave shards and is away; 0: no more
            than for a shard.
        max_image_pixels: the most that an image may have to be decoded.
        environ: where to look for STREAMLOAD_* variables; the process's own by default.

    Raises:
        OptionError: a value that can't be read; the message names the argument or variable.
    """
    environ = os.environ if environ is None else environ
    _warn_of_unknown(environ)
    sources: dict[str, str] = {}

    def given(name: str, argument: object) -> object:
        """The argument, else the variable when it isn't empty, else None; records which."""
        variable = VARIABLES[name]
        from_variable = environ.get(variable, "").strip()
        if argument is not None:
            sources[name] = "argument"
            return argument
        sources[name] = variable if from_variable else "default"
        return from_variable or None

    def label(name: str) -> str:
        return name if sources[name] == "argument" else sources[name]

    directory = given("cache_dir", cache_dir)
    size = given("cache_size", cache_size)
    far = given("ahead", ahead)
    asked, going, free = (
        given("revalidate", revalidate),
        given("eviction", eviction),
        given("free_disk", free_disk),
    )
    where = given("cache", cache)
    memory = given("memory_size", memory_size)
    shared = given("shared_cache", shared_cache)
    back = given("write_back", write_back)
    wait, outage = given("shared_wait", shared_wait), given("origin_wait", origin_wait)
    pixels = given("max_image_pixels", max_image_pixels)
    return Settings(
        cache_dir=default_cache_dir(environ)
        if directory is None
        else own_directory(_directory(directory, label("cache_dir"))),
        cache_size=parse_cache_size(DEFAULT_CACHE_SIZE if size is None else size, label("cache_size")),
        ahead_bytes=parse_size(DEFAULT_AHEAD if far is None else far, label("ahead")),
        revalidate=_one_of("never" if asked is None else asked, get_args(Revalidate), label("revalidate")),
        eviction=_one_of("plan" if going is None else going, get_args(Eviction), label("eviction")),
        free_disk=DEFAULT_FREE_DISK if free is None else parse_free_disk(free, label("free_disk")),
        cache="disk" if where is None else _one_of(where, get_args(Where), label("cache")),
        memory_size=parse_cache_size(
            DEFAULT_MEMORY_SIZE if memory is None else memory, label("memory_size"), "what memory is free"
        ),
        shared_cache=_shared(shared, label("shared_cache")),
        write_back=_switch(back, label("write_back")),
        shared_wait_seconds=DEFAULT_SHARED_WAIT_SECONDS
        if wait is None
        else _seconds(wait, label("shared_wait")),
        origin_wait_seconds=DEFAULT_ORIGIN_WAIT_SECONDS
        if outage is None
        else _seconds(outage, label("origin_wait")),
        max_image_pixels=DEFAULT_MAX_IMAGE_PIXELS
        if pixels is None
        else _count(pixels, label("max_image_pixels")),
        sources=sources,
    )


def parse_size(value: object, name: str = "size") -> int:
    """Bytes of an int or of text such as "500GB" (1000s), "1.5 TiB" (1024s) or "4_000_000".

    Raises:
        OptionError: not a positive size; `name` says in the message whose value it was.
    """
    allowed = 'expected bytes such as 4000000, "500GB" (thousands) or "1.5TiB" (1024s), over 0 and under 8EiB'
    if isinstance(value, int) and not isinstance(value, bool):
        number: float = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2].upper() in _UNITS:
        number = float(re.sub("[_,]", "", match[1])) * _UNITS[match[2].upper()]
    else:
        raise OptionError(f"{name}={value!r} is not a size; {allowed}")
    if not 1 <= number < 2**63:
        raise OptionError(f"{name}={value!r} is not a size; {allowed}")
    return math.floor(number)


def parse_cache_size(value: object, name: str = "cache_size", of: str = "the disk") -> CacheSize:
    """The limit of a tier from bytes, text with a unit, or a percentage of the disk ("80%").

    Args:
        value: what was given.
        name: whose value it is, for messages.
        of: what it is a share of, for messages.

    Raises:
        OptionError: neither a positive size nor a percentage in (0, 100].
    """
    if isinstance(value, str) and (match := _SHARE.fullmatch(value)):
        percent = float(match[1])
        if not 0 < percent <= 100:
            raise OptionError(
                f"{name}={value!r} is not a share of {of}; expected more than 0% and up to 100%"
            )
        return CacheSize(share=percent / 100)
    if isinstance(value, str) and "%" in value:
        raise OptionError(f'{name}={value!r} is not a share of {of}; expected a percentage such as "80%"')
    return CacheSize(size_bytes=parse_size(value, name))


def parse_free_disk(value: object, name: str = "free_disk") -> FreeDisk:
    """What has to stay free on the disk, from bytes (0: nothing), text with a unit, or a percentage ("5%").

    Raises:
        OptionError: none of these.
    """
    if value in (0, "0") and not isinstance(value, bool):
        return FreeDisk(size_bytes=0)
    size = parse_cache_size(value, name)
    return FreeDisk(size.size_bytes, size.share)


def default_cache_dir(environ: Mapping[str, str], mounts: str | None = None) -> Path:
    """A place for the tier on a disk of this machine.

    That is `$XDG_CACHE_HOME/streamload` or `~/.cache/streamload`; but where those are on a network or in
    memory, it is `/var/tmp/streamload-<uid>`, which is on disk and survives a reboot.
    """
    cache_home = environ.get("XDG_CACHE_HOME", "")
    home = Path(cache_home) if cache_home.startswith("/") else Path("~/.cache").expanduser()
    place = file_system(home, mounts)
    if home.is_absolute() and not place.is_elsewhere and not place.is_memory:
        return home / "streamload"
    return Path(f"/var/tmp/streamload-{os.getuid()}")


def own_directory(path: Path) -> Path:
    """Where this user's tier is if `path` is named: `path` itself, or a directory in it.

    A directory of root's in which others may write (a pod's volume, /scratch) can't be a tier, and only root
    could make it one: there the tier is in `streamload-<uid>`, made with mode 0700.
    """
    try:
        status = path.stat()
        is_of_all = stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and bool(status.st_mode & 0o022)
        if is_of_all and not (os.geteuid() == 0 and (path / "tier.json").exists()):
            return path / f"streamload-{os.geteuid()}"
    except OSError:  # whoever uses it will say what is wrong
        pass
    return path


def file_system(path: Path, mounts: str | None = None) -> FileSystem:
    """The file system on which `path` is, or would be created.

    Args:
        path: need not exist yet; links on the way are followed.
        mounts: the text of a mountinfo file (proc(5)); this process's own by default. Where the system has
            none, the answer is kind "unknown", which counts as local.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return FileSystem("/", "unknown")
    real = Path(os.path.realpath(path))
    found = FileSystem("/", "unknown")
    for line in mounts.splitlines():
        # A line ends with " - kind source options"; a mount over another comes later and hides it.
        fields, _, rest = line.partition(" - ")
        mount_point = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])
        if real.is_relative_to(mount_point) and len(mount_point) >= len(found.mount_point):
            found = FileSystem(mount_point, rest.split(" ", 1)[0])
    return found


def _one_of(value: object, allowed: tuple[_Choice, ...], name: str) -> _Choice:
    for choice in allowed:
        if value == choice:
            return choice
    raise OptionError(f"{name}={value!r}: it has to be one of {', '.join(map(repr, allowed))}")


def _shared(value: object, name: str) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, (str, os.PathLike)) or isinstance(path := os.fspath(value), bytes):
        raise OptionError(f"{name} is a {type(value).__name__}; expected a URL or a path")
    return str(path)


def _switch(value: object, name: str) -> bool:
    if isinstance(value, str) and value.lower() in _SWITCH:
        return _SWITCH[value.lower()]
    if value is None or isinstance(value, bool):
        return bool(value)
    raise OptionError(f"{name}={value!r}: it has to be 1 or 0")


def _seconds(value: object, name: str) -> float:
    with contextlib.suppress(ValueError):
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            number = float(value)
            if 0 <= number < math.inf:
                return number
    raise OptionError(f"{name}={value!r} is no time; expected seconds, such as 60, or 0")


def _count(value: object, name: str) -> int:
    with contextlib.suppress(ValueError):
        if isinstance(value, str | int) and not isinstance(value, bool) and (number := int(value)) >= 1:
            return number
    raise OptionError(f"{name}={value!r}: it has to be a whole number of at least 1")


def _directory(value: object, name: str) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise OptionError(f"{name}={value!r} is not a directory; expected a path on a local disk")
    text = os.fspath(value)
    if isinstance(text, bytes) or "://" in text or "\0" in text:
        raise OptionError(f"{name}={value!r} is not a directory; expected a path on a local disk")
    return Path.cwd() / Path(text).expanduser()


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    for name in environ:
        if name.startswith("STREAMLOAD_") and name not in VARIABLES.values():
            _warn_once(name)


@functools.cache
def _warn_once(name: str) -> None:
    close = difflib.get_close_matches(name, VARIABLES.values(), n=1, cutoff=0.75)
    advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(VARIABLES.values()))}"
    warnings.warn(
        f"the variable {name} is not one that streamload reads; {advice}", UserWarning, stacklevel=4
    )
