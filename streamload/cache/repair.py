"""Fetch damaged shards again that were removed from a tier.

No tombstone is left: running trainings shouldn't give up what this process can't fetch (it may lack their
credentials).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamload import limits, urls
from streamload.cache import demand
from streamload.cache.fill import Filled, FillOptions, fill
from streamload.cache.shard import Shard, shard_of
from streamload.cache.tier import Tier
from streamload.cache.verify import ShardDamage
from streamload.errors import StreamloadError
from streamload.options.storage import copy_options
from streamload.origins.origin import Origin, OriginOptions, open_origin

_HINT = "its index doesn't have its complete URL: give the shards' URLS to fetch it now"
_OPENED_FROM_AN_INDEX = frozenset({"http", "https", "s3", "gs", "az", "abfs", "hf"})


@dataclass(frozen=True, slots=True)
class Repair:
    """Outcome of the repair of a damaged shard.

    Attributes:
        fate: for messages.
        is_done: whether the tier holds, or another process is about to fetch, all that it should.
    """

    damage: ShardDamage
    fate: str
    is_done: bool


def repair(
    tier: Tier,
    damages: Iterable[ShardDamage],
    *,
    by_digest: Mapping[str, Shard] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: OriginOptions | None = None,
    jobs: int = 2,
) -> Iterator[Repair]:
    """Fetch shards again that `verify(take_out=True)` has removed.

    A shard is fetched by the URL that the caller knows, else by the one in its index if that is complete and
    is neither a command nor a path: those are opened only if the caller names them.

    Args:
        by_digest: the shards that the caller names, by digest.
        storage_options: for fsspec, or headers for http(s).

    Yields:
        What became of each of them, in order.
    """
    storage = copy_options(storage_options) or None
    stop = threading.Event()

    def work(damage: ShardDamage) -> Repair:
        shard = (by_digest or {}).get(damage.digest) or _from_index(damage, storage)
        if damage.kind != "shards" or not damage.taken_out or shard is None:
            return _without_fetching(damage)

        def origin() -> Origin:
            return open_origin(shard.url, storage, options, tier.counts, stop)

        return _fetch(tier, damage, shard, origin, stop)

    with limits.Threads(jobs, "streamload-repair") as pool:
        try:
            yield from pool.map(work, damages)
        finally:
            stop.set()


def _from_index(damage: ShardDamage, storage: dict[str, Any] | None) -> Shard | None:
    """The shard by the URL in its index; None if that URL is incomplete, or not to be trusted."""
    if urls.scheme(damage.url) not in _OPENED_FROM_AN_INDEX:
        return None
    shard = shard_of(damage.url, storage)
    return shard if shard.digest == damage.digest else None


def _without_fetching(damage: ShardDamage) -> Repair:
    if not damage.taken_out:
        return Repair(
            damage,
            "stays: it is in use, holds files that the tier did not make, or the disk refuses",
            is_done=False,
        )
    if damage.kind != "shards":
        return Repair(damage, "removed", is_done=True)
    return Repair(damage, f"removed; the next run that needs it fetches it ({_HINT})", is_done=False)


def _fetch(
    tier: Tier, damage: ShardDamage, shard: Shard, origin: Callable[[], Origin], stop: threading.Event
) -> Repair:
    part = tier.claim(shard.digest)
    if part is None:
        if tier.published(shard.digest).exists():
            return Repair(damage, "fetched again by another process", is_done=True)
        if tier.tombstone(shard.digest).exists():
            return Repair(damage, "removed; a running process has given this shard up", is_done=False)
        return Repair(damage, "removed; another process fetches it again", is_done=True)

    def next_use() -> float:
        """By the live runs: nothing that they need sooner is evicted for it."""
        return demand.next_uses(tier.root / "runs", [shard.digest]).get(shard.digest, math.inf)

    try:
        outcome = fill(
            part,
            shard,
            origin,
            FillOptions(damage.size_bytes, leave_tombstone=False),
            next_use=next_use,
            stop=stop,
        )
    except StreamloadError as exc:
        return Repair(damage, f"removed, but not fetched again: {exc}", is_done=False)
    if outcome.result is Filled.OUTDATED:  # an orphan of another version was found, and is gone now
        return _fetch(tier, damage, shard, origin, stop)
    fate = {
        Filled.PUBLISHED: "fetched again",
        Filled.NO_ROOM: "removed; there is no space to fetch it again",
    }
    return Repair(damage, fate.get(outcome.result, "removed"), is_done=outcome.result is Filled.PUBLISHED)
