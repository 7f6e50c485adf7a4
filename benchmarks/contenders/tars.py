"""What peers lack that read other formats, or no URLs: shards' paths and samples, and a download."""

import os
import shutil
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from braceexpand import braceexpand


def addresses(urls: str) -> list[str]:
    """The shards that a pattern with braces names."""
    return list(braceexpand(urls))


def samples(path: str | Path) -> Iterator[tuple[bytes, str]]:
    """The photographs and captions of a shard: a photograph's member goes before its caption's."""
    with tarfile.open(path) as tar:
        for member in tar:
            payload = tar.extractfile(member)
            assert payload is not None, member.name
            if member.name.endswith(".jpg"):
                photograph = payload.read()
            elif member.name.endswith(".txt"):
                yield photograph, payload.read().decode()


def piece_bytes(paths: list[str]) -> int:
    """How large a piece of another format is, to be moved and cached as the shards are."""
    return max(Path(path).stat().st_size for path in paths)


def link(urls: str, folder: Path) -> list[Path]:
    """Links to the shards in a folder, for a peer that writes its index beside them."""
    links = []
    for path in map(Path, addresses(urls)):
        links.append(folder / path.name)
        links[-1].symlink_to(path)
    return links


def download(url: str, path: str) -> str:
    """Fetch a file by one request to a name beside `path`; that name, to be published by a rename."""
    arriving = f"{path}.{os.getpid()}.tmp"
    with urllib.request.urlopen(url) as answer, open(arriving, "wb") as file:
        shutil.copyfileobj(answer, file, 1 << 20)
    return arriving
