"""Memory of a cached module's rows with CacheLevel.MEMORY: 2 ranks with 4 workers each.

Question: rows take more than `max_memory_cache_size_mb` allows. How much memory do all processes take, with
their rows, more than the same processes without a cache?

Command: python -m benchmarks.row_memory

Two ranks, each with a DataLoader of 4 forked workers that stay, whose Dataset calls a module with each
sample's key; rows of 64 KB, half as many bytes again as the limit. Each rank goes over all samples in an
order of its own, once to compute and twice to read; then everything is counted while it still lives: the
PSS of both process trees (each shared page once), and the files in tmpfs that say who has which share. "none"
is the module without a cache, "disk" with rows on disk alone; "memory" also in memory.

Result: results/row_memory.json

Explanation: each worker holds rows in its own memory, within its share of one limit for the node. What the
workers hold beside is the library, and the pages that SQLite keeps of each connection.
"""

import json
import os
import subprocess
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import streamload
from benchmarks import turns
from benchmarks.process_tree import pss_bytes
from benchmarks.turns import Contender
from streamload.cache import memory
from streamload.derived.store.row_store import close_stores

WIDTH = 16_384
"""Numbers of a row: 64 KB."""
LIMIT_MIB, QUICK_LIMIT_MIB = 512, 16
RANKS, WORKERS, PASSES = 2, 4, 3
ANY = {"preprocess": "none"}
CONTENDERS = [Contender(name, "", {**ANY, "kind": name}) for name in ("none", "disk", "memory")]


class Samples(Dataset[float]):
    """Numbers, by way of a row of a cached module."""

    def __init__(self, kind: str, directory: str, limit_mib: int, rows: int):
        class Wide(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + torch.arange(WIDTH, dtype=torch.float32)

        decorate = streamload.cache_module(
            None if kind == "none" else directory,
            cache_level=getattr(streamload.CacheLevel, "MEMORY" if kind == "memory" else "DISK"),
            max_memory_cache_size_mb=limit_mib,
        )
        self.module: Any = decorate(Wide)().eval()
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, at: int) -> float:
        row = self.module(torch.tensor([[float(at)]]), cache_key=[at])
        return float(row[0, 1]) - at


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank(**json.loads(sys.argv[2]))
        return
    given = turns.arguments(__doc__, rounds=3, names=[contender.name for contender in CONTENDERS])
    limit_mib = QUICK_LIMIT_MIB if given.quick else LIMIT_MIB
    rows: list[dict[str, Any]] = []
    with turns.scratch() as directory:
        for round_ in range(given.rounds):
            for contender in turns.rotated(turns.chosen(given, CONTENDERS), round_):
                with turns.empty_directory(directory) as empty:
                    found = measure(contender.job["kind"], str(empty), limit_mib)
                    rows.append({"label": contender.name, "round": round_, **found})
    medians = turns.medians(rows)
    growth = None
    if {"none", "memory"} <= medians.keys():
        growth = (medians["memory"]["total_bytes"] - medians["none"]["total_bytes"]) / (limit_mib << 20)
    turns.write(
        given,
        "row_memory",
        {
            "settings": {
                "row_bytes": 4 * WIDTH,
                "rows": row_count(limit_mib),
                "limit_bytes": limit_mib << 20,
                "ranks": RANKS,
                "workers": WORKERS,
            },
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "targets": [turns.target("growth of memory ÷ memory limit", growth, at_most=1.05)],
        },
    )


def row_count(limit_mib: int) -> int:
    """Half as many again as fit."""
    return (limit_mib << 20) * 3 // 2 // (4 * WIDTH)


def measure(kind: str, directory: str, limit_mib: int) -> dict[str, Any]:
    """Run the ranks, and count what they take when they are done and still there."""
    job = {"kind": kind, "directory": directory, "limit_mib": limit_mib, "rows": row_count(limit_mib)}
    command = [sys.executable, "-m", "benchmarks.row_memory", "--rank"]
    ranks = [
        subprocess.Popen(
            [*command, json.dumps({**job, "seed": number})],
            cwd=turns.ROOT,
            env={**turns.environment(), "STREAMLOAD_CACHE_SIZE": "50GB"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(RANKS)
    ]
    try:
        done = [json.loads(one.stdout.readline()) for one in ranks if one.stdout is not None]
        pss = sum(pss_bytes(one.pid) for one in ranks)
        copy_bytes = sum(
            path.stat().st_blocks * 512
            for path in (memory.PLACE / f"streamload-memory-{os.geteuid()}").rglob("*")
            if kind == "memory" and path.is_file()  # else it is what a killed run has left
        )
    finally:
        for one in ranks:
            one.communicate("go\n", timeout=turns.LIMIT_SECONDS)
    return {
        "total_bytes": pss + copy_bytes,
        "process_bytes": pss,
        "copy_bytes": copy_bytes,
        "cpu_seconds": sum(one["cpu_seconds"] for one in done),
    }


def rank(kind: str, directory: str, limit_mib: int, rows: int, seed: int) -> None:
    """One rank: pass over all samples, say so, and wait."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    samples = Samples(kind, directory, limit_mib, rows)
    loader = DataLoader(samples, 64, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    for _ in range(PASSES):
        if any(bool(batch.abs().max() != 1) for batch in loader):
            raise AssertionError("a row isn't the one of its key")
    print(json.dumps({"cpu_seconds": sum(os.times()[:4])}), flush=True)
    sys.stdin.readline()
    del loader
    close_stores()


if __name__ == "__main__":
    main()
