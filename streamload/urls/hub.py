"""The tars of a data set, model or bucket on the Hugging Face Hub, listed when a run starts (step A).

`hf://datasets/org/name` stands for its tars at any depth, a folder in it for the tars below, and a pattern
such as `hf://datasets/org/name/train/*.tar` for those that match. Only for these huggingface_hub is imported.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from streamload.errors import OriginDenied, OriginError, OriginNotFound, OriginUnavailable, UrlError
from streamload.urls.identity import compression, origin_of
from streamload.urls.listing import Node, TextNode
from streamload.urls.redaction import redact

OPTIONS = ("endpoint", "token")
"""The storage options that huggingface_hub takes."""

_MAGIC = re.compile(r"[*\[]")
_SPLITS = {
    "train": ("training", "train"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("testing", "test", "evaluation", "eval"),
}
"""Words in names of folders and files that say the split, as for the `datasets` library."""
_KINDS_SHOWN = 5


def expanded(source: str, node: Node, storage_options: Mapping[str, Any] | None) -> Node:
    """Return the shards of URLs, all made from one pattern with braces: itself where it names tars."""
    names_tars = (source.endswith(".tar") or compression(source)) and not _MAGIC.search(source)
    if names_tars or "?" in source:  # no query is known, which is an error later on
        return node
    return TextNode(tuple(shard for url in node for shard in shards_of(url, storage_options)))


def shards_of(url: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the URLs of the tars that a URL stands for, sorted by their paths.

    Args:
        url: a repository or bucket, a folder in it, a file, or a pattern, in which `**` also matches folders.
        storage_options: `endpoint` and `token`; by default those of huggingface_hub.

    Raises:
        UrlError: there is no tar; the message says what there is. Or there are several splits, which would be
            mixed: it names a pattern of each.
        OriginDenied: the repository is gated or private; the message says what to do.
        OriginNotFound, OriginUnavailable: there is no such repository, or the Hub doesn't answer.
    """
    from fsspec.utils import glob_translate
    from huggingface_hub import HfFileSystem

    place = url.removeprefix("hf://").rstrip("/")
    is_pattern = bool(_MAGIC.search(place))
    folder = _MAGIC.split(place)[0].rpartition("/")[0] if is_pattern else place
    options = {name: value for name, value in (storage_options or {}).items() if name in OPTIONS}
    files = HfFileSystem(**options, skip_instance_cache=True)
    try:
        paths = sorted(files.find(folder))
    except Exception as exc:
        raise _error(url, files.endpoint, exc) from exc
    if paths == [place]:
        return [url]
    if is_pattern:
        paths = [*filter(re.compile(glob_translate(place)).match, paths)]
    tars = [path for path in paths if path.endswith(".tar")] or [path for path in paths if compression(path)]
    if not tars:
        raise UrlError(f"no *.tar file in {redact(url)!r}: {_found(paths)}")
    by_split: dict[str, list[str]] = {}
    for path in tars:
        by_split.setdefault(_split(path[len(folder) :]), []).append(path)
    if len(by_split) > 1 and not is_pattern:
        parts = (
            f"{_place_of(names, tars, split)} ({len(names):,} tars)" for split, names in by_split.items()
        )
        raise UrlError(
            f"{redact(url)!r} has several splits, which would be mixed. Give one of them: {', '.join(parts)}"
        )
    return [f"hf://{path}" for path in tars]


def access_advice(url: str, endpoint: str) -> str:
    """Return what to do where the Hub denies a file or repository."""
    page = f"{endpoint}/{origin_of(url).removeprefix('hf://')}"
    return (
        f"if it is gated, accept its terms at {page}; for that and for a private one give a token that may "
        f"read it: HF_TOKEN, `hf auth login`, or storage_options={{'token': …}}"
    )


def _error(url: str, endpoint: str, exc: Exception) -> OriginError:
    """Return our error for an exception of huggingface_hub."""
    cause = exc.__cause__ or exc
    response = getattr(cause, "response", None)
    status = getattr(response, "status_code", None)
    words = getattr(cause, "server_message", None) or " ".join(str(cause).split())
    message = f"{redact(url)!r} can't be listed: {words}"
    if status in {401, 403}:
        return OriginDenied(f"{message} ({status}). Check its name; {access_advice(url, endpoint)}")
    if isinstance(exc, FileNotFoundError | ValueError):
        return OriginNotFound(
            f"{message}. Expected hf://datasets/org/name, hf://org/name or hf://buckets/org/name"
        )
    return OriginUnavailable(message)


def _found(paths: Sequence[str]) -> str:
    """Return what there is instead of tars."""
    kinds = Counter(PurePosixPath(path).suffix or PurePosixPath(path).name for path in paths)
    if not kinds:
        return "there is no such folder, or nothing matches"
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(_KINDS_SHOWN))
    return f"found {counts}; `streamload pack` makes shards of images, captions and tables"


def _split(path: str) -> str:
    """Return the split whose words are in a path, the last of several; "" if there are none."""
    words = re.split("[^a-z]+", path.lower())
    splits = [split for word in words for split, names in _SPLITS.items() if word in names]
    return splits[-1] if splits else ""


def _place_of(paths: Sequence[str], others: Sequence[str], split: str) -> str:
    """Return the folder or pattern that has these of all tars, else the first of them."""
    folder = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    if sum(path.startswith(f"{folder}/") for path in others) == len(paths):
        return f"hf://{folder}"
    for word in _SPLITS.get(split, ()):
        pattern = re.compile(f"{re.escape(folder)}/[^/]*{word}[^/]*[.]tar")
        if [*filter(pattern.fullmatch, others)] == paths:
            return f"hf://{folder}/*{word}*.tar"
    return f"hf://{paths[0]}, …"
