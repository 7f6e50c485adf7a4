"""Files, environment variables and late imports that code reads while it builds a module or computes rows.

code runs once → an audit hook records names → the names are stored → their contents join the fingerprint

Changes are found without running the code again: contents are compared by digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import stat
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_128_hexdigest

from streamload.derived.proof.project_code import package_of

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".h5", ".onnx", ".msgpack")
_CODE = (".py", ".pyc", ".so", ".pth.py")
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_OF_LIBRARIES = (
    *("/usr/lib/", "/usr/share/", "/etc/"),
    *(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(os.path.realpath(path) for path in sys.path if path.endswith(".zip")),
)
_OF_COMPILERS = ("/torchinductor_", "/.triton/", "/__pycache__/")
_LONGEST_PATH = 1024
_MOST_SIBLINGS = 10_000
_MOST_NAMES = 256
_MOST_VARIABLES = 32
"""Code that reads more variables is copying the environment, and depends on none of them."""
_WHOLE_BYTES = 64 << 20
"""Larger files are compared by size and modification time."""
_OF_ENVIRON = ("os", "collections.abc", "_collections_abc", __name__)
"""Modules between code and the environment: `os.environ.get` is a method of `collections.abc.Mapping`."""
FileIdentity = list[int]
"""Size, times and inode of a file."""
_ASKING = ("socket.connect", "subprocess.Popen", "os.system", "os.posix_spawn")


class Reads:
    """Record of what one thread reads.

    Attributes:
        paths: of files opened for reading, as the code named them.
        variables: names in the environment.
        modules: names of modules whose import began.
        is_closed: True if neither the network nor another process was used.
    """

    def __init__(self, *, of_project: bool = False):
        self.paths: set[str] = set()
        self.variables: set[str] = set()
        self.modules: set[str] = set()
        self.is_closed = True
        self._written: set[str] = set()
        self._of_project = of_project

    def event(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Record an audit event."""
        if name == "open":
            path, mode, flags = arguments
            if isinstance(path, (str, bytes)):
                access = flags & (os.O_WRONLY | os.O_RDWR) if isinstance(flags, int) else 0
                if access:
                    self._written.add(os.fsdecode(path))
                if access != os.O_WRONLY and not (isinstance(mode, str) and set(mode) & set("wax")):
                    self.paths.add(os.fsdecode(path))
        elif name == "import":
            self.modules.add(arguments[0])
        elif name in _ASKING:
            self.is_closed = False

    def variable(self, name: str) -> None:
        """Record a variable, unless a library reads it and only reads by the project count."""
        if not self._of_project or _is_read_by_project():
            self.variables.add(name)

    def files(self, strings: set[str]) -> dict[str, FileIdentity]:
        """Files that were read or that strings name, and weight files beside them, by real path."""
        named = {path for path in strings if _may_be_path(path)}
        paths = {path for path in map(os.path.realpath, self.paths | named) if not path.startswith(_SYSTEM)}
        paths = {path for path in paths if not path.endswith(_CODE) and "/__pycache__/" not in path}
        for folder in {path if path.is_dir() else path.parent for path in map(pathlib.Path, paths)}:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                beside = [entry.path for _, entry in zip(range(_MOST_SIBLINGS), entries, strict=False)]
                paths |= {os.path.realpath(path) for path in beside if path.endswith(WEIGHTS)}
        identities = {path: identity_of(path) for path in sorted(paths)}
        return {path: identity for path, identity in identities.items() if identity is not None}

    def names(self) -> ReadNames:
        """The names by which other processes find what was read."""
        paths = {path for path in self.paths - self._written if _may_change(path)}
        for module in map(sys.modules.get, self.modules):
            if module is not None and getattr(module, "__file__", None) and package_of(module) is None:
                paths.add(str(module.__file__))
        files = {path: pathlib.Path(path).is_file() for path in sorted(paths)[:_MOST_NAMES]}
        return ReadNames(files, sorted(self.variables) if len(self.variables) <= _MOST_VARIABLES else [])


@dataclass(frozen=True)
class ReadNames:
    """Names of files and variables that computing rows reads.

    Attributes:
        files: by path, whether there was a file.
        variables: of the environment.
    """

    files: dict[str, bool]
    variables: list[str]

    @classmethod
    def read(cls, data: bytes | None) -> ReadNames | None:
        """Parse the result of `written`; None: it is corrupt."""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            names = cls(**json.loads(data or b""))
            return cls(dict(names.files.items()), list(names.variables))
        return None

    def written(self) -> bytes:
        """The names as JSON."""
        return json.dumps({"files": self.files, "variables": self.variables}).encode()

    def without(self, values: Iterable[Any]) -> ReadNames:
        """The names without files that these values name: those are a row's input, part of its key."""
        texts = {os.fsdecode(value) for value in values if isinstance(value, (str, os.PathLike))}
        named = {
            os.path.realpath(text) for text in texts if 0 < len(text) < _LONGEST_PATH and "\0" not in text
        }
        files = {path: existed for path, existed in self.files.items() if os.path.realpath(path) not in named}
        return ReadNames(files, self.variables)

    def __or__(self, other: ReadNames) -> ReadNames:
        return ReadNames(self.files | other.files, sorted({*self.variables, *other.variables}))

    def contents(self) -> dict[str, Any] | None:
        """Digests of the present contents, as a part of a fingerprint; None: a file is missing.

        Files are identified by their last path component, so a project that moved keeps its rows.
        """
        if any(existed and not pathlib.Path(path).is_file() for path, existed in self.files.items()):
            return None
        parts: dict[str, Any] = {}
        if self.files:
            parts["files"] = sorted([pathlib.Path(path).name, _content_of(path)] for path in self.files)
        if self.variables:
            parts["variables"] = digests_of(self.variables)
        return parts


_watched = threading.local()
_watching = threading.Lock()
_watches = [0]


def _hook(name: str, arguments: tuple[Any, ...]) -> None:
    reads = getattr(_watched, "reads", None)
    if reads is not None:
        reads.event(name, arguments)


@functools.cache
def _listen() -> None:
    sys.addaudithook(_hook)


class _NotedEnviron(type(os.environ)):  # type: ignore[misc]
    """An environment that notes which variables are read: there is no audit event for that."""

    def __getitem__(self, name: Any) -> Any:
        reads = getattr(_watched, "reads", None)
        if reads is not None and isinstance(name, str):
            reads.variable(name)
        return super().__getitem__(name)


@contextlib.contextmanager
def watched(*, of_project: bool = False) -> Iterator[Reads]:
    """Record what this thread reads in the block.

    Args:
        of_project: leave out variables that only libraries read, such as those of a launcher.
    """
    _listen()
    before = getattr(_watched, "reads", None)
    reads = _watched.reads = Reads(of_project=of_project)
    _count_watches(1)
    try:
        yield reads
    finally:
        _count_watches(-1)
        _watched.reads = before


def _count_watches(change: int) -> None:
    """Record reads of the environment as long as any thread is watched."""
    with _watching:
        _watches[0] = max(0, _watches[0] + change)  # a child forked inside the block leaves it as well
        plain = _NotedEnviron.__mro__[1]
        os.environ.__class__ = _NotedEnviron if _watches[0] else plain


def _watch_nothing() -> None:
    """Fork safety: the watched threads stay with the parent."""
    global _watching
    _watching = threading.Lock()
    _watches[0] = 1
    _watched.reads = None
    _count_watches(-1)


os.register_at_fork(after_in_child=_watch_nothing)


def _is_read_by_project() -> bool:
    """True if the code that reads a variable, past the environment's own methods, is the project's."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") in _OF_ENVIRON:
        frame = frame.f_back
    module = None if frame is None else sys.modules.get(frame.f_globals.get("__name__", ""))
    return module is not None and package_of(module) is None


def digests_of(variables: Iterable[str]) -> dict[str, str | None]:
    """Digests of the present values of environment variables: a value may be a secret."""
    values = {name: os.environ.get(name) for name in sorted(variables)}
    return {
        name: None if value is None else hashlib.blake2b(os.fsencode(value), digest_size=16).hexdigest()
        for name, value in values.items()
    }


def identity_of(path: str) -> FileIdentity | None:
    """Size, mtime, ctime and inode of a file; None: no such regular file."""
    with contextlib.suppress(OSError):
        status = pathlib.Path(path).stat()
        if stat.S_ISREG(status.st_mode):
            return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    return None


def _content_of(path: str) -> str | None:
    """Digest of a file, or size and modification time of a large one; None: no such file."""
    identity = identity_of(path)
    with contextlib.suppress(OSError):
        if identity is not None and identity[0] <= _WHOLE_BYTES:
            return xxh3_128_hexdigest(pathlib.Path(path).read_bytes())
    return None if identity is None else f"{identity[0]} bytes of {identity[1]}"


def _may_change(path: str) -> bool:
    """True unless a file belongs to the system or a library, or is code, which `Describer` covers."""
    real = os.path.realpath(path)
    is_passing = any(part in real for part in _OF_COMPILERS)
    return not (real.startswith((*_SYSTEM, *_OF_LIBRARIES)) or real.endswith(_CODE) or is_passing)


def _may_be_path(text: str) -> bool:
    has_form = 0 < len(text) < _LONGEST_PATH and "\0" not in text and ("/" in text or text.endswith(WEIGHTS))
    with contextlib.suppress(OSError, ValueError):
        return has_form and text not in ("/", "./", "../") and pathlib.Path(text).exists()
    return False
