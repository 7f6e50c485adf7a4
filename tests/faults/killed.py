"""Rows 1 to 3: processes that fill are killed or stopped, at any moment, at each step, at each block."""

import contextlib
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamload.cache.garbage import clear
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt
from streamload.shards.index import IndexReader
from streamload.shards.samples import ShardScanner
from tests.faults import steps
from tests.faults.data import Data
from tests.faults.oracle import Attempt, DiskWatch
from tests.faults.readers import PATIENT, Reading, read_in_child
from tests.faults.rows import Row
from tests.faults.stages import state_of, tell_stages
from tests.support.kills import Child, ChildFailed, Hit, Moment, Stage, kill_loop

READERS = 4
_TRIES = 5
_FILLERS_BYTES_PER_SECOND = 4e6
"""Of each connection: a shard takes some 30 ms, so that kills find fills at all stages."""


def kills(attempt: Attempt) -> None:
    """Three readers work through a tier without room for all; a fourth is killed again and again."""
    data = attempt.borrow(attempt.seed, spawn=True, bytes_per_second_per_connection=_FILLERS_BYTES_PER_SECOND)
    limit, narrow = data.room_bytes(READERS), 2 * data.total_bytes // 3
    aim = state_of(attempt.variant)

    def reading(first: int) -> Reading:
        shards = [*data.shards[first:], *data.shards[:first]]
        return Reading(attempt.root, shards, limit)

    def victim(stage: Stage) -> Any:
        tell_stages(stage, data)
        return read_in_child(reading(0))

    def victim_in_little_room(stage: Stage) -> Any:
        tell_stages(stage, data)
        return read_in_child(replace(reading(0), limit_bytes=narrow))

    def again(moments: list[Moment]) -> Any:
        """What the others have filled goes, so that it fills again, with less room, so that it evicts."""
        clear(Tier(attempt.root, narrow))
        return kill_loop(victim_in_little_room, moments, after_kill=look)[1]

    def look(hit: Hit) -> None:
        if hit.stage is not None:
            attempt.happened["killed"] += 1
            attempt.killed_in[state_of(hit.stage)] += 1
        attempt.check_all(data.published_differences(attempt.root) if attempt.root.exists() else [])

    with ExitStack() as stack:
        others = [
            stack.enter_context(Child(lambda stage, first=first: read_in_child(reading(first))))
            for first in range(1, READERS)
        ]
        watch = stack.enter_context(DiskWatch(attempt.root))
        results = [kill_loop(victim, _moments(attempt), after_kill=look)[1]]
        while len(results) < _TRIES and not _hit(attempt, aim):  # it did not come there, or was through
            results.append(again(_moments(attempt, 0.5 ** len(results))))
        if not attempt.happened:  # where bytes come in large pieces, some stages are never seen
            results.append(again([Moment("claiming")]))
        results += [child.finish(60) for child in others]
    watch.check(attempt, limit)
    for result in results:
        attempt.check_no_error(result["error"])
        attempt.check_all(data.differences(result["seen"]))
    attempt.check_next_start(data, limit)


def _moments(attempt: Attempt, share: float = 1.0) -> list[Moment]:
    """Two kills for a variant: up to so many seconds after its stage was entered, or a share of that."""
    name = attempt.variant.partition(" ")[0]

    def late(seconds: float) -> float:
        return attempt.rng.uniform(0, share * seconds)

    if name == "taking":  # the first kill leaves the part that the second start takes over
        return [Moment("filling 1"), Moment("taking over", late(0.002))]
    longest = {
        "any": 0.15,
        "starting": 0.004,
        "claiming": 0.001,
        "filling": 0.01,
        "publishing": 0.0004,
        "evicting": 0.0006,
    }[name]
    stage = "" if name in {"any", "starting"} else attempt.variant
    return [Moment(stage, late(longest)) for _ in range(2)]


def _hit(attempt: Attempt, aim: str) -> bool:
    """Whether a kill has hit the state that it was aimed at."""
    return aim == "any" or aim in attempt.killed_in


def each_step(attempt: Attempt) -> None:
    """SIGKILL in front of each operation that changes the tier, one after the other, of one scenario."""
    data = attempt.borrow(attempt.seed, spawn=True)
    scenario = steps.Scenario.of(attempt.variant, data)
    number = 0
    while True:
        root = attempt.place / f"tier-{number}"
        scenario.prepare(root)
        with Child(lambda stage: _one_step(stage, data, scenario, root, number)) as child:  # noqa: B023
            child.join(60)
            ended = child.kill() is None and child.status == 0
        if child.status not in {0, -9}:
            raise ChildFailed(child.error)
        attempt.check_all(data.published_differences(root))
        attempt.check_note(root)
        attempt.check_next_start(data, scenario.limit_bytes, root)
        if ended:
            break
        attempt.happened[attempt.variant] += 1
        attempt.killed_in[state_of(child.killed_in or "")] += 1
        number += 1
    if not steps.why_not_counted():
        counted = steps.count_with_strace(scenario, attempt.place / "traced")
        attempt.check("L", counted == number, f"killed at {number} steps, strace counts {counted}")
        attempt.happened[f"{attempt.variant}, by strace"] += counted


def _one_step(stage: Stage, data: Data, scenario: steps.Scenario, root: Path, number: int) -> int:
    tell_stages(stage, data)
    return scenario.run(root, kill_at=number)


def filler_killed_at_a_block(attempt: Attempt) -> None:
    """Four readers follow a shard up to a block; its filler dies; one of them carries on."""
    _filler_lost_at_a_block(attempt, stopped=False)


def filler_stopped_at_a_block(attempt: Attempt) -> None:
    """The same with SIGSTOP: the filler holds all of its locks and does nothing."""
    _filler_lost_at_a_block(attempt, stopped=True)


def _filler_lost_at_a_block(attempt: Attempt, *, stopped: bool) -> None:
    data = attempt.borrow(attempt.seed, spawn=True, counts=(60,))
    shard, size = data.shards[0], data.largest_bytes
    name = data.paths[0].name
    blocks = size // 512
    stop = 512 * (attempt.seed * 37 % (blocks - 1) + 1)
    count, whole = _whole_samples(data, stop)
    before = len(data.server.ranges(name))
    data.server.stop_after((stop + 0.5) / size)  # a share of the file is rounded down to whole bytes
    # A dead filler is known at once; who gets no processor for a while must not count as a stopped one.
    reading = Reading(attempt.root, [shard], origin=PATIENT, stopped_seconds=2.0 if stopped else 20.0)

    def fills(stage: Stage) -> Any:
        tell_stages(stage, data)
        return read_in_child(reading)

    with ExitStack() as stack:
        stack.callback(data.server.go_on)
        filler = stack.enter_context(Child(fills))
        arrived = _wait_for_samples(attempt.root, shard.digest, count)
        readers = [stack.enter_context(Child(lambda stage: read_in_child(reading))) for _ in range(READERS)]
        attempt.check("L", arrived, f"the first {stop} bytes did not arrive")
        if stopped:
            filler.stop()
            attempt.happened["stopped"] += 1
        elif (hit := filler.kill()) is not None:
            attempt.happened["killed"] += 1
            attempt.killed_in[state_of(hit)] += 1
        data.server.go_on()
        for reader in readers:
            result = reader.finish(60)
            attempt.check_no_error(result["error"])
            attempt.check_all(data.differences(result["seen"]))
    again = data.server.ranges(name)[before:]
    attempt.check(
        "N", len(again) == 2 and again[1][0] >= whole, f"{whole} bytes were whole; asked for: {again}"
    )
    attempt.check_all(data.published_differences(attempt.root))


def _wait_for_samples(root: Path, digest: str, count: int) -> bool:
    """Wait until a part of a shard has begun, and holds so many samples."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for path in (root / "parts").glob(f"{digest}.*"):
            with contextlib.suppress(FileNotFoundError, CacheCorrupt), IndexReader(path) as index:
                if index.count >= count:
                    return True
        time.sleep(0.002)
    return False


def _whole_samples(data: Data, stop: int) -> tuple[int, int]:
    """How many samples are whole in the first `stop` bytes, and where the last of them ends."""
    entries = ShardScanner().feed(data.content[data.shards[0].digest][:stop])
    return len(entries), entries[-1].stop if entries else 0


ROWS = [
    Row(
        1,
        "killed at random",
        "SIGKILL of a filler at a random time, 4 processes on one tier",
        "NDBTKC",
        "A kill loses nothing that was verified and leaves nothing behind; readers beside it don't notice",
        kills,
        count=700,
        variants=(
            "any",
            "starting",
            *(f"filling {quarter}" for quarter in range(4)),
            "claiming",
            "publishing",
            "evicting",
            "taking over",
        ),
    ),
    Row(
        2,
        "killed at each step",
        "SIGKILL in front of each operation that changes the tier",
        "NBTCK",
        "There is no moment in a fill, a publish, an eviction or a take-over at which a kill does harm",
        each_step,
        count=15,
        short=1,
        variants=tuple(steps.SCENARIOS),
    ),
    Row(
        3,
        "filler killed",
        "the filler is killed at a block, 4 readers attached",
        "NB",
        "A reader takes over, and what was verified isn't fetched again",
        filler_killed_at_a_block,
        count=200,
        short=3,
    ),
    Row(
        3,
        "filler stopped",
        "the filler is stopped (SIGSTOP) at a block, 4 readers attached",
        "NB",
        "A filler that hangs holds nobody up",
        filler_stopped_at_a_block,
        count=60,
        short=2,
    ),
]
