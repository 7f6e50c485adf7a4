"""Shards of real photographs with captions, for the examples and benchmarks; nothing is downloaded.

The photographs come from the scikit-image and scikit-learn wheels. Each sample is a different crop, size,
mirroring and JPEG quality of one of them, so no two have the same bytes. Sizes are like ImageNet's (around
520×390, 110 KB on average). Captions describe what a small CLIP can learn to see.
"""

import functools
import io
import json
import math
import os
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.errors import OptionError

Pixels = npt.NDArray[np.uint8]


class Photograph(NamedTuple):
    """A photograph in a wheel, and its description."""

    words: str
    wheel: str
    path: str


PHOTOGRAPHS = (
    Photograph("an astronaut", "scikit-image", "skimage/data/astronaut.png"),
    Photograph("a cup of coffee", "scikit-image", "skimage/data/coffee.png"),
    Photograph("a cat", "scikit-image", "skimage/data/chelsea.png"),
    Photograph("a rocket", "scikit-image", "skimage/data/rocket.jpg"),
    Photograph("a motorcycle", "scikit-image", "skimage/data/motorcycle_left.png"),
    Photograph("stained tissue", "scikit-image", "skimage/data/ihc.png"),
    Photograph("far galaxies", "scikit-image", "skimage/data/hubble_deep_field.jpg"),
    Photograph("a man with a camera", "scikit-image", "skimage/data/camera.png"),
    Photograph("old coins", "scikit-image", "skimage/data/coins.png"),
    Photograph("a brick wall", "scikit-image", "skimage/data/brick.png"),
    Photograph("short grass", "scikit-image", "skimage/data/grass.png"),
    Photograph("gravel", "scikit-image", "skimage/data/gravel.png"),
    Photograph("a temple in china", "scikit-learn", "sklearn/datasets/images/china.jpg"),
    Photograph("a flower", "scikit-learn", "sklearn/datasets/images/flower.jpg"),
)

_MEAN_SIZE = (520, 390)
_UPRIGHT_SHARE = 0.2
_QUALITIES = (96, 100)  # inclusive; these give file sizes like ImageNet's
_ZOOMS = (1.0, 1.25, 1.6)  # how much larger than a crop the whole photograph is, on its tighter side
_CLOSE_UP = 1.5
_ROWS = ("top", "middle", "bottom")
_COLUMNS = ("left", "centre", "right")


@dataclass(frozen=True, slots=True)
class Picture:
    """One sample: an encoded photograph, its caption, and which of PHOTOGRAPHS it is."""

    key: str
    jpeg: bytes
    caption: str
    label: int


def picture(number: int, seed: int = 0) -> Picture:
    """Sample `number` of the endless sequence of a seed; deterministic, about 3 ms.

    Raises:
        OptionError: the wheels with the photographs aren't installed.
    """
    import simplejpeg

    rng = np.random.default_rng((seed, number))
    label = int(rng.integers(len(PHOTOGRAPHS)))
    photograph = PHOTOGRAPHS[label]
    zoom = float(rng.choice(_ZOOMS))
    upright, mirrored = bool(rng.random() < _UPRIGHT_SHARE), bool(rng.random() < 0.5)
    pixels, place = _crop(rng, _scaled(photograph, zoom, upright), upright)
    jpeg = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels[:, :: -1 if mirrored else 1]),
        quality=int(rng.integers(_QUALITIES[0], _QUALITIES[1] + 1)),
        colorsubsampling="420",
    )
    shape, view = "tall" if upright else "wide", "close up" if zoom > _CLOSE_UP else "photo"
    caption = f"a {shape} {view} of {photograph.words}, {place}" + (", mirrored" if mirrored else "")
    return Picture(f"{number:08d}", _with_comment(jpeg, f"{seed}/{number}"), caption, label)


def write_photograph_shards(
    directory: Path | str,
    samples: int,
    samples_per_shard: int,
    seed: int = 0,
    threads: int | None = None,
    members: Sequence[str] = ("jpg", "txt"),
) -> list[Path]:
    """Write `samples` pictures into shards `00000.tar`, `00001.tar`, … and a sizes.json with their counts.

    Args:
        directory: created if missing; files of the same name are replaced.
        samples: in all shards; the last shard has the remainder.
        samples_per_shard: 360 are about 40 MB.
        seed: of crops, sizes, mirroring and quality.
        threads: how many shards are written concurrently; default: one per core. The bytes don't depend on
            it.
        members: of each sample: "jpg", "txt", "cls".

    Returns:
        The shards, in order.
    """
    if samples < 1 or samples_per_shard < 1:
        raise OptionError(
            f"samples={samples}, samples_per_shard={samples_per_shard}; expected at least 1 of each"
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    starts = range(0, samples, samples_per_shard)
    paths = [directory / f"{number:05d}.tar" for number in range(len(starts))]
    stops = [min(start + samples_per_shard, samples) for start in starts]
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for _ in pool.map(_write_shard, paths, starts, stops, repeat(seed), repeat(members)):
            pass
    sizes = {path.name: stop - start for path, start, stop in zip(paths, starts, stops, strict=True)}
    (directory / "sizes.json").write_text(json.dumps(sizes, indent=1))
    return paths


def _write_shard(path: Path, start: int, stop: int, seed: int, members: Sequence[str]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(start, stop):
            made = picture(number, seed)
            payloads = {"jpg": made.jpeg, "txt": made.caption.encode(), "cls": b"%d" % made.label}
            for extension in members:
                member = tarfile.TarInfo(f"{made.key}.{extension}")
                member.size = len(payloads[extension])
                tar.addfile(member, io.BytesIO(payloads[extension]))


def _crop(rng: np.random.Generator, pixels: Pixels, upright: bool) -> tuple[Pixels, str]:
    """A random crop, and a description of its place."""
    width, height = (int(side * rng.uniform(0.8, 1.0)) for side in _largest(upright))
    across, down = rng.random(2)
    left, top = int(across * (pixels.shape[1] - width + 1)), int(down * (pixels.shape[0] - height + 1))
    return pixels[
        top : top + height, left : left + width
    ], f"{_ROWS[int(down * 3)]} {_COLUMNS[int(across * 3)]}"


def _largest(upright: bool) -> tuple[int, int]:
    """Width and height of the largest crop; the mean is _MEAN_SIZE."""
    width, height = (round(side / 0.9) for side in _MEAN_SIZE)
    return (height, width) if upright else (width, height)


@functools.cache
def _scaled(photograph: Photograph, zoom: float, upright: bool) -> Pixels:
    """The whole photograph, uint8[H, W, 3], scaled so that a crop shows at most 1/zoom of each side.

    Cached for all crops: scaling is most of the work.
    """
    from PIL import Image

    try:
        path = str(distribution(photograph.wheel).locate_file(photograph.path))
    except PackageNotFoundError as exc:
        raise OptionError(
            f"{photograph.wheel} is not installed; its wheel contains the photographs: "
            f"python -m pip install 'streamload[demo]'"
        ) from exc
    with Image.open(path) as image:
        width, height = _largest(upright)
        scale = zoom * max(width / image.width, height / image.height)
        size = math.ceil(image.width * scale), math.ceil(image.height * scale)
        return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC))


def _with_comment(jpeg: bytes, text: str) -> bytes:
    """Insert a comment (a COM segment after the start marker), so that no two JPEGs have the same bytes."""
    comment = text.encode()
    return jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]
