"""Prefetch on spot nodes: daemons that come and go fill a shared cache ahead of a training.

    python examples/spot_prefetch.py

On one machine, in a temporary directory: a slow origin, two daemons on "spot nodes" (each with its own
cache), a folder as the shared cache, and a training that starts at once. The daemons are killed repeatedly,
without notice, and restarted. The training's batches are compared with those of a run without daemons.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import streamload
from streamload import Cache, Order, Workers
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards

SHARDS, SAMPLES = 24, 32
STEP_SECONDS = 0.1
BYTES_PER_SECOND_PER_CONNECTION = 200_000.0


def loader(url: str, place: Path, name: str, shared: Path | None = None) -> streamload.Loader:
    """A training's loader, with its own cache."""
    return streamload.make_loader(
        f"{url}/{{00000..{SHARDS - 1:05d}}}.tar",
        batch_size=16,
        num_workers=1,
        shuffle=64,
        cache_dir=place / name,
        order=Order(lanes=2),
        cache=Cache(ahead=1, shared=shared),
        workers=Workers(map_sample=keys),
    )


def keys(sample: dict[str, Any]) -> dict[str, Any]:
    """What is compared of a sample."""
    return {"key": sample["__key__"]}


def train(batches: streamload.Loader) -> list[Any]:
    """Consume the batches, each for STEP_SECONDS."""
    found = []
    for batch in batches:
        found.append(batch["key"])
        time.sleep(STEP_SECONDS)
    return found


class SpotNodes:
    """Daemons that are killed without notice, and restarted."""

    def __init__(self, origin: str, shared: Path, place: Path, count: int = 2):
        self._origin, self._shared, self._place = origin, shared, place
        self._ended = threading.Event()
        self.kills = 0
        self._threads = [threading.Thread(target=self._node, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Kill all daemons for good."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _node(self, number: int) -> None:
        rng = random.Random(number)
        command = [sys.executable, "-m", "streamload", "daemon", "--shared-cache", str(self._shared)]
        command += ["--origin", self._origin]  # which the run that they follow may name
        options = ["--notices", "none", "--listen", "none", "--concurrency", "4"]
        while not self._ended.is_set():
            own = ["--cache-dir", str(self._place / f"node-{number}"), "--cache-size", "1GB"]
            daemon = subprocess.Popen([*command, *own, *options], stderr=subprocess.DEVNULL)
            parts = self._place / f"node-{number}" / "parts"
            while not self._ended.wait(0.1) and not (parts.is_dir() and any(parts.iterdir())):
                pass  # until it is at work
            self._ended.wait(rng.uniform(1.0, 5.0))
            daemon.kill()
            daemon.wait()
            self.kills += 1


def main() -> None:
    """Run both trainings, and print the results."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        shared = place / "shared"
        write_shards(place / "data", [SAMPLES] * SHARDS, options=ShardOptions(padding_bytes=(2000, 4000)))
        slow = BYTES_PER_SECOND_PER_CONNECTION
        with ShardServer.spawn(place / "data", bytes_per_second_per_connection=slow) as server:
            with loader(server.url, place, "alone") as alone:
                expected = train(alone)
                waited = alone.stats().data_wait_seconds
            nodes = SpotNodes(server.url, shared, place)
            try:
                with loader(server.url, place, "trainer", shared) as training:
                    found = train(training)
                    stats = training.stats()
            finally:
                nodes.close()
    assert found == expected, "the batches differ"
    print(f"without daemons: {len(expected)} batches, {waited:.1f} s of waiting for data")
    print(
        f"with two daemons, killed {nodes.kills} times: the same {len(found)} batches, "
        f"{stats.data_wait_seconds:.1f} s of waiting; {stats.shared_hits} of {SHARDS} shards came from the "
        "shared cache"
    )


if __name__ == "__main__":
    main()
