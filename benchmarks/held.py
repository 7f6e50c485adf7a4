"""What fills cost in a tier that holds many other shards: the same small ones beside none and beside 60,000.

    python -m benchmarks.held

Each run is a loader in a process of its own, which fetches all shards from a server on loopback into a tier
that holds so many others; they are taken out of it again afterwards. Runs take turns, with the order rotated.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, turns
from benchmarks.contenders.job import versions
from streamload import Workers
from streamload.cache.shard import shard_of
from streamload.cache.tier import Tier
from streamload.options import file_system
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from tests.support.indexes import WrittenIndex

HELD = (0, 5_000, 60_000)
SHARDS, SAMPLES_PER_SHARD = 80, 8
LIMIT = "100GB"
MOST = 1.2
"""Times what it takes beside none."""


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(read(sys.argv[2], Path(sys.argv[3]))))
        return
    given = turns.arguments(__doc__, rounds=7, names=["streamload"])
    shards, held = (8, (0, 50)) if given.quick else (SHARDS, HELD)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamload-bench-")))
        write_shards(place / "data", [SAMPLES_PER_SHARD] * shards, seed=1)
        server = stack.enter_context(ShardServer.spawn(place / "data"))
        urls = f"{server.url}/{{00000..{shards - 1:05d}}}.tar"
        tiers = {count: hold(place / f"tier-{count}", count) for count in held}
        for round_ in range(given.rounds):
            for count, tier in turns.rotated(list(tiers.items()), round_):
                label = f"beside {count:,}"
                row = {"label": label, "contender": "streamload", "round": round_}
                row |= {"load_before": machine.load(), **measured(urls, tier)}
                rows.append(row)
                assert len(list(tier.own("shards"))) == count + shards
                for number in range(shards):
                    tier.trash(tier.published(shard_of(f"{server.url}/{number:05d}.tar", None).digest))
        medians = turns.medians(rows)
        turns.write(
            given,
            "held",
            {
                "settings": {
                    "shards": shards,
                    "samples_per_shard": SAMPLES_PER_SHARD,
                    "held": list(held),
                    "file_system": file_system(place).kind,
                },
                "versions": {"streamload": versions("streamload", "xxhash", "numpy")},
                "seeds": [1],
                "rounds": rows,
                "medians": medians,
                "targets": [
                    turns.target(
                        f"{metric} beside {held[-1]:,}, times that beside none",
                        medians[f"beside {held[-1]:,}"][metric] / medians["beside 0"][metric],
                        at_most=MOST,
                    )
                    for metric in ("epoch_seconds", "first_batch_seconds")
                ],
            },
        )


def hold(root: Path, count: int) -> Tier:
    """A tier with so many small shards, as fills leave them, that nobody reads."""
    tier = Tier(root, 100 * 10**9)
    if count:
        first = tier.published(f"{0:032x}")
        first.mkdir()
        (first / "data").write_bytes(bytes(10_240))
        with WrittenIndex(first, {"url": "http://elsewhere.invalid/0.tar"}) as index:
            index.finish(size=10_240)
        for number in range(1, count):
            shutil.copytree(first, tier.published(f"{number:032x}"))
    tier.budget.count()
    return tier


def measured(urls: str, tier: Tier) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.held", "--run", urls, str(tier.root)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    found: dict[str, float] = json.loads(subprocess.check_output(command, env=environ, text=True))
    return found


def read(urls: str, root: Path) -> dict[str, float]:
    """One epoch, in this process and its workers."""
    import streamload

    with streamload.make_loader(
        urls, workers=Workers(map_sample=_key), batch_size=8, num_workers=2, cache_dir=root, cache_size=LIMIT
    ) as loader:
        began, first = time.monotonic(), 0.0
        for _ in loader:
            first = first or time.monotonic() - began
        return {"first_batch_seconds": first, "epoch_seconds": time.monotonic() - began}


def _key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


if __name__ == "__main__":
    main()
