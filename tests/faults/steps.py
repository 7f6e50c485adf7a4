"""Row 2: the operations by which a fill changes its tier, counted one by one, and a kill in front of each.

Python's audit events tell of files that are opened for writing, renamed, removed and made, from inside, in
front of the operation; what isn't audited (write, pwrite) is wrapped. `strace` counts the same from outside:
the two numbers have to be equal.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamload.cache.fill import fill
from streamload.cache.shard import Shard, shard_of
from streamload.cache.tier import Tier
from streamload.origins.origin import Origin, Stream, Version, open_origin
from tests.faults.data import Data
from tests.faults.readers import QUICK
from tests.support.disks import why_no_strace

ROOT = Path(__file__).resolve().parents[2]
_PIECE_BYTES = 20_000
SCENARIOS = ("fill", "evict", "take over")
_CALLS = (
    "openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat,"
    "write,writev,pwrite64,pwritev,ftruncate,truncate,fallocate,fchmod,chmod,fchmodat,utimensat,sendfile,"
    "copy_file_range"
)
_CHANGING = {
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "os.chmod": (0,),
}


@dataclass(frozen=True)
class Scenario:
    """A fill of one shard by one process.

    Attributes:
        name: "fill" into an empty tier, "evict" for room, "take over" of what a dead filler left.
        urls: of the shards; the first is filled.
        sizes: of the shards, in bytes.
        limit_bytes: of the tier.
    """

    name: str
    urls: tuple[str, ...]
    sizes: tuple[int, ...]
    limit_bytes: int

    @classmethod
    def of(cls, name: str, data: Data) -> "Scenario":
        room = 1.5 if name == "evict" else 10
        return cls(name, tuple(data.urls), tuple(map(len, data.content.values())), data.room_bytes(room))

    def prepare(self, root: Path) -> None:
        """What is there before the fill begins."""
        tier = self._tier(root)
        if self.name == "evict":
            self._fill(tier, shard_of(self.urls[1], None))
        elif self.name == "take over":
            self._fill(tier, shard_of(self.urls[0], None), stop_at=self.sizes[0] // 2)

    def run(self, root: Path, kill_at: int | None = None) -> int:
        """Fill the first shard; with a kill in front of change `kill_at`. Returns how many there were."""
        changes = _Changes(root, kill_at)
        self._fill(self._tier(root), shard_of(self.urls[0], None))
        return changes.count

    def _tier(self, root: Path) -> Tier:
        """One that doesn't tend itself by the clock: how many changes there are must not depend on it."""
        return Tier(root, self.limit_bytes, enforce_seconds=math.inf)

    def _fill(self, tier: Tier, shard: Shard, stop_at: int | None = None) -> None:
        stop = threading.Event()
        part = tier.claim(shard.digest)
        if part is None:
            raise RuntimeError(f"{shard.name} can't be claimed")
        origin = _InPieces(open_origin(shard.url, options=QUICK, stop=stop), stop, stop_at)
        fill(part, shard, lambda: origin, next_use=lambda: 0.0, stop=stop)


class _InPieces:
    """An origin whose bytes come in equal pieces, however the network cut them, so that runs can be compared.

    Args:
        stop: set when `stop_at` bytes have come: the fill leaves a part of about that length.
    """

    def __init__(self, origin: Origin, stop: threading.Event, stop_at: int | None):
        self.url = origin.url
        self._origin, self._stop, self._stop_at = origin, stop, stop_at
        self._stream: Stream | None = None
        self.version = Version()

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        self._stream = self._origin.open(start, expected)
        self.version = self._stream.version
        return self

    def chunks(self) -> Iterator[bytes]:
        assert self._stream is not None
        come, waiting = 0, b""
        for chunk in self._stream.chunks():
            waiting += chunk
            while len(waiting) >= _PIECE_BYTES:
                come += _PIECE_BYTES
                if self._stop_at is not None and come >= self._stop_at:
                    self._stop.set()
                yield waiting[:_PIECE_BYTES]
                waiting = waiting[_PIECE_BYTES:]
        yield waiting

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class _Changes:
    """Counts what this process changes below a directory, and kills it in front of number `kill_at`."""

    def __init__(self, root: Path, kill_at: int | None):
        self.count = 0
        self._root, self._kill_at = str(root), kill_at
        sys.addaudithook(self._audit)
        for name in ("write", "pwrite"):
            setattr(os, name, self._counting(getattr(os, name)))
        Path.write_text = _write_text  # type: ignore[method-assign]

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            changes = isinstance(flags, int) and flags & (os.O_CREAT | os.O_TRUNC)
            if changes and self._is_ours(path):
                self._step()
        elif event in _CHANGING:
            # A name that is relative to an open directory (rmtree) has its place only there.
            folder = args[-1] if event != "os.truncate" else -1
            if folder >= 0 or any(self._is_ours(args[place]) for place in _CHANGING[event]):
                self._step()

    def _counting(self, function: Callable[..., int]) -> Callable[..., int]:
        def counted(descriptor: int, *args: Any) -> int:
            if self._is_ours(f"/proc/self/fd/{descriptor}", follow=True):
                self._step()
            return function(descriptor, *args)

        return counted

    def _is_ours(self, path: Any, follow: bool = False) -> bool:
        if isinstance(path, int):
            path, follow = f"/proc/self/fd/{path}", True
        name = os.fsdecode(path)
        if follow:
            name = os.readlink(name)
        return name.startswith(f"{self._root}/")

    def _step(self) -> None:
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def _write_text(path: Path, text: str) -> int:
    """As pathlib's, by calls that are counted."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        return os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def why_not_counted() -> str:
    return why_no_strace()


def count_with_strace(scenario: Scenario, place: Path) -> int:
    """How many changes strace sees in the same scenario, run in a process of its own."""
    place.mkdir()
    root, log = place / "tier", place / "log"
    scenario.prepare(root)
    job = json.dumps([scenario.name, scenario.urls, scenario.sizes, scenario.limit_bytes, str(root)])
    command = ["strace", "-f", "-qq", "-y", "-s", "0", "-o", str(log), "-e", f"trace={_CALLS}"]
    command += [sys.executable, "-m", "tests.faults.steps", job]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return sum(_is_change(line, str(root)) for line in log.read_text().splitlines())


def _is_change(line: str, root: str) -> bool:
    found = re.match(r"\d+ +(\w+)\((.*)", line)
    if found is None or f"{root}/" not in line:
        return False
    call, rest = found.groups()
    return "O_CREAT" in rest or "O_TRUNC" in rest if call in {"open", "openat"} else True


if __name__ == "__main__":
    name, urls, sizes, limit, root = json.loads(sys.argv[1])
    Scenario(name, tuple(urls), tuple(sizes), limit).run(Path(root))
