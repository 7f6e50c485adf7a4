"""What prepared shards gain in training, what they cost, and how far their pixels are from the originals'.

Question: the data is in the cache, as it is and prepared; how much CPU time does an image of a warm epoch
take from each? What if images are to be prepared and no shard is? And what does it take to prepare them: CPU
time, bytes? How near is a random resized crop of a smaller copy to the same crop of the original? ("raw" has
the original's pixels.)

Command: python -m benchmarks.prepared

The warm epoch of warm.py with streamload's default transform and a cheap tokenizer: each contender is a
process of its own with 2 workers, CPU time is that of all of its processes in the second epoch. "uint8" hands
over levels, as for a training on a device, which normalises them there; "float32" is the default. Preparing
is one `streamload warm --prepare` from a server on the same machine; its CPU time is that of its process,
less what the same command takes when all is held: starting Python and importing torch.

The crops: boxes of RandomResizedCrop at scale (0.9, 1.0) of the copy, and the same part of the original, each
resized to 224 pixels by Pillow; PSNR of the two.

Result: results/prepared.json; docs/results/prepared-images.md has it as a table.

Explanation: decoding takes most of an image's time, and resizing its larger half of the rest. Of "raw" the
first falls away, against reading five times the bytes; of "raw-256" the second shrinks, too, and 2.5 times
the bytes are read. A JPEG of the
smaller size is decoded faster as it has fewer pixels, and takes a quarter of the bytes.
"""

import resource
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import machine, turns
from benchmarks.contenders.job import SIDE, Job
from benchmarks.turns import Contender
from streamload.derived.prepare.preparation import Preparation
from streamload.testing.server import ShardServer
from streamload.transforms.augment import Draws, RandomBox
from streamload.transforms.decode import decode_jpeg_or_image

SMALLER = ("raw-256", "jpeg-256-q90")
RECIPES = ("raw", *SMALLER)
SHARDS = {"as they are": None, **{recipe: recipe for recipe in RECIPES}}
DONE = {"preprocess": "default"}
CONTENDERS = [
    Contender(
        f"{shards}, {images}", "streamload_", {"prepare": recipe, "images": images, "cache_dir": "all"} | DONE
    )
    for images in ("uint8", "float32")
    for shards, recipe in SHARDS.items()
] + [
    Contender(
        f"{recipe}, none prepared, uint8",
        "streamload_",
        {"prepare": recipe, "images": "uint8", "cache_dir": "plain"} | DONE,
    )
    for recipe in SMALLER
]
SHARDS_WRITTEN, SAMPLES_PER_SHARD, CROPS = 8, 384, 300
QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD, QUICK_CROPS = 2, 32, 20


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=[contender.name for contender in CONTENDERS])
    shards, per_shard, crops = (
        (QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD, QUICK_CROPS)
        if given.quick
        else (SHARDS_WRITTEN, SAMPLES_PER_SHARD, CROPS)
    )
    contenders = turns.chosen(given, CONTENDERS)
    rows: list[dict[str, Any]] = []
    with (
        turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes),
        ShardServer.spawn(directory / "shards") as server,
    ):
        urls = turns.pattern(server.url, shards)
        warm(given.python, urls, directory / "plain")
        warm(given.python, urls, directory / "all")
        made = {
            recipe: preparing(given.python, urls, directory / "all", recipe, shards * per_shard)
            for recipe in RECIPES
        }
        for round_ in range(given.rounds):
            for contender in turns.rotated(contenders, round_):
                asked = {
                    **contender.job,
                    "cache_dir": str(directory / contender.job["cache_dir"]),
                    "samples": shards * per_shard,
                    "seed": round_,
                }
                job = Job(urls=urls, epochs=2, **asked)
                rows.append(measure(contender, job, given))
        originals = images_of(sorted((directory / "shards").glob("*.tar"))[0], crops)
        psnr = {recipe: nearness(originals, Preparation.parse(recipe)) for recipe in SMALLER}
    versions = turns.versions(rows)
    medians = turns.medians(rows)
    gains = {
        f"{recipe}, {images}": turns.ratio(
            medians, "cpu_us_per_image", f"as they are, {images}", f"{recipe}, {images}"
        )
        for images in ("uint8", "float32")
        for recipe in RECIPES
    }
    turns.write(
        given,
        "prepared",
        {
            "settings": {
                "samples": shards * per_shard,
                "shards": shards,
                "bytes": total_bytes,
                "batch_size": job.batch_size,
                "workers": job.workers,
                "tokenizer": job.tokenizer,
                "crops": len(originals),
            },
            "versions": versions,
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "preparing": made,
            "psnr": psnr,
            "ratios": {"CPU time of shards as they are": gains},
            "targets": [
                turns.target(
                    "raw, uint8: CPU time of an image / of one as it is, with the same pixels",
                    turns.ratio(medians, "cpu_us_per_image", "raw, uint8", "as they are, uint8"),
                    at_most=0.4,
                ),
                turns.target(
                    "raw-256, uint8: CPU time of an image as it is / of a prepared one",
                    gains["raw-256, uint8"],
                    at_least=3.5,
                ),
                turns.target(
                    "jpeg-256-q90, uint8: CPU time of an image as it is / of a prepared one",
                    gains["jpeg-256-q90, uint8"],
                    at_least=1.8,
                ),
                turns.target(
                    "raw-256: PSNR of a crop of the copy, dB", psnr["raw-256"]["mean_db"], at_least=38.0
                ),
            ],
        },
    )


def warm(python: Path, urls: str, cache: Path, *more: str) -> None:
    command = [str(python), "-m", "streamload", "warm", urls, "--cache-dir", str(cache)]
    subprocess.run(
        [*command, "--cache-size", "20GB", "--concurrency", "2", *more],
        cwd=turns.ROOT,
        env=turns.environment(),
        check=True,
        capture_output=True,
    )


def preparing(python: Path, urls: str, cache: Path, recipe: str, samples: int) -> dict[str, float]:
    """What it costs to prepare the shards, for each image."""
    held = set(cache.glob("shards/*/data"))
    began = _cpu_seconds_of_children()
    warm(python, urls, cache, "--prepare", recipe)
    prepared = _cpu_seconds_of_children()
    warm(python, urls, cache, "--prepare", recipe)  # all is held: what starting takes
    seconds = 2 * prepared - began - _cpu_seconds_of_children()
    added = set(cache.glob("shards/*/data")) - held
    return {
        "cpu_us_per_image": seconds / samples * 1e6,
        "bytes_per_image": sum(path.stat().st_size for path in added) / samples,
    }


def _cpu_seconds_of_children() -> float:
    """Of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(contender: Contender, job: Job, given: Any) -> dict[str, Any]:
    load = machine.load()
    ran = turns.run(contender, job, given.python)
    last, stats = ran.epochs[-1], ran.result.notes["stats"]
    return {
        "label": contender.name,
        "contender": contender.name,
        "round": job.seed,
        "load_before": load,
        "images": last.images,
        "images_per_second": last.images / (last.ended - last.began),
        "cpu_us_per_image": last.cpu_seconds / last.images * 1e6,
        "origin_bytes": stats["origin_bytes"],
        "versions": ran.result.versions,
    }


def images_of(shard: Path, most: int) -> list[bytes]:
    with tarfile.open(shard) as tar:
        files = [tar.extractfile(info) for info in tar if info.name.endswith(".jpg")]
        return [file.read() for file in files[:most] if file is not None]


def nearness(originals: list[bytes], preparation: Preparation) -> dict[str, float]:
    """PSNR between crops of the copies and the same crops of the originals, in dB."""
    boxes, draws, found = RandomBox(), Draws(), []
    for seed, data in enumerate(originals):
        draws.seed(seed)
        copy = Image.fromarray(preparation.pixels(data).copy())
        original = Image.fromarray(decode_jpeg_or_image(data))
        across, down = original.width / copy.width, original.height / copy.height
        top, left, height, width = boxes.draw(copy.height, copy.width, draws)
        box = (left, top, left + width, top + height)
        there = (left * across, top * down, (left + width) * across, (top + height) * down)
        crops = [
            np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=part), np.float64)
            for image, part in ((copy, box), (original, there))
        ]
        found.append(10 * np.log10(255**2 / np.mean((crops[0] - crops[1]) ** 2)))
    return {"mean_db": float(np.mean(found)), "lowest_tenth_db": float(np.quantile(found, 0.1))}


if __name__ == "__main__":
    main()
