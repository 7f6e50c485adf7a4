"""The eviction rule, against the optimum computed by trying everything."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.cache.budget import allowed_bytes
from streamload.cache.eviction import HeldShard, victims


def shard(name: str, size: int = 10, used_at: float = 0.0) -> HeldShard:
    return HeldShard(name, Path(name), size, "shards", used_at)


def digests(chosen: list[HeldShard]) -> list[str]:
    return [s.digest for s in chosen]


def test_the_shard_whose_next_visit_is_farthest_goes_first() -> None:
    held = [shard("soon"), shard("late"), shard("later")]
    next_uses = {"soon": 1.0, "late": 5.0, "later": 9.0}
    chosen = victims(held, next_uses, newcomer_next_use=0, excess_bytes=15, may_go=lambda s: True)
    assert digests(chosen) == ["later", "late"]


def test_a_shard_that_nobody_awaits_goes_before_all_and_the_one_used_longest_ago_first() -> None:
    held = [shard("awaited"), shard("new", used_at=9.0), shard("old", used_at=1.0)]
    chosen = victims(held, {"awaited": 100.0}, newcomer_next_use=0, excess_bytes=11, may_go=lambda s: True)
    assert digests(chosen) == ["old", "new"]


def test_an_open_shard_never_goes() -> None:
    held = [shard("open"), shard("closed")]
    chosen = victims(held, {}, newcomer_next_use=0, excess_bytes=10, may_go=lambda s: s.digest != "open")
    assert digests(chosen) == ["closed"]
    chosen = victims(held, {}, newcomer_next_use=0, excess_bytes=11, may_go=lambda s: s.digest != "open")
    assert digests(chosen) == ["closed"]


def test_nothing_that_is_needed_sooner_than_the_newcomer_goes_for_it() -> None:
    held = [shard("sooner"), shard("later")]
    next_uses = {"sooner": 3.0, "later": 8.0}
    for excess in (5, 15):
        chosen = victims(held, next_uses, newcomer_next_use=5, excess_bytes=excess, may_go=lambda s: True)
        assert digests(chosen) == ["later"]


def test_room_that_is_there_already_costs_nobody() -> None:
    assert victims([shard("a")], {}, newcomer_next_use=0, excess_bytes=0, may_go=lambda s: True) == []


def test_what_its_prepared_form_has_superseded_goes_first_however_soon_it_is_needed() -> None:
    superseded = HeldShard("soon", Path("superseded"), 10, "shards", 0.0, is_superseded=True)
    held = [shard("never", used_at=1.0), shard("soon", used_at=1.0), superseded]
    chosen = victims(held, {"soon": 0.0}, newcomer_next_use=5, excess_bytes=10, may_go=lambda s: True)
    assert chosen == [superseded]


def test_where_not_enough_may_go_a_tier_that_has_to_shrink_gives_what_it_can() -> None:
    held = [shard("soon"), shard("late"), shard("open")]
    next_uses = {"soon": 0.0, "late": 5.0}
    chosen = victims(held, next_uses, excess_bytes=100, may_go=lambda s: s.digest != "open")
    assert digests(chosen) == ["late", "soon"]
    assert digests(victims(held, next_uses, excess_bytes=5, may_go=lambda s: s.digest != "open")) == ["late"]
    assert victims(held, next_uses, excess_bytes=-5, may_go=lambda s: True) == []


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_tier_at_what_it_is_allowed_leaves_the_floor_free_or_holds_nothing(
    limit: int, stored: int, free: int, floor: int
) -> None:
    allowed = allowed_bytes(limit, stored, free, floor)
    assert 0 <= allowed <= limit
    assert allowed == 0 or free + stored - allowed >= floor
    assert allowed == limit or free + stored - (allowed + 1) < floor


@pytest.mark.parametrize("seed", range(5))
def test_over_a_run_the_rule_hits_as_often_as_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    passes = [rng.sample("abcdef", 6) for _ in range(3)]
    visits = list(itertools.chain(*passes))
    room = 3

    def by_rule() -> int:
        held: list[str] = []
        hits = 0
        for at, name in enumerate(visits):
            hits += name in held
            if name in held:
                continue
            rest = visits[at + 1 :]
            next_uses = {h: float(rest.index(h)) for h in held if h in rest}
            if len(held) == room:
                gone = victims(
                    [shard(h, 1) for h in held],
                    next_uses,
                    newcomer_next_use=-1,
                    excess_bytes=1,
                    may_go=lambda s: True,
                )
                held.remove(gone[0].digest)
            held.append(name)
        return hits

    best: dict[tuple[int, frozenset[str]], int] = {}

    def by_trying(at: int, held: frozenset[str]) -> int:
        if at == len(visits):
            return 0
        if (at, held) not in best:
            name = visits[at]
            if name in held:
                best[at, held] = 1 + by_trying(at + 1, held)
            elif len(held) < room:
                best[at, held] = by_trying(at + 1, held | {name})
            else:
                best[at, held] = max(by_trying(at + 1, held - {h} | {name}) for h in held)
        return best[at, held]

    assert by_rule() == by_trying(0, frozenset())
