"""What counting costs: the loader's rate with all metrics, beside the rate without them.

Question: how many fewer images does a loader make because it counts where its time goes, looks at alerts and
publishes its numbers?

Command: python -m benchmarks.metrics_cost

One process makes float32 batches of 64 from a warm cache (num_workers=0), so that all that a worker and the
training's process count is in its CPU time. In each round it makes an epoch with metrics and one without, in
alternating order; without, the functions that count stages, waits and steps, and those that look and publish
once a second, are replaced by ones that do nothing. Then the parts alone: what a batch costs, what a look
with its published page does, and what reading the page does.

- cpu_us_per_image: CPU time of the process.
- us: CPU time of one of the parts.

Result: results/metrics_cost.json; docs/guides/metrics.md has the numbers in words.

Explanation: time stamps are per batch, and per image only for one of 16. The page is a few kilobytes in the
page cache.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import streamload
from benchmarks import machine, turns
from benchmarks.contenders.job import versions
from examples.photograph_shards import write_photograph_shards
from streamload.batches import images
from streamload.batches.in_progress import MakingCosts
from streamload.batches.tokenize import BatchTokenizer
from streamload.loader.loader import Loader
from streamload.loader.rank_process import LoopClock
from streamload.metrics import Counters
from streamload.observe.observer import RunObserver
from streamload.observe.page import read_runs
from streamload.worker.messages import ready_counts
from streamload.worker.stages import Stages

SAMPLES, BATCH = 640, 64
ON, OFF, READ, LOOK, COUNT = (
    "with metrics",
    "without",
    "reading a page",
    "a look, with its page",
    "counting a batch",
)


def main() -> None:
    given = turns.arguments(__doc__, rounds=20, names=["streamload"])
    samples = 128 if given.quick else SAMPLES
    rows: list[turns.Row] = []
    with tempfile.TemporaryDirectory(prefix="streamload-bench-") as place:
        write_photograph_shards(Path(place) / "shards", samples, 512)
        urls = sorted(str(path) for path in (Path(place) / "shards").glob("*.tar"))
        with streamload.make_loader(
            urls, batch_size=BATCH, num_workers=0, cache_dir=f"{place}/cache", cache_size="1GB"
        ) as loader:
            for _ in range(2):
                epoch(loader)
            for round_ in range(given.rounds):
                order = [ON, OFF] if round_ % 2 else [OFF, ON]
                for label in order:
                    with without_metrics() if label == OFF else contextlib.nullcontext():
                        us = epoch(loader)
                    row = {"label": label, "contender": "streamload", "round": round_}
                    rows.append({**row, "load_before": machine.load(), "cpu_us_per_image": us})
            parts = cost_of_parts(loader, f"{place}/cache")
    medians = turns.medians(rows)
    by_round = {
        label: [row["cpu_us_per_image"] for row in rows if row["label"] == label] for label in (ON, OFF)
    }
    ratios = sorted(off / on for on, off in zip(by_round[ON], by_round[OFF], strict=True))
    of_image = parts[COUNT] / BATCH + parts[LOOK] * medians[ON]["cpu_us_per_image"] / 1e6
    turns.write(
        given,
        "metrics_cost",
        {
            "settings": {"samples": samples, "batch": BATCH},
            "versions": {"streamload": versions("streamload", "torch", "numpy")},
            "seeds": [0],
            "rounds": rows,
            "medians": medians | {label: {"us": us} for label, us in parts.items()},
            "rate_ratios": ratios,
            "targets": [
                turns.target("rate with metrics, times without", ratios[len(ratios) // 2], at_least=0.99),
                turns.target(
                    "share of an image's CPU time, by the parts",
                    of_image / medians[ON]["cpu_us_per_image"],
                    at_most=0.01,
                ),
            ],
        },
    )


def epoch(loader: Loader) -> float:
    """Make an epoch; returns the CPU time of an image in microseconds."""
    began, made = time.process_time(), 0
    for batch, _ in loader:
        made += len(batch)
    return 1e6 * (time.process_time() - began) / made


@contextlib.contextmanager
def without_metrics() -> Iterator[None]:
    """Count nothing of what isn't needed to train."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def nothing_timed(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    with contextlib.ExitStack() as patches:
        for owner, name, instead in (
            *((Stages, name, nothing) for name in ("begin_read", "end_read", "made", "handed_over")),
            *((Stages, name, nothing_timed) for name in ("samples", "finish")),
            *((LoopClock, name, nothing) for name in ("asked", "took", "returned", "wait_began")),
            *((RunObserver, name, nothing) for name in ("took", "tick", "waited")),
            (Counters, "add_all", nothing),
            (LoopClock, "copying", nothing_timed),
            (LoopClock, "wait_ended", lambda *_: 0),
            (BatchTokenizer, "real_and_padding", lambda *_: (0, 0)),
            (images, "_TIMED", -1),
        ):
            patches.enter_context(mock.patch.object(owner, name, instead))
        yield


def cost_of_parts(loader: Loader, cache_dir: str) -> dict[str, float]:
    """Microseconds of what is done for each batch, once a second, and by a reader."""
    batches = iter(loader)
    batch, _ = next(batches)
    counts, clock, observer = loader._run.process.counts, loader._run.process.clock, loader.observer
    stages = Stages(counts)
    made = mock.Mock(values={"image": batch}, blocked=(), rows=mock.Mock(passes=()))
    measured = MakingCosts(1000, 1000, 1000, 100, 100)

    def count() -> None:
        clock.asked()
        observer.tick()
        since = time.monotonic()
        clock.wait_began(since)
        with stages.samples():
            stages.begin_read()
            stages.end_read()
        with stages.finish():
            pass
        stages.made(measured, None)
        counts.add_all(ready_counts(made.values))
        stages.handed_over()
        with clock.copying():
            pass
        waited_ns = clock.wait_ended(since)
        observer.waited(waited_ns)
        clock.took(made, waited_ns)
        observer.took(made)
        clock.returned()

    found = {
        COUNT: _us(count, 2000),
        LOOK: _us(lambda: observer.tick(is_due=True), 200),
        READ: _us(lambda: read_runs([cache_dir]), 200),
    }
    del batches
    return found


def _us(run: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        run()
    return 1e6 * (time.process_time() - began) / times


if __name__ == "__main__":
    main()
