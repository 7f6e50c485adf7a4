"""DALI on the CPU: its webdataset reader, its decoder with a random crop, its resize, its threads.

The tars are indexed once by DALI's own wds2idx, as its documentation recommends: that is its conversion.
Captions come out as bytes, as DALI has no tokenizer; the consumer makes ids of them, by batch.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import wds2idx
from nvidia.dali import fn, pipeline_def, types

from benchmarks.contenders import tars
from benchmarks.contenders.job import SIDE, Job, Result, versions
from benchmarks.contenders.workload import converting, tokenizer, train
from streamload.transforms.normalise import OPENAI_MEAN, OPENAI_STD

SAMPLE_SHUFFLE = 1024
"""Its default: samples that wait in memory for their turn."""

LIMITS = (
    "no cache",
    "reads tars from local files and S3 only",
    "no tokenizer: the consumer makes the ids",
)


def convert(job: Job, folder: Path) -> None:
    for path in tars.link(job.urls, folder):
        with wds2idx.IndexCreator(str(path), str(path.with_suffix(".idx")), verbose=False) as creator:
            creator.create_index()


@pipeline_def
def photographs(folder: str, shuffle: int) -> tuple[Any, Any]:
    """Normalised images, float32[3, 224, 224], and captions, uint8[bytes]."""
    jpegs, captions = fn.readers.webdataset(
        paths=sorted(map(str, Path(folder).glob("*.tar"))),
        index_paths=sorted(map(str, Path(folder).glob("*.idx"))),
        ext=["jpg", "txt"],
        missing_component_behavior="error",
        random_shuffle=True,
        initial_fill=shuffle,
        name="shards",
    )
    images = fn.decoders.image_random_crop(
        jpegs, device="cpu", random_area=(0.9, 1.0), random_aspect_ratio=(3 / 4, 4 / 3)
    )
    images = fn.resize(images, size=(SIDE, SIDE), interp_type=types.INTERP_CUBIC, antialias=True)
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * mean for mean in OPENAI_MEAN],
        std=[255 * std for std in OPENAI_STD],
    )
    return images, captions


def main() -> None:
    job = Job.from_argument()
    names = ("nvidia-dali-cuda120", "torch")
    if job.convert_to is not None:
        converting(convert, job, names)
        return
    tokenize = tokenizer(job)
    making = time.monotonic()
    resuming = {"enable_checkpointing": True} if job.resumes else {}
    if job.takes_up:
        resuming["checkpoint"] = job.saved_state()
    pipeline = photographs(
        job.urls,
        job.shuffle or SAMPLE_SHUFFLE,
        batch_size=job.batch_size,
        num_threads=job.workers,
        device_id=None,
        seed=job.seed,
        exec_dynamic=True,
        prefetch_queue_depth=2,
        **resuming,
    )
    pipeline.build()

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(job.batches):
            images, captions = pipeline.run()
            texts = [captions.at(number).tobytes().decode() for number in range(job.batch_size)]
            yield torch.from_dlpack(images.as_tensor()), tokenize(texts)

    imported = time.monotonic()
    epochs = [train(batches(), job, epoch, pipeline.checkpoint) for epoch in range(job.epochs)]
    Result(imported, epochs, versions(*names), limits=LIMITS, making=making).print()


if __name__ == "__main__":
    main()
