"""How many samples the shards have, by the sizes.json files that lie beside them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from streamload import urls
from streamload.errors import OriginDenied, OriginNotFound
from streamload.origins.origin import open_origin

logger = logging.getLogger("streamload")

_LIMIT_BYTES = 64 << 20


def listed_sizes(shards: Sequence[str], storage_options: dict[str, Any] | None) -> list[int] | None:
    """The number of samples in each shard; None if a shard isn't listed, or can't be (a pipe).

    A sizes.json is `{shard's base name: samples}`, in the folder of the shards, as OpenCLIP reads it.

    Raises:
        OriginError: a sizes.json can't be read for another reason than that there is none.
    """
    known: dict[str, dict[str, Any]] = {}
    sizes = []
    for shard in shards:
        if urls.scheme(shard) == "pipe":
            return None
        beside = _beside(shard)
        if beside not in known:
            known[beside] = _read(beside, storage_options)
        samples = known[beside].get(urls.basename(shard))
        if not isinstance(samples, int):
            return None
        sizes.append(samples)
    return sizes


def listed_samples(shards: Sequence[str], storage_options: dict[str, Any] | None) -> int | None:
    """The number of samples in all shards, by the same files; None where one isn't known."""
    sizes = listed_sizes(shards, storage_options)
    return None if sizes is None else sum(sizes)


def _beside(shard: str) -> str:
    """The URL of the sizes.json in a shard's folder."""
    if urls.is_local(shard):
        return str(urls.local_path(shard).parent / "sizes.json")
    return f"{shard.partition('?')[0].rpartition('/')[0]}/sizes.json"


def _read(url: str, storage_options: dict[str, Any] | None) -> dict[str, Any]:
    """The content of a sizes.json; empty if there is none, or if it is no such thing."""
    try:
        text = urls.local_path(url).read_bytes() if urls.is_local(url) else _fetch(url, storage_options)
        sizes = json.loads(text)
    except (FileNotFoundError, OriginNotFound, OriginDenied):
        return {}
    except ValueError as exc:
        logger.warning("%s is not JSON (%s): the number of samples stays unknown", urls.redact(url), exc)
        return {}
    return sizes if isinstance(sizes, dict) else {}


def _fetch(url: str, storage_options: dict[str, Any] | None) -> bytes:
    content = bytearray()
    stream = open_origin(url, storage_options).open()
    try:
        for chunk in stream.chunks():
            content += chunk
            if len(content) > _LIMIT_BYTES:
                raise ValueError(f"more than {_LIMIT_BYTES:,} bytes")
    finally:
        stream.close()
    return bytes(content)
