"""What reporting losses costs a training step.

Question: how much processor time does `loader.report` take a step, sums by source included?

Command: python -m benchmarks.reporting

Losses (bfloat16, of a graph) and alignments of 8 sources, for batches of several sizes, in this process
alone. A step reports both; every 200 steps the sums are read, as for a decision, which isn't counted. With a
GPU in the machine, tensors there are measured as well: a report only starts a copy.

- us_per_step: processor time of this thread by step.

Result: results/reporting.json; docs/guides/mixing.md has the number in words.

Explanation: a report is one copy into a buffer. Sums are made for as many values at once as a processor's
cache holds, with about ten calls of torch, however many reports these are.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import streamload
from benchmarks import machine, turns
from benchmarks.contenders.job import versions
from streamload.testing.shards import write_shards

SOURCES, STEPS, EVERY = 8, 2000, 200
ROWS = (64, 256, 1024)


def main() -> None:
    given = turns.arguments(__doc__, rounds=7, names=["streamload"])
    steps = 200 if given.quick else STEPS
    torch.set_num_threads(1)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="streamload-bench-") as place:
        for name in range(SOURCES):
            write_shards(Path(place) / str(name), [40], seed=name)
        for round_ in range(given.rounds):
            for device, count in itertools.product(devices, ROWS):
                row = {"label": f"{count} rows, {device}", "contender": "streamload", "round": round_}
                us = measured(Path(place), count, torch.device(device), steps)
                rows.append({**row, "load_before": machine.load(), "us_per_step": us})
    medians = turns.medians(rows)
    worst = max(medians[f"256 rows, {device}"]["us_per_step"] for device in devices)
    turns.write(
        given,
        "reporting",
        {
            "settings": {"sources": SOURCES, "steps": steps, "every": EVERY},
            "versions": {"streamload": versions("streamload", "torch", "numpy")},
            "seeds": [0],
            "rounds": rows,
            "medians": medians,
            "targets": [turns.target("processor time of a step's reports, µs", worst, at_most=20.0)],
        },
    )


def measured(place: Path, count: int, device: torch.device, steps: int) -> float:
    """Microseconds of processor time by step."""
    sources = [streamload.Source(f"{place}/{name}", name=str(name)) for name in range(SOURCES)]
    loader = streamload.make_loader(
        sources,
        batch_size=count,
        order=streamload.Order(mixing=lambda summary: None, num_batches=2),
        num_workers=0,
        workers=streamload.Workers(map_sample=number_of),
        cache_dir=place / "cache",
    )
    spent = 0.0
    with loader:
        batch = next(iter(loader))
        losses = (torch.rand(count, device=device, requires_grad=True) * 2).to(torch.bfloat16)
        cosines = torch.rand(count, device=device)
        for step in range(steps):
            began = time.thread_time()
            loader.report(loss=losses, alignment=cosines)
            spent += time.thread_time() - began
            if step % EVERY == EVERY - 1:
                loader.state_dict()  # reads the sums, as a decision does; it may wait for the device
        del batch
    return 1e6 * spent / steps


def number_of(sample: dict[str, Any]) -> dict[str, Any]:
    """A value of one sample."""
    return {"number": torch.tensor(int(sample["__key__"]))}


if __name__ == "__main__":
    main()
