"""What bucketing saves of a training's own time, where images are patches in their own resolution.

Question: how much less CPU time does a small transformer need for the same images, if rows with about as many
patches are in one microbatch?

Command: python -m benchmarks.naflex_step

Images of many sizes (their patches log-normal, at most 256: `Patches(16, seq_lens=(256,), max_ratio=1.0)`),
steps of 64 rows, microbatches of 16, each cut to its longest row by `loader.microbatches`. A transformer of
two layers computes forward and backward of each part, its padding masked. The ways take a step each in turn,
in one process with one thread; all train on the same images, once each:

- "in the order of the run": the rows of a step as they come. "whole steps": the same without microbatches,
  padded to 256, as timm's and OpenCLIP's batches are.
- "step", "blocks of 1,024": `Batches(bucketing=…)`.

"training_us_per_image" is CPU time of the thread in forward and backward alone, without the loader's.
"padding" is the share of patches that aren't there in what is computed. The rate is that of the order of the
run, by CPU time, ÷ the way's.

Result: results/naflex_step.json
"""

import io
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import streamload
from benchmarks import machine, turns
from benchmarks.turns import Row

SAMPLES, QUICK_SAMPLES, ROWS, PART = 2048, 192, 64, 16
PATCH, LONGEST, WIDTH = 16, 256, 96
AT_LEAST = 1.15
RANDOM, WHOLE, STEP, BLOCKS = "in the order of the run", "whole steps", "step", "blocks of 1,024"
WAYS: dict[str, dict[str, Any]] = {
    RANDOM: {"microbatch": PART},
    WHOLE: {},
    STEP: {"microbatch": PART, "bucketing": "step"},
    BLOCKS: {"microbatch": PART, "bucketing": 1024},
}


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=["streamload"])
    samples = QUICK_SAMPLES if given.quick else SAMPLES
    torch.set_num_threads(1)
    with turns.scratch() as directory:
        urls = write_images(directory / "shards", samples)
        rows = [row for round_ in range(given.rounds) for row in one_round(urls, samples, directory, round_)]
    medians = turns.medians(rows)
    rates = {
        way: turns.ratio(medians, "training_us_per_image", RANDOM, way) for way in WAYS if way in medians
    }
    turns.write(
        given,
        "naflex_step",
        {
            "settings": {"samples": samples, "rows": ROWS, "part": PART, "longest": LONGEST, "width": WIDTH},
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "ratios": {"rate against the order of the run": rates},
            "targets": [
                turns.target(f"{way}: steps of a transformer, × random", rates[way], at_least=AT_LEAST)
                for way in (STEP, BLOCKS)
            ],
        },
    )


def write_images(directory: Path, samples: int) -> str:
    """Shards of images of many sizes and aspects; their pixels don't matter."""
    draw = np.random.default_rng(0)
    directory.mkdir()
    shards = samples // 64
    for shard in range(shards):
        with tarfile.open(directory / f"{shard:05d}.tar", "w") as tar:
            for number in range(64):
                patches = float(np.clip(np.exp(draw.normal(4.6, 0.8)), 9, LONGEST))
                aspect = float(np.exp(draw.normal(0, 0.3)))
                sides = (max(PATCH, round(PATCH * (patches * by) ** 0.5)) for by in (aspect, 1 / aspect))
                file = io.BytesIO()
                Image.new("RGB", tuple(sides), (number, shard, 9)).save(file, "JPEG")
                for name, data in (("jpg", file.getvalue()), ("txt", b"an image")):
                    info = tarfile.TarInfo(f"{shard:03d}{number:03d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return turns.pattern(str(directory), shards)


class Tower(torch.nn.Module):
    """A small transformer over patches: their mean is an image's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(PATCH * PATCH * 3, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, image: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32[N, L, P] of patches to float32[N, WIDTH]."""
        valid = image["patch_valid"]
        found = self.layers(self.embed(image["patches"]), src_key_padding_mask=~valid)
        embedded: torch.Tensor = (found * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
        return embedded


def one_round(urls: str, samples: int, directory: Path, round_: int) -> Iterator[Row]:
    """Train on all images in each way, a step of each in turn."""
    torch.manual_seed(0)
    model, load = Tower(), machine.load()
    loaders = {way: loader_of(urls, directory, round_, options) for way, options in WAYS.items()}
    epochs = {way: iter(loader) for way, loader in loaders.items()}
    spent, computed, useful, images, keys = (dict.fromkeys(WAYS, 0) for _ in range(5))
    for step in range(samples // ROWS):
        for way in turns.rotated(list(WAYS), step):
            batch = next(epochs[way])
            for part in loaders[way].microbatches(batch):
                began = time.thread_time_ns()
                model(part["image"]).square().sum().backward()
                model.zero_grad()
                spent[way] += time.thread_time_ns() - began
                computed[way] += part["image"]["patch_valid"].numel()
                useful[way] += int(part["image"]["patch_valid"].sum())
                images[way] += len(part["__key__"])
            keys[way] += sum(map(int, batch["__key__"]))
    for loader in loaders.values():
        loader.close()
    assert len({(images[way], keys[way], useful[way]) for way in WAYS}) == 1, "not the same images"
    for way in WAYS:
        yield {
            "label": way, "contender": "streamload", "round": round_, "load_before": load,
            "training_us_per_image": spent[way] / images[way] / 1e3,
            "padding": 1 - useful[way] / computed[way],
        }  # fmt: skip


def loader_of(urls: str, directory: Path, seed: int, batches: dict[str, Any]) -> streamload.Loader:
    patches = streamload.Patches(PATCH, seq_lens=(LONGEST,), max_ratio=1.0)
    return streamload.make_loader(
        urls, batch_size=ROWS, num_workers=1, seed=seed, output="dict",
        images=streamload.Images(patches=patches), batches=streamload.Batches(with_keys=True, **batches),
        cache_dir=directory / "cache", cache_size="1GB",
    )  # fmt: skip


if __name__ == "__main__":
    main()
