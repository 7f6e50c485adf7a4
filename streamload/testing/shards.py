"""Shards for tests: deterministic tars whose samples identify themselves, and an oracle that reads them.

Both use `tarfile`, independently of the code under test. The images are small and show noise.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from xxhash import xxh3_64_hexdigest

_MEMBER_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META_NAME = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True)
class ShardOptions:
    """Options of `write_shards`."""

    image_side: tuple[int, int] = (16, 48)
    """Smallest and largest width and height, in pixels."""
    padding_bytes: tuple[int, int] = (0, 2000)
    """Smallest and largest number of bytes to append to an image, as JPEG comments, so that sizes vary."""
    without_text_every: int = 0
    """Every n-th sample has no `txt`; 0: all have one."""
    folder: str = ""
    """Prefix of each key, with its slash."""
    extra: Mapping[str, bytes] = field(default_factory=dict)
    """Further members of each sample, by extension."""
    format: int = tarfile.GNU_FORMAT
    """`tarfile.USTAR_FORMAT`, `GNU_FORMAT` or `PAX_FORMAT`."""


def write_shards(
    directory: str | Path, counts: Sequence[int], *, seed: int = 0, options: ShardOptions | None = None
) -> list[Path]:
    """Write one shard per count: `00000.tar`, `00001.tar`, …; equal arguments give equal bytes.

    A sample is a `jpg`, a `json` with {"shard", "index", "digest"} and a `txt` with the same in words; the
    digest is xxh3_64 of the JPEG. So each sample shows where it came from, and whether it is complete.

    Args:
        directory: created if missing.
        counts: samples per shard.
        seed: of sizes and pixels.
        options: of the images and members.

    Returns:
        The paths, in order.
    """
    options = options or ShardOptions()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard, count in enumerate(counts):
        path = directory / f"{shard:05d}.tar"
        with tarfile.open(path, "w", format=options.format) as tar:
            for index in range(count):
                key = f"{options.folder}{shard:05d}{index:06d}"
                for extension, payload in _sample(shard, index, seed, options).items():
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size = len(payload)
                    tar.addfile(info, io.BytesIO(payload))
        paths.append(path)
    return paths


def read_oracle(path: str | Path) -> list[tuple[str, dict[str, bytes]]]:
    """Read a shard with `tarfile`, grouping members by the WebDataset convention as open_clip does.

    A link gives the payload of the earlier member that it names. Other links and sparse files are left out.

    Returns:
        (key, {extension: payload}) of each sample, in the order of the tar.
    """
    samples: list[tuple[str, dict[str, bytes]]] = []
    extracted: dict[str, bytes | None] = {}
    with tarfile.open(path, "r|") as tar:
        for info in tar:
            if info.islnk() or info.issym():
                folder = posixpath.dirname(info.name) if info.issym() else ""
                payload = extracted.get(posixpath.normpath(posixpath.join(folder, info.linkname)))
            elif info.isreg():
                content = None if info.issparse() else tar.extractfile(info)
                payload = content.read() if content is not None else None
            else:
                continue
            extracted[posixpath.normpath(info.name)] = payload
            match = _MEMBER_NAME.match(info.name)
            if payload is None or match is None or _META_NAME.match(info.name):
                continue
            key, extension = match[1], match[2].lower()
            if not samples or samples[-1][0] != key or extension in samples[-1][1]:
                samples.append((key, {}))
            samples[-1][1][extension] = payload
    return samples


def _sample(shard: int, index: int, seed: int, options: ShardOptions) -> dict[str, bytes]:
    rng = np.random.default_rng([seed, shard, index])
    width, height = rng.integers(*options.image_side, size=2, endpoint=True).tolist()
    jpeg = _jpeg(rng, width, height, int(rng.integers(*options.padding_bytes, endpoint=True)))
    digest = xxh3_64_hexdigest(jpeg)
    metadata = {"shard": shard, "index": index, "digest": digest}
    members = {"jpg": jpeg, "json": json.dumps(metadata).encode()}
    if not options.without_text_every or (index + 1) % options.without_text_every:
        members["txt"] = f"noise from shard {shard} index {index} digest {digest}".encode()
    return {**members, **options.extra}


def _jpeg(rng: np.random.Generator, width: int, height: int, padding_bytes: int) -> bytes:
    """A JPEG of coarse noise in one tint, with `padding_bytes` of comments."""
    tint = rng.integers(0, 200, size=3)
    pixels = (tint + rng.integers(0, 56, size=(height, width, 3))).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
    jpeg = buffer.getvalue()
    comments = b""
    while padding_bytes > len(comments):
        text = rng.bytes(min(padding_bytes - len(comments), 65_533))
        comments += b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text
    scan = jpeg.index(b"\xff\xda")
    return jpeg[:scan] + comments + jpeg[scan:]
