"""A GPU that trains on our batches, beside the same on batches that already lie there.

Question: how much of the speed of a training on one GPU is left when its batches come from the loader, and
how much of its time does it wait for them?

Command: python -m benchmarks.gpu_feed (on a machine with a GPU; without one it ends with status 2)

The model has the shapes of ViT-B/32 (clip_model.py) and trains in bfloat16 under autocast, with AdamW. In
each round it takes equally many steps on

- "synthetic": one batch of noise that lies on the device, over and over: what the GPU can do;
- "cold": batches of the loader, its cache empty, the shards on a server on this machine;
- "warm": the same once more, each shard in the cache.

A clock starts at the first batch, and stops when the device has done the last step. The first steps of a
process, which choose kernels, are not counted. Waiting is the time that the process spent in asking for
batches; as it runs in front of the device, the device may have been at work meanwhile, so the ratio of the
images a second is what counts, and the share of waiting tells where to look.

`--device cpu --quick` trains a tiny model on the CPU, which only shows that the script works.

Result: results/gpu_feed.json, with the device's name.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import streamload
from benchmarks import machine, turns
from benchmarks.clip_model import TINY, Shape, Training
from benchmarks.contenders.workload import WordTokenizer
from benchmarks.turns import Row
from streamload.testing.server import ShardServer

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]

SAMPLES_PER_SHARD, QUICK_SAMPLES_PER_SHARD = 512, 32


@dataclass(frozen=True)
class Settings:
    """Of a run of the script.

    Attributes:
        not_counted: steps that a process takes first.
    """

    batch_size: int
    steps: int
    workers: int
    not_counted: int
    samples_per_shard: int

    @property
    def shards(self) -> int:
        """As many as the steps need."""
        return -(-self.batch_size * self.steps // self.samples_per_shard)


def main() -> None:
    given, device = arguments()
    settings = Settings(
        batch_size=given.batch_size or (16 if given.quick else 512),
        steps=given.steps or (6 if given.quick else 64),
        workers=given.workers or (1 if given.quick else max(1, len(os.sched_getaffinity(0)) - 1)),
        not_counted=1 if given.quick else 8,
        samples_per_shard=QUICK_SAMPLES_PER_SHARD if given.quick else SAMPLES_PER_SHARD,
    )
    training = Training(TINY if given.quick else Shape(), device)
    noise = synthetic(settings.batch_size, device)
    run(training, itertools.repeat(noise, settings.not_counted))
    samples = settings.shards * settings.samples_per_shard
    with (
        turns.photographs(samples, settings.samples_per_shard) as (directory, total_bytes),
        ShardServer.spawn(directory / "shards") as server,
    ):
        url = turns.pattern(server.url, settings.shards)
        rows = [
            row
            for round_ in range(given.rounds)
            for row in one_round(training, noise, url, directory, round_, settings)
        ]
    told = {**asdict(settings), "samples": samples, "bytes": total_bytes}
    turns.write(given, "gpu_feed", content(given, device, rows, told))


def arguments() -> tuple[argparse.Namespace, torch.device]:
    """What it was told; it ends with status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small form that only shows that it works")
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--batch-size", type=int, help="default 512")
    parser.add_argument("--steps", type=int, help="default 64")
    parser.add_argument("--workers", type=int, help="default: one for each core but one")
    parser.add_argument(
        "--out",
        type=Path,
        help="file for the JSON; default benchmarks/results/gpu_feed.json, none with --quick",
    )
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 3)
    found = torch.accelerator.current_accelerator(check_available=True)
    if given.device is None and found is None:
        parser.error("torch finds no GPU here; --device cpu --quick only shows that this script works")
    device = found if given.device is None else torch.device(given.device)
    if device.type == "cpu" and not given.quick:
        parser.error("what a CPU trains says nothing about a GPU: --device cpu goes with --quick")
    if device.type != "cpu" and (found is None or found.type != device.type):
        parser.error(f"torch finds no {device} here, but {found}")
    return given, device


def one_round(
    training: Training,
    noise: tuple[torch.Tensor, torch.Tensor],
    url: str,
    directory: Path,
    round_: int,
    settings: Settings,
) -> Iterator[Row]:
    with (
        turns.empty_directory(directory) as cache,
        streamload.make_loader(
            url,
            WordTokenizer(),
            batch_size=settings.batch_size,
            num_batches=settings.steps,
            num_workers=settings.workers,
            seed=round_,
            device=training.device,
            cache_dir=cache,
        ) as loader,
    ):
        for label in ("synthetic", "cold", "warm"):
            batches = itertools.repeat(noise, settings.steps) if label == "synthetic" else loader
            before, load = loader.stats(), machine.load()
            row = run(training, batches)
            fetched = loader.stats().origin_bytes - before.origin_bytes
            print(f"{label}: {row['images_per_second']:.0f} images/s", file=sys.stderr, flush=True)
            yield {"label": label, "round": round_, "load_before": load, **row, "fetched_bytes": fetched}


def run(training: Training, batches: Batches) -> Row:
    """Train on batches; the clock starts when the first is there."""
    asked = time.monotonic()
    coming = iter(batches)
    batch = next(coming, None)
    began = time.monotonic()
    images = steps = 0
    waited, loss = 0.0, torch.zeros(())
    while batch is not None:
        loss = training.step(*batch)
        images, steps = images + len(batch[0]), steps + 1
        asked_again = time.monotonic()
        batch = next(coming, None)
        waited += time.monotonic() - asked_again
    final = loss.item()  # the device has done all of it
    seconds = time.monotonic() - began
    return {
        "images": images,
        "steps": steps,
        "seconds": seconds,
        "images_per_second": images / seconds,
        "waited_share": waited / seconds,
        "first_batch_seconds": began - asked,
        "loss": final,
    }


def synthetic(batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of noise on the device, as the loader's are there."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, 224, 224, generator=generator)
    ids = torch.randint(1, 49_000, (batch_size, 77), generator=generator)
    return images.contiguous(memory_format=torch.channels_last).to(device), ids.to(device)


def content(given: argparse.Namespace, device: torch.device, rows: list[Row], settings: Row) -> Row:
    medians = turns.medians(rows)
    ratios = {
        label: turns.ratio(medians, "images_per_second", label, "synthetic") for label in ("cold", "warm")
    }
    return {
        "device": name_of(device),
        "settings": settings,
        "versions": {"streamload": {name: version(name) for name in ("streamload", "torch")}},
        "seeds": list(range(given.rounds)),
        "rounds": rows,
        "medians": medians,
        "ratios": {"images_per_second against synthetic": ratios},
        "targets": [],
    }


def name_of(device: torch.device) -> str:
    """As its maker calls it, where torch says so."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else str(name(device))


if __name__ == "__main__":
    main()
