"""The pictures of docs/guides/metrics.md: `streamload top` and a report, of a run whose origin slows down.

    python -m benchmarks.pictures

Two ranks on this machine train on two sources from a server on loopback, which is slow for a part of the
time. It takes two minutes, and chromium for the report.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

import streamload
from streamload.cli.top import shown
from streamload.observe.live import RunWatch
from streamload.observe.page import read_runs
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
RANKS, SHARDS, SAMPLES = 2, 300, 48
SECONDS, SLOW_FROM, SLOW_UNTIL = 100.0, 25.0, 50.0
SLOW = Fault(bytes_per_second=15_000)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], Path(sys.argv[3]))
        return
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamload-pictures-")))
        for name, seed in (("photos", 1), ("drawings", 2)):
            write_shards(place / "data" / name, [SAMPLES] * SHARDS, seed=seed)
        server = stack.enter_context(ShardServer(place / "data"))
        ranks = [started(rank, server.url, place) for rank in range(RANKS)]
        for process in ranks:
            stack.callback(process.wait)
        show_top(server, place)
        for process in ranks:
            process.wait()
        draw_report(place)


def started(rank: int, url: str, place: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.pictures", "--rank", url, str(place)]
    environ = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "STREAMLOAD_RECORD": str(place / "records")}
    return subprocess.Popen(command, env={**os.environ, **environ, "OMP_NUM_THREADS": "1"})


def train(url: str, place: Path) -> None:
    """A rank: steps of a twentieth of a second, and weights that change."""
    sources = [
        streamload.Source(f"{url}/{name}/{{00000..{SHARDS - 1:05d}}}.tar", weight=weight, name=name)
        for name, weight in (("photos", 2.0), ("drawings", 1.0))
    ]
    ends = time.monotonic() + SECONDS
    with streamload.make_loader(
        sources,
        batch_size=16,
        num_workers=2,
        order=streamload.Order(num_batches=10**6),
        cache_dir=place / "cache",
        cache_size="100MB",
    ) as loader:
        for number, _ in enumerate(loader):
            time.sleep(0.05)
            if number == 400:
                loader.set_weights({"drawings": 2.0})
            if time.monotonic() > ends:
                return


def show_top(server: ShardServer, place: Path) -> None:
    """Slow the origin down for some time, and take a picture while it is."""
    watch, began = RunWatch(), time.monotonic()
    slow = [f"{name}/{shard:05d}.tar" for name in ("photos", "drawings") for shard in range(SHARDS)]
    console = Console(record=True, width=128, quiet=False, file=io.StringIO(), force_terminal=True)
    is_slow = is_taken = False
    while (at := time.monotonic() - began) < SECONDS:
        ranks = watch.look(read_runs([place / "cache"]))
        if at > SLOW_FROM and not is_slow:
            is_slow = True
            for path in slow:
                server.misbehave(path, SLOW)
        if at > SLOW_UNTIL and not is_taken:
            is_taken = True
            console.print(shown(ranks, "n"))
            console.save_svg(str(IMAGES / "top.svg"), title="streamload top")
            for path in slow:
                server.misbehave(path)
        time.sleep(1.0)


def draw_report(place: Path) -> None:
    out = place / "run.html"
    command = [sys.executable, "-m", "streamload", "report", str(place / "records"), "-o", str(out)]
    subprocess.run(command, check=True)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--window-size=1240,1900", f"--screenshot={IMAGES / 'report.png'}", out.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
