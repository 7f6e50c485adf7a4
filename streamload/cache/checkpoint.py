"""What a state keeps of the shards that a run has begun, and whether they are still what they were then (G).

An order goes on exactly only over the same samples. So a state says of each shard with samples to come how
many were seen, where it was given up if it was, which version it is and how its index begins; whoever goes on
compares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import xxhash

from streamload.cache.follow import ShardView
from streamload.cache.shard import version_of
from streamload.cache.shard_cache import Numbers, ShardCache
from streamload.errors import CacheCorrupt, DatasetChanged, OptionError

_ENTRIES = 16
"""Of so many entries a shard is known to be the same: their keys, members, sizes, widths and heights."""


class CheckpointShard(NamedTuple):
    """A shard as it was when a state was made.

    Attributes:
        samples: how many usable ones had been seen.
        ended: whether these are all.
        given_up: after how many entries it was given up; -1: it wasn't.
        version: a digest of its version; 0 where its origin names none.
        entries: of how many entries of its index `contents` is a digest; 0: not known.
        contents: of the first ones; it is the same wherever the shard is.
    """

    samples: int
    ended: bool
    given_up: int
    version: int
    entries: int = 0
    contents: int = 0

    @classmethod
    def from_json(cls, value: Any) -> CheckpointShard:
        """What `list(begun)` has become by way of JSON.

        Raises:
            OptionError: it is something else.
        """
        is_known = isinstance(value, list) and len(value) in (4, 6)
        if not is_known or not all(isinstance(part, int) for part in value):
            raise OptionError("not a shard of a state: four or six whole numbers")
        samples, ended, *others = value
        return cls(samples, bool(ended), *others)


class CheckedArrivals:
    """The arrivals of one source (see order.lanes.Arrivals), held against what a state knows of its shards.

    Args:
        cache: all shards of the run.
        first: the place of the source's first shard among them.
        begun: what the state knows, by the place of the shard in the source.
        holds: whether the pass that the state speaks of is still being read; it says nothing of later ones.
    """

    def __init__(
        self, cache: ShardCache, first: int, begun: Mapping[int, CheckpointShard], holds: Callable[[], bool]
    ) -> None:
        self._cache = cache
        self._first = first
        self._begun = begun
        self._holds = holds
        self._settled: dict[
            int, CheckpointShard
        ] = {}  # shards that have ended, as they were when last asked for
        self._same: set[int] = set()  # shards whose index begins as the state says
        self._contents: dict[int, tuple[int, int]] = {}  # of open shards: of how many entries, and the digest

    def arrived(self, shard: int) -> tuple[Numbers, bool]:
        """The usable sample numbers of a shard so far, and whether no more will come.

        Raises:
            DatasetChanged: the shard isn't what it was when the state was made.
            StreamloadError: as ShardCache.arrived.
        """
        numbers, ended = self._cache.arrived(self._first + shard)
        begun = self._known(shard)
        if begun is None:
            return numbers, ended
        view = self._cache.view(self._first + shard)
        if view.gave_up and len(numbers) < begun.samples and view.reader is not None:
            raise DatasetChanged(
                f"{view.shard.name} can't be read as far as when the state was saved ({len(numbers)} of "
                f"{begun.samples} usable samples): {view.reader.cause}. The state's epoch needs the rest "
                f"of it: bring it back, or load no state and begin the next epoch by set_epoch()"
            )
        versions = _digests_of(view)
        if begun.version and versions and begun.version not in versions:
            raise DatasetChanged(f"{view.shard.name} is another version than when the state was saved")
        if shard not in self._same:
            if not self._is_same(view, begun, ended):
                return numbers[:0], False
            self._same.add(shard)
        if begun.given_up >= 0 and view.count >= begun.given_up:
            numbers, ended = numbers[numbers < begun.given_up], True
        if (ended and len(numbers) < begun.samples) or (begun.ended and len(numbers) > begun.samples):
            raise DatasetChanged(
                f"{view.shard.name} has {len(numbers)} usable samples{'' if ended else ' or more'}; when the "
                f"state was saved it had {begun.samples}{'' if begun.ended else ' or more'}: it has changed, "
                f"or can't be read to the same end, or keep, image_key, text_key or label_key choose others"
            )
        return numbers, ended

    def begun(self, shards: Collection[int]) -> dict[int, CheckpointShard]:
        """What a state is to know of open shards, by their place in the source."""
        self._contents = {shard: self._contents[shard] for shard in shards if shard in self._contents}
        if self._begun and self._holds():
            return {shard: self._seen(shard) for shard in shards}
        found = {shard: self._settled.get(shard) or self._seen(shard) for shard in shards}
        self._settled = {shard: seen for shard, seen in found.items() if seen.ended}
        return found

    def _is_same(self, view: ShardView, begun: CheckpointShard, ended: bool) -> bool:
        """Whether the index begins as the state says; False: not known yet.

        Raises:
            DatasetChanged: it doesn't.
        """
        if view.count < begun.entries:
            return ended  # with too few samples, which is told of by their number
        try:
            contents = _contents_of(view, begun.entries)
        except CacheCorrupt:
            view.invalidate()
            return False
        if contents != begun.contents:
            raise DatasetChanged(f"{view.shard.name} has other samples than when the state was saved")
        return True

    def _known(self, shard: int) -> CheckpointShard | None:
        return self._begun.get(shard) if self._begun and self._holds() else None

    def _seen(self, shard: int) -> CheckpointShard:
        numbers, ended = self.arrived(shard)
        view = self._cache.view(self._first + shard)
        known = self._known(shard)
        given_up = view.count if view.gave_up else -1
        if known is not None and known.given_up >= 0 and ended:
            given_up = known.given_up
        entries = min(view.count, _ENTRIES)
        if self._contents.get(shard, (-1, 0))[0] != entries:
            try:
                self._contents[shard] = entries, _contents_of(view, entries)
            except CacheCorrupt:  # what finds it when samples are read fetches it again
                self._contents[shard] = 0, 0
        return CheckpointShard(
            len(numbers), ended, given_up, next(iter(_digests_of(view)), 0), *self._contents[shard]
        )


def _contents_of(view: ShardView, count: int) -> int:
    """A digest of the first entries of a shard's index, as they are wherever the shard is; 0 of none."""
    if view.reader is None or not count:
        return 0
    entries = view.reader.entries(range(min(count, view.count)))
    said = [(entry.key, sorted(entry.sizes.items()), entry.width, entry.height) for entry in entries]
    return xxhash.xxh3_64_intdigest(repr(said).encode()) >> 1


def _digests_of(view: ShardView) -> list[int]:
    """Digests of what names a shard's version, the best first.

    Of a local file it is its size: copies have other times. Of one on a web server it is the date: backends
    of a load balancer may each have an ETag of their own.
    """
    if view.reader is None:
        return []
    version, names = version_of(view.reader), list[tuple[Any, ...]]()
    if view.shard.local is not None:
        names = [("size", version.size)]
    elif version.etag is not None:
        names = [("etag", version.etag)]
    if view.shard.local is None and version.last_modified is not None:
        dated = ("modified", version.last_modified, version.size)
        if version.etag is None or view.shard.name.startswith(("http://", "https://")):
            names.insert(0, dated)
    return [xxhash.xxh3_64_intdigest(repr(name).encode()) >> 1 or 1 for name in names]
