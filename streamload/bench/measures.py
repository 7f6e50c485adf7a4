"""The measurements, each of which runs in a process of its own: a job as JSON in, a row of numbers out.

Command: python -m streamload.bench.measures < job.json

Loaders are read as a training would, with next to no work for a batch: one channel of every image. The clock
starts at the first batch, so that starting processes is no part of it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from streamload import Cache, Shards
from streamload.bench.job import Job, NotHere, tokenizer_of
from streamload.bench.process_tree import cpu_seconds
from streamload.errors import OptionError, OriginError, StreamloadError

_READ_BYTES = 1 << 20

Row = dict[str, Any]


def origin(job: Job) -> Row:
    """The link: all shards by the product's own fill, into a tier that is empty before."""
    from streamload.daemon.warm import warm
    from streamload.origins.origin import import_origins

    import_origins(job.urls)
    with tempfile.TemporaryDirectory(dir=job.directory, prefix="origin-") as tier:
        began, cpu_before = time.monotonic(), cpu_seconds()
        report = warm(job.urls, cache_dir=tier, cache="disk", storage_options=job.storage_options)
        seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu_before
    for url, why in report.failures.items():
        raise OriginError(f"{url}: {why}")
    return {
        "bytes_per_second": report.bytes_arrived / seconds,
        "cpu_seconds_per_gb": cpu / job.size_bytes * 1e9,
    }


def disk(job: Job) -> Row:
    """The disk: the shards' files one after the other, when the kernel has forgotten their pages.

    Raises:
        NotHere: they are in memory.
    """
    from streamload.options import file_system

    if all(file_system(Path(path)).is_memory for path in job.paths):
        raise NotHere("the shards' files are in memory")
    total, seconds, buffer = 0, 0.0, bytearray(_READ_BYTES)
    for path in job.paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.monotonic()
            while read := os.readv(descriptor, [buffer]):
                total += read
            seconds += time.monotonic() - began
        finally:
            os.close(descriptor)
    return {"bytes_per_second": total / seconds}


def decode(job: Job) -> Row:
    """The floor, without anything behind the decoder."""
    return _floor(job, "decode")


def floor_uint8(job: Job) -> Row:
    """The floor, with batches as bytes."""
    return _floor(job, "uint8")


def floor_float32(job: Job) -> Row:
    """The floor, with normalised batches."""
    return _floor(job, "float32")


def streamload(job: Job) -> Row:
    """The loader as it ships, with its default transform, from its cache."""
    from streamload.loader import make_loader

    with make_loader(
        job.urls,
        tokenizer_of(job.tokenizer),
        batch_size=job.batch_size,
        num_workers=job.workers,
        num_batches=job.batches,
        seed=job.seed,
        cache=Cache(where="disk"),
        cache_dir=job.tier or str(Path(job.directory) / "unused"),
        shards=Shards(storage_options=job.storage_options),
    ) as loader:
        row = _read(loader, job)
        stats = loader.stats()
    return {**row, "data_wait_seconds": stats.data_wait_seconds, "transform_seconds": stats.transform_seconds}


def webdataset(job: Job) -> Row:
    """webdataset as its documentation has it, its images by Pillow."""
    from streamload.bench.peers import webdataset_loader

    return _read(webdataset_loader(job), job)


def open_clip(job: Job) -> Row:
    """open_clip's own loader with its own transform.

    Raises:
        NotHere: it can't be imported.
    """
    from streamload.bench.peers import open_clip_loader

    return _read(open_clip_loader(job), job)


MEASURES: dict[str, Callable[[Job], Row]] = {
    "origin": origin,
    "disk": disk,
    "decode alone": decode,
    "floor, uint8": floor_uint8,
    "floor, float32": floor_float32,
    "streamload": streamload,
    "webdataset": webdataset,
    "open_clip": open_clip,
}


def main() -> None:
    """Measure what standard input asks for; print the row, or why there is none."""
    job = Job(**json.load(sys.stdin))
    try:
        said = MEASURES[job.name](job)
    except NotHere as exc:
        said = {"left_out": str(exc)}
    except StreamloadError as exc:
        said = {"error": str(exc)}
    print(f"\n{json.dumps(said)}")


def _floor(job: Job, form: Any) -> Row:
    from streamload.bench import floor

    _, once = floor.run(
        job.paths,
        workers=job.workers,
        form=form,
        batch_size=job.batch_size,
        tokenizer=tokenizer_of(job.tokenizer) if form != "decode" else None,
        samples=job.samples,
        passes=2,
    )
    return _row(once.images, once.ended - once.began, once.cpu_seconds)


def _read(loader: Iterable[Any], job: Job) -> Row:
    """Go through the batches; the first one starts the clock."""
    batches = itertools.islice(loader, job.batches)
    next(batches)
    images, began, cpu_before = 0, time.monotonic(), cpu_seconds()
    for number, batch in enumerate(batches):
        images += len(batch[0])
        batch[0][:, number % 3].mean().item()
    seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu_before
    if images != (job.batches - 1) * job.batch_size:
        raise OptionError(
            f"{job.name} gave {images:,} images in place of {(job.batches - 1) * job.batch_size:,}"
        )
    return _row(images, seconds, cpu)


def _row(images: int, seconds: float, cpu: float) -> Row:
    return {"images": images, "images_per_second": images / seconds, "cpu_us_per_image": cpu / images * 1e6}


if __name__ == "__main__":
    main()
