"""What strategies of caching gain in training: the table that articles on the subject show.

Question: where what was loaded or computed is kept (nowhere, in memory, on disk, prepared), how many images a
second does an epoch load, and how many does a small training process? What does the first epoch take, and how
many bytes are kept?

Command: python -m benchmarks.strategies

Photographs with labels become float32[N, 3, 224, 224]. Each contender is a process of its own with 2 workers
that goes through three epochs: the first, in which caches are filled; one that only loads; and one that
trains a network so small that loading is most of it. "First epoch" counts from making the loader, and with
preparing, where `streamload warm --prepare` goes before.

"Dataset" are map-style Datasets as articles show them, in torch's DataLoader: without a cache, with a list of
preprocessed tensors in memory, and with a file by torch.save for each. They resize to 224 pixels by Pillow
and keep the result, so their training has no augmentation. streamload draws a random crop in each epoch:
"no cache" reads the shards where they are, "memory" and "disk" keep them as they are, and the recipes keep
decoded images.

Result: results/strategies.json; docs/results/prepared-images.md has it as a table.

Explanation: a cache of files gains nothing where files are near: decoding is the work. A preprocessed float
tensor has 602 KB, from 110 KB of JPEG: it is read, unpickled and copied into its batch, by the kernel, Python
and torch. Prepared images are bytes, and the crop is written straight into the batch.
"""

import argparse
import contextlib
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import machine, turns
from benchmarks.contenders.job import Job
from benchmarks.prepared import warm
from benchmarks.turns import Contender
from streamload.testing.server import ShardServer

ANY = {"preprocess": "default"}
NO_CACHE = "Dataset, no cache"
CONTENDERS = [
    Contender(NO_CACHE, "map_style", {**ANY, "keeps": "nothing"}),
    Contender("Dataset, tensors in memory", "map_style", {**ANY, "keeps": "memory"}),
    Contender("Dataset, a file a sample", "map_style", {**ANY, "keeps": "disk"}),
    Contender("streamload, no cache", "streamload_labels", {**ANY, "keeps": "nothing"}, reads="path"),
    Contender("streamload, memory", "streamload_labels", {**ANY, "keeps": "memory"}),
    Contender("streamload, disk", "streamload_labels", {**ANY, "keeps": "disk"}),
    Contender("streamload, raw", "streamload_labels", {**ANY, "prepare": "raw"}),
    Contender("streamload, raw-256", "streamload_labels", {**ANY, "prepare": "raw-256"}),
    Contender("streamload, auto", "streamload_labels", {**ANY, "prepare": "auto"}),
]
"""Another strategy is a line here, and an adapter that prints a Result with `kept_bytes`."""
SHARDS, SAMPLES_PER_SHARD = 40, 512
QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD = 2, 64
MEMORY = Path("/dev/shm")
CACHE_BYTES = 40_000_000_000
METRICS = ("loading_images_per_second", "training_images_per_second", "training_cpu_us_per_image")


def main() -> None:
    given = turns.arguments(__doc__, rounds=1, names=[contender.name for contender in CONTENDERS])
    shards, per_shard = (
        (QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD) if given.quick else (SHARDS, SAMPLES_PER_SHARD)
    )
    contenders = turns.chosen(given, CONTENDERS)
    with labelled(shards, per_shard) as directory, ShardServer.spawn(directory / "shards") as server:
        total_bytes = sum(path.stat().st_size for path in (directory / "shards").glob("*.tar"))
        rows = [
            measure(contender, directory, server.url, shards, shards * per_shard, round_, given)
            for round_ in range(given.rounds)
            for contender in turns.rotated(contenders, round_)
        ]
    settings = {
        "samples": shards * per_shard,
        "shards": shards,
        "bytes": total_bytes,
        "batch_size": Job.batch_size,
        "workers": Job.workers,
    }
    content = turns.content(given, settings, rows)
    against = {
        metric: {name: turns.ratio(content["medians"], metric, name, NO_CACHE) for name in content["medians"]}
        for metric in METRICS
    }
    training = against["training_images_per_second"]
    turns.write(
        given,
        "strategies",
        {
            **content,
            "ratios": {f"{metric} against {NO_CACHE}": found for metric, found in against.items()},
            "targets": [
                turns.target(
                    f"{name}: training, × the images/s of {NO_CACHE}", training.get(name), at_least=least
                )
                for name, least in (("streamload, raw", 1.8), ("streamload, raw-256", 3.0))
            ],
        },
    )


@contextlib.contextmanager
def labelled(shards: int, per_shard: int) -> Iterator[Path]:
    """Shards of photographs and labels in `shards`, and each photograph as a file in `files`."""
    from examples.photograph_shards import write_photograph_shards

    with turns.scratch() as directory:
        write_photograph_shards(directory / "shards", shards * per_shard, per_shard, members=("jpg", "cls"))
        (directory / "files").mkdir()
        for path in sorted((directory / "shards").glob("*.tar")):
            with tarfile.open(path) as tar:
                payloads = {info.name: tar.extractfile(info) for info in tar}
                data = {name: file.read() for name, file in payloads.items() if file is not None}
            for name, jpeg in data.items():
                key, _, extension = name.partition(".")
                if extension == "jpg":
                    label = data[f"{key}.cls"].decode()
                    (directory / "files" / f"{key}-{label}.jpg").write_bytes(jpeg)
        yield directory


def measure(
    contender: Contender,
    directory: Path,
    url: str,
    shards: int,
    samples: int,
    round_: int,
    given: argparse.Namespace,
) -> dict[str, Any]:
    """Run a contender with an empty cache of its own, which goes with it."""
    base = url if contender.reads == "url" else str(directory / "shards")
    recipe = contender.job.get("prepare")
    place = (
        MEMORY if contender.job.get("keeps") == "memory" and contender.adapter != "map_style" else directory
    )
    with tempfile.TemporaryDirectory(dir=place, prefix="streamload-bench-") as cache:
        began = time.monotonic()
        if recipe not in (None, "auto"):
            warm(given.python, contender.data(base, shards), Path(cache), "--prepare", recipe)
        preparing_seconds = time.monotonic() - began
        job = Job(
            urls=contender.data(base, shards),
            samples=samples,
            epochs=3,
            seed=round_,
            cache_dir=cache,
            cache_bytes=CACHE_BYTES,
            files=str(directory / "files"),
            **contender.job,
        )
        load = machine.load()
        ran = turns.run(contender, job, given.python, limit_seconds=1800)
    first, loading, training = ran.epochs
    return {
        "label": contender.name,
        "contender": contender.name,
        "round": round_,
        "load_before": load,
        "images": loading.images,
        "first_seconds": first.ended - ran.result.making + preparing_seconds,
        "loading_seconds": loading.ended - loading.began,
        "loading_images_per_second": loading.images / (loading.ended - loading.began),
        "loading_cpu_us_per_image": loading.cpu_seconds / loading.images * 1e6,
        "training_seconds": training.ended - training.began,
        "training_images_per_second": training.images / (training.ended - training.began),
        "training_cpu_us_per_image": training.cpu_seconds / training.images * 1e6,
        "training_loss": training.channel_mean,
        "kept_bytes_per_image": ran.result.notes["kept_bytes"] / samples,
        "limits": ran.result.limits,
        "versions": ran.result.versions,
    }


if __name__ == "__main__":
    main()
