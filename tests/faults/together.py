"""Rows 14, 15 and 17: many processes at once, without locks, without room."""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from streamload.cache import memory
from tests.faults.data import Data
from tests.faults.disk import check_goes_on
from tests.faults.oracle import Attempt, DiskWatch
from tests.faults.readers import PATIENT, Reading, read_in_child
from tests.faults.rows import Row
from tests.support.kills import Child, Stage


def same_cold_shard(attempt: Attempt) -> None:
    """Many processes want the same shard at the same moment: each of its bytes is asked for once."""
    data = attempt.borrow(attempt.seed, spawn=True, counts=(60,))
    processes = 4 if attempt.short else 16
    name = data.paths[0].name
    before = len(data.server.ranges(name))
    gate, opener = os.pipe()

    def work(stage: Stage) -> Any:
        os.close(opener)
        os.read(gate, 1)  # until the last of those who may open it has closed it
        began = time.monotonic()
        result = read_in_child(Reading(attempt.root, data.shards, origin=PATIENT))
        return [result, began, time.monotonic()]

    with ExitStack() as stack:
        children = [stack.enter_context(Child(work)) for _ in range(processes)]
        os.close(opener)
        os.close(gate)
        results = [child.finish(60) for child in children]
    for result, _, _ in results:
        attempt.check_no_error(result["error"])
        attempt.check_all(data.differences(result["seen"]))
    ranges = sorted(data.server.ranges(name)[before:])
    at = 0
    for begin, stop in ranges:
        attempt.check("N", begin == at, f"bytes asked for twice or never: {ranges}")
        at = stop
    attempt.check("N", at == data.largest_bytes, f"{at} bytes of {data.largest_bytes}")
    first_end = min(ended for _, _, ended in results)
    attempt.happened["processes"] += sum(began < first_end for _, began, _ in results)


def useless_locks(attempt: Attempt) -> None:
    """flock says yes to everybody, as on some network file systems; in memory it holds, as always."""
    data = attempt.borrow(attempt.seed, spawn=True)

    def work(first: int) -> Callable[[Stage], Any]:
        def reads(stage: Stage) -> Any:
            asked, flock = 0, fcntl.flock

            def yes(descriptor: int, operation: int) -> None:
                nonlocal asked
                if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(memory.PLACE):
                    flock(descriptor, operation)
                else:
                    asked += 1

            fcntl.flock = yes
            shards = [*data.shards[first:], *data.shards[:first]]
            return [read_in_child(Reading(attempt.root, shards)), asked]

        return reads

    with ExitStack() as stack:
        children = [stack.enter_context(Child(work(first % 2))) for first in range(4)]
        results = [child.finish(60) for child in children]
    for result, asked in results:
        attempt.happened["locks that were none"] += asked
        attempt.check_no_error(result["error"])
        attempt.check_all(data.differences(result["seen"]))
    attempt.check_all(data.published_differences(attempt.root))


def little_room(attempt: Attempt) -> None:
    """Eight readers in a tier for two shards; or a tier that is smaller than any shard."""
    data = attempt.borrow(attempt.seed, spawn=True)
    if attempt.variant == "less than one shard":
        _no_room(attempt, data)
        return
    limit = data.room_bytes(2)
    readers = 3 if attempt.short else 8

    def work(first: int) -> Callable[[Stage], Any]:
        shards = [*data.shards[first:], *data.shards[:first]]
        return lambda stage: read_in_child(Reading(attempt.root, shards, limit))

    with ExitStack() as stack:
        watch = stack.enter_context(DiskWatch(attempt.root))
        children = [stack.enter_context(Child(work(n % len(data.shards)))) for n in range(readers)]
        results = [child.finish(100) for child in children]
    watch.check(attempt, limit)
    for result in results:
        attempt.check_no_error(result["error"])
        attempt.check_all(data.differences(result["seen"]))
    attempt.happened["evictions"] += sum(result["counts"]["shards_evicted"] for result in results)


def _no_room(attempt: Attempt, data: Data) -> None:
    limit = attempt.rng.randrange(4096, data.largest_bytes // 2)
    with DiskWatch(attempt.root) as watch:
        result = read_in_child(Reading(attempt.root, data.shards, limit, no_room_seconds=0.2))
    watch.check(attempt, limit)
    attempt.happened["too small a tier"] += 1
    check_goes_on(attempt, data, result)


ROWS = [
    Row(
        14,
        "cold together",
        "16 processes want the same cold shard at the same moment",
        "NDB",
        "Each byte is asked for once, whatever the number of processes",
        same_cold_shard,
        count=60,
        short=2,
    ),
    Row(
        15,
        "locks that do nothing",
        "`flock` that says yes to everybody",
        "NDBC",
        "Locks only save bandwidth: without them nothing is wrong",
        useless_locks,
        count=60,
        short=2,
    ),
    Row(
        17,
        "little room",
        "8 readers with a limit of 2 shards; a limit under 1 shard",
        "NDBK",
        "Eight readers share room for two shards, within the limit, without a deadlock",
        little_room,
        count=40,
        variants=("2 shards", "less than one shard"),
    ),
]
