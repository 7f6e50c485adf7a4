"""The simulation of spot nodes is right where the answer is known, and decides as the daemon does."""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report, spot_tables
from benchmarks.spot_actors import OPTIONS
from benchmarks.spot_parts import Events, Limit, Link
from benchmarks.spot_run import simulate
from benchmarks.spot_setup import Setup
from benchmarks.spot_world import World
from streamload.cache.shared import leases
from streamload.daemon import demand, followed, plan_file, publisher
from streamload.order.plan import OrderOptions, pieces

ROOT = Path(__file__).resolve().parents[2]
FREE = 1e12
SMALL = Setup(
    groups=20,
    shards=8_000,
    nodes=4,
    follows=None,
    origin=FREE,
    uplink=FREE,
    stream=FREE,
    shared=FREE,
    request_seconds=0.0,
    gets=FREE,
    puts=FREE,
)
"""4 nodes that take 1 GB/s together, for 20 groups that read 0.5 GB/s; nothing else is short."""


def closely(value: float, share: float = 0.02) -> object:
    return pytest.approx(value, rel=share)


# -- the parts


def test_events_come_in_the_order_of_their_time_and_then_as_they_were_asked_for():
    events, seen = Events(), []
    for name, seconds in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("never", math.inf)):
        events.after(seconds, lambda name=name: seen.append((name, events.now)))
    events.run(10.0)
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0)]
    assert events.now == 10.0


def test_transfers_share_a_link_fairly_and_each_ends_when_its_bytes_have_come():
    events, ends = Events(), {}
    link = Link(events, 100.0, {"a": (80.0, math.inf), "b": (math.inf, 30.0)})
    for name, kind, size in (("a1", "a", 350.0), ("a2", "a", 700.0), ("b1", "b", 150.0), ("b2", "b", 150.0)):
        link.start(kind, size, lambda name=name: ends.setdefault(name, events.now))
    events.run(100.0)
    # The two b have 15 each of 100, the two a 35; all but a2 end at 10, then it has its 80.
    assert ends == {
        "a1": closely(10.0),
        "b1": closely(10.0),
        "b2": closely(10.0),
        "a2": closely(10.0 + 350 / 80),
    }
    assert link.carried("a") == closely(1050.0)


def test_a_transfer_that_is_broken_off_leaves_its_share_to_the_others_and_never_arrives():
    events, ends = Events(), []
    link = Link(events, 100.0, {"a": (math.inf, math.inf)})
    broken = link.start("a", 1e9, lambda: ends.append("broken"))
    link.start("a", 1000.0, lambda: ends.append(events.now))
    events.run(10.0)
    assert link.stop(broken) == closely(500.0)
    assert link.stop(broken) == 0.0
    events.run(1e9)
    assert ends == [closely(15.0)]


def test_a_limit_serves_in_turn_and_refuses_what_would_wait_longer_than_its_patience():
    events = Events()
    limit = Limit(events, 10.0, patience_seconds=3.0)
    assert [limit.seconds_for(20), limit.seconds_for(20)] == [2.0, 4.0]
    assert limit.seconds_for(1) == math.inf
    events.run(2.0)
    assert limit.seconds_for(10) == 3.0
    assert (limit.asked, limit.refused) == (51, 1)


# -- limits with known answers


def test_without_daemons_trainers_read_at_the_rate_of_the_origin_or_of_their_uplink():
    for limits in ({"origin": 0.2e9}, {"uplink": 0.2e9}):
        found = simulate(replace(SMALL, nodes=0, seconds=1_800, **limits), from_seconds=600)
        assert found["read_share"] == closely(0.4)
        assert found["waited_share"] == closely(0.6)
        assert found["egress_times"] == 1.0


def test_with_an_endless_link_nobody_waits_and_each_byte_leaves_the_origin_once():
    found = simulate(replace(SMALL, seconds=1_200), from_seconds=180)
    assert found["waited_share"] < 0.002
    assert found["read_share"] == closely(1.0)
    assert found["origin_share"] == 0.0
    # At the beginning daemons bring what trainers are about to fetch.
    assert 1.0 <= found["egress_times"] < 1.03
    assert (found["nodes"], found["nodes_begun"]) == (closely(4.0), 4)


def test_daemons_all_dead_leave_the_trainers_to_the_origin():
    setup = replace(SMALL, uplink=0.2e9, loss=(900.0, 1.0), returns=False, window=60.0, seconds=2_400)
    found = simulate(setup, from_seconds=1_200)
    assert found["nodes"] == 0.0
    assert found["read_share"] == closely(0.4, 0.03)
    assert found["origin_share"] == closely(1.0, 0.03)


def test_what_is_held_ahead_lasts_as_long_as_the_window_says_when_all_nodes_go():
    setup = replace(SMALL, uplink=0.05e9, loss=(1_500.0, 1.0), returns=False, head_start=900.0, seconds=2_400)
    minutes = simulate(setup)["minutes"]
    # With the notice, 600 s after the trainers began, daemons take no more; the window is 600 s.
    ends = max(minute["at"] for minute in minutes if minute["waited_share"] < 0.5)
    assert ends == pytest.approx(600 + 600 + setup.ahead * setup.shard_seconds, abs=80)
    # Then all shards ahead come together, with a tenth of what is read, so in six minutes.
    assert sum(minute["waited_share"] for minute in minutes[-6:]) / 6 == closely(0.9)


def test_a_window_fills_at_the_rate_by_which_nodes_are_quicker_than_trainers():
    minutes = simulate(replace(SMALL, window=3_000.0, follows=5, seconds=900))["minutes"]
    gained = minutes[13]["held_seconds"] - minutes[3]["held_seconds"]
    assert gained == closely(600 * (_rate_of_nodes(SMALL) / SMALL.demand - 1), 0.05)


def test_nodes_that_are_too_few_add_no_more_than_what_they_bring():
    setup = replace(SMALL, nodes=1, uplink=0.1e9, seconds=3_600)
    found = simulate(setup, from_seconds=600)
    assert found["waited_share"] > 0.25
    assert 0.2 < found["read_share"] <= 1.02 * (0.1e9 + _rate_of_nodes(setup)) / setup.demand


@pytest.mark.deep
def test_so_many_nodes_live_as_their_lives_and_replacements_say():
    setup = replace(SMALL, groups=2, shards=4_000, nodes=40, lost_per_hour=3.0, seconds=4 * 3_600.0)
    found = simulate(replace(setup, window=12.0, notice_seconds=0.0), from_seconds=3_600)
    lives, away = 3_600 / 3.0, setup.replace_seconds
    assert found["nodes"] == closely(40 * lives / (lives + away), 0.05)
    assert found["node_hours"] == closely(found["nodes"] * 3)


def test_requests_are_those_of_trainers_that_tell_and_read_and_of_daemons_that_look_and_store():
    setup = replace(SMALL, get_bytes=3e6, put_bytes=3e6, seconds=1_200)
    asked = simulate(setup)["requests_per_second"]
    shards = 20 / setup.shard_seconds
    assert asked["reading shards"] == closely(101 * shards, 0.05)
    told, looked = 20 / publisher.EVERY_SECONDS, 4 * (20 + 1) / OPTIONS.look_seconds
    assert asked["progress"] == closely(told + looked, 0.05)


def test_runs_that_share_nothing_take_the_data_once_each_and_with_a_shared_cache_about_once():
    setup = replace(SMALL, runs=4, groups=5, shards=200, nodes=0, seconds=36_000.0)
    assert simulate(setup)["egress_times"] == 4.0
    shared = simulate(replace(setup, write_back=True))
    assert 1.0 <= shared["egress_times"] < 1.4
    assert shared["read_bytes"] == 4 * 200 * setup.shard_bytes


def test_the_same_seed_gives_the_same_and_another_one_does_not():
    setup = replace(SMALL, lost_per_hour=20.0, origin=0.6e9, uplink=0.1e9, notice_seconds=0.0, seconds=1_200)
    assert simulate(setup) == simulate(setup)
    assert simulate(setup) != simulate(replace(setup, seed=1))


@pytest.mark.deep
def test_a_quarter_of_the_size_gives_the_same_shares():
    setup = replace(Setup().scaled(0.2), shards=20_000, nodes=28, seconds=600)
    large, small = (simulate(of) for of in (setup, setup.scaled(0.25)))
    assert large["waited_share"] > 0.1
    assert small["waited_share"] == pytest.approx(large["waited_share"], abs=0.03)
    assert small["read_share"] == pytest.approx(large["read_share"], abs=0.03)


# -- the decisions of daemons


def test_what_is_taken_next_is_what_the_daemon_would_take():
    """The first free tasks, as Coming.of and in_order have them without those that are held or leased."""
    setup = Setup(groups=6, shards=300, nodes=1, follows=None, window=120.0)
    world = World(setup)
    world.start_node(0)
    node = world.nodes[0]
    rng = random.Random(5)
    for group in world.groups:
        for _ in range(rng.randrange(8)):
            world.opened(group)
    world.publish()
    node.view = world.published
    order = OrderOptions(0, 6, 8, 10_000)
    plan = plan_file.RunPlan((plan_file.PlannedSource(300, order),), False, None, "0" * 32)
    coming = followed.Coming(plan)
    width = int(world.widths[0])
    wanted = demand.in_order(
        coming.of(plan_file.Progress(g, 0, ((0, group.front),), setup.ahead), width)
        for g, group in enumerate(world.groups)
    )
    for shard in rng.sample(wanted, 20):
        group, place = world._places[0][shard]
        if rng.random() < 0.5:
            world.hold(shard)
        else:
            world.lease(node, group, place)
    missing = [shard for shard in wanted if shard not in world.held and shard not in world.leased]
    found = [group.shards[place] for group, place in world.free(node, len(wanted))]
    assert found == missing
    assert world.free(node, 5) == world.free(node, 1_000)[:5]
    assert world.count(node.follows) == (len(missing) + len(world.leased), len(world.held))
    for shard in list(world.leased):
        node.give_back(shard)
    assert len(world.free(node, 1_000)) == len(wanted) - len(world.held)


def test_each_group_reads_the_shards_of_its_piece_once():
    world = World(Setup(runs=2, groups=5, shards=200, nodes=0))
    for run in range(2):
        own = pieces(OrderOptions(run, 5, 8, 10_000), 200, 3).shards
        assert sorted(world.groups[5 * run + 3].shards) == sorted(own)
        assert sorted(s for group in world.groups[5 * run : 5 * run + 5] for s in group.shards) == list(
            range(200)
        )
    assert world.groups[0].shards != world.groups[5].shards


def test_units_of_a_node_that_was_killed_are_taken_over_once_their_leases_have_expired():
    world = World(replace(SMALL, nodes=2, node=1e6, notice_seconds=0.0, returns=False, head_start=1e6))
    world.begin()
    world.events.run(30.0)
    killed, other = world.nodes.values()
    tasks = set(killed.tasks)
    assert len(tasks) == OPTIONS.concurrency
    world.take(killed)
    world.events.run(30.0)
    assert world.orphans == tasks
    taken_over = []
    while world.events.now < 30.0 + leases.LEASE_SECONDS + 20.0:
        for shard in list(other.tasks):  # so that it has hands
            other.give_back(shard)
        world.events.run(world.events.now + 1.0)
        taken_over.append(world.taken_over)
    first = next(n for n, count in enumerate(taken_over) if count)
    assert leases.LEASE_SECONDS <= first <= leases.LEASE_SECONDS + 2 * OPTIONS.look_seconds


def test_a_node_with_a_notice_takes_nothing_more_and_hands_back_what_it_has_before_its_end():
    setup = replace(SMALL, nodes=2, node=1e6, returns=False)
    world = World(setup)
    world.begin()
    world.events.run(30.0)
    node = world.nodes[0]
    tasks = set(node.tasks)
    world.take(node)
    world.events.run(30.0 + setup.notice_seconds - 5.1)
    assert set(node.tasks) == tasks
    world.events.run(30.0 + setup.notice_seconds - 4.9)
    assert not node.tasks
    assert node.lives
    assert not world.orphans
    world.events.run(30.0 + setup.notice_seconds + 0.1)
    assert not node.lives
    assert world.node_hours() * 3600 == closely(2 * world.events.now, 0.001)


# -- what is shown


@pytest.mark.deep
def test_the_quick_form_writes_what_the_tables_show(tmp_path: Path):
    out = tmp_path / "spot.json"
    command = [sys.executable, "-m", "benchmarks.spot", "--quick", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=150, stdout=subprocess.DEVNULL)
    result = json.loads(out.read_text())
    assert {row["table"] for row in result["rounds"]} == {"egress", "requests", "window", "loss", "size"}
    tables = report.tables_of({"spot": result})
    for name in spot_tables.NAMES:
        assert tables[name].count("\n") >= 1 or tables[name].startswith("!"), name


def test_the_tables_of_the_page_are_those_of_the_committed_result():
    result = json.loads((ROOT / "benchmarks/results/spot.json").read_text())
    page = (ROOT / "docs/results/spot-nodes.md").read_text()
    for name, table in spot_tables.tables(result).items():
        assert f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in page, name


def _rate_of_nodes(setup: Setup) -> float:
    """Bytes per second, where nothing but the nodes' own links is short."""
    return setup.nodes * OPTIONS.concurrency * min(setup.stream, setup.node / OPTIONS.concurrency)
