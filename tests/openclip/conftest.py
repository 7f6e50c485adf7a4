"""What the tests with open_clip share: shards of things that can be learnt, a tiny model, its training."""

import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from streamload.testing.torchvision_stub import define_torchvision_schemas

define_torchvision_schemas()  # before anything imports torchvision

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


@pytest.fixture(scope="session")
def shards(scratch: Path) -> list[Path]:
    """800 samples in 4 shards."""
    return write_colour_shards(scratch / "train", [200] * 4, seed=1)


@pytest.fixture(scope="session")
def validation_shards(scratch: Path) -> list[Path]:
    """70 samples in 2 shards: two batches of 32, and 6 left over."""
    return write_colour_shards(scratch / "val", [50, 20], seed=2)


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


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Run]:
    """Run open_clip's training of the tiny model to its end: `train("--train-data", …, ranks=2)`."""
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(TINY))

    def run(*arguments: str, ranks: int = 1, environ: Mapping[str, str] | None = None) -> Run:
        launcher = [sys.executable, str(Path(__file__).parent / "launch.py")]
        if ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            launcher = [sys.executable, *torchrun, launcher[1], "--"]
        record = tmp_path / "record"
        record.mkdir()
        fixed = "--model tiny --device cpu --precision fp32 --batch-size 32 --warmup 5 --lr 2e-3 --epochs 2"
        logs = f"--logs {tmp_path} --name run --log-every-n-steps 1 --save-frequency 0"
        done = subprocess.run(
            [*launcher, *fixed.split(), *logs.split(), "--dataset-type", "webdataset", *arguments],
            env={
                **os.environ,
                "OPENCLIP_TEST_MODEL": str(model),
                "OPENCLIP_TEST_RECORD": str(record),
                "STREAMLOAD_CACHE_DIR": str(tmp_path / "cache"),
                "STREAMLOAD_CACHE_SIZE": "100MB",
                "OMP_NUM_THREADS": "1",
                **(environ or {}),
            },
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        batches = [
            [Batch(**json.loads(line)) for line in (record / f"rank-{rank}.jsonl").read_text().splitlines()]
            for rank in range(ranks)
        ]
        results = tmp_path / "run" / "checkpoints" / "results.jsonl"
        lines = results.read_text().splitlines() if results.exists() else []
        return Run(batches, (tmp_path / "run" / "out.log").read_text(), [json.loads(line) for line in lines])

    return run
