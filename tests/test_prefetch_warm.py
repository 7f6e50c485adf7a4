"""`warm` and what it finds in the tier."""

from __future__ import annotations

from pathlib import Path

from tiers import until

from streamload.prefetch.warm import warm
from streamload.testing.kills import Child
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards


def test_what_a_killed_warm_up_left_of_another_version_is_fetched_anew(tmp_path: Path) -> None:
    """It was taken for the end of the shard, and the warm-up failed for want of a verdict."""
    cache = tmp_path / "cache"
    write_shards(tmp_path / "data", [40], seed=1)
    with ShardServer.spawn(tmp_path / "data") as server:
        url = f"{server.url}/00000.tar"
        server.stop_after(0.5)
        with Child(lambda stage: warm(url, cache_dir=cache, cache_size="10MB").shards) as child:
            until(lambda: any(path.stat().st_size > 1000 for path in cache.glob("parts/*/index")))
            child.kill()
        (path,) = write_shards(tmp_path / "data", [41], seed=2)
        server.go_on()
        report = warm(url, cache_dir=cache, cache_size="10MB")
        assert (report.shards_complete, report.failures) == (1, {})
        (data,) = cache.glob("shards/*/data")
        assert data.read_bytes() == path.read_bytes()
