"""The measurements of `streamload bench`, each run in its own process: a job as JSON in, a row as JSON out.

Command: python -m streamload.profile.measures < job.json

The loader is read like by a training loop that does next to no work: it reads one channel of each image. The
clock starts at the first batch, so starting the workers isn't measured.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload.errors import OptionError, OriginError, StreamloadError
from streamload.profile.data import BenchData
from streamload.profile.machine import cpu_seconds

if TYPE_CHECKING:
    from streamload.profile.floor import Form

_READ_BYTES = 1 << 20

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Options of a measurement.

    Attributes:
        workers: processes of the loader and of the floor.
        batch_size: of both.
        samples: read per round; None: 1,000 per worker.
        rounds: how often each measurement runs.
        tokenizer: an open_clip model whose tokenizer is used; None leaves captions as strings.
        step_seconds: duration of a training step; None if unknown.
        cache_dir: the temporary directory is created beside it; None: the configured one.
        storage_options: for fsspec.
    """

    workers: int
    batch_size: int = 64
    samples: int | None = None
    rounds: int = 3
    tokenizer: str | None = None
    step_seconds: float | None = None
    cache_dir: str | None = None
    storage_options: dict[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """One measurement.

    Attributes:
        name: a key of MEASURES.
        directory: for temporary files.
        samples: how many are read.
    """

    name: str
    seed: int
    directory: str
    samples: int
    data: BenchData
    options: ProfileOptions

    @classmethod
    def of_json(cls, text: str) -> MeasureJob:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        data, options = BenchData(**fields.pop("data")), ProfileOptions(**fields.pop("options"))
        return cls(data=data, options=options, **fields)

    def to_json(self) -> str:
        """The input of the measuring process."""
        return json.dumps(asdict(self))


def origin(job: MeasureJob) -> Row:
    """Download speed: fill an empty tier with all shards, as `streamload warm` does."""
    from streamload.daemon.warm import warm
    from streamload.origins.origin import import_origins

    import_origins(list(job.data.urls), job.options.storage_options)
    with tempfile.TemporaryDirectory(dir=job.directory, prefix="origin-") as tier:
        start, cpu_before = time.monotonic(), cpu_seconds()
        report = warm(
            list(job.data.urls), cache_dir=tier, cache="disk", storage_options=job.options.storage_options
        )
        seconds, cpu = time.monotonic() - start, cpu_seconds() - cpu_before
    for url, why in report.failures.items():
        raise OriginError(f"{url}: {why}")
    return {
        "bytes_per_second": report.bytes_arrived / seconds,
        "cpu_seconds_per_gb": cpu / job.data.size_bytes * 1e9,
    }


def disk(job: MeasureJob) -> Row:
    """Sequential read speed of the local copies, after dropping them from the page cache."""
    from streamload.options import file_system

    if all(file_system(Path(path)).is_memory for path in job.data.paths):
        return {"left_out": "the shards' files are in memory"}
    total, seconds, buffer = 0, 0.0, bytearray(_READ_BYTES)
    for path in job.data.paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.monotonic()
            while read := os.readv(descriptor, [buffer]):
                total += read
            seconds += time.monotonic() - start
        finally:
            os.close(descriptor)
    return {"bytes_per_second": total / seconds}


def bare(job: MeasureJob, form: Form) -> Row:
    """The floor, of images that are only decoded, or made uint8 or normalised batches."""
    from streamload.profile import floor

    _, measured = floor.run(
        job.data.paths,
        workers=job.options.workers,
        form=form,
        batch_size=job.options.batch_size,
        tokenizer=tokenizer_of(job.options.tokenizer) if form != "decode" else None,
        samples=job.samples,
        passes=2,
    )
    return _row(measured.images, measured.ended - measured.started, measured.cpu_seconds)


def streamload(job: MeasureJob) -> Row:
    """The loader with its default transform, reading from its cache."""
    from streamload import Cache, Order, Shards, make_loader

    options = job.options
    with make_loader(
        list(job.data.urls),
        tokenizer_of(options.tokenizer),
        batch_size=options.batch_size,
        num_workers=options.workers,
        seed=job.seed,
        order=Order(num_batches=job.samples // options.batch_size),
        cache=Cache(where="disk"),
        cache_dir=job.data.tier or str(Path(job.directory) / "unused"),
        shards=Shards(storage_options=options.storage_options),
    ) as loader:
        row = _read(loader, job)
        stats = loader.stats()
    return {**row, "data_wait_seconds": stats.data_wait_seconds, "transform_seconds": stats.transform_seconds}


MEASURES: dict[str, Callable[[MeasureJob], Row]] = {
    "origin": origin,
    "disk": disk,
    "decode alone": functools.partial(bare, form="decode"),
    "floor, uint8": functools.partial(bare, form="uint8"),
    "floor, float32": functools.partial(bare, form="float32"),
    "streamload": streamload,
}


def tokenizer_of(model: str | None) -> Any:
    """An open_clip model's tokenizer, if it goes word by word, which the floor relies on.

    Raises:
        OptionError: open_clip can't be imported, lacks the model, or has another kind of tokenizer for it.
    """
    if model is None:
        return None
    from streamload.batches.simple_tokenizer import is_simple_tokenizer

    try:
        import open_clip
    except (ImportError, RuntimeError) as exc:  # RuntimeError: a torchvision built for another torch
        raise OptionError(f"--tokenizer={model}: open_clip can't be imported: {exc}") from exc
    if open_clip.get_model_config(model) is None:
        raise OptionError(f"--tokenizer={model}: open_clip has no such model; one that it has is ViT-B-32")
    tokenizer = open_clip.get_tokenizer(model)
    if not is_simple_tokenizer(tokenizer):
        raise OptionError(
            f"--tokenizer={model}: its tokenizer is a {type(tokenizer).__name__}; expected a model with "
            f"open_clip's SimpleTokenizer, such as ViT-B-32"
        )
    return tokenizer


def main() -> None:
    """Run the job on standard input; print its row, {"left_out": reason} or {"error": message}."""
    job = MeasureJob.of_json(sys.stdin.read())
    try:
        row = MEASURES[job.name](job)
    except StreamloadError as exc:
        row = {"error": str(exc)}
    print(f"\n{json.dumps(row)}")


def _read(loader: Iterable[Any], job: MeasureJob) -> Row:
    """Iterate over the batches; the first one starts the clock."""
    batches = iter(loader)
    next(batches)
    images, start, cpu_before = 0, time.monotonic(), cpu_seconds()
    for number, batch in enumerate(batches):
        images += len(batch[0])
        batch[0][:, number % 3].mean().item()
    seconds, cpu = time.monotonic() - start, cpu_seconds() - cpu_before
    expected = (job.samples // job.options.batch_size - 1) * job.options.batch_size
    if images != expected:
        raise OptionError(f"{job.name} yielded {images:,} images, expected {expected:,}")
    return _row(images, seconds, cpu)


def _row(images: int, seconds: float, cpu: float) -> Row:
    return {"images": images, "images_per_second": images / seconds, "cpu_us_per_image": cpu / images * 1e6}


if __name__ == "__main__":
    main()
