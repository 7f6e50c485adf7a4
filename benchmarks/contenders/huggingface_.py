"""Hugging Face datasets: the tars streamed by its webdataset builder into a DataLoader of torch."""

import logging
import time
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader

from benchmarks.contenders import tars
from benchmarks.contenders.workload import Job, Result, Transform, train, versions

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
    dataset = (
        datasets.load_dataset(
            "webdataset", data_files={"train": tars.addresses(job.urls)}, split="train", streaming=True
        )
        .shuffle(seed=job.seed, buffer_size=job.shuffle or SAMPLE_SHUFFLE)
        .decode(False)
    )
    loader = DataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.workers,
        drop_last=True,
        collate_fn=collate,
        persistent_workers=job.workers > 0,
    )
    imported = time.monotonic()
    epochs = []
    for epoch in range(job.epochs):
        dataset.set_epoch(epoch)
        epochs.append(train(loader, job, epoch))
    names = ("datasets", "torchvision", "torch", "pillow")
    Result(imported, epochs, versions(*names), limits=LIMITS).print()


if __name__ == "__main__":
    main()
