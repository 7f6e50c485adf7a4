"""Row 39: a cache with room for fewer shards than a training has open at once."""

import itertools
import os
from pathlib import Path
from typing import Any

from streamload import Workers
from streamload.worker import shortage
from tests.faults.data import Data
from tests.faults.oracle import Attempt, DiskWatch
from tests.faults.processes import all_samples, describe, differences, gone_from, import_torch
from tests.faults.rows import Row
from tests.support import flat
from tests.support.kills import Child, Stage

_COUNTS = (32,) * 8
_BATCH = 8
_FOR_EVER_SECONDS = 600.0


def small_cache(attempt: Attempt) -> None:
    """Two epochs, or the rest of one with another room: each sample once, within the limit.

    Lanes and window that weren't given are cut, so that nothing is read by range, or fetched twice in the
    first epoch; those that were given aren't. A single process never waits for room that can't come.
    """
    import_torch()
    data = attempt.borrow(attempt.seed, spawn=True, counts=_COUNTS, latency_seconds=0.005)
    form, _, workers = attempt.variant.partition(", ")
    options: dict[str, Any] = {"num_workers": int(workers.partition(" ")[0]), "seed": attempt.seed}
    if form == "given":
        options |= {"lanes": 8, "shuffle": 200}
    limit_bytes = data.room_bytes(attempt.rng.uniform(2, 4))
    steps = attempt.rng.randrange(1, 3 * len(_COUNTS)) if form == "gone on" else 0

    def work(stage: Stage) -> Any:
        os.setsid()  # so that all that it starts can be told
        if not options["num_workers"]:
            shortage._NO_ROOM_SECONDS = shortage._STANDOFF_SECONDS = _FOR_EVER_SECONDS
        return _train(data, attempt.root, limit_bytes, options, steps)

    with DiskWatch(attempt.root) as watch, Child(work) as child:
        result = child.finish(100)
    session = child.pid
    watch.check(attempt, limit_bytes)
    for samples in result["epochs"]:
        attempt.check_all(differences(all_samples(data), sorted(samples)))
    if form == "given":
        attempt.happened["samples read by range"] += result["range_reads"]
    else:
        attempt.happened["cut"] += result["lanes"] < 8
        attempt.check("D", not result["range_reads"], f"{result['range_reads']} samples were read by range")
    if form == "cut":
        # The next epoch's take the room of those that were read, and some are begun beside them.
        again = result["first_bytes"] - data.total_bytes
        said = f"{again} bytes were fetched twice; there is room for {limit_bytes}"
        attempt.check("D", again <= 1.5 * limit_bytes, said)
    if form == "gone on":
        wide = _train(data, attempt.place / "wide", 1 << 30, options, 0, result["state"])
        attempt.check("N", wide["epochs"][0] == result["rest"], "with more room it went on in another order")
    left = gone_from(session)
    attempt.check("L", not left, f"still running: {left}")


def _train(
    data: Data, root: Path, limit_bytes: int, options: dict[str, Any], steps: int, state: Any = None
) -> dict[str, Any]:
    """Two epochs; or one, with the state after some steps; or the rest of one from a state."""
    with flat.make_loader(
        data.urls,
        workers=Workers(map_sample=describe),
        batch_size=_BATCH,
        cache_dir=root,
        cache_size=limit_bytes,
        **options,
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
            return {"epochs": [_samples(loader)]}
        batches = iter(loader)
        begun = _samples(itertools.islice(batches, steps))
        state = loader.state_dict()
        rest = _samples(batches)
        first_bytes = loader.stats().origin_bytes
        epochs = [begun + rest] if steps else [rest, _samples(loader)]
        return {
            "epochs": epochs,
            "state": state,
            "rest": rest,
            "lanes": loader.state_dict()["sources"][0][1],
            "range_reads": loader.stats().range_reads,
            "first_bytes": first_bytes,
        }


def _samples(batches: Any) -> list[list[str]]:
    return [list(pair) for batch in batches for pair in zip(batch["key"], batch["digest"], strict=True)]


ROWS = [
    Row(
        39,
        "small cache",
        "a cache with room for 2 to 4 of 8 shards, by the default lanes and window, or by given ones",
        "NDBKL",
        "Lanes and window fit the cache unless they were given; a run that goes on keeps its order",
        small_cache,
        count=90,
        variants=tuple(
            f"{form}, {workers} workers" for form in ("cut", "given", "gone on") for workers in (0, 2)
        ),
        short=6,
    )
]
