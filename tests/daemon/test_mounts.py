"""Daemons over shards on a network mount, whose kind an injected table of mounts gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamload.cache.shard import shard_of
from streamload.cache.tier import Tier
from streamload.daemon.options import ServiceOptions
from streamload.daemon.service import Service
from streamload.errors import OptionError
from streamload.options import directories
from streamload.testing.shards import write_shards
from tests.support import flat


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URLs of four shards in a folder that the table of mounts has on Lustre."""
    write_shards(tmp_path / "nas", [20] * 4)
    table = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {tmp_path}/nas rw - lustre mds:/nas rw\n"
    monkeypatch.setattr(directories, "_own_mounts", lambda: table)
    return f"{tmp_path}/nas/{{00000..00003}}.tar"


def run(shards: str, place: Path, **options: Any) -> int:
    """The shards that a daemon has brought when it ends."""
    service = ServiceOptions(
        urls=(shards,), cache_dir=place / "tier", once=True, notices="none", listen="none", **options
    )
    with Service(service) as daemon:
        return daemon.run().done


def test_a_daemon_fills_its_nodes_cache_for_a_training(shards: str, tmp_path: Path) -> None:
    assert run(shards, tmp_path) == 4
    tier = Tier.open(tmp_path / "tier")
    assert all(
        (tier.published(shard_of(url, None, is_copied=True).digest) / "data").exists()
        for url in named(shards)
    )
    with flat.make_loader(shards, cache_dir=tmp_path / "tier", batch_size=8, num_workers=0) as loader:
        assert sum(1 for _ in loader) == 10
        stats = loader.stats()
    assert (stats.origin_bytes, stats.tier_hits, stats.tier_misses) == (0, 4, 0)


def test_a_daemon_stores_shards_of_a_mount_for_other_nodes(shards: str, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    assert run(shards, tmp_path, shared_cache=str(shared), into="shared") == 4
    with flat.make_loader(
        shards, cache_dir=tmp_path / "node", shared=str(shared), batch_size=8, num_workers=0
    ) as loader:
        assert sum(1 for _ in loader) == 10
        assert (loader.stats().origin_bytes, loader.stats().shared_hits) == (0, 4)


def test_files_of_one_machine_are_not_brought_by_nodes_of_a_cluster(shards: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "local", [20])
    with pytest.raises(OptionError, match="files of this machine"):
        run(f"{tmp_path}/local/00000.tar", tmp_path, shared_cache=str(tmp_path / "shared"), ray="auto")


def named(shards: str) -> list[str]:
    return [shards.replace("{00000..00003}", f"{number:05d}") for number in range(4)]
