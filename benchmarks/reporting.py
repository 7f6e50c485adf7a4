"""What reporting losses costs a training step.

Question: how much processor time does `loader.report` take a step, sums by source included, and how much does
a batch's `info`?

Command: python -m benchmarks.reporting

Losses and alignments of 8 sources, for batches of several sizes, as tensors in host memory, in this process
alone. A step reports both, and every 200 steps the sums are read, as for a decision. On a GPU a report is one
copy that is started there; with one in the machine, its steps are measured as well, without waiting for it.

- us_per_step: processor time of this thread by step.

Result: results/reporting.json; docs/guides/mixing.md has the number in words.

Explanation: a report is one copy into a buffer. Sums are made for as many values at once as a processor's
cache holds, with about ten calls of torch, however many reports these are.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks import machine, turns
from benchmarks.contenders.workload import versions
from streamload.loader.batch_info import BatchInfo
from streamload.loader.microbatches import Yielded
from streamload.loader.signals import ALIGNMENT, LOSS, Reports

SOURCES, STEPS, EVERY = 8, 2000, 200
ROWS = (64, 256, 1024)


def main() -> None:
    given = turns.arguments(__doc__, rounds=7, names=["streamload"])
    steps = 200 if given.quick else STEPS
    torch.set_num_threads(1)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows: list[dict[str, Any]] = []
    for round_ in range(given.rounds):
        for device in devices:
            for count in ROWS:
                row = {"label": f"{count} rows, {device}", "contender": "streamload", "round": round_}
                us = measured(count, torch.device(device), steps)
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


def measured(count: int, device: torch.device, steps: int) -> float:
    """Microseconds of processor time by step."""
    rng, reports = np.random.default_rng(0), Reports(SOURCES)
    names = tuple(map(str, range(SOURCES)))
    infos = [
        BatchInfo(Yielded(0, count, (), None, ()), names, seats.tobytes(), {}, device)
        for seats in rng.integers(0, SOURCES, (16, count)).astype(np.int32)
    ]
    losses = (torch.rand(count, device=device, requires_grad=True) * 2).to(torch.bfloat16)
    cosines = torch.rand(count, device=device)
    spent = 0.0
    for step in range(steps):
        began = time.thread_time()
        reports.add(LOSS + step * 8 // EVERY % 8, losses, infos[step % 16], None)
        reports.add(ALIGNMENT, cosines, infos[step % 16], None)
        spent += time.thread_time() - began
        if step % EVERY == EVERY - 1:
            reports.read()  # at a decision, which may wait for the device
    return 1e6 * spent / steps


if __name__ == "__main__":
    main()
