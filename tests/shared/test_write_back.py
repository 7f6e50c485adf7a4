"""Write-back beside a shared cache that fails: each shard ends, stored or not."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from streamload.cache.shard import Shard, shard_of
from streamload.cache.shared.write_back import WriteBack
from streamload.errors import SharedTierError
from streamload.metrics import Counters

SHARDS = [shard_of(f"http://host/{number}.tar", None) for number in range(8)]


class Failing:
    """A shared cache that can't be written to, once it is let."""

    def __init__(self) -> None:
        self.counts, self.may_fail = Counters(), threading.Event()

    def store(self, shard: Shard, directory: Path) -> bool:
        assert self.may_fail.wait(60)
        raise SharedTierError("no space left")

    def report(self, shard: Shard, error: Exception) -> None:
        pass

    def close(self) -> None:
        pass


def test_shards_that_are_dropped_after_failures_end_as_those_that_failed() -> None:
    tier: Any = Failing()
    ended = list[Shard]()
    with closing(WriteBack(tier, ended=ended.append)) as writing:
        for shard in SHARDS:
            writing.add(shard, Path("nowhere"))
        assert writing.has_room()
        tier.may_fail.set()
        assert writing.wait(60)
        assert not writing.takes
        assert sorted(shard.name for shard in ended) == [shard.name for shard in SHARDS]
        assert writing.failures.keys() == {shard.name for shard in SHARDS}
