"""A map-style Dataset whose deterministic preprocessing runs once: the first epoch computes, the others read.

    python examples/cached_preprocessing.py --images photographs/   # a folder for each class

Without a folder it makes one of photographs; nothing is downloaded. Rows are in streamload's cache directory
(STREAMLOAD_CACHE_DIR), so a second run reads from its first epoch on.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from photograph_shards import picture
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import streamload


@streamload.cache_module
class Preprocess(nn.Module):
    """The path of an image to float32[3, side, side]: decoded, resized and cropped, always the same."""

    def __init__(self, side: int):
        super().__init__()
        self.side = side

    def forward(self, path: str) -> torch.Tensor:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
        scale = self.side / min(rgb.size)
        width, height = (max(self.side, round(length * scale)) for length in rgb.size)
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
        left, top = ((length - self.side) // 2 for length in rgb.size)
        crop = rgb.crop((left, top, left + self.side, top + self.side))
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1).float() / 127.5 - 1


class Photographs(Dataset):
    """Images in a folder for each class."""

    def __init__(self, directory: Path, side: int):
        self.paths = sorted(path for path in directory.glob("*/*") if path.is_file())
        self.classes = sorted({path.parent.name for path in self.paths})
        self.preprocess = Preprocess(side).eval()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int, int, int]:
        path = self.paths[at]
        before = streamload.cache_info(self.preprocess)  # the counts of this worker
        # A file that is written again has another time, and so another key: it is computed anew.
        key = f"{path.parent.name}/{path.name} {path.stat().st_mtime_ns}"
        image = self.preprocess(str(path), cache_key=key)
        after = streamload.cache_info(self.preprocess)
        if torch.rand(()) < 0.5:  # what is random comes after the cache
            image = image.flip(-1)
        label = self.classes.index(path.parent.name)
        return image, label, after.hits - before.hits, after.rows_computed - before.rows_computed


@contextlib.contextmanager
def photographs(count: int) -> Iterator[Path]:
    """A directory with photographs, in a folder for each class."""
    with tempfile.TemporaryDirectory() as directory:
        for number in range(count):
            made = picture(number)
            folder = Path(directory) / f"{made.label:02d}"
            folder.mkdir(exist_ok=True)
            (folder / f"{made.key}.jpg").write_bytes(made.jpeg)
        yield Path(directory)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=Path, help="a directory with a folder of images for each class")
    parser.add_argument("--side", type=int, default=64, help="of the preprocessed images, in pixels")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with contextlib.nullcontext(args.images) if args.images else photographs(192) as directory:
        dataset = Photographs(directory, args.side)
        loader = DataLoader(dataset, args.batch_size, shuffle=True, num_workers=args.workers)
        torch.manual_seed(0)
        features = 3 * (args.side // 4) ** 2
        train(
            loader,
            nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(features, len(dataset.classes))),
            args.epochs,
        )


def train(loader: DataLoader, model: nn.Module, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        began, losses, computed, read = time.monotonic(), [], 0, 0
        for images, labels, were_read, were_computed in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            read += int(were_read.sum())
            computed += int(were_computed.sum())
        seconds = time.monotonic() - began
        print(
            f"epoch {epoch + 1}: {computed} images computed, {read} read, in {seconds:.1f} s, "
            f"mean loss {sum(losses) / len(losses):.3f}"
        )


if __name__ == "__main__":
    main()
