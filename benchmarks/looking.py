"""What looking at runs costs: a scrape of 8 ranks with 8 workers, the report of a run of 10⁶ samples.

    python -m benchmarks.looking

Processes publish pages on which every metric has a value, as ranks do; the server of `streamload metrics
serve` is asked over HTTP. The report is made by the command from recordings as long as they get. Seconds are
on the clock; cpu_seconds are those of server and client together, and of the command.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import urllib3

from benchmarks import turns
from benchmarks.contenders.job import versions
from streamload.cache.tier import Tier
from streamload.metrics import COUNTERS, GIVEN
from streamload.observe.metrics_server import MetricsServer
from streamload.observe.page import PageFile, RunPage, names_of_sources, now
from streamload.observe.recording import MOST, Recording

RANKS, WORKERS, SOURCES, SCRAPES = 8, 8, 4, 200
SAMPLES = 1_000_000
SCRAPE_SECONDS, REPORT_SECONDS, REPORT_BYTES = 0.010, 2.0, 2_000_000


def main() -> None:
    given = turns.arguments(__doc__, rounds=7, names=["streamload"])
    scrapes = 5 if given.quick else SCRAPES
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamload-bench-")))
        tier = Tier(place / "tier", 1 << 30)
        stack.enter_context(ranks(tier.root))
        server = stack.enter_context(MetricsServer([tier.root], "127.0.0.1:0"))
        record(place / "records", given.quick)
        for round_ in range(given.rounds):
            common = {"contender": "streamload", "round": round_}
            rows.append({"label": "scrape", **common, **scraped(server.url, scrapes)})
            rows.append({"label": "report", **common, **drawn(place)})
    medians = turns.medians(rows)
    scrape, report = medians["scrape"], medians["report"]
    series = scrape["series_per_rank"]
    turns.write(
        given,
        "looking",
        {
            "settings": {"ranks": RANKS, "workers": WORKERS, "sources": SOURCES, "samples": SAMPLES},
            "versions": {"streamload": versions("streamload", "numpy", "urllib3")},
            "seeds": [],
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target("scrape of 8 ranks, CPU s", scrape["cpu_seconds"], at_most=SCRAPE_SECONDS),
                turns.target("series of a rank with 4 sources", series, at_most=85 + 8 * SOURCES),
                turns.target("report of 10⁶ samples, CPU s", report["cpu_seconds"], at_most=REPORT_SECONDS),
                turns.target("report of 10⁶ samples, bytes", report["bytes"], at_most=REPORT_BYTES),
            ],
        },
    )


def page(rank: int, share: float = 1.0) -> RunPage:
    """A rank on whose page nothing is missing, after a share of its run."""
    sources, moment = names_of_sources(f"source {place}" for place in range(SOURCES)), now()
    gauges: dict[str, dict[tuple[str, ...], float]] = {}
    for metric in GIVEN:
        labels = sources if "source" in metric.labels else ("disk",) if metric.labels else (None,)
        gauges[metric.name] = {(label,) if label else (): share * 1e5 / 3 for label in labels}
    began = moment._replace(monotonic_ns=0, unix=moment.unix - 1e4)
    return RunPage(
        run="0123456789abcdef" * 2,
        rank=rank,
        world_size=RANKS,
        pid=os.getpid(),
        host="node",
        began=began,
        written=moment._replace(monotonic_ns=int(share * 1e13)) if share < 1 else moment,
        workers=WORKERS,
        sources=sources,
        counters={name: int(share * (10**12 + place)) for place, name in enumerate(COUNTERS)}
        | {"samples_yielded": int(share * SAMPLES / RANKS)},
        wait_buckets=tuple(int(share * 10**place) for place in range(24)),
        gauges=gauges,
        verdict="waited 31% of the last 60 s for data: the origin gives 38 MB/s where 55 MB/s are needed",
        alerts={"data wait": "the training waits 31% of its time for data"},
    )


@contextlib.contextmanager
def ranks(root: Path) -> Any:
    """Processes that have published, and live."""
    context = multiprocessing.get_context("fork")
    ready = context.Semaphore(0)
    found = [context.Process(target=publish, args=(root, rank, ready)) for rank in range(RANKS)]
    for process in found:
        process.start()
    for _ in found:
        ready.acquire()
    try:
        yield
    finally:
        for process in found:
            process.kill()
            process.join()


def publish(root: Path, rank: int, ready: Any) -> None:
    PageFile(root).write(page(rank))
    ready.release()
    signal.pause()


def scraped(url: str, count: int) -> dict[str, float]:
    """The median of some scrapes over one connection, as Prometheus has it."""
    seconds, text, spent = [], "", time.process_time()
    with urllib3.PoolManager(retries=False) as pools:
        for _ in range(count):
            began = time.perf_counter()
            text = pools.request("GET", f"{url}/metrics").data.decode()
            seconds.append(time.perf_counter() - began)
    series = sum(not line.startswith("#") for line in text.splitlines())
    median = sorted(seconds)[len(seconds) // 2]
    spent = (time.process_time() - spent) / count
    return {"seconds": median, "cpu_seconds": spent, "series_per_rank": series / RANKS, "bytes": len(text)}


def record(folder: Path, quick: bool) -> None:
    """Recordings of all ranks, as long as they get."""
    moments = 20 if quick else MOST - 1
    for rank in range(RANKS):
        recording = Recording(folder, {"batch_size": 256})
        for moment in range(1, moments + 1):
            recording.add(dataclasses.replace(page(rank, moment / (moments + 1)), pid=rank))


def drawn(place: Path) -> dict[str, float]:
    """The time of the command, with the start of Python, and the size of what it writes."""
    out = place / "run.html"
    began, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "streamload", "report", str(place / "records"), "-o", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - began, os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu_seconds": spent, "bytes": out.stat().st_size}


if __name__ == "__main__":
    main()
