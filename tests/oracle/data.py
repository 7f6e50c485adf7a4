"""The shards of the oracle: small, made by seed, with one date, so that equal code gives equal bytes."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from streamload.testing.shards import ShardOptions, read_oracle, write_shards

MODIFIED = 1_700_000_000
"""The date of all files, in seconds: a version is an ETag, or a date and a size."""

COUNTS = {
    "plain": [12, 5, 17, 8, 1, 20, 9, 14, 3],
    "few": [10, 6],
    "many": [4] * 24,
    "sized": [6, 18, 11, 9, 7, 15, 10, 8],
    "captions": [16, 11, 7, 20, 13, 5],
    "damaged": [12, 12, 9, 14, 10],
    "photographs": [8, 6, 9, 5],
    "cut": [7, 9, 8],
}
"""Samples of each shard of each set."""

Members = dict[str, bytes]
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
_WORDS = ["a", "the", "red", "old", "small", "dog", "cat", "house", "near", "two", "of", "with", "river"]


def write_sets(root: Path) -> None:
    """Write all sets below a directory: `plain/00000.tar`, …, and the tables of their facts."""
    for name in ("plain", "few", "many", "sized"):
        # Each set has keys of its own: sources of a mixture may be any of them.
        options = ShardOptions(folder=f"{name}/", without_text_every=7 if name == "plain" else 0)
        write_shards(root / name, COUNTS[name], seed=len(name), options=options)
    _write(root / "captions", COUNTS["captions"], _captioned)
    _write(root / "damaged", COUNTS["damaged"], _maybe_damaged)
    _write(root / "photographs", COUNTS["photographs"], _photograph)
    write_shards(root / "cut", COUNTS["cut"], seed=1)
    cut = root / "cut" / "00001.tar"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2 // 512 * 512 + 100])
    sizes = {f"{shard:05d}.tar": count for shard, count in enumerate(COUNTS["sized"])}
    (root / "sized" / "sizes.json").write_text(json.dumps(sizes))
    for name in COUNTS:
        _write_scores(root, name)
    for path in root.rglob("*"):
        os.utime(path, (MODIFIED, MODIFIED))


def _write(folder: Path, counts: list[int], sample: object) -> None:
    folder.mkdir(parents=True)
    for shard, count in enumerate(counts):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for index in range(count):
                rng = random.Random(f"{folder.name}/{shard}/{index}")
                for extension, payload in sample(rng, shard, index).items():  # type: ignore[operator]
                    info = tarfile.TarInfo(f"{folder.name}/{shard:02d}{index:03d}.{extension}")
                    info.size = len(payload)
                    tar.addfile(info, io.BytesIO(payload))


def _captioned(rng: random.Random, shard: int, index: int) -> Members:
    """Captions of unlike lengths, some blank or missing; labels; images of three formats."""
    extension = rng.choice(["jpg", "jpg", "png", "webp"])
    members = {extension: _image(rng, rng.randint(16, 64), rng.randint(16, 64), _FORMATS[extension])}
    if rng.random() < 0.9:
        words = rng.choices(_WORDS, k=rng.choice([0, 1, 3, 6, 12, 30]))
        members["txt"] = " ".join(words).encode()
    if rng.random() < 0.95:
        members["cls"] = str(rng.randint(0, 9)).encode()
    score = {"score": round(rng.random(), 3)} if rng.random() < 0.8 else {}
    members["json"] = json.dumps({"caption": f"number {index} of {shard}", **score}).encode()
    return members


def _maybe_damaged(rng: random.Random, shard: int, index: int) -> Members:
    image = _image(rng, rng.randint(16, 64), rng.randint(16, 64), "JPEG")
    damage = rng.choice(["", "", "", "", "", "", "", "", "", "cut", "text", "empty"])
    image = {"cut": image[: len(image) // 3], "text": b"not an image", "empty": b""}.get(damage, image)
    return {"jpg": image, "txt": f"{damage or 'sound'} {index}".encode(), "cls": b"1"}


def _photograph(rng: random.Random, shard: int, index: int) -> Members:
    """Larger than the transforms' results, so that images are decoded at a part of their size."""
    image = _image(rng, rng.randint(230, 560), rng.randint(230, 560), "JPEG")
    return {"jpg": image, "txt": f"photograph {shard} {index}".encode(), "cls": str(index).encode()}


def _image(rng: random.Random, width: int, height: int, form: str) -> bytes:
    """Waves and some noise."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    waves = [rng.uniform(0.02, 0.3) * x + rng.uniform(0.02, 0.3) * y + rng.uniform(0, 6) for _ in range(3)]
    noise = np.random.default_rng(rng.getrandbits(32)).integers(0, 24, (height, width, 3))
    pixels = (110 + 90 * np.sin(np.stack(waves, axis=2)) + noise).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **({"lossless": True} if form == "WEBP" else {}))
    return buffer.getvalue()


def _write_scores(root: Path, name: str) -> None:
    """A table of facts: a score for nine of ten samples, and how often each is used."""
    rng = random.Random(f"scores of {name}")
    with (root / f"{name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["key", "score", "uses"])
        for key in _keys(root / name):
            if rng.random() < 0.9:
                table.writerow([key, round(rng.random(), 3), rng.choice([0, 0.3, 1, 1, 2, 2.5])])


def _keys(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.tar")) if folder.name != "cut" else ():
        for key, _ in read_oracle(path):
            yield key


def patterns(way: str, name: str) -> str:
    """The URL pattern of a set, the same wherever the sets are.

    Args:
        way: "local", "http" (through a proxy that serves the sets for any host) or "pipe".
        name: of the set.
    """
    prefix = {"local": "", "http": "http://shards.test/", "pipe": "pipe:cat "}[way]
    return f"{prefix}{name}/{{00000..{len(COUNTS[name]) - 1:05d}}}.tar"
