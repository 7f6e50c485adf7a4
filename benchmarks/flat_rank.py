"""One loader for flat.py: says every so many samples what each of its workers holds for itself."""

import json
import multiprocessing
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import streamload
from benchmarks.contenders.job import versions
from benchmarks.contenders.workload import WordTokenizer
from streamload import Order

BATCH_SIZE, WORKERS = 64, 2
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)")


class Nothing(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """As many batches as are asked for, of next to no bytes."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.zeros(BATCH_SIZE), torch.zeros(BATCH_SIZE)


def private_bytes(pid: int) -> int:
    """Memory that no other process has; not that of batches, which lies in files in memory."""
    total, counts = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if (mapping := _MAPPING.match(line)) is not None:
            counts = not mapping[1].startswith(("/memfd:", "/dev/shm/"))
        elif counts and line.startswith("Private_"):
            total += int(line.split()[1]) * 1024
    return total


def loader_for(job: dict[str, Any]) -> Iterable[Any]:
    if job["kind"] != "streamload":
        streamload.make_loader  # noqa: B018  (imports what it needs)
        return DataLoader(Nothing(), batch_size=None, num_workers=WORKERS)
    return streamload.make_loader(
        job["urls"],
        WordTokenizer(),
        batch_size=BATCH_SIZE,
        num_workers=WORKERS,
        order=Order(endless=True),
        seed=job["seed"],
        cache_dir=job["cache_dir"],
    )


def main() -> None:
    job = json.loads(sys.argv[1])
    seen = told = 0
    for images, _ in loader_for(job):
        seen += len(images)
        if seen >= told + job["every"]:
            told = seen
            workers = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
            sizes = [private_bytes(pid) for pid in workers]
            print(json.dumps({"samples": seen, "workers": workers, "private_bytes": sizes}), flush=True)
        if seen >= job["samples"]:
            break
    print(json.dumps({"workers": workers, "versions": versions("streamload", "torch", "numpy")}), flush=True)


if __name__ == "__main__":
    main()
