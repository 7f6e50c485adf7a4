"""Megatron-Energon: the tars as they are, with the metadata of its `energon prepare` beside them.

A task encoder makes tensors of a CaptioningSample; the windows are those of its documentation.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    WorkerConfig,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from benchmarks.contenders import tars
from benchmarks.contenders.job import Job, Result, versions
from benchmarks.contenders.workload import converting, open_clip_preprocess, tokenizer, train

SAMPLE_SHUFFLE = 100
SAMPLES_IN_SEQUENCE = 100
"""Both as its documentation has them."""

LIMITS = (
    "an index of all samples is made before the first",
    "reads object stores and local files, not plain HTTP",
    "no cache that lasts from epoch to epoch",
)


@edataclass
class Example(Sample):
    image: torch.Tensor
    text: torch.Tensor


@edataclass
class BatchAssembly(Batch):
    images: torch.Tensor
    texts: torch.Tensor


class Encoder(DefaultTaskEncoder[CaptioningSample, Example, BatchAssembly, BatchAssembly]):
    decoder = SampleDecoder(image_decode="pilrgb")

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._preprocess, self._tokenize = open_clip_preprocess(), tokenizer(job)

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: CaptioningSample) -> Example:
        image, text = self._preprocess(sample.image), self._tokenize(sample.caption)[0]
        return Example.derive_from(sample, image=image, text=text)

    @stateless
    def batch(self, samples: list[Example]) -> BatchAssembly:
        images = torch.stack([sample.image for sample in samples])
        texts = torch.stack([sample.text for sample in samples])
        return BatchAssembly.from_samples(samples, images=images, texts=texts)


def convert(job: Job, folder: Path) -> None:
    tars.link(job.urls, folder)
    options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"]
    options += ["--field-map", '{"image": "jpg", "caption": "txt"}', "--num-workers", str(job.workers)]
    command = [Path(sys.executable).with_name("energon"), "prepare", *options, "--no-progress", folder]
    subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> None:
    job = Job.from_argument()
    names = ("megatron-energon", "webdataset", "torchvision", "torch", "pillow")
    if job.convert_to is not None:
        converting(convert, job, names)
        return
    making = time.monotonic()
    dataset: Any = get_train_dataset(
        job.urls,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=job.workers, seed_offset=job.seed),
        batch_size=job.batch_size,
        batch_drop_last=True,
        shuffle_buffer_size=job.shuffle or SAMPLE_SHUFFLE,
        max_samples_per_sequence=SAMPLES_IN_SEQUENCE,
        virtual_epoch_length=job.samples // job.batch_size,
        task_encoder=Encoder(job),
    )
    loader: Any = get_savable_loader(dataset) if job.resumes else get_loader(dataset)
    if job.takes_up:
        loader.restore_state_rank(job.saved_state())
    save = loader.save_state_rank if job.resumes else None
    imported = time.monotonic()
    epochs = [train(((b.images, b.texts) for b in loader), job, epoch, save) for epoch in range(job.epochs)]
    Result(imported, epochs, versions(*names), limits=LIMITS, making=making).print()


if __name__ == "__main__":
    main()
