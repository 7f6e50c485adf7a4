"""What articles on caching preprocessed images show: a Dataset without a cache, and two that have one.

Both caches keep the tensor of an image after all of its preprocessing, which therefore can have no random
part. They are as plain as in the articles: one is a list that is filled when the Dataset is made, the other
writes a file by torch.save for each sample, and reads it if it is there.
"""

import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.contenders.classifier import epochs_of
from benchmarks.contenders.job import SIDE, Job, Result, versions

LIMITS = ("no augmentation after what is kept", "local files only", "no state, and no check of what is read")
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
Sample = tuple[torch.Tensor, int]


class Images(Dataset[Sample]):
    """Decodes and preprocesses an image each time."""

    def __init__(self, folder: Path):
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: int) -> Sample:
        return self.preprocessed(at), self.label(at)

    def label(self, at: int) -> int:
        return int(self.paths[at].stem.rpartition("-")[2])

    def preprocessed(self, at: int) -> torch.Tensor:
        with Image.open(self.paths[at]) as image:
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        levels = np.asarray(small, np.float32) / 255
        return torch.from_numpy(((levels - MEAN) / STD).transpose(2, 0, 1).copy())


class InMemory(Images):
    """Keeps a list of preprocessed tensors."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.tensors = [self.preprocessed(at) for at in range(len(self))]

    def __getitem__(self, at: int) -> Sample:
        return self.tensors[at], self.label(at)


class OnDisk(Images):
    """Writes each preprocessed tensor to a file, and reads it from there the next time."""

    def __init__(self, folder: Path, cache: Path):
        super().__init__(folder)
        self.cache = cache

    def __getitem__(self, at: int) -> Sample:
        path = self.cache / f"{at}.pt"
        if path.exists():
            return torch.load(path), self.label(at)
        tensor = self.preprocessed(at)
        torch.save(tensor, path)
        return tensor, self.label(at)


def main() -> None:
    job = Job.from_argument()
    torch.manual_seed(job.seed)
    assert job.cache_dir is not None
    folder, cache = Path(job.files), Path(job.cache_dir)
    making = time.monotonic()
    dataset = {
        "nothing": lambda: Images(folder),
        "memory": lambda: InMemory(folder),
        "disk": lambda: OnDisk(folder, cache),
    }[job.keeps]()
    loader = DataLoader(
        dataset,
        batch_size=job.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
    )
    imported = time.monotonic()
    epochs = epochs_of(loader, job)
    kept = sum(tensor.nbytes for tensor in getattr(dataset, "tensors", ()))
    kept += sum(path.stat().st_size for path in cache.iterdir())
    found = versions("torch", "pillow")
    Result(imported, epochs, found, {"kept_bytes": kept}, LIMITS, making).print()


if __name__ == "__main__":
    main()
