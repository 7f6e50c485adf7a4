"""Threads that fill: idle ones sleep until they are called, and somebody watches the clock all the same."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

from tiers import until

from streamload.cache.shard import Shard, shard_of
from streamload.cache.tier import Tier
from streamload.errors import OriginUnavailable
from streamload.metrics import Counters
from streamload.origins.origin import Origin, OriginOptions, open_origin
from streamload.prefetch.ahead import Ahead
from streamload.testing.server import Fault, ShardServer
from streamload.testing.shards import write_shards

PATIENT = OriginOptions(connect_seconds=300, stall_seconds=300)
PAUSES = {"00001.tar": 0.05, "00002.tar": 0.5}


def test_who_watched_the_clock_calls_another_when_it_goes_to_work(tmp_path: Path) -> None:
    """Two of three threads come to wait for bytes; the last one tries again what failed, when it is due."""
    write_shards(tmp_path / "data", [5, 5, 5])
    counts, opened = Counters(), Counter[str]()

    def open_(shard: Shard, stop: threading.Event) -> Origin:
        name = shard.name.rpartition("/")[2]
        opened[name] += 1
        if name in PAUSES and opened[name] == 1:
            raise OriginUnavailable(f"{name}: not now")
        return open_origin(shard.url, options=PATIENT, counters=counts, stop=stop)

    with ShardServer(tmp_path / "data") as server:
        for name in ("00000.tar", "00001.tar"):
            server.misbehave(name, Fault(silent=True))
        shards = [shard_of(f"{server.url}/0000{number}.tar", None) for number in range(3)]
        tier = Tier(tmp_path / "tier", 1 << 30, counts)
        ahead = Ahead(
            tier,
            open_,
            threads=3,
            counts=counts,
            failed=lambda shard, why: PAUSES[shard.name.rpartition("/")[2]],
        )
        ahead.want(shards)
        try:
            until(tier.published(shards[2].digest).exists)
            assert opened == {"00000.tar": 1, "00001.tar": 2, "00002.tar": 2}
        finally:
            ahead.close()
