"""JPEG decoded and transformed on a GPU, beside the same on a processor core: speed, CPU time, differences.

Question: how many images a second does one thread decode, crop and resize on a device, at what CPU time and
with how much of its memory, and how far are its pixels from those of libjpeg-turbo? And how many does a
loader that decodes there give on few cores?

Command: python -m benchmarks.gpu_decode (on a machine with a GPU and `streamload[gpu]`; without one it ends
with status 2)

Photographs of around 520×390 (examples/photograph_shards.py), by open_clip's training transform for 224
pixels: random boxes, bicubic, normalised. In each round, over the same files,

- "host": decoded and transformed as a worker does, by one thread;
- "decoder alone, N": lists of N files → pixels on the device;
- "resize alone, N": these pixels → a batch;
- "device, N": files → a normalised batch on the device, as the loader does it.

The clock stops when the device has done all of it. "cpu_microseconds" is the time of all of this process's
threads. "device_peak_bytes" is the most that torch's tensors had; what the decoder's library allocates by
itself is in "device_used_bytes", the memory in use on the device at the end.

"differences" are levels of 255 after crop and resize, between the device and the host, by kind of file:
mean, largest, PSNR in dB (none if equal), and the share of images that are the same to the bit.

Then the loader alone: batches on the device, and nobody trains. A process of its own for each row has 2, 4, 8
or 16 cores, as far as there are so many, with a worker for each but one. The decoders are Pillow in the loop
that people write themselves (own_loop.py), libjpeg-turbo in our workers (`decode="host"`), and the device
(`decode="device"`). All read local files; the clock starts after a pass over them, and stops after --seconds
at the latest. "cpu_microseconds" there is the time of workers and rank together, "worker_cpu_microseconds"
that of workers alone, which needs no GPU: by `--quick`, too, it is about what they spend on an image.

`--device cpu --quick` compares the CPU's form of the same code with itself, which only shows that the script
works: there every difference is 0, no row is one of a GPU, and only the time of workers is what it says.

Result: results/gpu_decode.json, with the device's name.
"""

import argparse
import concurrent.futures
import contextlib
import io
import itertools
import math
import multiprocessing
import os
import random
import resource
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import streamload
from benchmarks import machine, own_loop, process_tree, turns
from benchmarks.contenders.workload import WordTokenizer
from benchmarks.gpu_feed import name_of
from benchmarks.turns import Row
from examples.photograph_shards import write_photograph_shards
from streamload.device import memory_of
from streamload.errors import OptionError
from streamload.pixels.decoders import HostDecoder, ImageDecoder, decoder_for
from streamload.pixels.pipeline import DeviceImages, Together
from streamload.pixels.segments import refusal
from streamload.transforms.decode import decode_jpeg_or_image, jpeg_size
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.plan import Choices, PlannedTransform, clip_plan

PLAN = clip_plan(train=True)
CPU = torch.device("cpu")
BATCHES, QUICK_BATCHES = (64, 256, 512), (8,)
LARGE = (3000, 4000)
"""Height and width of the photographs of a camera."""

CORES, QUICK_CORES = (2, 4, 8, 16), (1, 2)
DECODERS = ("Pillow", "host", "device")
PHOTOGRAPHS = 4096
"""Of the loaders: they go round and round in them."""
LATER_STEPS = 64
"""Steps after the measured ones, so that workers neither end nor pause before their time is read."""
QUICK_PHOTOGRAPHS, QUICK_BATCH, QUICK_STEPS = 128, 32, 4

KINDS = {
    "4:2:0, quality 85": {"quality": 85, "subsampling": 2},
    "4:2:2, quality 85": {"quality": 85, "subsampling": 1},
    "4:4:4, quality 85": {"quality": 85, "subsampling": 0},
    "progressive, 4:2:0": {"quality": 85, "subsampling": 2, "progressive": True},
    "gray": {"quality": 85},
    "4000×3000, 4:2:0": {"quality": 85, "subsampling": 2},
}


def main() -> None:
    options, device, decoder = arguments()
    count = 24 if options.quick else 2048
    batches = QUICK_BATCHES if options.quick else BATCHES
    with turns.scratch() as directory:
        files = photographs(directory, count)
        loaders = [
            row
            for round_ in range(options.rounds)
            for row in loaders_alone(directory, device, round_, options)
        ]
    choices = chosen(files)
    rows = [
        row
        for round_ in range(options.rounds)
        for row in one_round(files, choices, device, decoder, batches, round_)
    ]
    few = 4 if options.quick else 100
    apart = {kind: difference(of_kind(kind, files, few), device, decoder) for kind in KINDS}
    rows += loaders
    medians = turns.medians(rows)
    largest = f"device, {batches[-1]}"
    content = {
        "device": name_of(device),
        "decoder": decoder.name,
        "settings": {"images": count, "batches": batches, "mean_bytes": sum(map(len, files)) / count},
        "versions": {"streamload": {name: version(name) for name in ("streamload", "torch", "pillow")}},
        "seeds": list(range(options.rounds)),
        "rounds": rows,
        "medians": medians,
        "ratios": {
            "images_per_second": {largest: turns.ratio(medians, "images_per_second", largest, "host")}
        },
        "differences": apart,
        "targets": targets(medians, apart, device),
    }
    turns.write(options, "gpu_decode", content)


def arguments() -> tuple[argparse.Namespace, torch.device, ImageDecoder]:
    """The options; it ends with status 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small form that only shows that it works")
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a loader alone, at most")
    parser.add_argument(
        "--out",
        type=Path,
        help="file for the JSON; default benchmarks/results/gpu_decode.json, none with --quick",
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if options.device is None and accelerator is None:
        parser.error("torch finds no GPU here; --device cpu --quick only shows that this script works")
    device = accelerator if options.device is None else torch.device(options.device)
    if device.type == "cpu" and not options.quick:
        parser.error("what a CPU decodes says nothing about a GPU: --device cpu goes with --quick")
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        parser.error(f"torch finds no {device} here, but {accelerator}")
    try:
        return options, device, decoder_for(device)
    except OptionError as error:
        parser.error(str(error))


def photographs(directory: Path, count: int) -> list[bytes]:
    """So many JPEG files."""
    (shard,) = write_photograph_shards(directory / "shards", count, count)
    with tarfile.open(shard) as tar:
        return [tar.extractfile(member).read() for member in tar if member.name.endswith(".jpg")]


def chosen(files: Sequence[bytes]) -> list[Choices]:
    transform, draw = PlannedTransform(PLAN), random.Random(0)
    return [transform.draw(*jpeg_size(file), draw.getrandbits(64)) for file in files]


def one_round(
    files: Sequence[bytes],
    choices: Sequence[Choices],
    device: torch.device,
    decoder: ImageDecoder,
    batches: Sequence[int],
    round_: int,
) -> list[Row]:
    images, of_host = (
        DeviceImages(PLAN, place, by, DEFAULT_MAX_IMAGE_PIXELS)
        for place, by in ((device, decoder), (CPU, HostDecoder()))
    )
    together = Together(PLAN)
    some_files = files[: max(batches)]
    # The device's memory holds the pixels of the largest batch, for all of these.
    pixels = [image for image in decoder.decode(some_files) if isinstance(image, torch.Tensor)]

    def resized(rows: slice) -> torch.Tensor:
        decoded = dict(enumerate(pixels[rows]))
        levels = torch.empty(len(decoded), *PLAN.size, 3, dtype=torch.uint8, device=device)
        together(decoded, dict(enumerate(choices[rows])), levels)
        return levels

    contenders: dict[str, tuple[int, int, Callable[[slice], object]]] = {
        "host": (batches[0], len(files), lambda rows: of_host.images(files[rows], choices[rows]))
    }
    for size in batches:
        contenders |= {
            f"decoder alone, {size}": (size, len(files), lambda rows: decoder.decode(files[rows])),
            f"resize alone, {size}": (size, len(pixels), resized),
            f"device, {size}": (size, len(files), lambda rows: images.images(files[rows], choices[rows])),
        }
    rows = []
    for label in turns.rotated(list(contenders), round_):
        size, count, do = contenders[label]
        load, memory = machine.load(), memory_of(device)
        do(slice(0, size))  # chooses kernels, and allocates
        if memory is not None:
            memory.reset_peak()
        row = timed(do, size, count, device)
        if memory is not None:
            free, total = torch.cuda.mem_get_info(device)
            row |= {"device_peak_bytes": memory.peak_bytes(), "device_used_bytes": total - free}
        print(f"{label}: {row['images_per_second']:.0f} images/s", file=sys.stderr, flush=True)
        rows.append({"label": label, "round": round_, "load_before": load, **row})
    return rows


@dataclass(frozen=True)
class Alone:
    """A loader to run alone.

    Attributes:
        decoder: one of DECODERS.
        first_steps: before the clock starts: whatever is made once has been made then.
        steps: at most.
        seconds: at most.
    """

    decoder: str
    workers: int
    device: str
    batch_size: int
    first_steps: int
    steps: int
    seconds: float


def loaders_alone(
    directory: Path, device: torch.device, round_: int, options: argparse.Namespace
) -> Iterator[Row]:
    """A row for each decoder and number of cores, each from a process of its own."""
    data = directory / "loaders"
    if not data.exists():
        count, of_a_shard = (QUICK_PHOTOGRAPHS, 64) if options.quick else (PHOTOGRAPHS, 512)
        write_photograph_shards(data / "shards", count, of_a_shard)
        own_loop.unpacked(data / "shards", data / "files", PHOTOGRAPHS)
    usable = sorted(os.sched_getaffinity(0))
    for cores in QUICK_CORES if options.quick else CORES:
        for decoder in turns.rotated(list(DECODERS), round_) if cores <= len(usable) else ():
            size, steps = (QUICK_BATCH, QUICK_STEPS) if options.quick else (512, 1 << 20)
            first = (QUICK_PHOTOGRAPHS if options.quick else PHOTOGRAPHS) // size
            alone = Alone(decoder, max(1, cores - 1), str(device), size, first, steps, options.seconds)
            label, load = f"loader, {decoder}, {cores} cores", machine.load()
            with on_cores(usable[:cores]) as pool:
                row = pool.submit(run_alone, alone, data).result()
            print(f"{label}: {row['images_per_second']:.0f} images/s", file=sys.stderr, flush=True)
            yield {"label": label, "round": round_, "load_before": load, **row}


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[concurrent.futures.Executor]:
    """A process of its own that has these cores alone."""
    own = os.sched_getaffinity(0)
    spawn = multiprocessing.get_context("spawn")
    os.sched_setaffinity(0, cores)  # it begins with those of the thread that starts it
    try:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
            yield pool
    finally:
        os.sched_setaffinity(0, own)


def run_alone(alone: Alone, data: Path) -> Row:
    """Take batches until the first limit, in a process of its own, after a pass over the photographs."""
    device = torch.device(alone.device)
    with contextlib.ExitStack() as stack:
        steps = alone.first_steps + alone.steps + LATER_STEPS
        if alone.decoder == "Pillow":
            batches = own_loop.batches(data / "files", alone.batch_size, steps, alone.workers, device)
            return taken(batches, alone, device)
        cache = stack.enter_context(turns.empty_directory(data))
        loader = stack.enter_context(
            streamload.make_loader(
                str(data / "shards" / "*.tar"),
                WordTokenizer(),
                batch_size=alone.batch_size,
                order=streamload.Order(num_batches=steps),
                num_workers=alone.workers,
                device=device,
                cache_dir=cache,
                images=streamload.Images(decode=alone.decoder),
            )
        )
        row = taken(iter(loader), alone, device)
        shares = {name.removeprefix("decode."): share for name, share in loader._run.parts.metrics().items()}
        return {**row, **shares}


def taken(batches: Iterator[object], alone: Alone, device: torch.device) -> Row:
    """The clock starts after the first steps."""
    for _ in range(alone.first_steps):
        next(batches)
    synchronize(device)
    cpu, cpu_of_workers = process_tree.cpu_seconds(), process_tree.children_cpu_seconds()
    began, images = time.monotonic(), 0
    for _ in range(alone.steps):
        if time.monotonic() - began > alone.seconds or next(batches, None) is None:
            break
        images += alone.batch_size
    synchronize(device)
    seconds = time.monotonic() - began
    return {
        "images": images,
        "seconds": seconds,
        "images_per_second": images / seconds,
        "cpu_microseconds": (process_tree.cpu_seconds() - cpu) / images * 1e6,
        "worker_cpu_microseconds": (process_tree.children_cpu_seconds() - cpu_of_workers) / images * 1e6,
    }


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def targets(medians: dict[str, Row], apart: dict[str, Row], device: torch.device) -> list[Row]:
    """What is to be reached on a GPU; on a CPU only the workers' part is measured."""
    workers = [row["worker_cpu_microseconds"] for name, row in medians.items() if "loader, device" in name]
    row = {} if device.type == "cpu" else medians.get("loader, device, 4 cores", {})
    mean = None if device.type == "cpu" else apart["4:2:0, quality 85"]["mean"]
    return [
        turns.target("CPU of an image, workers, µs", workers[-1], at_most=120),
        turns.target("loader alone, 4 cores, images/s", row.get("images_per_second"), at_least=8000),
        turns.target("CPU of an image, workers and rank, µs", row.get("cpu_microseconds"), at_most=200),
        turns.target("mean difference to the host, 4:2:0, levels of 255", mean, at_most=0.6),
    ]


def timed(do: Callable[[slice], object], size: int, count: int, device: torch.device) -> Row:
    """Do it with whole batches of so many images."""
    starts = list(range(0, count - size + 1, size))
    cpu, began = cpu_seconds(), time.monotonic()
    for start in starts:
        do(slice(start, start + size))
    synchronize(device)
    seconds, images = time.monotonic() - began, size * len(starts)
    return {
        "images": images,
        "seconds": seconds,
        "images_per_second": images / seconds,
        "cpu_microseconds": (cpu_seconds() - cpu) / images * 1e6,
    }


def cpu_seconds() -> float:
    """Of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def of_kind(kind: str, files: Sequence[bytes], count: int) -> list[bytes]:
    """Photographs, encoded once more."""
    encoded = []
    for file in itertools.islice(files, 2 if kind.startswith("4000") and count < 100 else count):
        image = Image.fromarray(decode_jpeg_or_image(file))
        if kind.startswith("4000"):
            image = image.resize(LARGE[::-1], Image.Resampling.BICUBIC)
        out = io.BytesIO()
        (image.convert("L") if kind == "gray" else image).save(out, "JPEG", **KINDS[kind])
        encoded.append(out.getvalue())
    return encoded


def difference(files: Sequence[bytes], device: torch.device, decoder: ImageDecoder) -> Row:
    """Between the levels of the device and of the host."""
    choices = chosen(files)
    refused = [reason for file in files if (reason := refusal(file)) is not None]
    levels, expected = (
        DeviceImages(PLAN, place, by, DEFAULT_MAX_IMAGE_PIXELS).images(files, choices)
        for place, by in ((device, decoder), (CPU, HostDecoder()))
    )
    sound = [row for row in range(len(files)) if row not in levels.failed]
    apart = np.abs(levels.images.cpu().numpy()[sound].astype(int) - expected.images.numpy()[sound])
    mean_square = float((apart**2).mean())
    return {
        "images": len(sound),
        "refused": len(refused),
        "failed": len(levels.failed),
        "mean": float(apart.mean()),
        "largest": int(apart.max()),
        "psnr": 10 * math.log10(255**2 / mean_square) if mean_square else None,
        "same": float((apart.max((1, 2, 3)) == 0).mean()),
    }


if __name__ == "__main__":
    main()
