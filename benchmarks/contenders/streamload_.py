"""streamload as its README uses it."""

import time

import streamload
from benchmarks.contenders.workload import Job, Result, open_clip_preprocess, tokenizer, train, versions


def main() -> None:
    job = Job.from_argument()
    preprocess = open_clip_preprocess() if job.preprocess == "open_clip" else None
    tokenize = tokenizer(job)
    with streamload.make_loader(
        job.urls,
        tokenize,
        preprocess=preprocess,
        batch_size=job.batch_size,
        num_workers=job.workers,
        shuffle=job.shuffle,
        seed=job.seed,
        cache_dir=job.cache_dir,
    ) as loader:
        imported = time.monotonic()
        epochs = [train(loader, job, epoch) for epoch in range(job.epochs)]
        notes = {"stats": loader.stats().as_dict()}
    Result(imported, epochs, versions("streamload", "torch", "simplejpeg", "pillow"), notes).print()


if __name__ == "__main__":
    main()
