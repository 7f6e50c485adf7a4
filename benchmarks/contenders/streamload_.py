"""streamload as its README uses it."""

import time
from collections.abc import Callable

import streamload
from benchmarks.contenders.job import JITTERED, Job, Result, versions
from benchmarks.contenders.workload import bytes_of, open_clip_preprocess, read, tokenizer, train
from streamload import Images, Workers


def main() -> None:
    run(Job.from_argument()).print()


def run(
    job: Job, after_epoch: Callable[[], object] = lambda: None, start_method: str | None = None
) -> Result:
    """Do the job; `start_method`, of its workers, is the job's own by default."""
    is_open_clips = job.preprocess in ("open_clip", JITTERED)
    preprocess = open_clip_preprocess(job.preprocess == JITTERED) if is_open_clips else None
    reads_only = job.preprocess == "none"
    tokenize = None if reads_only else tokenizer(job)
    make_loader, epochs = streamload.make_loader, []  # which imports it
    making = time.monotonic()
    with make_loader(
        job.urls,
        tokenize,
        preprocess=preprocess,
        batch_size=job.batch_size,
        num_workers=job.workers,
        shuffle=job.shuffle,
        seed=job.seed,
        images=Images(dtype=job.images, compile=job.compile, prepare=job.prepare),
        workers=Workers(
            map_sample=bytes_of if reads_only else None,
            multiprocessing_context=start_method or job.start_method,
        ),
        cache_dir=job.cache_dir,
        cache_size=job.cache_bytes,
    ) as loader:
        if job.takes_up:
            loader.load_state_dict(job.saved_state())
        imported = time.monotonic()
        for epoch in range(job.epochs):
            job.await_turn(epoch)
            trained = read(loader, job) if reads_only else train(loader, job, epoch, loader.state_dict)
            epochs.append(trained)
            after_epoch()
        notes = {"stats": loader.stats().as_dict()}
    names = ("streamload", "torch", "simplejpeg", "pillow")
    return Result(imported, epochs, versions(*names), notes, making=making)


if __name__ == "__main__":
    main()
