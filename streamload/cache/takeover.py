"""What a fill can take up of a part that its filler, dead or stopped, has left (step F): it only looks."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from streamload.cache.sample_io import read_sample
from streamload.cache.shard import version_of
from streamload.errors import CacheCorrupt
from streamload.origins.origin import Version
from streamload.shards.index import IndexReader
from streamload.shards.record import open_file
from streamload.shards.samples import Entry


class Outdated(Exception):
    """What has been filled of a shard isn't of the version that its origin has: the fill begins anew."""


def can_be_taken_up(orphan: Path) -> bool:
    """Whether a fill would go on behind what a dead filler left; else it begins anew. Reads one sample."""
    with contextlib.suppress(OSError):
        version, entries = verified_prefix(orphan, 1)
        return bool(entries) and version.is_traceable
    return False


def verified_prefix(orphan: Path, most: int | None = None) -> tuple[Version, list[Entry]]:
    """The version whose bytes an orphan holds, and its entries as far as they verify, at most so many."""
    entries: list[Entry] = []
    with contextlib.closing(IndexReader(orphan)) as index, open_data(orphan) as data:
        index.refresh()
        version = version_of(index)
        for number in range(0 if index.ended else index.count)[:most]:
            entry = index.entry(number)
            if read_sample(data, entry, lambda extensions: ()) is None:
                break
            entries.append(entry)
    return version, entries


@contextlib.contextmanager
def open_data(orphan: Path) -> Iterator[int]:
    """A descriptor of the bytes that an orphan holds, for a block.

    Raises:
        FileNotFoundError: there are none, or the orphan has been taken away.
        CacheCorrupt: what is there wasn't made by a filler.
    """
    try:
        data = open_file(orphan / "data")
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise CacheCorrupt(f"{orphan / 'data'} is a symbolic link") from exc
        raise
    with data:
        yield data.number
