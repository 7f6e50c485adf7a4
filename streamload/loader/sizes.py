"""How many samples the shards have, by the sizes.json files that lie beside them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from streamload import urls
from streamload.errors import DataError, OriginDenied, OriginNotFound
from streamload.origins.origin import open_origin

logger = logging.getLogger("streamload")

_LIMIT_BYTES = 64 << 20
_LIMIT_SAMPLES = 1 << 40
_STRICT = (
    ". By sizes.json the samples are divided among nodes, so none may miss it: let it be read, or answered "
    "with 404, or initialise torch.distributed before, by which the ranks compare what they found"
)


def listed_sizes(
    shards: Sequence[str], storage_options: dict[str, Any] | None, strict: bool = False
) -> list[int] | None:
    """The number of samples in each shard; None if a shard isn't listed, or can't be (a pipe).

    A sizes.json is `{shard's base name: samples}`, in the folder of the shards, as OpenCLIP reads it.

    Args:
        shards: their URLs.
        storage_options: for their origins.
        strict: only a missing file counts as no sizes.json; else one that can't be read does, too.

    Raises:
        OriginError: a sizes.json can't be read for another reason than that there is none.
        DataError: strict, and it isn't JSON.
    """
    known: dict[str, dict[str, Any]] = {}
    sizes = []
    for shard in shards:
        if urls.scheme(shard) == "pipe":
            return None
        beside = _beside(shard)
        if beside not in known:
            known[beside] = _read(beside, storage_options, strict)
        samples = known[beside].get(urls.basename(shard))
        if type(samples) is not int or not 0 <= samples < _LIMIT_SAMPLES:
            return None
        sizes.append(samples)
    return sizes


def _beside(shard: str) -> str:
    """The URL of the sizes.json in a shard's folder."""
    if urls.is_local(shard):
        return str(urls.local_path(shard).parent / "sizes.json")
    return f"{shard.partition('?')[0].rpartition('/')[0]}/sizes.json"


def _read(url: str, storage_options: dict[str, Any] | None, strict: bool) -> dict[str, Any]:
    """The content of a sizes.json; empty if there is none, or if it is no such thing."""
    try:
        text = urls.local_path(url).read_bytes() if urls.is_local(url) else _fetch(url, storage_options)
        sizes = json.loads(text)
        if not isinstance(sizes, dict):
            raise ValueError(f"a {type(sizes).__name__}")  # noqa: TRY004
    except (FileNotFoundError, OriginNotFound):
        return {}
    except OriginDenied as exc:
        # A store may refuse to say that an object is missing.
        if strict:
            raise OriginDenied(f"{exc}{_STRICT}") from exc
        return {}
    except (ValueError, RecursionError) as exc:
        said = f"{urls.redact(url)} is not a JSON object ({exc})"
        if strict:
            raise DataError(f"{said}{_STRICT}") from exc
        logger.warning("%s: the number of samples stays unknown", said)
        return {}
    return sizes


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
