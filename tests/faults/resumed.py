"""Row 19: a training that is killed within an epoch, and taken up on other numbers of workers and ranks."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import streamload
from streamload import Order, Workers
from tests.faults.data import Data
from tests.faults.oracle import Attempt
from tests.faults.processes import (
    COUNTS,
    TRAINING,
    all_samples,
    describe,
    differences,
    gone_from,
    import_torch,
)
from tests.faults.rows import Row
from tests.support.kills import Child, Stage

_GLOBAL_BATCH = 4
"""It divides the samples: none is left over at the end of the epoch."""
_LAYOUTS = {"1 × 0": (1, 0), "1 × 2": (1, 2), "2 × 1": (2, 1), "4 × 0": (4, 0)}


def killed_and_resumed(attempt: Attempt) -> None:
    """Each step is written down with its state before the next one; the last one written is gone on from."""
    import_torch()
    data = attempt.borrow(attempt.seed, spawn=True, counts=COUNTS)
    first, _, second = attempt.variant.partition(" → ")
    steps = sum(COUNTS) // _GLOBAL_BATCH
    kill_behind = attempt.rng.randrange(1, steps)
    diary = attempt.place / "diary.jsonl"
    cold = attempt.rng.random() < 0.5

    with Child(lambda stage: _train(stage, data, attempt, _LAYOUTS[first], diary, kill_behind)) as child:
        child.stage.wait_for(TRAINING, 60)
        child.kill()
        session = child.pid
    attempt.happened["killed"] += 1
    lines = [line for line in diary.read_text().splitlines(keepends=True) if line.endswith("\n")]
    written = [json.loads(line) for line in lines]
    seen = [sample for step in written for sample in step["samples"]]
    states = written[-1]["states"]
    place = attempt.place / "empty" if cold else attempt.root
    with Child(lambda stage: _go_on(data, place, _LAYOUTS[second], states)) as child:
        rest = child.finish(90)
    attempt.check_all(differences(all_samples(data), sorted(seen + rest)))
    left = gone_from(session)
    attempt.check("L", not left, f"still running: {left}")


def _train(
    stage: Stage, data: Data, attempt: Attempt, layout: tuple[int, int], diary: Path, kill_behind: int
) -> None:
    """Train on until the kill comes, from some step on slowly."""
    os.setsid()  # so that all that it starts can be told
    loaders = _loaders(data, attempt.root, layout)
    with diary.open("a") as file:
        for number, parts in enumerate(zip(*loaders, strict=True), 1):
            states = [loader.state_dict() for loader in loaders]
            file.write(json.dumps({"samples": _samples(parts), "states": states}) + "\n")
            file.flush()
            if number == kill_behind:
                stage.enter(TRAINING)
            if number >= kill_behind:
                time.sleep(attempt.rng.random() / 20)
    time.sleep(60)


def _go_on(data: Data, place: Path, layout: tuple[int, int], states: list[dict[str, Any]]) -> list[Any]:
    loaders = _loaders(data, place, layout)
    with contextlib.ExitStack() as stack:
        for loader in loaders:
            stack.enter_context(loader)
            loader.load_state_dict(states)
        return [sample for parts in zip(*loaders, strict=True) for sample in _samples(parts)]


def _loaders(data: Data, place: Path, layout: tuple[int, int]) -> list[streamload.Loader]:
    ranks, workers = layout
    return [
        streamload.make_loader(
            data.urls,
            workers=Workers(map_sample=describe),
            batch_size=_GLOBAL_BATCH // ranks,
            num_workers=workers,
            order=Order(rank=rank, world_size=ranks, lanes=2),
            shuffle=15,
            cache_dir=place,
            cache_size="1GB",
        )
        for rank in range(ranks)
    ]


def _samples(parts: tuple[dict[str, Any], ...]) -> list[list[str]]:
    return [list(pair) for part in parts for pair in zip(part["key"], part["digest"], strict=True)]


ROWS = [
    Row(
        19,
        "killed and resumed",
        "SIGKILL of a training at a step; taken up from its last state on other ranks × workers",
        "NDBL",
        "What the first training took and what the second gives is each sample of the epoch once",
        killed_and_resumed,
        count=96,
        variants=tuple(f"{a} → {b}" for a in _LAYOUTS for b in _LAYOUTS if a != b),
        short=4,
    )
]
