"""One seed: some jobs on one tier, kills, stops and restarts, and what must hold meanwhile and at the end.

N D B: each job's samples are exactly the shard's, by `job.py` · K: the files never take more than the limit,
by `disk.py` · L: a job that ends has nothing open · T: after a last clean start nothing is left that a dead
process began and nobody needs · C: each published shard is byte for byte one that its origin had · nobody
asks for what a living process is transferring · nobody writes into another's file · no sample is distrusted,
as nothing damages them · it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from streamload.cache.tier import Tier
from streamload.metrics import Snapshot
from streamload.shards.index import IndexReader

from .disk import ROOMS, Disk
from .engine import Engine, Process
from .job import Job, Plan
from .system import MUTATING, System, installed
from .world import World

_MEMORY = Path("/dev/shm")
_FILL_BYTES = 100_000
"""What the fill of one shard reserves beyond its bytes, and a little."""
_HELD_BYTES = 4 * 4096
"""What a published shard takes beyond its bytes, at most."""
_ROOMY_BYTES = 8 << 20
_TRACED_CALLS = 1 << 20


@dataclass
class Result:
    """How the simulation of a seed went.

    Attributes:
        seed: of the simulation.
        failure: what didn't hold, with the last steps; None if all did.
        steps: calls of the operating system.
        happened: how often what happened, over all its processes.
    """

    seed: int
    failure: str | None
    steps: int
    happened: Counter[str]


class _Fate:
    """Who is killed or stopped, and in front of which call."""

    def __init__(self, engine: Engine, system: System):
        self.happened: Counter[str] = Counter()
        self._engine, self._system = engine, system
        rng = engine.rng
        count = rng.choice([0, 1, 2, 4])
        self._at_change = sorted(rng.randrange(1, 500) for _ in range(count))
        """Which call that changes something is one in front of, or within, which somebody dies or stops."""
        self._changes = 0
        self.victims: set[str] = set()
        engine.on_step = self.on_step

    def on_step(self, process: Process, call: str) -> None:
        if not self._at_change or call not in MUTATING:
            return
        self._changes += 1
        if self._changes < self._at_change[0]:
            return
        self._at_change.pop(0)
        rng = self._engine.rng
        if rng.random() < 0.4:
            self._engine.stop(process, rng.uniform(0.2, 3.0))
            self.happened["stops"] += 1
            if rng.random() < 0.3:  # never to go on
                self._engine.at(rng.uniform(0.0, 3.0), lambda: self._engine.kill(process))
        else:
            self.happened[f"kills at {call}"] += 1
            if call in ("write", "pwrite") and rng.random() < 0.5:
                self._system.torn = process
            else:
                self._engine.kill(process)


class _Story:
    def __init__(self, engine: Engine, root: Path):
        rng = engine.rng
        self.engine = engine
        self.root = root
        self.world = World(engine, rng.randint(2, 4))
        jobs = rng.choice([1, 2, 2, 3])
        self._open_shards = rng.choice([1, 1, 2])
        largest = self.world.largest_bytes
        one = _FILL_BYTES + largest * 9 // 8
        room = one + jobs * self._open_shards * (_HELD_BYTES + largest)
        self.limit_bytes = rng.choice([_ROOMY_BYTES, _ROOMY_BYTES, room + 60_000, room, one])
        self.disk = Disk(root, self.limit_bytes, engine.fail)
        self.system = System(engine, self.disk, rng.choice([0.0, 0.0, 0.1]))
        self.fate = _Fate(engine, self.system)
        self.jobs: list[Job] = []
        same = rng.random() < 0.6
        orders = [rng.sample(range(len(self.world.truths)), len(self.world.truths)) for _ in range(jobs)]
        for number in range(jobs):
            order = orders[0] if same else orders[number]
            plan = Plan(order * rng.choice([1, 1, 2]), self._open_shards, rng.choice([1, 1, 2]))
            engine.at(
                rng.choice([0.0, 0.0, rng.uniform(0.0, 0.5)]),
                lambda n=number, p=plan: self._begin(f"job{n}", p),
            )

    def _begin(self, name: str, plan: Plan) -> None:
        job = Job(self.world, plan, self.root, self.limit_bytes)
        self.jobs.append(job)
        process = self.engine.process(name, job.main)
        self._watch(process, name, plan)

    def _watch(self, process: Process, name: str, plan: Plan) -> None:
        """Begin a killed job anew, after a while."""

        def look() -> None:
            if not process.is_alive:
                self._begin(f"{name}'", plan)
            elif process.tasks:
                self._watch(process, name, plan)

        self.engine.at(self.engine.rng.uniform(0.1, 1.0), look)

    def check_the_end(self) -> str | None:
        """What is wrong after all jobs have ended, and after a last clean start; None: nothing."""
        total = Counter(job.outcome for job in self.jobs)
        if total["full"] and self.limit_bytes == _ROOMY_BYTES:
            return "a job ends by CacheFull, though there is room for all"
        distrusted = sum(job.counts.snapshot().checksum_failures for job in self.jobs)
        if distrusted:
            return f"{distrusted} copies were distrusted, and nothing was damaged"
        tier = Tier(self.root, self.limit_bytes)
        tier.sweep()
        left = [path for room in ("trash", "gone", "runs") for path in (self.root / room).iterdir()]
        left += [path for path in (self.root / "parts").iterdir() if tier.published(path.name[:32]).exists()]
        left += [
            path for path in self.root.iterdir() if path.name not in {*ROOMS, "runs", "lock", "tier.json"}
        ]
        if left:
            return "left behind after a clean start: " + ", ".join(
                str(path.relative_to(self.root)) for path in left
            )
        for path in (self.root / "shards").iterdir():
            wrong = self._wrong(path)
            if wrong:
                return f"the published shard of {self.world.of[path.name].shard.name} {wrong}"
        return None

    def _wrong(self, path: Path) -> str:
        truth = self.world.of[path.name]
        missing = {"data", "index", "names"} - {file.name for file in path.iterdir()}
        if missing:
            return f"is without its {' and '.join(sorted(missing))}"
        data = (path / "data").read_bytes()
        contents = [content for content in truth.contents if content.data == data]
        if truth.status != "complete":
            return f"is none that can be whole: it is {truth.kind}"
        if not contents:
            return f"has {len(data)} bytes that its origin never had"
        extra = {file.name for file in path.iterdir()} - {"data", "index", "names"}
        if extra:
            return f"has files that don't belong to it: {extra}"
        with contextlib.closing(IndexReader(path)) as index:
            entries = [index.entry(number) for number in range(index.count)]
            if not index.is_complete or len(entries) != len(contents[0].samples):
                return f"has {len(entries)} entries, and its status is {index.status!r}"
        for number, entry in enumerate(entries):
            members = entry.payloads(memoryview(data)[entry.start : entry.stop])
            if not contents[0].holds(number, entry.key, members):
                return f"has a wrong entry {number}: {entry}"
        return ""


def simulate(seed: int, *, trace: bool = False) -> Result:
    """Run the simulation of a seed; `trace` prints all of its calls."""
    place = tempfile.mkdtemp(
        prefix=f"streamload-test-{os.getpid()}-", dir=_MEMORY if _MEMORY.is_dir() else None
    )
    engine = Engine(seed, _TRACED_CALLS if trace else 100)
    try:
        story = _Story(engine, Path(place) / "tier")
        with installed(story.system):
            engine.run()
        failure = engine.failure or story.check_the_end()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    happened = story.fate.happened
    happened.update(f"jobs {job.outcome or 'killed'}" for job in story.jobs)
    happened["requests"] = story.world.requests
    for snapshot in (job.counts.snapshot() for job in story.jobs):
        happened.update(_counted(snapshot))
    if trace:
        print(engine.told_trace(_TRACED_CALLS).replace(f"{place}/", ""))
    if failure is not None:
        failure = failure.replace(f"{place}/", "")
    return Result(seed, failure, engine.steps, happened)


def _counted(snapshot: Snapshot) -> dict[str, int]:
    names = (
        "origin_retries",
        "shards_published",
        "shards_taken_over",
        "shards_evicted",
        "shards_given_up",
        "range_reads",
    )
    return {name: getattr(snapshot, name) for name in names}
