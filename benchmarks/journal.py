"""What a journal costs a training, and what it costs to look back.

Question: how much slower is a training that keeps a journal, how large is that, and how long does it take to
find a step's state, its rows, and the steps of a sample?

Command: python -m benchmarks.journal

- "training": CPU time of all that a journal does in a step, in workers and rank, and the step's without it ÷
  with it: batches of 256 by open_clip's transform from a warm cache, shards of 1,000, the losses of all rows
  reported. (Trainings with and without, in turn, differ by less than two of the same do.)
- "journal": bytes a step and rank of eight ranks that share a node, with 256 rows and shards of 1,000
  samples, by what is written of 512 steps.
- "replay": CPU time until the first batch of 256 again, in this process, whose cache has the shards.
- "seek": CPU time of a state 500 steps behind a mark, by arithmetic alone, for shards of 1,000 samples that
  aren't there, with a window of 81,920, in the middle of a pass: of one group and of all. Reading the journal
  is part of it.
- "used": CPU time to find the steps of all samples of a shard in a pass, with a mark every 512 steps.

Result: results/journal.json; docs/results/costs.md shows it.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import streamload
from benchmarks import turns
from benchmarks.turns import Row
from streamload import Order
from streamload.journal.files import Record, RecordWriter, path_of
from streamload.journal.history import RunHistory
from streamload.journal.leave_out import ExcludedSamples, LeftOutChanges
from streamload.journal.recorder import MARK_STEPS, Recorder, StepWitness
from streamload.loader.loader import Loader
from streamload.loader.options import LoaderOptions
from streamload.loader.past import MakeLoaders, as_recorded, seek, steps_from, uses
from streamload.loader.registered import by_rank, extensions_of
from streamload.loader.schedule import RunSchedule
from streamload.order.group import Cursor, GroupOrder
from streamload.order.plan import Pieces, pieces, shard_axis
from streamload.testing.shards import ShardOptions, write_shards
from streamload.worker.states import GroupState, OpenShards, SourceState

MAKE = MakeLoaders(Loader, extensions_of, by_rank())
ROWS, SAMPLES, WINDOW, AHEAD = 256, 1000, 81_920, 520
SCALES = {"10⁵ shards, 64 ranks": (100_000, 64, 8), "10⁶ shards, 1,024 ranks": (1_000_000, 1024, 128)}
QUICK_SCALES = {"10⁴ shards, 16 ranks": (10_000, 16, 2)}
ENTRIES, SHARDS = np.arange(SAMPLES), 10_000


class Whole:
    """Arrivals of shards that are all there."""

    def arrived(self, shard: int) -> tuple[Any, bool]:
        return ENTRIES, True


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=["computed"])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = 4 if given.quick else 24
        options = ShardOptions(image_side=(220, 260))
        urls = [str(path) for path in write_shards(folder / "shards", [SAMPLES] * 2, options=options)]
        for round_ in range(given.rounds):
            rows += [{"round": round_, **row} for row in trained(folder, urls, steps)]
            for label, (shards, ranks, groups) in (QUICK_SCALES if given.quick else SCALES).items():
                rows.append(
                    {"round": round_, "label": f"seek: {label}", **sought(folder, shards, ranks, groups)}
                )
            shards = 1000 if given.quick else 100_000
            rows.append({"round": round_, "label": f"used: {shards:,} shards", **looked_up(folder, shards)})
    turns.write(given, "journal", content(given, rows, steps))


def made(folder: Path, urls: list[str], journal: Path | None) -> Loader:
    return streamload.make_loader(
        urls,
        batch_size=ROWS,
        num_workers=0,
        cache_dir=folder / "cache",
        order=Order(endless=True, journal=journal),
    )


@contextlib.contextmanager
def timed(spent: list[float]) -> Iterator[None]:
    """Add the CPU time of all that a journal does in a training, in its workers and in the rank."""
    hooks = [
        *((StepWitness, name) for name in ("finish",)),
        *((Recorder, name) for name in ("before_batch", "taken", "yielded", "report")),
        *((ExcludedSamples, name) for name in ("excludes",)),
        *((LeftOutChanges, name) for name in ("taken",)),
    ]

    def measured(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments)
            finally:
                spent.append(time.process_time() - began)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in hooks:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, measured(original))
        yield


def trained(folder: Path, urls: list[str], steps: int) -> list[Row]:
    """A training with a journal, and one of its steps again."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    spent: list[float] = []
    loader, began = made(folder, urls, folder / "run"), 0.0
    with timed(spent), loader:
        for step, _ in zip(range(steps + 2), loader, strict=False):
            loader.report(loss=torch.rand(ROWS))
            if step == 1:  # after the first ones, in which images are seen and things are imported
                began, spent[:] = time.process_time(), []
        whole = time.process_time() - began
    own = sum(spent)
    began = time.process_time()
    again = next(steps_from(RunHistory(folder / "run"), steps // 2, loader.options, MAKE))
    replayed = time.process_time() - began
    assert len(again.rows) == ROWS
    return [
        {"label": "training", "cpu_us_per_step": own / steps * 1e6, "ratio": (whole - own) / whole},
        {"label": "replay", "cpu_seconds": replayed},
        {"label": "journal", "bytes_per_step": bytes_per_step(folder)},
    ]


def bytes_per_step(folder: Path) -> float:
    """Bytes a step and rank of a long run on 8 ranks of a node: marks, ended shards, digests, worst rows."""
    path = folder / "long.journal"
    path.unlink(missing_ok=True)
    writer, random = RecordWriter(path), np.random.default_rng(0)
    writer.open()
    schedule = RunSchedule(options_of(SHARDS, 8, 1), lambda epoch: None)
    state = reached(schedule, {0: 400_000}, 400_000)
    ended = 8 * ROWS * MARK_STEPS // SAMPLES
    writer.add(Record("mark", {"step": 0, "origin": 0, "state": state}, {}))
    shards = random.integers(0, 1 << 62, (ended, 11))
    shards[:, [0, 1, 2, 4, 5, 6, 7, 9]] = [0, 0, 3, SAMPLES, SAMPLES, 1, -1, 16]
    shards[:, 3] = random.permutation(SHARDS)[:ended]
    writer.add(Record("ended", {"origin": 0}, {"shards": shards}))
    ranks = 8
    marked = path.stat().st_size / ranks
    for first in range(0, MARK_STEPS, 64):
        losses = np.sort(2 + random.normal(0, 0.3, (64, ROWS)), axis=1)[:, ::-1][:, :8]
        arrays = {
            "digest": random.integers(0, 1 << 62, 64).astype(np.uint64),
            "content": random.integers(1, 1 << 32, 64).astype(np.uint32),
            "loss": random.normal(2, 0.02, 64).astype(np.float32),
            "rows": random.integers(0, ROWS, (64, 8)).astype(np.uint16),
            "worst": losses.astype(np.float16),
            "count": np.full(64, 8, np.uint8),
        }
        writer.add(Record("steps", {"step": first}, arrays))
    return (path.stat().st_size - marked * ranks + marked) / MARK_STEPS


def options_of(shards: int, ranks: int, groups: int) -> LoaderOptions:
    """The options of a run over shards that aren't there."""
    loader = streamload.make_loader(
        f"/missing/{{0000000..{shards - 1:07d}}}.tar",
        batch_size=ROWS,
        num_workers=0,
        shuffle=WINDOW,
        order=Order(groups=groups, rank=0, world_size=ranks, endless=True, lanes=64),
    )
    return as_recorded(loader.options, MAKE, 0, ranks, ROWS)


def reached(schedule: RunSchedule, positions: dict[int, int], position: int) -> dict[str, Any]:
    """The state of a run whose groups are at positions of their sequences."""
    order = schedule.settle()
    (options,) = schedule.source_orders()
    count = order.shards[0]
    axis, found = shard_axis(options, count), {}
    for group, place in positions.items():
        own = Pieces(pieces(options, count, group, axis).shards, {})
        walked = GroupOrder(options, count, group, 0, Cursor.at(place), pieces=own)
        walked.advance(Whole())
        found[group] = GroupState((0,), (SourceState(walked.mark_at(place), OpenShards.of({})),))
    schedule.tracker.load(replace(schedule.tracker.next(), position=position, groups=found))
    return schedule.state({}, {"torch": torch.__version__}, {})


def ended_from(schedule: RunSchedule, state: GroupState, group: int, stop: int) -> Any:
    """The rows of `Reader.ended` from a group's state to a position of it."""
    (options,) = schedule.source_orders()
    count = schedule.order.shards[0]
    own = Pieces(pieces(options, count, group).shards, {})
    order = GroupOrder(options, count, group, 0, state.sources[0].cursor, pieces=own)
    while order.position < stop:
        order.advance(Whole())
    rows = [
        (group, 0, pass_, shard, samples, SAMPLES, 1, -1, 1, 16, 1)
        for pass_, shards, counts in order.ended()
        for shard, samples in zip(shards.tolist(), counts.tolist(), strict=True)
    ]
    return np.array(rows, np.int64).reshape(-1, 11)


def write_rank(folder: Path, rank: int, ranks: int, groups: int, first: int) -> RecordWriter:
    """The file of a rank, with the beginning of a segment."""
    writer = RecordWriter(path_of(folder, rank))
    writer.open()
    begin = {"segment": "a", "parent": None, "step": first, "rank": rank, "world_size": ranks, "rows": ROWS}
    writer.add(Record("segment", {**begin, "seconds": 0, "order": {"groups": groups}}, {}))
    return writer


def sought(folder: Path, shards: int, ranks: int, groups: int) -> Row:
    """CPU time of a state 500 steps behind a mark in the middle of a pass."""
    journal, options = folder / "scale", options_of(shards, ranks, groups)
    shutil.rmtree(journal, ignore_errors=True)
    of_step = ROWS * ranks // groups
    first = shards * SAMPLES // groups // 2 // of_step
    schedule = RunSchedule(options, lambda epoch: None)
    reached(schedule, dict.fromkeys(range(groups), first * of_step), first * ROWS * ranks)
    position = schedule.tracker.now()
    for group in range(groups):
        writer = write_rank(journal, group * ranks // groups, ranks, groups, first)
        schedule.tracker.load(replace(position, groups={group: position.groups[group]}))
        state = schedule.state({}, {"torch": torch.__version__}, {})
        writer.add(Record("mark", {"step": first, "origin": first, "state": state}, {}))
        ended = ended_from(schedule, position.groups[group], group, (first + AHEAD) * of_step)
        writer.add(Record("ended", {"origin": first}, {"shards": ended}))
        writer.add(Record("steps", {"step": first}, {"digest": np.zeros(AHEAD, np.uint64)}))
    spent = {}
    for name, wanted in (("one_group_seconds", {0}), ("all_groups_seconds", None)):
        began = time.process_time()
        segment = RunHistory(journal).at(first + 500)
        seek(segment, first + 500, options, MAKE, wanted)
        spent[name] = time.process_time() - began
    spent["group_seconds"] = (spent["all_groups_seconds"] - spent["one_group_seconds"]) / (groups - 1)
    return dict(spent)


def looked_up(folder: Path, shards: int) -> Row:
    """CPU time to find the steps of a shard's samples in one pass of one group."""
    ranks, journal = 8, folder / "used"
    shutil.rmtree(journal, ignore_errors=True)
    options = options_of(shards, ranks, 1)
    schedule = RunSchedule(options, lambda epoch: None)
    writer, of_step = write_rank(journal, 0, ranks, 1, 0), ROWS * ranks
    steps = shards * SAMPLES // of_step
    for step in range(0, steps, MARK_STEPS):
        state = reached(schedule, {0: step * of_step}, step * of_step)
        writer.add(Record("mark", {"step": step, "origin": 0, "state": state}, {}))
    ended = np.zeros((shards, 11), np.int64)
    ended[:, 3], ended[:, 4], ended[:, 5], ended[:, 7] = np.arange(shards), SAMPLES, SAMPLES, -1
    writer.add(Record("ended", {"origin": 0}, {"shards": ended}))
    writer.add(Record("steps", {"step": 0}, {"digest": np.zeros(steps, np.uint64)}))
    spent = []
    for shard in np.random.default_rng(0).integers(0, shards, 3).tolist():
        began = time.process_time()
        found = [
            use for use in uses(RunHistory(journal).segment(), options, MAKE, 0, shard) if use.pass_ == 0
        ]
        spent.append(time.process_time() - began)
        assert len(found) == SAMPLES, len(found)
    return {"cpu_seconds": float(np.median(spent))}


def content(given: Any, rows: list[Row], steps: int) -> Row:
    medians = turns.medians(rows)
    largest = [label for label in medians if label.startswith("seek")][-1]
    used = next(label for label in medians if label.startswith("used"))
    return {
        "settings": {"rows of a batch": ROWS, "steps": steps, "steps of a mark": MARK_STEPS},
        "rounds": rows,
        "medians": medians,
        "targets": [
            turns.target("training without ÷ with", medians["training"]["ratio"], at_least=0.995),
            turns.target("bytes a step and rank", medians["journal"]["bytes_per_step"], at_most=50),
            turns.target("256 rows again, CPU s", medians["replay"]["cpu_seconds"], at_most=1.5),
            turns.target(f"{largest}: a group more, CPU s", medians[largest]["group_seconds"], at_most=1),
            turns.target(f"{largest}: all, CPU s", medians[largest]["all_groups_seconds"], at_most=20),
            turns.target(f"{used}: a pass, CPU s", medians[used]["cpu_seconds"], at_most=2),
        ],
    }


if __name__ == "__main__":
    main()
