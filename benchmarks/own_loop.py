"""The loop that people write themselves: a map-style Dataset of files, Pillow, a DataLoader (gpu_feed.py)."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks.contenders.workload import WordTokenizer
from streamload.transforms.normalise import OPENAI_MEAN, OPENAI_STD

SIDE = 224
_MEAN, _STD = (np.array(values, np.float32) for values in (OPENAI_MEAN, OPENAI_STD))


class Files(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images of a folder with their captions: a random crop of at least 90 %, at 224 pixels, normalised."""

    def __init__(self, folder: Path):
        self._paths = sorted(folder.glob("*.jpg"))
        self._tokenize = WordTokenizer()

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        path = self._paths[index]
        with Image.open(path) as image:
            width, height = image.size
            share = float(torch.empty(1).uniform_(0.9, 1.0).sqrt())
            left, top = (torch.rand(2) * torch.tensor([width, height]) * (1 - share)).tolist()
            box = (left, top, left + share * width, top + share * height)
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
        levels = (np.asarray(small, np.float32) / 255 - _MEAN) / _STD
        return torch.from_numpy(levels.transpose(2, 0, 1).copy()), self._tokenize(
            path.with_suffix(".txt").read_text()
        )[0]


def unpacked(shards: Path, folder: Path, samples: int) -> Path:
    """Write the members of the first samples into a folder, as files."""
    folder.mkdir()
    for path in sorted(shards.glob("*.tar")):
        if len(list(folder.glob("*.jpg"))) >= samples:
            break
        with tarfile.open(path) as tar:
            tar.extractall(folder, filter="data")
    return folder


def batches(
    folder: Path, batch_size: int, steps: int, workers: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches on the device, by the options that are usually given; files come again once all have come."""
    files = Files(folder)
    loader = DataLoader(
        files,
        batch_size,
        sampler=RandomSampler(files, num_samples=steps * batch_size),
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type != "cpu",
    )
    for _, (images, ids) in zip(range(steps), loader, strict=False):
        yield images.to(device, non_blocking=True), ids.to(device, non_blocking=True)
