"""The work that is the same for all contenders: what a job says, the transform, the captions' ids, the
consumer.

Photographs become float32[N, 3, 224, 224] as open_clip trains on them (a random resized crop, bicubic with
antialias, normalised), captions become int64[N, 77], and the consumer reads one channel of every image.
"""

import collections
import io
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.contenders.job import SIDE, Epoch, Job, Result, versions
from benchmarks.process_tree import cpu_seconds, disk_bytes

Batch = TypeVar("Batch")
LENGTH = 77
_IDS = 49_406


class WordTokenizer:
    """Words to ids by a checksum: cheap, the same everywhere, and shaped like CLIP's."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, captions: str | Sequence[str]) -> torch.Tensor:
        captions = [captions] if isinstance(captions, str) else captions
        rows = torch.zeros(len(captions), LENGTH, dtype=torch.int64)
        for row, caption in zip(rows, captions, strict=True):
            ids = [_IDS, *(self._id(word) for word in caption.lower().split()), _IDS + 1][:LENGTH]
            row[: len(ids)] = torch.tensor(ids)
        return rows

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = zlib.crc32(word.encode()) % _IDS
        return self._ids[word]


class NumberTokenizer:
    """The number at the end of a caption, and zeros: which sample it is of."""

    def __call__(self, captions: str | Sequence[str]) -> torch.Tensor:
        captions = [captions] if isinstance(captions, str) else captions
        rows = torch.zeros(len(captions), LENGTH, dtype=torch.int64)
        rows[:, 0] = torch.tensor([int(caption.split()[-1]) for caption in captions])
        return rows


def tokenizer(job: Job) -> Callable[..., torch.Tensor]:
    if job.tokenizer == "words":
        return WordTokenizer()
    if job.tokenizer == "numbers":
        return NumberTokenizer()
    return _open_clip().get_tokenizer("ViT-B-32")


def open_clip_preprocess(jitter: bool = False) -> Callable[..., torch.Tensor]:
    """What open_clip's create_model_and_transforms gives as preprocess_train.

    Args:
        jitter: with colour jitter and grey images, as often and as strong as in CLIPA's trainings.
    """
    colour = {"color_jitter": (0.32, 0.32, 0.32, 0.08), "color_jitter_prob": 0.8, "gray_scale_prob": 0.2}
    return _open_clip().image_transform(SIDE, is_train=True, aug_cfg=colour if jitter else None)


class Transform:
    """A photograph's bytes and its caption to tensors: Pillow, open_clip's function, the job's tokenizer."""

    def __init__(self, job: Job) -> None:
        self._preprocess, self._tokenize = open_clip_preprocess(), tokenizer(job)

    def __call__(self, jpeg: bytes, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        from PIL import Image

        with Image.open(io.BytesIO(jpeg)) as image:
            return self._preprocess(image), self._tokenize(caption)[0]


def converting(convert: Callable[[Job, Path], None], job: Job, names: Sequence[str]) -> None:
    """Convert the shards, and print how long that took and how many bytes it wrote."""
    assert job.convert_to is not None
    folder, began = Path(job.convert_to), time.monotonic()
    folder.mkdir(parents=True)
    convert(job, folder)
    seconds = time.monotonic() - began
    written = sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
    )
    Result(began, [], versions(*names), {"seconds": seconds, "bytes": written}).print()


def train(
    loader: Iterable[tuple[torch.Tensor, torch.Tensor]],
    job: Job,
    epoch: int,
    save: Callable[[], object] | None = None,
) -> Epoch:
    """Go through an epoch as a training would, with next to no work for each batch.

    Args:
        save: gives the loader's state; asked where the job says so.
    """
    numbers: list[int] = []

    def look(batch: tuple[torch.Tensor, torch.Tensor], is_first: bool) -> tuple[int, float]:
        images, texts = batch
        if is_first:
            _check(images, texts, job)
        if job.tokenizer == "numbers":
            numbers.extend(texts[:, 0].tolist())
        return len(images), read_one_channel(images, epoch % 3)

    if not job.keep:
        is_last = epoch == job.epochs - 1
        seen = timed(loader, job, look, save if is_last else None)
        seen.numbers = numbers
        return seen
    kept = Kept(job.keep)

    def look_and_keep(batch: tuple[torch.Tensor, torch.Tensor], is_first: bool) -> tuple[int, float]:
        kept.add(batch)
        return look(batch, is_first)

    seen = timed(loader, job, look_and_keep)
    seen.changed_batches = kept.changed()
    return seen


class Kept:
    """The last batches, and what their bytes were when they came."""

    def __init__(self, most: int) -> None:
        self._batches: collections.deque[tuple[tuple[torch.Tensor, ...], bytes]] = collections.deque(
            maxlen=most
        )

    def add(self, batch: tuple[torch.Tensor, ...]) -> None:
        self._batches.append((batch, _digest(batch)))

    def changed(self) -> int:
        """How many of them aren't what they were.

        Raises:
            RuntimeError: there is none.
        """
        if not self._batches:
            raise RuntimeError("no batch was kept")
        return sum(_digest(batch) != digest for batch, digest in self._batches)


def _digest(batch: tuple[torch.Tensor, ...]) -> bytes:
    import xxhash

    digest = xxhash.xxh3_64()
    for part in batch:
        digest.update(part.contiguous().numpy())
    return digest.digest()


def read_one_channel(images: torch.Tensor, channel: int) -> float:
    """The mean of one channel of every image, which is next to no work.

    Of bytes, channels last, a sum of every third would be some: 100 µs an image. All of them are read, as
    words, and the mean is that of every 16th row.
    """
    if images.dtype != torch.uint8:
        return images[:, channel].mean().item()
    levels = images.permute(0, 2, 3, 1).numpy()
    np.bitwise_xor.reduce(levels.reshape(len(levels), -1).view(np.uint64), axis=None)
    return float(levels[:, ::16, :, channel].mean())


def read(loader: Iterable[dict[str, Any]], job: Job) -> Epoch:
    """Go through an epoch of samples of which nothing is made but the number of their bytes."""
    return timed(loader, job, lambda batch, is_first: (len(batch["bytes"]), 0.0))


def bytes_of(sample: dict[str, Any]) -> dict[str, int]:
    """The number of a sample's bytes."""
    return {"bytes": sum(len(data) for name, data in sample.items() if not name.startswith("__"))}


def timed(
    loader: Iterable[Batch],
    job: Job,
    look: Callable[[Batch, bool], tuple[int, float]],
    save: Callable[[], object] | None = None,
) -> Epoch:
    """Go through an epoch.

    Args:
        look: takes a batch, and whether it is the first; gives the number of its images, and a number whose
            mean over the batches is kept as `channel_mean`.
        save: as of `train`.
    """
    if job.drop_pages and job.cache_dir is not None:
        drop_pages(Path(job.cache_dir))
    cpu_before, disk_before = cpu_seconds(), disk_bytes()
    seen = Epoch(began=time.monotonic())
    mean, asked = 0.0, seen.began
    for batch in loader:
        came = time.monotonic()
        if seen.batches:
            seen.waited_seconds += came - asked
        else:
            seen.first_batch = came
        own = time.thread_time()
        images, channel = look(batch, not seen.batches)
        seen.consumer_cpu_seconds += time.thread_time() - own
        mean += channel
        seen.batches += 1
        seen.images += images
        if save is not None and not job.takes_up and seen.batches == job.save_after:
            began = time.monotonic()
            torch.save(save(), job.state)
            seen.saving_seconds = time.monotonic() - began
        if job.step_seconds:
            time.sleep(job.step_seconds)
        asked = time.monotonic()
    seen.ended = time.monotonic()
    seen.cpu_seconds = cpu_seconds() - cpu_before
    seen.disk_bytes = disk_bytes() - disk_before
    seen.channel_mean = mean / max(1, seen.batches)
    return seen


def drop_pages(directory: Path) -> None:
    """Let the kernel forget the pages of all files below a directory; what is on its way goes out first."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _check(images: torch.Tensor, texts: torch.Tensor, job: Job) -> None:
    assert images.dtype == getattr(torch, job.images), images.dtype
    assert images.shape == (job.batch_size, 3, SIDE, SIDE), images.shape
    assert texts.dtype == torch.int64, texts.dtype
    assert texts.shape == (job.batch_size, LENGTH), texts.shape


def _open_clip() -> Any:
    from benchmarks.torchvision_stub import define_torchvision_schemas

    define_torchvision_schemas()
    import open_clip

    return open_clip
