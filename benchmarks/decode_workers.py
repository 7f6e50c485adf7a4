"""What a worker spends on an image that the device decodes, beside one that it decodes itself.

Question: with `decode="device"` workers do all but the pixels. How much CPU time is that, by the size of the
batches?

Command: python -m benchmarks.decode_workers

Photographs of around 520×390, 110 KB each (examples/photograph_shards.py), by open_clip's training transform
for 224 pixels, from local files, one worker. The rank makes no pixels: it takes the files of each batch and
gives a gray image for each, as an engine would that costs no CPU time. So no GPU is needed, and no decoder
beside the worker pushes its data out of the processor's caches. The clock starts after a pass over the
photographs. "worker_cpu_microseconds" is the CPU time of the worker by image, "cpu_microseconds" that of
worker and rank together. Captions are tokenized by a tokenizer in Python (contenders/workload.py), which is
part of that; with "text" they stay as they are.

Result: results/decode_workers.json

Explanation: a file is read, judged by its segments, and copied into the memory that is handed over: three
passes over its bytes. All else is done once for a sample or a batch.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import streamload
from benchmarks import machine, turns
from benchmarks.contenders.workload import WordTokenizer
from benchmarks.gpu_decode import Alone, on_cores, taken
from benchmarks.turns import Row
from examples.photograph_shards import write_photograph_shards
from streamload.pixels.rank import CHOICES, DECODING, FILES, MADE, Decoding, ImagesOfFiles

BATCHES, QUICK_BATCHES = (64, 256, 512), (16,)
PHOTOGRAPHS, QUICK_PHOTOGRAPHS = 4096, 64
SECONDS, QUICK_SECONDS = 15.0, 1.0
WAYS = {"host": WordTokenizer, "device": WordTokenizer, "device, text": None}
"""The tokenizer of captions, by the decoder."""


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=list(WAYS))
    batches = QUICK_BATCHES if given.quick else BATCHES
    photographs = QUICK_PHOTOGRAPHS if given.quick else PHOTOGRAPHS
    contenders = {f"{way}, batches of {size}": (way, size) for size in batches for way in given.contenders}
    rows = []
    with turns.scratch() as directory:
        write_photograph_shards(directory / "shards", photographs, photographs // 8)
        for round_ in range(given.rounds):
            for label in turns.rotated(list(contenders), round_):
                way, size = contenders[label]
                first = photographs // size
                seconds = QUICK_SECONDS if given.quick else SECONDS
                decode = way.partition(",")[0]
                alone = Alone(decode, 1, "cpu", size, first, first if given.quick else 1 << 20, seconds)
                load = machine.load()
                with on_cores(sorted(os.sched_getaffinity(0))) as pool:
                    row = pool.submit(run_alone, alone, way, directory).result()
                print(f"{label}: {row['worker_cpu_microseconds']:.0f} µs", file=sys.stderr, flush=True)
                rows.append({"label": label, "round": round_, "load_before": load, **row})
    medians = turns.medians(rows)
    content = {
        "settings": {"images": photographs, "batches": batches, "workers": 1},
        "seeds": list(range(given.rounds)),
        "rounds": rows,
        "medians": medians,
        "ratios": {
            "worker_cpu_microseconds": {
                label: turns.ratio(medians, "worker_cpu_microseconds", label, f"host, batches of {size}")
                for label, (_, size) in contenders.items()
            }
        },
        "targets": [
            turns.target(f"CPU of an image, {label}, µs", row["worker_cpu_microseconds"], at_most=120)
            for label, row in medians.items()
            if label == f"device, batches of {batches[-1]}"
        ],
    }
    turns.write(given, "decode_workers", content)


def run_alone(alone: Alone, way: str, directory: Path) -> Row:
    """Take batches until the first limit, in a process of its own, after a pass over the photographs."""
    tokenizer = WAYS[way]
    with (
        mock.patch.object(ImagesOfFiles, "__call__", with_gray_images),
        turns.empty_directory(directory) as cache,
        streamload.make_loader(
            str(directory / "shards" / "*.tar"),
            None if tokenizer is None else tokenizer(),
            batch_size=alone.batch_size,
            order=streamload.Order(num_batches=1 << 30),
            num_workers=alone.workers,
            device="cpu",
            cache_dir=cache,
            images=streamload.Images(decode=alone.decoder),
        ) as loader,
    ):
        return taken(iter(loader), alone, torch.device("cpu"))


def with_gray_images(images: ImagesOfFiles, values: Mapping[str, Any]) -> dict[str, Any]:
    """In place of the rank's decoding: a batch's values with the same image for each row."""
    rows = len(values[CHOICES])
    others = {name: value for name, value in values.items() if name not in (CHOICES, FILES, MADE)}
    gray = torch.zeros(1, 3, 224, 224, dtype=torch.uint8).expand(rows, -1, -1, -1)
    return {**others, "image": gray, DECODING: Decoding("none", rows, 0, 0)}


if __name__ == "__main__":
    main()
