"""A GPU that trains on our batches, beside the same on batches that already lie there.

Question: how much of the speed of a training on one GPU is left when its batches come from the loader, and
how much of its time does it wait for them?

Command: python -m benchmarks.gpu_feed (on a machine with a GPU; without one it ends with status 2)

The model has the shapes of ViT-B/32 (clip_model.py) and trains in bfloat16 under autocast, with AdamW. In
each round it takes equally many steps on

- "synthetic": one batch of noise that lies on the device, over and over: what the GPU can do;
- "cold": batches of the loader, its cache empty, the shards on a server on this machine;
- "warm": the same once more, each shard in the cache;
- "loader alone": the same once more, and nobody trains: what the loader can do;
- "own loop": what people write themselves (own_loop.py): a map-style Dataset of files, Pillow,
  `num_workers=8, pin_memory=True`; fewer steps;
- "synthetic, compiled" and "warm, compiled": as above, with the model compiled by torch.compile.

Then open_clip's own training of a ViT-B/32 (gpu_openclip.py, in the environment of --openclip-python), one
epoch each, on its synthetic data, with its own loader ("stock") and with ours, on all cores, 8 and 4, and
compiled. The rate and the GPU's use are those between its second line in the log and its last.

"workers_busy" is the CPU time of the processes below this one, first batch included, as a share of that of a
core for each worker ("own loop" has 8 at most); "device_peak_bytes" is the most that tensors
had on the device.

A clock starts at the first batch, and stops when the device has done the last step. The first steps of a
process, which choose kernels, are not counted. Waiting is the time that the process spent in asking for
batches; as it runs in front of the device, the device may have been at work meanwhile, so the ratio of the
images a second is what counts, and the share of waiting tells where to look.

A call takes about --seconds at most (default 450): trainings of open_clip for which no time is left are named
in the result.

`--device cpu --quick` trains a tiny model on the CPU, which only shows that the script works.

Result: results/gpu_feed.json, with the device's name.
"""

import argparse
import functools
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import streamload
from benchmarks import gpu_openclip, machine, own_loop, turns
from benchmarks.clip_model import TINY, Shape, Training
from benchmarks.contenders.workload import WordTokenizer
from benchmarks.process_tree import cpu_seconds
from benchmarks.turns import Row
from streamload.device import memory_of
from streamload.testing.server import ShardServer

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]

SAMPLES_PER_SHARD, QUICK_SAMPLES_PER_SHARD = 512, 32
OWN_WORKERS, OWN_STEPS = 8, 16
"""Of the loop that people write themselves, at most: it is slow."""


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
    deadline = time.monotonic() + given.seconds
    settings = Settings(
        batch_size=given.batch_size or (8 if given.quick else 512),
        steps=given.steps or (6 if given.quick else 64),
        workers=given.workers or (1 if given.quick else max(1, len(os.sched_getaffinity(0)) - 1)),
        not_counted=1 if given.quick else 8,
        samples_per_shard=QUICK_SAMPLES_PER_SHARD if given.quick else SAMPLES_PER_SHARD,
    )
    shape, noise = TINY if given.quick else Shape(), synthetic(settings.batch_size, device)
    training = Training(shape, device)
    compiled = Training(shape, device, "eager" if given.quick else "inductor")
    for each in (training, compiled):
        run(each.step, itertools.repeat(noise, settings.not_counted))
    samples = settings.shards * settings.samples_per_shard
    with (
        turns.photographs(samples, settings.samples_per_shard) as (directory, total_bytes),
        ShardServer.spawn(directory / "shards") as server,
    ):
        url = turns.pattern(server.url, settings.shards)
        own_samples = settings.batch_size * min(OWN_STEPS, settings.steps)
        own_loop.unpacked(directory / "shards", directory / "files", own_samples)
        rows = [
            row
            for round_ in range(given.rounds)
            for row in one_round(training, compiled, noise, url, directory, round_, settings)
        ]
        shards = turns.pattern(str(directory / "shards"), settings.shards)
        openclip_rows, left_out = openclip(given, shards, samples, deadline)
    told = {**asdict(settings), "samples": samples, "bytes": total_bytes}
    result = content(given, device, [*rows, *openclip_rows], told)
    turns.write(given, "gpu_feed", {**result, "cannot": left_out})


def arguments() -> tuple[argparse.Namespace, torch.device]:
    """What it was told; it ends with status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small form that only shows that it works")
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--rounds", type=int, help="default 2, with --quick 1")
    parser.add_argument("--batch-size", type=int, help="default 512")
    parser.add_argument("--steps", type=int, help="default 64")
    parser.add_argument("--workers", type=int, help="default: one for each core but one")
    parser.add_argument("--seconds", type=float, default=450.0, help="no training of open_clip begins later")
    parser.add_argument(
        "--openclip-python", type=Path, default=openclip_python(), help="none: without open_clip"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="file for the JSON; default benchmarks/results/gpu_feed.json, none with --quick",
    )
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 2)
    found = torch.accelerator.current_accelerator(check_available=True)
    if given.device is None and found is None:
        parser.error("torch finds no GPU here; --device cpu --quick only shows that this script works")
    device = found if given.device is None else torch.device(given.device)
    if device.type == "cpu" and not given.quick:
        parser.error("what a CPU trains says nothing about a GPU: --device cpu goes with --quick")
    if device.type != "cpu" and (found is None or found.type != device.type):
        parser.error(f"torch finds no {device} here, but {found}")
    return given, device


def openclip_python() -> Path:
    """This interpreter if it has open_clip's training code, else that of the project's environment for it."""
    has_training = importlib.util.find_spec("open_clip_train") is not None
    return Path(sys.executable) if has_training else turns.ROOT / ".venv-openclip/bin/python"


def one_round(
    training: Training,
    compiled: Training,
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
            order=streamload.Order(num_batches=settings.steps),
            num_workers=settings.workers,
            seed=round_,
            device=training.device,
            cache_dir=cache,
        ) as loader,
    ):
        again = functools.partial(itertools.repeat, noise, settings.steps)
        own_workers = min(OWN_WORKERS, settings.workers)
        own = functools.partial(
            own_loop.batches,
            *(directory / "files", settings.batch_size, min(OWN_STEPS, settings.steps), own_workers),
            training.device,
        )
        for label, step, batches in (
            ("synthetic", training.step, again),
            ("cold", training.step, lambda: loader),
            ("warm", training.step, lambda: loader),
            ("loader alone", untrained, lambda: loader),
            ("own loop", training.step, own),
            ("synthetic, compiled", compiled.step, again),
            ("warm, compiled", compiled.step, lambda: loader),
        ):
            before, load, memory = loader.stats(), machine.load(), memory_of(training.device)
            if memory is not None:
                memory.reset_peak()
            with gpu_openclip.GpuUse().measured() as use:
                began, spent = time.monotonic(), cpu_seconds() - time.process_time()
                row = run(step, batches())
                row["gpu_use"] = use.mean(began + row["first_batch_seconds"], time.monotonic())
                spent = cpu_seconds() - time.process_time() - spent
            row["workers_busy"] = spent / (row["first_batch_seconds"] + row["seconds"]) / settings.workers
            if memory is not None:
                row["device_peak_bytes"] = memory.peak_bytes()
            fetched = loader.stats().origin_bytes - before.origin_bytes
            print(f"{label}: {row['images_per_second']:.0f} images/s", file=sys.stderr, flush=True)
            yield {"label": label, "round": round_, "load_before": load, **row, "fetched_bytes": fetched}


def openclip(
    given: argparse.Namespace, shards: str, samples: int, deadline: float
) -> tuple[list[Row], dict[str, str]]:
    """open_clip's trainings, in turn; and why some are missing."""
    most = len(os.sched_getaffinity(0))
    cores = [most] if given.quick else sorted({most, *(count for count in (8, 4) if count < most)})
    rows, left_out = [], {}
    for planned in gpu_openclip.runs(cores, are_compiled=not given.quick):
        if not given.openclip_python.exists():
            left_out[planned.label] = f"{given.openclip_python} doesn't exist"
        elif not gpu_openclip.has_room(deadline):
            left_out[planned.label] = f"--seconds {given.seconds:g} were over"
        else:
            load, left = machine.load(), deadline - time.monotonic()
            try:
                row = gpu_openclip.train(
                    planned, given.openclip_python, shards, samples, is_quick=given.quick, seconds=left
                )
            except (TimeoutError, RuntimeError) as error:
                left_out[planned.label] = str(error)
                continue
            print(f"{planned.label}: {row['images_per_second']:.0f} images/s", file=sys.stderr, flush=True)
            rows.append({"label": planned.label, "round": 0, "load_before": load, **row})
    return rows, left_out


def untrained(images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Do nothing with a batch but wait until it is there."""
    return images[:1, :1, :1, :1].float().mean()


def run(step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], batches: Batches) -> Row:
    """Take a step on each batch; the clock starts when the first is there."""
    asked = time.monotonic()
    coming = iter(batches)
    batch = next(coming, None)
    began = time.monotonic()
    images = steps = 0
    waited, loss = 0.0, torch.zeros(())
    while batch is not None:
        loss = step(*batch)
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
        label: turns.ratio(medians, "images_per_second", label, beside(label, medians))
        for label in medians
        if beside(label, medians) not in ("", label)
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


def beside(label: str, medians: dict[str, Row]) -> str:
    """The row on synthetic data that one is compared with; "" if there is none."""
    kind = ", compiled" if label.endswith(", compiled") else ""
    if not label.startswith("open_clip"):
        return f"synthetic{kind}"
    with_synthetic = (
        name
        for name in medians
        if name.startswith("open_clip: synthetic") and name.endswith(", compiled") == bool(kind)
    )
    return next(with_synthetic, "")


def name_of(device: torch.device) -> str:
    """As its maker calls it, where torch says so."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else str(name(device))


if __name__ == "__main__":
    main()
