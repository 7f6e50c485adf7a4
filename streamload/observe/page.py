"""The page that a rank publishes about itself: its numbers at one moment, for exporters, `top` and reports.

A page holds names of sources, cut and without secrets, and numbers; never keys, URLs or anything else of the
data, but for the name of the file of a slow shard in a verdict. Its file is in `runs/` of the tier, beside
the rank's demand file: the rank holds a lock on it and writes it in place, about once a second. Readers show
no page whose lock is gone, so what a killed rank published vanishes with it; the next run deletes the file.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from streamload.cache import demand
from streamload.cache.locks import FileLock, is_locked, live_file, remove_if_unlocked, remove_live_file
from streamload.descriptors import Descriptor
from streamload.metrics.counters import Snapshot
from streamload.metrics.registry import BUCKET_NS, BUCKETS, BY_NAME, COUNTERS, ROWS
from streamload.urls import redact_text

logger = logging.getLogger("streamload")

Labels = tuple[str, ...]

FORMAT = 1
MOST_SOURCES = 256
"""Sources with values of their own on a page; those after them are counted in the rank's sums only."""
MOST_BYTES = 1 << 20
_NAME_LENGTH = 64
_SECONDS = 1e9
_HEAD_BYTES = 16
"""Length and checksum of the text."""
_RESERVED_BYTES = 8 << 10
"""Taken at once, so that a disk that fills up later still takes the page."""
_LOOKS, _LOOK_SECONDS = 5, 0.002
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Instant(NamedTuple):
    """A moment.

    Attributes:
        boot: of the machine; two moments of one boot are compared by `monotonic_ns`, which no one sets.
        monotonic_ns: since then.
        unix: seconds since 1970, as the machine believes.
    """

    boot: str
    monotonic_ns: int
    unix: float

    def seconds_since(self, earlier: Instant) -> float:
        """Seconds since an earlier moment; 0 if it seems to be later."""
        if self.boot == earlier.boot:
            return max(0.0, (self.monotonic_ns - earlier.monotonic_ns) / _SECONDS)
        return max(0.0, self.unix - earlier.unix)


@dataclass(frozen=True, slots=True)
class RunPage:
    """One rank of a run, as it published itself last.

    Attributes:
        run: the name of the run, the same for the ranks of a node; it means nothing.
        rank, world_size: the rank among how many.
        pid: of its process.
        host: its host.
        began: when the loader was made.
        written: when the page was written: about once a second, by next() and while that waits for data. In a
            long step of the training itself nothing is written.
        workers: its worker processes; 0: the training process makes batches.
        sources: as they are named here: at most 256, of at most 64 printable characters, all different.
        counters: by the names of COUNTERS, those that aren't 0.
        wait_buckets: the histogram of data waits: int[24], not cumulative (registry.BUCKET_NS).
        gauges: by the names of GIVEN, and by labels.
        verdict: what limits the training, in a sentence; "": it doesn't wait.
        run_verdict: the same, over the whole run.
        alerts: the alerts that are raised: their names and messages.
        reader: when the page was read.
    """

    run: str
    rank: int
    world_size: int
    pid: int
    host: str
    began: Instant
    written: Instant
    workers: int = 0
    sources: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    wait_buckets: tuple[int, ...] = (0,) * BUCKETS
    gauges: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    verdict: str = ""
    run_verdict: str = ""
    alerts: Mapping[str, str] = field(default_factory=dict)
    reader: Instant | None = None

    @property
    def age_seconds(self) -> float:
        """Age of the page when it was read."""
        return 0.0 if self.reader is None else self.reader.seconds_since(self.written)

    @property
    def run_seconds(self) -> float:
        """Age of the loader when the page was written."""
        return self.written.seconds_since(self.began)

    @property
    def still_seconds(self) -> float:
        """Time since the training loop moved when the page was read; 0 between epochs."""
        still = self.gauge("still_seconds")
        return still + self.age_seconds if still else 0.0

    def gauge(self, name: str, *labels: str) -> float | None:
        """One value that was given; None: it wasn't."""
        return self.gauges.get(name, {}).get(labels)

    def cumulative_buckets(self) -> list[tuple[float, int]]:
        """The histogram of data waits as exporters want it: upper bounds in seconds, and waits up to them."""
        bounds = [(BUCKET_NS << place) / _SECONDS for place in range(BUCKETS - 1)]
        sums = np.cumsum(self.wait_buckets).tolist()
        return list(zip([*bounds, float("inf")], sums, strict=True))

    def snapshot(self) -> Snapshot:
        """The counters as a Snapshot, of which differences can be taken."""
        row = [self.counters.get(name, 0) for name in COUNTERS]
        samples, waits = (self.gauges.get(name, {}) for name in ("samples", "source_wait_seconds"))
        by_source = {
            name: (int(n), round(waits.get((name,), 0.0) * _SECONDS)) for (name,), n in samples.items()
        }
        return Snapshot.of(np.array([[*row, *self.wait_buckets]], np.int64), by_source)

    def encode(self) -> bytes:
        """The page as bytes, which `decode` knows for whole ones."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reader"}
        values["counters"] = {name: n for name, n in self.counters.items() if n}
        values["gauges"] = {
            name: [[*labels, round(value, 9)] for labels, value in by_label.items()]
            for name, by_label in self.gauges.items()
        }
        text = json.dumps({"format": FORMAT, **values}, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + xxhash.xxh3_64_digest(text) + text

    @classmethod
    def decode(cls, content: bytes, reader: Instant) -> RunPage | None:
        """The page in a file; None: it is being written, is damaged, or is of another version.

        Args:
            content: of the file, which may have more after the page.
            reader: when it was read.
        """
        length = int.from_bytes(content[:8], "little")
        text = content[_HEAD_BYTES : _HEAD_BYTES + length]
        if not length or len(text) != length or content[8:_HEAD_BYTES] != xxhash.xxh3_64_digest(text):
            return None
        try:
            return _parsed(json.loads(text), reader)
        except (ValueError, TypeError, KeyError):
            return None


def _parsed(values: dict[str, Any], reader: Instant) -> RunPage:
    """A page from JSON; names that this version doesn't know are left out."""
    if values.pop("format") != FORMAT:
        raise ValueError("a page of another version")
    gauges = {
        name: {tuple(labels): float(value) for *labels, value in rows}
        for name, rows in values["gauges"].items()
        if name in BY_NAME
    }
    plain = {f.name: values[f.name] for f in fields(RunPage) if f.name in values}
    return RunPage(
        **plain
        | {
            "began": Instant(*values["began"]),
            "written": Instant(*values["written"]),
            "sources": tuple(values["sources"]),
            "counters": {name: int(n) for name, n in values["counters"].items() if name in ROWS},
            "wait_buckets": _buckets(values["wait_buckets"]),
            "gauges": gauges,
            "reader": reader,
        }
    )


def _buckets(counts: Iterable[int]) -> tuple[int, ...]:
    buckets = tuple(int(n) for n in counts)
    if len(buckets) != BUCKETS:
        raise ValueError(f"a histogram of {len(buckets)} buckets")
    return buckets


def names_of_sources(names: Iterable[str]) -> tuple[str, ...]:
    """The sources' names as a page has them: short, printable, without secrets, and all different."""
    texts = map(_short, list(names)[:MOST_SOURCES])
    return distinct(texts, lambda text, number: f"{text[: _NAME_LENGTH - 5]}~{number}")


def distinct(names: Iterable[str], numbered: Callable[[str, int], str]) -> tuple[str, ...]:
    """These names, all different: `numbered` makes another of one that is there already."""
    shown: dict[str, None] = {}
    for name in names:
        number, unique = 1, name
        while unique in shown:
            number += 1
            unique = numbered(name, number)
        shown[unique] = None
    return tuple(shown)


def _short(name: str) -> str:
    text = "".join(c if c.isprintable() else "�" for c in redact_text(name))
    return text if len(text) <= _NAME_LENGTH else f"{text[: _NAME_LENGTH - 1]}…"


def as_dict(page: RunPage) -> dict[str, Any]:
    """A page as plain values, for JSON; labels are joined by commas."""
    values = asdict(page)
    values["gauges"] = {
        name: {",".join(labels): value for labels, value in by_label.items()}
        for name, by_label in page.gauges.items()
    }
    return values | {"age_seconds": page.age_seconds, "still_seconds": page.still_seconds}


class PageFile:
    """The file of a page, which lives as long as its process; a forked child doesn't have it.

    A disk that doesn't take it is logged once, and nothing is published; that harms nothing else.

    Args:
        root: of the tier.

    Attributes:
        path: of the file.
    """

    def __init__(self, root: Path):
        self.path = root / "runs"
        self._lock: FileLock | None = None
        self._is_logged = False
        try:
            for path in files(root):
                with contextlib.suppress(OSError):
                    remove_if_unlocked(path)
            self.path, self._lock = live_file(root / "runs", ".metrics")
            _reserve(self._lock.file.number)
        except OSError as exc:
            self.close()
            self._log(exc)

    def write(self, page: RunPage) -> None:
        """Publish a page in place of the last one."""
        if self._lock is None:
            return
        content = page.encode()
        try:
            if len(content) <= MOST_BYTES and os.pwrite(self._lock.file.number, content, 0) == len(content):
                self._is_logged = False
        except OSError as exc:
            self._log(exc)

    def close(self) -> None:
        """Delete the file. Idempotent."""
        if self._lock is not None:
            remove_live_file(self.path, self._lock)
            self._lock = None

    def _log(self, error: OSError) -> None:
        if not self._is_logged:
            self._is_logged = True
            logger.warning(
                "this run can't be seen by `streamload top` and exporters, as its page can't be written: "
                "%s: %s; the training goes on",
                *(self.path, error.strerror or error),
            )


def read_runs(roots: Iterable[Path | str]) -> list[RunPage]:
    """The pages of all live ranks, by run and rank; about 0.1 ms each.

    A page says how old it is (`age_seconds`). Pages of killed processes aren't among them.

    Args:
        roots: of tiers: cache directories, and the one in memory (tier.memory_root). Those that don't
            exist, or aren't tiers, have none.
    """
    pages = (page for root in dict.fromkeys(map(Path, roots)) for page in _read(root))
    return sorted(pages, key=lambda page: (page.run, page.rank, page.pid))


def files(root: Path) -> list[Path]:
    """The files of pages in a tier, of live or dead processes."""
    try:
        return sorted(demand.pages(root / "runs"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def now() -> Instant:
    """This moment, on this machine."""
    return Instant(_boot(), time.monotonic_ns(), time.time())


@functools.cache
def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _read(root: Path) -> Iterator[RunPage]:
    for path in files(root):
        with contextlib.suppress(OSError):  # deleted meanwhile, or another user's
            if is_locked(path, shared=True):  # by the process that writes it
                page = _page_in(path)
                if page is not None:
                    yield page


def _page_in(path: Path) -> RunPage | None:
    """The page in a file; looks again while it is being written. None: it isn't written yet."""
    with Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        for _ in range(_LOOKS):
            page = RunPage.decode(os.pread(file.number, MOST_BYTES, 0), now())
            if page is not None:
                return page
            time.sleep(_LOOK_SECONDS)
    return None


def _reserve(file: int) -> None:
    """Take the page's space, where the file system can."""
    try:
        os.posix_fallocate(file, 0, _RESERVED_BYTES)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
