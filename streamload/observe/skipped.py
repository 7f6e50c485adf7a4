"""The samples of a run that could not be used, with their pictures as far as the cache has their bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from streamload.cache.inventory import url_of
from streamload.cache.shard import shard_of
from streamload.cache.shard_copy import Members, ShardCopy, read_sample
from streamload.cache.tier import Tier
from streamload.errors import StreamloadError
from streamload.observe.pictures import Picture, Row
from streamload.observe.recording import Skipped
from streamload.shards.index import IndexReader

MOST = 60
"""Samples on a page."""
_MOST_PIXELS = 40_000_000
_SIDE = 320


def rows_of(samples: Sequence[Skipped], tier: Tier | None) -> list[Row]:
    """The first samples as rows of a page.

    Args:
        samples: as recorded.
        tier: that may have their bytes; nothing is removed from it. None: none has.
    """
    chosen = list(dict.fromkeys(samples))[:MOST]
    members_of = {} if tier is None else dict(_members(tier, chosen))
    rows: list[Row] = []
    for cause, url, key, message in chosen:
        members = members_of.get((url, key))
        picture, why = (None, "its bytes aren't in the cache") if members is None else _picture(members)
        caption = bytes(members["txt"]).decode(errors="replace") if members and "txt" in members else None
        values = {"caption": caption, "key": key, "shard": url, "error": f"{cause}: {message}"}
        rows.append((values | ({} if picture is not None else {"no picture": why}), picture))
    return rows


def _members(tier: Tier, samples: Sequence[Skipped]) -> Iterator[tuple[tuple[str, str], Members]]:
    """The members of those samples that the tier has, by the shard's URL and the key."""
    keys_by_url: dict[str, set[str]] = {}
    for _, url, key, _ in samples:
        keys_by_url.setdefault(url, set()).add(key)
    for path in tier.own("shards"):
        url = url_of(path)
        try:
            for key, members in _read(path, url, keys_by_url.get(url, set())):
                yield (url, key), members
        except (OSError, StreamloadError):
            continue  # evicted meanwhile, damaged, or a local file that is gone


def _read(path: Path, url: str, keys: set[str]) -> Iterator[tuple[str, Members]]:
    copy = ShardCopy.open(path, shard_of(url, None, is_copied=(path / "data").exists())) if keys else None
    if copy is None:
        return
    try:
        reader: IndexReader = copy.reader
        for number in range(reader.count):
            entry = reader.entry(number)
            if entry.key in keys and (members := read_sample(copy.descriptor(), entry)) is not None:
                yield entry.key, members
    finally:
        copy.close()


def _picture(members: Mapping[str, memoryview]) -> tuple[Picture | None, str]:
    """A small picture of a sample's first image, as far as it can be decoded; None, and why there is none."""
    from PIL import Image, ImageFile, UnidentifiedImageError

    from streamload.transforms.by_pillow import FORMATS

    why, before = "it has no image", ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True  # what there is of a cut file is drawn
    try:
        for data in members.values():
            try:
                with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                    image.draft("RGB", (_SIDE, _SIDE))
                    if image.width * image.height > _MOST_PIXELS:
                        why = f"it is too large to be drawn: {image.width} × {image.height} pixels"
                        continue
                    image.thumbnail((_SIDE, _SIDE))
                    return np.array(image.convert("RGB")), ""
            except UnidentifiedImageError:
                continue
            except Exception as exc:
                why = f"it can't be drawn: {exc}"
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before
    return None, why
