"""What must hold, by letter: one attempt's findings, a watch over the disk, and a look at what was left.

N nothing lost · D nothing doubled · B byte-identical · T no temporary files or locks left after the next
start · K disk use never over the limit · C every published shard verifies offline · L no process, thread,
descriptor or shared memory left, and an end in time · E one typed error that names the shard and the cause ·
S no secret, and no request, goes where it isn't meant to
"""

import contextlib
import os
import random
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import process_tree
from streamload.cache.directory import Directory
from streamload.cache.locks import usage_of
from streamload.cache.tier import Tier
from streamload.descriptors import Descriptor
from streamload.errors import CacheCorrupt
from streamload.metrics import Counters
from streamload.observe.page import PageFile
from streamload.shards.index import IndexReader
from tests.faults.data import Data, Truth
from tests.faults.readers import Hang, Reading, read

LETTERS = {
    "N": "nothing lost",
    "D": "nothing doubled",
    "B": "byte-identical",
    "T": "no temporary files or locks left after the next start",
    "K": "disk use never over the limit",
    "C": "every published shard verifies offline",
    "L": "nothing left running, and an end in time",
    "E": "one typed error that names shard and cause",
    "S": "no secret, and no request, goes where it isn't meant to",
}
_DIGEST = re.compile(r"[0-9a-f]{32}")
_ROOMS = {"parts", "shards", "bare", "gone", "columns", "runs", "trash"}


@dataclass
class Attempt:
    """One attempt at a row: what it may use, and what it found.

    Attributes:
        variant: which form of the fault it is to meet.
        place: an empty directory, removed afterwards.
        short: whether it belongs to the tests, where everything is small.
        happened: how often the fault happened, by kind; without any the attempt fails.
        killed_in: the states of a shard's life that each SIGKILL hit.
        wrong: what did not hold: (letter, what).
    """

    seed: int
    variant: str
    place: Path
    short: bool
    borrow: Callable[..., Data]
    happened: Counter[str] = field(default_factory=Counter)
    killed_in: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} {self.variant}")

    @property
    def root(self) -> Path:
        """Where the tier of this attempt is."""
        return self.place / "tier"

    def check(self, letter: str, holds: bool, otherwise: str) -> None:
        """Note what is wrong, if it doesn't hold."""
        if not holds:
            self.wrong.append((letter, otherwise))

    def check_seconds(self, seconds: float, limit: float, what: str) -> None:
        """L: something took no longer than it may. Not in the tests, which measure no time."""
        self.check("L", self.short or seconds <= limit, f"{what} {seconds:.1f} s, not {limit:g}")

    def check_all(self, wrong: Iterable[tuple[str, str]]) -> None:
        self.wrong += wrong

    def check_error(self, error: dict[str, Any] | None, kinds: str, names: str = "") -> None:
        """E: an error of one of some kinds ("OriginError|ShardError") came, and names what it is about."""
        if error is None:
            self.check("E", False, "there was no error")
        elif "Hang" in error["kinds"]:
            self.check("L", False, error["text"])
        else:
            typed = set(kinds.split("|")) & set(error["kinds"])
            said = f"{error['kinds'][0]}: {error['text'][:300]}"
            self.check("E", bool(typed), f"not a {kinds}: {said}")
            self.check("E", names in error["text"], f"it doesn't name {names}: {said}")

    def check_no_error(self, error: dict[str, Any] | None) -> None:
        if error is not None:
            letter = "L" if "Hang" in error["kinds"] else "N"
            self.check(letter, False, f"{error['kinds'][0]}: {error['text'][:400]}")

    def check_note(self, root: Path) -> None:
        """K: what is noted as the most that a tier takes, by which room is granted, is no less."""
        with Descriptor.open(root / "lock", os.O_RDONLY) as lock:
            noted = usage_of(lock)
        used_bytes = Directory(root, Counters()).used_bytes
        self.check(
            "K", noted is None or used_bytes <= noted.total, f"{used_bytes:,} bytes taken, {noted} noted"
        )

    def check_next_start(self, data: Truth, limit_bytes: int = 1 << 30, root: Path | None = None) -> None:
        """T, N, B, C: a new reader gets everything, and after the next start nothing is there but shards."""
        root = root or self.root
        found = read(Reading(root, data.shards, limit_bytes, open_origin=data.open_origin))
        if found.error is not None:
            self.check("L" if isinstance(found.error, Hang) else "N", False, f"next start: {found.error!r}")
        self.check_all(data.differences(found.seen))
        self.check_all(data.published_differences(root))
        # As each training begins: what was deleted under a reader is still there, and a killed rank's page.
        Tier(root, limit_bytes).sweep()
        PageFile(root).close()
        self.check_all(garbage(root))


def garbage(root: Path) -> list[tuple[str, str]]:
    """T: what lies in a tier that nobody uses and doesn't belong there.

    A part with samples of a shard that isn't published does: a reader may be through with a shard before its
    fill has come to the end, and the next start goes on from there. So does a bare index, by which samples of
    such a shard are read from its origin.
    """
    wrong = []
    belongs = _ROOMS | {"tier.json", "lock"}
    wrong += [("T", f"{name} was left") for name in sorted(os.listdir(root)) if name not in belongs]
    for room in sorted(_ROOMS - {"shards"}):
        if (root / room).is_dir():
            left = [entry for entry in os.scandir(root / room) if not _is_of_use(root, room, entry.name)]
            wrong += [("T", f"{room}/{entry.name} was left") for entry in left]
    for shard in os.scandir(root / "shards"):
        if not _DIGEST.fullmatch(shard.name):
            wrong.append(("T", f"shards/{shard.name} was left"))
        elif extra := {file.name for file in os.scandir(shard.path)} - {"data", "index", "names"}:
            wrong.append(("T", f"a published shard holds {sorted(extra)}"))
    return wrong


def _is_of_use(root: Path, room: str, name: str) -> bool:
    if room not in {"parts", "bare"} or (root / "shards" / name[:32]).exists():
        return False
    try:
        with IndexReader(root / room / name) as index:
            return index.is_complete if room == "bare" else index.count > 0
    except (OSError, CacheCorrupt):
        return False


class DiskWatch:
    """K: looks every 10 ms at all that a tier takes: blocks of its files, and of unlinked ones still open.

    Args:
        root: of the tier; the open files are those of this process and all that descend from it.
    """

    def __init__(self, root: Path, every_seconds: float = 0.01):
        self.peak_bytes = 0
        self.samples = 0
        self._root, self._every_seconds = root, every_seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="disk-watch")

    def __enter__(self) -> "DiskWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def check(self, attempt: Attempt, limit_bytes: int) -> None:
        over = self.peak_bytes - limit_bytes
        attempt.check("K", over <= 0, f"{over:,} bytes over the limit of {limit_bytes:,}")

    def _watch(self) -> None:
        while not self._end.wait(self._every_seconds):
            self.peak_bytes = max(self.peak_bytes, taken_bytes(self._root, process_tree.pids()))
            self.samples += 1


def taken_bytes(root: Path, pids: Iterable[int]) -> int:
    """What the files below a directory take on disk now, with those that are unlinked but open."""
    files: dict[tuple[int, int], int] = {}

    def count(path: str) -> None:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                files[status.st_dev, status.st_ino] = status.st_blocks * 512

    for path in _below(str(root)):
        count(path)
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                link = f"/proc/{pid}/fd/{descriptor}"
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if target.startswith(f"{root}/") and target.endswith(" (deleted)"):
                        count(link)
    return sum(files.values())


def _below(directory: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path)
        else:
            yield entry.path
