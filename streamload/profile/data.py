"""The shards that `streamload bench` measures on: the first ones of a list, as local files.

Local shards are read in place. Others are downloaded once into a temporary tier by the loader's own fill; a
published shard's data file is its tar, byte for byte, so the floor can read it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamload.cache.shard import Shard, ShardList
from streamload.cache.tier import Tier
from streamload.daemon.warm import warm
from streamload.errors import NoValidSamples, OptionError, OriginError
from streamload.options.storage import copy_options
from streamload.shards.local import index_local
from streamload.urls import expand_urls

_IMAGES = frozenset(("jpg", "jpeg"))
_CAPTION = "txt"
FEWEST_BATCHES = 3
"""One starts the clock, two are measured."""


@dataclass(frozen=True, slots=True)
class BenchData:
    """Shards to measure on.

    Attributes:
        urls: of the shards.
        names: the URLs without secrets.
        paths: local files with their bytes.
        tier: the directory of the temporary tier; None where all shards are local files.
        size_bytes: of all shards.
        samples: in all shards.
        usable: samples with a JPEG and a .txt caption.
        width, height: mean size of the images, in pixels.
    """

    urls: tuple[str, ...]
    names: tuple[str, ...]
    paths: tuple[str, ...]
    tier: str | None
    size_bytes: int
    samples: int
    usable: int
    width: int
    height: int

    def as_dict(self) -> dict[str, Any]:
        """The report's part on the shards."""
        return {
            "shards": list(self.names),
            "bytes": self.size_bytes,
            "samples": self.samples,
            "usable": self.usable,
            "mean_width": self.width,
            "mean_height": self.height,
        }


class _SampleTally:
    """Counts the samples of shards, and sums up their image sizes."""

    def __init__(self) -> None:
        self.samples = self.usable = self.width = self.height = self.sized = 0
        self.extensions: set[str] = set()

    def add(self, path: str) -> None:
        for entries in index_local(path):
            for entry in entries:
                extensions = entry.sizes.keys()
                self.samples += 1
                self.extensions |= extensions
                if _CAPTION not in extensions or _IMAGES.isdisjoint(extensions):
                    continue
                self.usable += 1
                if entry.width:
                    self.width, self.height = self.width + entry.width, self.height + entry.height
                    self.sized += 1


def prepare(
    urls: Sequence[str], samples: int, batch_size: int, storage: Mapping[str, Any] | None, tier: Path
) -> BenchData:
    """Take as many of the first shards as have `samples` usable samples, or all.

    Args:
        urls: as for make_loader.
        samples: how many are wanted.
        batch_size: there must be at least three batches.
        storage: storage options for fsspec.
        tier: directory of the temporary tier, created only if a shard isn't local.

    Raises:
        UrlError: an invalid URL.
        OriginError, ShardError: a shard can't be fetched, or isn't a tar.
        NoValidSamples: no sample has a JPEG and a caption.
        OptionError: fewer samples than three batches.
    """
    listed = ShardList(expand_urls(list(urls), storage), copy_options(storage) or None)
    tally, shards, paths = _SampleTally(), [], []
    for shard in listed:
        path = _fetched(shard, storage, tier)
        tally.add(path)
        shards.append(shard)
        paths.append(path)
        if tally.usable >= samples:
            break
    _check(tally, shards, samples, batch_size)
    return BenchData(
        urls=tuple(shard.url for shard in shards),
        names=tuple(shard.name for shard in shards),
        paths=tuple(paths),
        tier=None if all(shard.in_place is not None for shard in shards) else str(tier),
        size_bytes=sum(Path(path).stat().st_size for path in paths),
        samples=tally.samples,
        usable=tally.usable,
        width=round(tally.width / max(1, tally.sized)),
        height=round(tally.height / max(1, tally.sized)),
    )


def _check(tally: _SampleTally, shards: Sequence[Shard], samples: int, batch_size: int) -> None:
    """Raise if there aren't enough usable samples."""
    if not tally.usable:
        where = shards[0].name + (" …" if len(shards) > 1 else "")
        if not tally.samples:
            raise NoValidSamples(f"{where}: no samples")
        held = ", ".join(f".{extension}" for extension in sorted(tally.extensions)[:8])
        raise NoValidSamples(
            f"{where}: none of {tally.samples:,} samples has a JPEG (.jpg, .jpeg) and a caption (.txt); "
            f"expected both, found {held}"
        )
    if min(samples, tally.usable) < FEWEST_BATCHES * batch_size:
        raise OptionError(
            f"{min(samples, tally.usable):,} samples are less than {FEWEST_BATCHES} batches of {batch_size}: "
            f"give a smaller --batch-size, or more samples"
        )


def _fetched(shard: Shard, storage: Mapping[str, Any] | None, tier: Path) -> str:
    """The local file with the shard's bytes; downloads it unless the shard is local."""
    if shard.in_place is not None:
        return str(shard.in_place)
    report = warm([shard.url], cache_dir=tier, cache="disk", storage_options=storage)
    for why in report.failures.values():
        raise OriginError(why if shard.name in why else f"{shard.name}: {why}")
    return str(Tier.open(tier).published(shard.digest) / "data")
