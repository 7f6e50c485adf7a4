"""A DataLoader of torch and nothing else: what start.py compares with.

Its workers read the same shards with the floor's reader, make the same batches, and hand them over as torch
does. It has imported what streamload's process has, so that its workers begin with the same: pages to share
where they are forked, modules to import where they are spawned.
"""

import mmap
import random
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import streamload.loader  # noqa: F401
from benchmarks.contenders import tars
from benchmarks.contenders.job import Job, Result, versions
from benchmarks.contenders.workload import tokenizer, train
from streamload.profile import floor

_Batch = tuple[torch.Tensor, torch.Tensor]

LIMITS = (
    "no cache: local files only",
    "neither shuffles nor verifies",
    "no state, and no mending of what is broken",
)


class Shards(IterableDataset[_Batch]):
    """Every worker reads shards of its own, as listed."""

    def __init__(self, paths: list[str], job: Job) -> None:
        self._paths, self._job, self._tokenize = paths, job, tokenizer(job)

    def __iter__(self) -> Iterator[_Batch]:
        worker, job = get_worker_info(), self._job
        own = self._paths[worker.id :: worker.num_workers] if worker else self._paths
        batch, filled, draw = self._empty_batch(), 0, random.random
        for path in own:
            with mapped(path) as data, memoryview(data) as view:
                for image, size, text, length in floor.pairs(data):
                    with view[image : image + size] as jpeg:
                        batch.put(filled, jpeg, str(data[text : text + length], "utf-8"), draw)
                    filled += 1
                    if filled == job.batch_size:
                        yield batch.images, torch.from_numpy(batch.ids)
                        batch, filled = self._empty_batch(), 0

    def _empty_batch(self) -> floor.FloorBatch:
        """With memory of its own: torch moves what was yielded into shared memory some time later."""
        return floor.FloorBatch(self._job.batch_size, self._job.images, self._tokenize)


def mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def main() -> None:
    job = Job.from_argument()
    paths = tars.addresses(job.urls)
    making = time.monotonic()
    loader = DataLoader(
        Shards(paths, job),
        batch_size=None,
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
        multiprocessing_context=job.start_method,
    )
    imported = time.monotonic()
    epochs = [train(loader, job, epoch) for epoch in range(job.epochs)]
    names = ("streamload", "torch", "simplejpeg")
    Result(imported, epochs, versions(*names), limits=LIMITS, making=making).print()


if __name__ == "__main__":
    main()
