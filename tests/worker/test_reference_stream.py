"""What a reader tells the other users of a tier, against the digests of its shards one by one."""

from pathlib import Path
from typing import Any

import numpy as np

from streamload.cache import demand
from streamload.cache.shard import ShardList, shard_of
from streamload.cache.tier import Tier
from streamload.order.group import GroupOrder
from streamload.order.plan import OrderOptions
from streamload.urls import expand_urls
from streamload.worker.reference_stream import ReferenceStream
from tests.support.order_oracle import shard_order


class AllHere:
    def arrived(self, shard: int) -> tuple[np.ndarray, bool]:
        return np.arange(10), True


def test_the_shards_that_are_open_and_that_come_next_are_told_of_at_every_step(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", 10**6)
    shards = ShardList(expand_urls("https://host/{000..299}.tar"), None)
    options = OrderOptions(5, groups=2, lanes=4, window=50)
    order, beside = (GroupOrder(options, len(shards), 1, 0, passes=1) for _ in range(2))
    following = shard_order(options, len(shards), 1, 1, 0)
    arrivals: Any = AllHere()
    stream = ReferenceStream(order, lambda: following, shards, 0, arrivals, tier)
    told = set()
    references: list[int] = []
    for stop in range(8, 1480, 8):
        while not stream.has(stop):
            stream.follow()
            references += beside.advance(arrivals).shards.tolist()
        stream.take(stop - 8, stop)
        in_use = dict.fromkeys([*beside.open_shards(), *sorted(references[stop:])])
        assert stream.shards_in_use() == list(in_use)
        stream.tell_progress()
        (path,) = demand.files(tier.root / "runs")
        visits = [*stream.shards_in_use(), *stream.coming(demand.VISITS_KEPT)]
        names = [demand.short(shard_of(shards.urls[shard], None).digest) for shard in visits]
        assert demand.visits_of(path).tolist() == names[: demand.VISITS_KEPT]
        told.add(tuple(names))
    assert len(told) > 10
    stream.close()


def test_references_of_steps_that_others_make_keep_no_shard_in_use(tmp_path: Path) -> None:
    """A worker that waits at a later step knows those before, which other workers have claimed."""
    shards = ShardList(expand_urls("https://host/{00..19}.tar"), None)
    order = GroupOrder(OrderOptions(5, groups=1, lanes=4, window=8), len(shards), 0, 0, passes=1)
    arrivals: Any = AllHere()
    tier = Tier(tmp_path / "tier", 10**6)
    stream = ReferenceStream(order, lambda: np.arange(20), shards, 0, arrivals, tier)
    while not stream.has(140):
        stream.follow(20)
    known = stream.shards_in_use()
    own = set(stream.peek(120, order.position)[:, 1].tolist())
    stream.begin_at(120)
    assert set(stream.shards_in_use()) == {*order.open_shards(), *own}
    assert len(stream.shards_in_use()) < len(known)
    stream.begin_at(100)  # never back
    assert set(stream.shards_in_use()) == {*order.open_shards(), *own}
    assert len(stream.take(120, 136)) == 16
    stream.close()
