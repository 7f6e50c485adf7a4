"""Hugging Face datasets: the tars streamed by its webdataset builder into a DataLoader of torch."""

import functools
import logging
import time
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader

from benchmarks.contenders import tars
from benchmarks.contenders.job import Job, Result, versions
from benchmarks.contenders.workload import Transform, train

SAMPLE_SHUFFLE = 1000
"""As its documentation has it, and its default."""

LIMITS = ("no cache when it streams: each epoch fetches all again", "more workers than shards stay idle")


def main() -> None:
    job = Job.from_argument()
    transform = Transform(job)

    def collate(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        images, texts = zip(*(transform(row["jpg"]["bytes"], row["txt"]) for row in rows), strict=True)
        return torch.stack(images), torch.stack(texts)

    logging.basicConfig(level=logging.WARNING)
    making = time.monotonic()
    dataset = (
        datasets.load_dataset(
            "webdataset", data_files={"train": tars.addresses(job.urls)}, split="train", streaming=True
        )
        .shuffle(seed=job.seed, buffer_size=job.shuffle or SAMPLE_SHUFFLE)
        .decode(False)
    )
    loader = _loader_class(job)(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.workers,
        drop_last=True,
        collate_fn=collate,
        persistent_workers=job.workers > 0,
    )
    first = 0
    if job.takes_up:
        saved = job.saved_state()
        first = saved["epoch"]
        loader.load_state_dict(saved["loader"])
    imported = time.monotonic()
    epochs = []
    for epoch in range(job.epochs):
        dataset.set_epoch(first + epoch)
        save = functools.partial(_state, first + epoch, loader)
        epochs.append(train(loader, job, epoch, save))
    names = ("datasets", "torchdata", "torchvision", "torch", "pillow")
    Result(imported, epochs, versions(*names), limits=LIMITS, making=making).print()


def _loader_class(job: Job) -> type[DataLoader[Any]]:
    """torch's, or the one with states that the documentation of datasets names for resuming."""
    if not job.resumes:
        return DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def _state(epoch: int, loader: Any) -> dict[str, Any]:
    return {"epoch": epoch, "loader": loader.state_dict()}


if __name__ == "__main__":
    main()
