"""streamload on images and labels, for strategies.py."""

import time
from pathlib import Path

import streamload
from benchmarks.contenders.classifier import epochs_of
from benchmarks.contenders.job import Job, Result, versions
from streamload import Images, Shards


def main() -> None:
    job = Job.from_argument()
    make_loader = streamload.make_loader  # which imports it
    assert job.cache_dir is not None
    making = time.monotonic()
    with make_loader(
        job.urls,
        batch_size=job.batch_size,
        num_workers=job.workers,
        seed=job.seed,
        shards=Shards(text_key=None, label_key="cls"),
        images=Images(prepare=job.prepare),
        cache_dir=job.cache_dir,
        cache_size=job.cache_bytes,
    ) as loader:
        imported = time.monotonic()
        epochs = epochs_of(loader, job)
        notes = {"stats": loader.stats().as_dict()}
    kept = sum(path.stat().st_size for path in Path(job.cache_dir).glob("shards/*/*"))
    found = versions("streamload", "torch", "simplejpeg", "pillow")
    Result(imported, epochs, found, {**notes, "kept_bytes": kept}, making=making).print()


if __name__ == "__main__":
    main()
