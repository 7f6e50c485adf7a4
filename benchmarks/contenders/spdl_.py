"""SPDL: threads of one process; it reads tars by its iter_tarfile, and decodes, crops and resizes by FFmpeg.

A batch goes through the pipeline whole, so that a step between its stages, which costs a turn of an event
loop, comes once for 64 images. Bicubic by swscale, which widens the filter when it makes an image smaller:
that is antialiasing.
"""

import math
import random
import time
import urllib.request
from collections.abc import Iterator

import av  # noqa: F401  (loads what FFmpeg's libraries need; see environments/build.py)
import spdl.io
import torch
from spdl.pipeline import PipelineBuilder

from benchmarks.contenders import tars
from benchmarks.contenders.job import SIDE, Job, Result, versions
from benchmarks.contenders.workload import tokenizer, train
from streamload.transforms.normalise import OPENAI_MEAN, OPENAI_STD

LIMITS = (
    "no cache: each epoch fetches all again",
    "shuffles no samples: shards are, and a batch is a piece of one",
    "a split of tars among ranks is the user's to write",
)

Samples = list[tuple[bytes, str]]


def batches(job: Job, epoch: int) -> Iterator[Samples]:
    """Whole batches of samples, the shards in another order in each epoch."""
    paths = tars.addresses(job.urls)
    random.Random(f"{job.seed} {epoch}").shuffle(paths)
    batch: Samples = []
    for path in paths:
        with urllib.request.urlopen(path) if path.startswith("http") else open(path, "rb") as file:
            for name, payload in spdl.io.iter_tarfile(file):
                if name.endswith(".jpg"):
                    photograph = payload
                elif name.endswith(".txt"):
                    batch.append((photograph, payload.decode()))
                if len(batch) == job.batch_size:
                    yield batch
                    batch = []


def random_resized_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """Width, height, left and top as torchvision's RandomResizedCrop(scale=(0.9, 1)) draws them."""
    for _ in range(10):
        area = width * height * random.uniform(0.9, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return w, h, random.randint(0, width - w), random.randint(0, height - h)
    ratio = min(max(width / height, 3 / 4), 4 / 3)
    w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
    return w, h, (width - w) // 2, (height - h) // 2


def decoded(photograph: bytes) -> "spdl.io.ImageFrames":
    packets = spdl.io.demux_image(photograph)
    w, h, left, top = random_resized_crop(packets.codec.width, packets.codec.height)
    crop = f"crop=w={w}:h={h}:x={left}:y={top}:exact=1"
    scale = f"scale=w={SIDE}:h={SIDE}:flags=bicubic:threads=1"
    return spdl.io.decode_packets(packets, filter_desc=f"{crop},{scale},format=pix_fmts=rgb24")


def main() -> None:
    job = Job.from_argument()
    tokenize = tokenizer(job)
    scale = (1 / 255 / torch.tensor(OPENAI_STD)).view(3, 1, 1)
    shift = (-torch.tensor(OPENAI_MEAN) / torch.tensor(OPENAI_STD)).view(3, 1, 1)

    def tensors(batch: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        frames = spdl.io.convert_frames([decoded(photograph) for photograph, _ in batch])
        images = spdl.io.to_torch(frames).permute(0, 3, 1, 2)
        floats = torch.empty(images.shape)
        for image, place in zip(images, floats, strict=True):
            place.copy_(image).mul_(scale).add_(shift)
        return floats, tokenize([caption for _, caption in batch])

    imported = time.monotonic()
    epochs = []
    for epoch in range(job.epochs):
        pipeline = (
            PipelineBuilder()
            .add_source(batches(job, epoch))
            .pipe(tensors, concurrency=job.workers)
            .add_sink(2)
            .build(num_threads=job.workers)
        )
        with pipeline.auto_stop():
            epochs.append(train(pipeline, job, epoch))
    Result(imported, epochs, versions("spdl", "torch"), limits=LIMITS).print()


if __name__ == "__main__":
    main()
