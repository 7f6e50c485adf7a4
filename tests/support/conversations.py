"""Shards of samples with 0 to 8 images of several formats, some of them broken; their sizes by Pillow."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, UnidentifiedImageError

FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF"}
_BROKEN = [b"", b"no image", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBPVP8 "]


def encoded(rng: random.Random, kind: str) -> bytes:
    """An image of a random size; a JPEG may have a thumbnail's worth of EXIF, with an orientation."""
    out, options = io.BytesIO(), {}
    if kind == "JPEG" and rng.random() < 0.5:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6  # to be turned by 90 degrees
        options["exif"][0x010E] = "x" * rng.choice([10, 3000, 20_000])
    size = rng.randint(1, 90), rng.randint(1, 90)
    Image.new("RGB", size, (rng.randrange(256), 9, 200)).save(out, kind, **options)
    return out.getvalue()


def conversation(rng: random.Random) -> dict[str, bytes]:
    """The members of a sample by extension, in a random order."""
    count = rng.randint(0, 8)
    names = [f"{turn}.{rng.choice([*FORMATS])}" for turn in range(count)]
    if count and rng.random() < 0.3:
        names[rng.randrange(count)] = rng.choice(["jpg", "png", "a b.jpg", "left.seg.png"])
    members = {
        name: rng.choice(_BROKEN) if rng.random() < 0.1 else encoded(rng, FORMATS[name.rpartition(".")[2]])
        for name in names
    }
    words = rng.randint(1, 40)
    members["txt"] = b"word " * words
    members["json"] = json.dumps({"turns": count, "words": words}).encode()
    if rng.random() < 0.2:
        members["jpg.txt"] = encoded(rng, "JPEG")  # by its name no image
    shuffled = list(members.items())
    rng.shuffle(shuffled)
    return dict(shuffled)


def write_conversations(directory: Path, counts: Sequence[int], seed: int = 0) -> list[Path]:
    """Write shards of so many samples each."""
    directory.mkdir(parents=True, exist_ok=True)
    rng, paths = random.Random(seed), []
    for shard, count in enumerate(counts):
        paths.append(directory / f"{shard:05d}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for number in range(count):
                for extension, payload in conversation(rng).items():
                    info = tarfile.TarInfo(f"{shard:02d}{number:04d}.{extension}")
                    info.size = len(payload)
                    tar.addfile(info, io.BytesIO(payload))
    return paths


def sizes_by_pillow(members: dict[str, bytes]) -> list[tuple[str, tuple[int, int]]]:
    """Extension and (width, height) of each image in order; (0, 0) of what Pillow doesn't know."""
    sizes = []
    for extension, payload in members.items():
        if extension.split(".")[-1] in FORMATS:
            size = (0, 0)
            with contextlib.suppress(UnidentifiedImageError, OSError):
                size = Image.open(io.BytesIO(payload)).size
            sizes.append((extension, size))
    return sizes
