"""Other loaders, set up as their documentation has it, for as much as is installed here.

Their workers share out shards, not samples: where there are fewer shards than workers, shards are listed
again, so that each worker has work.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from streamload.bench.job import Job, NotHere, tokenizer_of
from streamload.transforms.augment import Draws, RandomBox
from streamload.transforms.normalise import OPENAI_MEAN, OPENAI_STD

_SIZE = 224
_SHARD_SHUFFLE, _SAMPLE_SHUFFLE = 100, 1000
"""webdataset's, as its documentation has them."""


class PillowTransform:
    """What torchvision does on Pillow images: a random box, resized, to float, normalised."""

    def __init__(self) -> None:
        self._boxes, self._draws = RandomBox(), Draws()
        self._mean = torch.tensor(OPENAI_MEAN).view(3, 1, 1)
        self._std = torch.tensor(OPENAI_STD).view(3, 1, 1)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """float32[3, 224, 224] of a Pillow image in RGB."""
        self._draws.seed(int(torch.randint(1 << 32, ()).item()))
        top, left, height, width = self._boxes.draw(image.height, image.width, self._draws)
        cut = image.crop((left, top, left + width, top + height))
        resized = cut.resize((_SIZE, _SIZE), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()
        return pixels.float().div_(255).sub_(self._mean).div_(self._std)


def webdataset_loader(job: Job) -> Iterable[Any]:
    """As many batches as are asked for, in the fluid form of webdataset's documentation."""
    import webdataset as wds

    tokenizer = tokenizer_of(job.tokenizer)
    dataset = (
        wds.WebDataset(_for_each_worker(job), shardshuffle=_SHARD_SHUFFLE)
        .repeat()
        .shuffle(_SAMPLE_SHUFFLE)
        .decode("pilrgb")
        .to_tuple("jpg;jpeg", "txt")
        .map_tuple(PillowTransform(), _same if tokenizer is None else _Ids(tokenizer))
        .batched(job.batch_size, partial=False)
        .with_epoch(math.ceil(job.batches / job.workers))
    )
    loader: Iterable[Any] = wds.WebLoader(dataset, batch_size=None, num_workers=job.workers)
    return loader


def open_clip_loader(job: Job) -> Iterable[Any]:
    """An epoch of open_clip's own loader, called as its training calls it.

    Raises:
        NotHere: it can't be imported.
    """
    try:
        import open_clip
        from open_clip_train import data
    except (ImportError, RuntimeError) as exc:  # RuntimeError: a torchvision of another torch
        raise NotHere(f"open_clip can't be imported: {exc}") from exc
    arguments = SimpleNamespace(
        train_data=_one_pattern(job),
        train_num_samples=job.batches * job.batch_size,
        train_data_upsampling_factors=None,
        dataset_resampled=True,  # else it ends where the shards of a worker do
        val_data=None,
        val_num_samples=None,
        seed=job.seed,
        batch_size=job.batch_size,
        workers=job.workers,
        world_size=1,
    )
    preprocess = open_clip.image_transform(_SIZE, is_train=True)
    tokenizer = tokenizer_of(job.tokenizer) or _as_it_is  # the same work as for the others
    info = data.get_wds_dataset(arguments, preprocess, is_train=True, epoch=0, tokenizer=tokenizer)
    info.set_epoch(0)
    loader: Iterable[Any] = info.dataloader
    return loader


class _Ids:
    """One caption's ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, caption: str) -> Any:
        return self._tokenizer(caption)[0]


def _same(caption: str) -> str:
    return caption


def _as_it_is(caption: str) -> list[str]:
    return [caption]


def _for_each_worker(job: Job) -> list[str]:
    return job.paths * math.ceil(max(1, job.workers) / len(job.paths))


def _one_pattern(job: Job) -> str:
    """The shards under numbered names, as a list in one string can be said to open_clip."""
    folder = Path(job.directory) / f"shards-{os.getpid()}"
    folder.mkdir()
    paths = _for_each_worker(job)
    for number, path in enumerate(paths):
        (folder / f"{number:06d}.tar").symlink_to(Path(path).resolve())
    return f"{folder}/{{000000..{len(paths) - 1:06d}}}.tar"
