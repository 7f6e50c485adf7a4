"""The samples that have arrived of a source, compared with what a state recorded of its shards (step G)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from streamload.cache.selection import Numbers
from streamload.cache.shard import version_of
from streamload.cache.shard_cache import ShardCache
from streamload.cache.shard_view import ShardView
from streamload.errors import CacheCorrupt, DatasetChanged
from streamload.order.left_out import LeftOut
from streamload.worker.states import COLUMNS, ENDED, CheckpointShard, OpenShards

_ENTRIES = 16
"""A shard is identified by its first entries: their keys, members, sizes, widths and heights."""


class CheckedArrivals:
    """The arrivals of one source (see order.lanes.Arrivals), compared with what a state recorded.

    Args:
        cache: all shards of the run.
        first: the position of the source's first shard among them.
        recorded: what the state recorded, by the shard's position in the source.
        recorded_in: the pass that it says something about.
        current_pass: returns the pass whose shards are asked for.
    """

    def __init__(
        self,
        cache: ShardCache,
        first: int,
        recorded: Mapping[int, CheckpointShard],
        recorded_in: int,
        current_pass: Callable[[], int],
    ) -> None:
        self._cache = cache
        self._first = first
        self._begun = recorded
        self._begun_in, self._current_pass = recorded_in, current_pass
        self._settled = OpenShards.of({}).rows  # of shards that have ended, as last recorded, by their index
        self._settled_in = recorded_in  # the pass that these are of
        self._same: set[int] = set()  # shards whose index starts as recorded
        self._contents: dict[int, tuple[int, int]] = {}  # of open shards: number of entries, their digest

    def arrived(self, shard: int) -> tuple[Numbers, bool]:
        """The usable sample numbers of a shard so far, and whether no more will come.

        Raises:
            DatasetChanged: the shard differs from what the state recorded.
            StreamloadError: as ShardCache.arrived.
        """
        numbers, ended = self._cache.arrived(self._first + shard)
        recorded = self._known(shard)
        if recorded is None:
            return numbers, ended
        view = self._cache.view(self._first + shard)
        if view.gave_up and len(numbers) < recorded.samples and view.reader is not None:
            raise DatasetChanged(
                f"{view.shard.name} can't be read as far as when the state was saved ({len(numbers)} of "
                f"{recorded.samples} usable samples): {view.reader.cause}. The epoch of the state needs the "
                f"rest: restore the shard, or load no state and start the next epoch with set_epoch()"
            )
        versions = _digests_of(view)
        if recorded.version and versions and recorded.version not in versions:
            raise DatasetChanged(f"{view.shard.name} has another version than when the state was saved")
        if shard not in self._same:
            if not self._is_same(view, recorded, ended):
                return numbers[:0], False
            self._same.add(shard)
        if recorded.given_up >= 0 and view.count >= recorded.given_up:
            numbers, ended = numbers[numbers < recorded.given_up], True
        if (ended and len(numbers) < recorded.samples) or (
            recorded.ended and len(numbers) > recorded.samples
        ):
            raise DatasetChanged(
                f"{view.shard.name} has {len(numbers)} usable samples{'' if ended else ' or more'}; when the "
                f"state was saved it had {recorded.samples}{'' if recorded.ended else ' or more'}: it has "
                f"changed, or can't be read to the same end, or keep, image_key, text_key or label_key "
                f"select others"
            )
        return numbers, ended

    def left_out(self, shard: int) -> LeftOut:
        """The samples of a shard that are left out, as far as `arrived` last returned it."""
        left_out, recorded = self._cache.left_out(self._first + shard), self._known(shard)
        if recorded is None or recorded.given_up < 0:
            return left_out
        count = int(np.searchsorted(left_out.numbers, recorded.given_up))
        return LeftOut(left_out.numbers[:count], left_out.causes[:count])

    def begun(self, shards: npt.NDArray[np.int64], pass_: int) -> OpenShards:
        """Records of open shards for a state, in their order.

        Args:
            shards: int64[N]: their indexes in the source.
            pass_: of the state's cursor, of which the records are; its lanes may be reading the next.
        """
        if self._settled_in != pass_:
            self._settled_in, self._settled = pass_, self._settled[:0]
        settled = self._settled
        places = np.searchsorted(settled[:, 0], shards)
        is_settled = np.append(settled[:, 0], -1)[places] == shards
        rows = np.empty((len(shards), COLUMNS), np.int64)
        rows[is_settled] = settled[places[is_settled]]
        fresh = np.flatnonzero(~is_settled).tolist()
        for place in fresh:
            shard = int(shards[place])
            rows[place] = (shard, *self.seen(shard, pass_))
        if fresh or len(settled) > 2 * len(shards):
            ended = rows[rows[:, ENDED] == 1]
            self._settled = ended[np.argsort(ended[:, 0])]
            for shard in self._contents.keys() - set(shards.tolist()):
                del self._contents[shard]
        return OpenShards(rows)

    def seen(self, shard: int, pass_: int) -> CheckpointShard:
        """The record of an open shard for a state, of a pass."""
        numbers, ended = self.arrived(shard)  # compares with what was recorded
        recorded = self._begun.get(shard) if pass_ == self._begun_in else None
        if recorded is not None and (recorded.ended or len(numbers) < recorded.samples):
            return recorded  # of its pass; the shard may arrive once more, or be whole by now
        view = self._cache.view(self._first + shard)
        given_up = view.count if view.gave_up else -1
        entries = min(view.count, _ENTRIES)
        if self._contents.get(shard, (-1, 0))[0] != entries:
            try:
                self._contents[shard] = entries, _contents_of(view, entries)
            except CacheCorrupt:  # whatever finds this when it reads samples will fetch the shard again
                self._contents[shard] = 0, 0
        return CheckpointShard(
            len(numbers), ended, given_up, next(iter(_digests_of(view)), 0), *self._contents[shard]
        )

    def _is_same(self, view: ShardView, recorded: CheckpointShard, ended: bool) -> bool:
        """True if the start of the index is as recorded; False: not known yet.

        Raises:
            DatasetChanged: it isn't.
        """
        if view.count < recorded.entries:
            return ended  # with too few samples, which the comparison of their number reports
        try:
            contents = _contents_of(view, recorded.entries)
        except CacheCorrupt:
            view.invalidate()
            return False
        if contents != recorded.contents:
            raise DatasetChanged(f"{view.shard.name} has other samples than when the state was saved")
        return True

    def _known(self, shard: int) -> CheckpointShard | None:
        return self._begun.get(shard) if self._current_pass() == self._begun_in else None


def _contents_of(view: ShardView, count: int) -> int:
    """A digest of the first entries of an index, independent of where the shard is; 0 if there are none."""
    view.wake()
    if view.reader is None or not count:
        return 0
    entries = view.reader.entries(range(min(count, view.count)))
    facts = [(entry.key, sorted(entry.sizes.items()), entry.width, entry.height) for entry in entries]
    return xxhash.xxh3_64_intdigest(repr(facts).encode()) >> 1


def _digests_of(view: ShardView) -> list[int]:
    """Digests of what identifies a shard's version, the most reliable first.

    A file is identified by its size, as copies have other times; an object on a web server by its date, as
    the backends of a load balancer may each have their own ETags.
    """
    if view.reader is None:
        return []
    version, names = version_of(view.reader), list[tuple[Any, ...]]()
    is_file = view.shard.local is not None or view.shard.is_copied
    if is_file:
        names = [("size", version.size)]
    elif version.etag is not None:
        names = [("etag", version.etag)]
    if not is_file and version.last_modified is not None:
        dated = ("modified", version.last_modified, version.size)
        if version.etag is None or view.shard.name.startswith(("http://", "https://")):
            names.insert(0, dated)
    return [xxhash.xxh3_64_intdigest(repr(name).encode()) >> 1 or 1 for name in names]
