"""Rows 4 and 5: disks that are full or broken."""

import contextlib
import encodings.idna  # noqa: F401 -- sockets load it late, when a process may not be allowed to read it any more
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from streamload.cache.shard import shard_of
from tests.faults.data import Data
from tests.faults.oracle import Attempt
from tests.faults.readers import Reading, read_in_child
from tests.faults.rows import Row
from tests.support.disks import (
    failing_calls,
    limited_file_size,
    read_only,
    resize_disk,
    small_disk,
    why_no_small_disk,
    why_no_strace,
)
from tests.support.kills import Child, Stage

ROOT = Path(__file__).resolve().parents[2]
_NOBODY = 65534


def check_goes_on(attempt: Attempt, data: Data, result: dict[str, Any], *, from_start: bool = False) -> None:
    """What is promised when a tier fails in a run: reading goes on, by range or through memory.

    Args:
        from_start: it may be of no use from the start; then it is an error that says so, before any sample.
    """
    if from_start and result["error"] is not None and not result["seen"]:
        attempt.check_error(result["error"], "CacheError", str(attempt.place))
        return
    attempt.check_no_error(result["error"])
    attempt.check_all(data.differences(result["seen"]))


def full(attempt: Attempt) -> None:
    """A disk without bytes, without inodes, or with files that may not grow; and then there is room."""
    data = attempt.borrow(attempt.seed, spawn=True)
    reading = Reading(attempt.root, data.shards, no_room_seconds=0.2)
    size = attempt.rng.randrange(16 << 10, int(0.9 * data.total_bytes))
    inodes = attempt.rng.randrange(2, 24) if attempt.variant == "inodes" else None
    size = size if attempt.variant == "bytes" else 1 << 30

    def on_a_small_disk(stage: Stage) -> Any:
        small_disk(attempt.root, size, inodes)
        first = read_in_child(reading)
        filled = os.statvfs(attempt.root)
        resize_disk(attempt.root, 1 << 30, 1 << 20)
        again = Attempt(attempt.seed, attempt.variant, attempt.place, attempt.short, attempt.borrow)
        again.check_next_start(data)
        return [first, filled.f_bavail * filled.f_frsize, filled.f_favail, again.wrong]

    def with_small_files(stage: Stage) -> Any:
        with limited_file_size(min(size, attempt.rng.randrange(4 << 10, data.largest_bytes // 2))):
            first = read_in_child(reading)
        again = Attempt(attempt.seed, attempt.variant, attempt.place, attempt.short, attempt.borrow)
        again.check_next_start(data)
        return [first, 0, 0, again.wrong]

    with Child(with_small_files if attempt.variant == "file size" else on_a_small_disk) as child:
        first, _, _, wrong = child.finish(60)
    attempt.happened[attempt.variant] += 1  # by arithmetic: what is read is more than there is room for
    check_goes_on(attempt, data, first, from_start=True)
    attempt.check_all(tuple(found) for found in wrong)


def broken(attempt: Attempt) -> None:
    """Calls on the tier's files fail; or the tier is made read-only, or taken away, while it is in use."""
    data = attempt.borrow(attempt.seed, spawn=True)
    {
        "EIO on read": _eio_on_read,
        "EIO on read of an index": _eio_on_read,
        "EIO on write": _eio_on_write,
        "EIO on close": _eio_on_close,
        "read-only from the start": _read_only_disk,
        "read-only in a run": _read_only_in_a_run,
        "removed in a run": _removed_in_a_run,
    }[attempt.variant](attempt, data)


def _eio_on_read(attempt: Attempt, data: Data) -> None:
    read_in_child(Reading(attempt.root, data.shards))
    victim = attempt.rng.choice(data.shards)
    in_index = attempt.variant.endswith("index")
    path = attempt.root / "shards" / victim.digest / ("index" if in_index else "data")
    when = f"{attempt.rng.randrange(1, 3 if in_index else 20)}"
    result, failed = _under_strace(attempt, data, "pread64", "EIO", when, path)
    attempt.happened[attempt.variant] += failed
    attempt.check_no_error(result["error"])
    attempt.check_all(data.differences(result["seen"]))
    attempt.check("N", result["counts"]["origin_bytes"] > 0, "nothing was fetched again")
    attempt.check_next_start(data)


def _eio_on_write(attempt: Attempt, data: Data) -> None:
    when = f"{attempt.rng.randrange(2, 12)}"
    result, failed = _under_strace(attempt, data, "write", "EIO", when, None)
    attempt.happened[attempt.variant] += failed
    check_goes_on(attempt, data, result)
    attempt.check_next_start(data)


def _under_strace(
    attempt: Attempt, data: Data, calls: str, error: str, when: str, path: Path | None
) -> tuple[dict[str, Any], int]:
    """Read all in a process some of whose calls fail; its result, and how many failed."""
    log, out = attempt.place / "strace", attempt.place / "result"
    job = json.dumps([str(attempt.root), data.urls, str(out)])
    command = [sys.executable, "-m", "tests.faults.disk", job]
    command = failing_calls(command, calls, error, when=when, path=path, log=log)
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return json.loads(out.read_text()), log.read_text().count("(INJECTED)")


def _eio_on_close(attempt: Attempt, data: Data) -> None:
    """A close that reports what a write could not: it has closed, and says EIO."""
    fails_at = attempt.rng.randrange(1, len(data.shards))

    def work(stage: Stage) -> Any:
        close, closed = os.close, 0

        def failing(descriptor: int) -> None:
            nonlocal closed
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            writes = name.endswith("/data") and "/parts/" in name and _is_for_writing(descriptor)
            close(descriptor)
            if writes:
                closed += 1
                if closed == fails_at:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.close = failing  # type: ignore[assignment]
        result = read_in_child(Reading(attempt.root, data.shards))
        return [result, closed]

    with Child(work) as child:
        result, closed = child.finish(60)
    attempt.happened[attempt.variant] += closed >= fails_at
    check_goes_on(attempt, data, result)
    attempt.check_next_start(data)


def _is_for_writing(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


def _read_only_disk(attempt: Attempt, data: Data) -> None:
    def work(stage: Stage) -> Any:
        small_disk(attempt.root, 1 << 30)
        read_in_child(Reading(attempt.root, data.shards[:3]))
        read_only(attempt.root)
        return read_in_child(Reading(attempt.root, data.shards))

    with Child(work) as child:
        result = child.finish(60)
    attempt.happened[attempt.variant] += 1
    check_goes_on(attempt, data, result, from_start=True)


def _read_only_in_a_run(attempt: Attempt, data: Data) -> None:
    """Every directory of the tier loses its write permission under a process that isn't root."""
    at = attempt.rng.randrange(1, 60)

    def close_the_doors(samples: int) -> None:
        if samples == at:
            for path in [path for path, _, _ in os.walk(attempt.root)]:
                with contextlib.suppress(FileNotFoundError):  # fillers go on meanwhile
                    os.chmod(path, 0o500)

    def work(stage: Stage) -> Any:
        attempt.place.chmod(0o777)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        result = read_in_child(Reading(attempt.root, data.shards, between=close_the_doors))
        for path in [attempt.root, *attempt.root.glob("*"), *attempt.root.glob("*/*")]:
            if path.is_dir():
                path.chmod(0o700)
        again = Attempt(attempt.seed, attempt.variant, attempt.place, attempt.short, attempt.borrow)
        again.check_next_start(data)
        return [result, again.wrong]

    with Child(work) as child:
        result, wrong = child.finish(60)
    attempt.happened[attempt.variant] += 1
    check_goes_on(attempt, data, result)
    attempt.check_all(tuple(found) for found in wrong)


def _removed_in_a_run(attempt: Attempt, data: Data) -> None:
    at = attempt.rng.randrange(1, 100)

    def remove(samples: int) -> None:
        if samples == at:
            shutil.rmtree(attempt.root, ignore_errors=True)
            attempt.happened[attempt.variant] += 1

    result = read_in_child(Reading(attempt.root, data.shards, between=remove))
    check_goes_on(attempt, data, result)
    shutil.rmtree(attempt.root, ignore_errors=True)  # what a filler still wrote meanwhile is no tier
    attempt.check_next_start(data)


def _needs_disk_and_strace() -> str:
    return why_no_small_disk() or why_no_strace()


ROWS = [
    Row(
        4,
        "disk full",
        "disk full at byte k; out of inodes; files may not grow",
        "NDBTE",
        "Reading goes on without the disk; once there is room, the same tier is used again",
        full,
        count=150,
        variants=("bytes", "inodes", "file size"),
        needs=why_no_small_disk,
    ),
    Row(
        5,
        "disk broken",
        "EIO on read, on write, on close; the tier made read-only or removed in a run",
        "NBTE",
        "What can't be read is fetched again, and what can't be written isn't kept: reading goes on",
        broken,
        count=120,
        variants=(
            "EIO on read",
            "EIO on read of an index",
            "EIO on write",
            "EIO on close",
            "read-only from the start",
            "read-only in a run",
            "removed in a run",
        ),
        needs=_needs_disk_and_strace,
    ),
]

if __name__ == "__main__":
    root, urls, out = json.loads(sys.argv[1])
    found = read_in_child(Reading(Path(root), [shard_of(url, None) for url in urls]))
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(descriptor, json.dumps(found).encode(), 0)  # not by write, which fails here
