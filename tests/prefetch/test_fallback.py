"""How shards are kept that find no room: each way once, told, and forgotten when they aren't wanted."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamload.cache import memory
from streamload.cache.budget import part_bytes
from streamload.cache.part import reserved_bytes
from streamload.cache.shard import shard_of
from streamload.cache.tier import Tier
from streamload.errors import CacheError, CacheFull
from streamload.metrics import Counters
from streamload.origins.endpoints import learn_ranges, remember
from streamload.prefetch import fallback as fallback_
from streamload.prefetch.fallback import FallbackPolicy, FallbackTier, StorageMode
from tests.support.kills import Child

ONE, OTHER = (shard_of(f"http://localhost:1/{name}.tar", None) for name in ("one", "other"))

COMMAND = shard_of("pipe:cat two.tar", None)
"""Its origin has no ranges."""


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path / "tier", 1 << 30, Counters())


def spare_of(tier: Tier, monkeypatch: Any) -> FallbackTier:
    """One that is in a directory beside the tier, where the tier itself may be in memory."""
    place = tier.root.parent / "memory"
    place.mkdir()
    monkeypatch.setattr("streamload.prefetch.fallback._MEMORY", place)
    monkeypatch.setattr(memory, "free_memory", lambda _: SimpleNamespace(free_bytes=1 << 30))
    return FallbackTier(tier.root, Counters())


def test_a_shard_is_kept_bare_once_and_whole_again_when_it_was_not_wanted(tier: Tier) -> None:
    policy = FallbackPolicy(tier, None, index_only=True)
    assert policy.mode(ONE) == StorageMode(tier, index_only=False)
    policy.refuse(ONE, size_bytes=7)
    assert policy.lacks_bytes(ONE) == part_bytes(reserved_bytes(7))
    assert policy.store_index_only(ONE)
    assert policy.mode(ONE) == StorageMode(tier, index_only=True)
    assert not policy.is_refused(ONE)  # of what is asked for now nothing is known, but for the size
    assert (policy.size_bytes(ONE), policy.lacks_bytes(ONE)) == (7, 0)
    policy.refuse(ONE, size_bytes=6400)
    assert policy.lacks_bytes(ONE) == part_bytes(100)  # its index
    assert not policy.store_index_only(ONE)
    assert not policy.store_index_only(COMMAND)
    assert not policy.store_in_fallback(ONE)
    policy.only([ONE, OTHER], [])
    assert policy.mode(ONE).index_only
    policy.only([OTHER], [])
    assert policy.mode(ONE) == StorageMode(tier, index_only=False)


def test_what_the_tier_does_not_take_goes_into_the_spare(tier: Tier, monkeypatch: Any, caplog: Any) -> None:
    fallback_tier = spare_of(tier, monkeypatch)
    policy = FallbackPolicy(tier, fallback_tier, index_only=True)
    assert policy.tiers == (tier,)
    assert policy.store_index_only(ONE)
    assert policy.store_in_fallback(ONE, OSError(errno.EIO, "broken"))
    assert fallback_tier.tier is not None
    assert policy.tiers == (tier, fallback_tier.tier)
    assert policy.mode(ONE) == StorageMode(fallback_tier.tier, index_only=False)
    assert policy.mode(OTHER) == StorageMode(tier, index_only=False)
    assert not policy.store_in_fallback(ONE)
    assert policy.store_in_fallback(OTHER, OSError(errno.EIO, "broken"))
    assert len([1 for line in caplog.messages if "doesn't take" in line]) == 1
    fallback_tier.close()


def test_processes_share_a_spare_until_the_last_of_them_is_done(tier: Tier, monkeypatch: Any) -> None:
    first = spare_of(tier, monkeypatch)
    second = FallbackTier(tier.root, Counters())
    opened = first.open(), second.open()
    assert opened[0] is not None
    assert opened[1] is not None
    assert opened[0].root == opened[1].root
    first.close()
    assert opened[1].root.exists()
    second.close()
    assert not opened[1].root.exists()


def test_a_shard_of_a_server_without_ranges_is_kept_bare_only_where_there_is_no_spare(
    tier: Tier, monkeypatch: Any, caplog: Any
) -> None:
    remembering = remember()
    learn_ranges(OTHER.url, False)
    assert FallbackPolicy(tier, None, index_only=True).store_index_only(ONE)  # rather than not at all
    fallback_tier = spare_of(tier, monkeypatch)
    policy = FallbackPolicy(tier, fallback_tier, index_only=True)
    assert not policy.store_index_only(ONE)
    assert policy.store_in_fallback(ONE)
    assert "its origin gives no byte ranges" in caplog.text
    assert policy.store_index_only(ONE)  # the spare has no room either
    remembering()
    assert policy.store_index_only(OTHER)
    fallback_tier.close()


@pytest.mark.parametrize("trouble", [OSError(errno.EIO, "broken"), CacheFull("full")])
def test_a_disk_that_fails_again_and_again_is_left_alone_and_one_that_is_full_is_not(
    tier: Tier, monkeypatch: Any, trouble: OSError
) -> None:
    fallback_tier = spare_of(tier, monkeypatch)
    policy = FallbackPolicy(tier, fallback_tier, index_only=False)
    for number in range(3):
        assert policy.mode(ONE).tier is tier
        assert policy.store_in_fallback(shard_of(f"http://localhost:1/{number}.tar", None), trouble)
    assert policy.mode(ONE).tier is (tier if isinstance(trouble, CacheFull) else fallback_tier.tier)
    fallback_tier.close()


def test_a_fill_is_told_when_its_shard_is_to_be_kept_in_another_way(tier: Tier) -> None:
    policy = FallbackPolicy(tier, None, index_only=True)
    mode = policy.mode(ONE)
    assert not policy.note(ONE, mode, is_refused=True)
    assert policy.is_refused(ONE)
    assert policy.refused_seconds(ONE) > 0
    assert policy.refused_seconds(OTHER) == 0
    assert not policy.note(ONE, mode, is_refused=False)
    assert not policy.is_refused(ONE)
    policy.store_index_only(ONE)
    assert policy.note(ONE, mode, is_refused=True)
    assert not policy.is_refused(ONE)


def test_too_many_open_files_pass_for_a_while(tier: Tier, monkeypatch: Any) -> None:
    policy = FallbackPolicy(tier, None, index_only=True)
    short = OSError(errno.EMFILE, "too many open files")
    wrapped = CacheError("can't be used")
    wrapped.__cause__ = short
    assert not policy.may_pass(ONE, OSError(errno.EIO, "broken"))
    assert not policy.may_pass(ONE, CacheError("can't be used"))
    assert policy.may_pass(ONE, short)
    assert policy.may_pass(ONE, wrapped)
    monkeypatch.setattr(fallback_, "PATIENCE_SECONDS", 0.0)
    assert not policy.may_pass(ONE, short)
    monkeypatch.undo()
    policy.went_well(ONE)
    assert policy.may_pass(ONE, short)


def test_how_long_files_are_short_is_counted_for_each_shard_as_long_as_it_is_requested(
    tier: Tier, monkeypatch: Any
) -> None:
    policy = FallbackPolicy(tier, None, index_only=True)
    short = OSError(errno.EMFILE, "too many open files")
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(fallback_, "time", clock)
    assert policy.may_pass(ONE, short)
    policy.went_well(OTHER)
    clock.monotonic = lambda: fallback_.PATIENCE_SECONDS
    policy.only([], [ONE])
    assert policy.may_pass(OTHER, short)
    assert not policy.may_pass(ONE, short)
    policy.only([], [OTHER])
    assert policy.may_pass(ONE, short)


def test_fallback_tiers_of_runs_that_were_killed_go_when_any_run_begins(tier: Tier, monkeypatch: Any) -> None:
    used = spare_of(tier, monkeypatch)
    assert used.open() is not None
    abandoned = tier.root.parent / "another"

    def be_killed(stage: object) -> None:
        assert FallbackTier(abandoned, Counters()).open() is not None
        os.kill(os.getpid(), signal.SIGKILL)

    with Child(be_killed) as child:
        assert child.join(60.0) == -signal.SIGKILL
    (left,) = (place for place in [fallback_.place(abandoned)] if place is not None and place.exists())
    half_deleted = left.with_name(f"{left.name}.7.gone")
    half_deleted.mkdir()
    fallback_.remove_all_unused()
    assert list(left.parent.iterdir()) == [fallback_.place(tier.root)]
    used.close()
    assert list(left.parent.iterdir()) == []


def test_a_fallback_tier_that_is_opened_while_it_is_deleted_is_another_one(
    tier: Tier, monkeypatch: Any
) -> None:
    before, after = spare_of(tier, monkeypatch), FallbackTier(tier.root, Counters())
    assert before.open() is not None
    delete = shutil.rmtree

    def opened_meanwhile(path: Path, **options: Any) -> None:
        (path / "users").unlink()
        assert after.open() is not None
        delete(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", opened_meanwhile)
        before.close()
    assert after.tier is not None
    assert (after.tier.root / "tier.json").exists()
    after.close()
