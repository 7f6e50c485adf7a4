"""A training that is small enough for a test: pictures that can be learnt, the model, what came of a run."""

import io
import itertools
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (30, 60, 210), "grey": (128, 128, 128)}
SHAPES = ("plain", "striped", "barred", "framed")
TINY = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}


def write_colour_shards(directory: Path, counts: Sequence[int], seed: int) -> list[Path]:
    """Shards of small pictures in a colour and a pattern, with captions that name both."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    kinds = itertools.cycle(itertools.product(COLOURS, SHAPES))
    paths = []
    for shard, count in enumerate(counts):
        paths.append(directory / f"{shard:05d}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for index, (colour, shape) in zip(range(count), kinds, strict=False):
                jpeg, caption = _picture(rng, colour, shape), f"a {shape} {colour} picture"
                for extension, payload in (("jpg", jpeg), ("txt", caption.encode())):
                    member = tarfile.TarInfo(f"{seed}-{shard:05d}-{index:04d}.{extension}")
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
    return paths


def _picture(rng: np.random.Generator, colour: str, shape: str) -> bytes:
    side = int(rng.integers(70, 90))
    pixels = np.full((side, side, 3), COLOURS[colour], np.int16)
    if shape == "striped":
        pixels[:, ::16] = pixels[:, 1::16] = pixels[:, 2::16] = 255
    elif shape == "barred":
        pixels[::16] = pixels[1::16] = pixels[2::16] = 255
    elif shape == "framed":
        pixels[:12] = pixels[-12:] = pixels[:, :12] = pixels[:, -12:] = 255
    pixels += rng.integers(-20, 20, pixels.shape, dtype=np.int16)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


@dataclass(frozen=True)
class Batch:
    """What a training took in one step of a rank."""

    train: bool
    epoch: int
    keys: list[str]
    urls: list[str]
    origin_requests: int
    """Of all steps so far."""


@dataclass(frozen=True)
class Run:
    """A training that has ended: its batches by rank, what it said, and its losses in order."""

    batches: list[list[Batch]]
    log: str
    results: list[dict[str, float]]

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss in re.findall(r"Train Epoch: .* Loss: (\S+) ", self.log)]

    def origin_requests(self, rank: int, epoch: int) -> int:
        """By the end of an epoch of training."""
        return max(b.origin_requests for b in self.batches[rank] if b.train and b.epoch == epoch)

    def keys(self, rank: int, epoch: int, *, train: bool = True) -> list[list[str]]:
        return [b.keys for b in self.batches[rank] if b.train is train and b.epoch == epoch]
