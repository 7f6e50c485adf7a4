"""What is measured on: the first shards of a list, in files on this machine, and what they hold.

Local shards are read where they are. All others are filled once into a tier of the measurement's own, by the
product's own fill; the published data of a shard is its tar, byte by byte, so all contenders read that.
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
from streamload.shards.local import index_local
from streamload.urls import expand_urls

_IMAGES = frozenset(("jpg", "jpeg"))
_CAPTION = "txt"
FEWEST_BATCHES = 3
"""One to begin with, two to measure."""


@dataclass(frozen=True, slots=True)
class Data:
    """Shards to measure on.

    Attributes:
        urls: of the shards.
        names: the same as they may be shown.
        paths: where their bytes are on this machine.
        tier: the directory of the tier that has them; None where all are local files.
        size_bytes: of all of them.
        samples: in them.
        usable: samples with a JPEG and a .txt caption.
        width, height: of the images, in the mean, in pixels.
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

    @property
    def bytes_per_sample(self) -> float:
        """What has to be moved for each usable sample."""
        return self.size_bytes / self.usable


class _Tally:
    """What the shards so far hold."""

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
) -> Data:
    """Take as many of the first shards as have `samples` usable samples, or all.

    Args:
        urls: as for make_loader.
        samples: that are wanted.
        batch_size: of which there have to be three batches.
        storage: for fsspec.
        tier: a directory for a tier of this measurement's own, not made where all shards are local.

    Raises:
        UrlError: a URL that can't be used.
        OriginError, ShardError: a shard that can't be had, or isn't one.
        NoValidSamples: there is no sample with a JPEG and a caption.
        OptionError: there are fewer samples than three batches.
    """
    listed = ShardList(expand_urls(list(urls)), dict(storage) if storage else None)
    tally, taken, paths = _Tally(), [], []
    for shard in listed:
        path = _near(shard, storage, tier)
        tally.add(path)
        taken.append(shard)
        paths.append(path)
        if tally.usable >= samples:
            break
    if not tally.usable:
        where = taken[0].name + (" …" if len(taken) > 1 else "")
        if not tally.samples:
            raise NoValidSamples(f"{where}: there is no sample in it")
        held = ", ".join(f".{extension}" for extension in sorted(tally.extensions)[:8])
        raise NoValidSamples(
            f"{where}: none of {tally.samples:,} samples has a JPEG (.jpg, .jpeg) and a caption (.txt), "
            f"which is what this measures; they have {held}"
        )
    if min(samples, tally.usable) < FEWEST_BATCHES * batch_size:
        raise OptionError(
            f"{min(samples, tally.usable):,} samples are less than {FEWEST_BATCHES} batches of {batch_size}: "
            f"give a smaller --batch-size, or more samples"
        )
    return Data(
        urls=tuple(shard.url for shard in taken),
        names=tuple(shard.name for shard in taken),
        paths=tuple(paths),
        tier=None if all(shard.local is not None for shard in taken) else str(tier),
        size_bytes=sum(Path(path).stat().st_size for path in paths),
        samples=tally.samples,
        usable=tally.usable,
        width=round(tally.width / max(1, tally.sized)),
        height=round(tally.height / max(1, tally.sized)),
    )


def _near(shard: Shard, storage: Mapping[str, Any] | None, tier: Path) -> str:
    """Where the shard's bytes are; fetched if they are far."""
    if shard.local is not None:
        return str(shard.local)
    report = warm([shard.url], cache_dir=tier, cache="disk", storage_options=storage)
    for why in report.failures.values():
        raise OriginError(why if shard.name in why else f"{shard.name}: {why}")
    return str(Tier.open(tier).published(shard.digest) / "data")
