"""streamload as its README uses it."""

import time
from collections.abc import Callable
from typing import Any

import streamload
from benchmarks.contenders.workload import (
    Job,
    Result,
    bytes_of,
    open_clip_preprocess,
    read,
    tokenizer,
    train,
    versions,
)


def main() -> None:
    run(Job.from_argument()).print()


def run(job: Job, after_epoch: Callable[[], object] = lambda: None, **more: Any) -> Result:
    """Do the job; `more` is for make_loader."""
    preprocess = open_clip_preprocess() if job.preprocess == "open_clip" else None
    reads_only = job.preprocess == "none"
    epochs = []
    with streamload.make_loader(
        job.urls,
        None if reads_only else tokenizer(job),
        preprocess=preprocess,
        compile=job.compile,
        map_sample=bytes_of if reads_only else None,
        batch_size=job.batch_size,
        num_workers=job.workers,
        shuffle=job.shuffle,
        seed=job.seed,
        image_dtype=job.images,
        prepare=job.prepare,
        cache_dir=job.cache_dir,
        cache_size=job.cache_bytes,
        **more,
    ) as loader:
        imported = time.monotonic()
        for epoch in range(job.epochs):
            epochs.append(read(loader, job) if reads_only else train(loader, job, epoch))
            after_epoch()
        notes = {"stats": loader.stats().as_dict()}
    return Result(imported, epochs, versions("streamload", "torch", "simplejpeg", "pillow"), notes)


if __name__ == "__main__":
    main()
