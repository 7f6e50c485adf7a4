"""What the peers that read no shards by URL need of them: their paths, and their samples."""

import tarfile
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
