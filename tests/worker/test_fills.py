"""What the fills of a worker do where an epoch begins."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from streamload.cache.shard import shard_of
from streamload.prefetch.scheduler import FillRequest, FillScheduler
from streamload.worker.fills import Fills


def test_a_shard_that_could_not_be_fetched_is_looked_at_again_when_an_epoch_begins() -> None:
    end = threading.Event()
    scheduler, shard = FillScheduler(1, lambda: None, end), shard_of("http://host/a.tar", None)
    end.set()  # nothing is waited for
    scheduler.want([FillRequest(shard, 1.0)])
    assert scheduler.take() == shard
    scheduler.settle(shard, 600.0, is_refused=False)
    assert scheduler.take() is None
    fills: Any = Fills.__new__(Fills)
    begun = list[str]()
    fills.prefetcher, fills.freshness = scheduler, SimpleNamespace(begin=begun.append)
    fills.begin(SimpleNamespace(epoch=2, position=40, generation=6))
    assert begun == ["2-40-6"]
    assert scheduler.take() == shard
