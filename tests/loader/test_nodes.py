"""A job on several nodes: the same global batches whatever happens to one of them, and no needless wait.

How it shows that it works: each node has a network, processes, mounts and a name of its own, a boot id and a
disk (tests/support/nodes.py). Origin and shared cache are outside of them.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from streamload.errors import RankFailed, StateMismatch
from streamload.ipc import ControlBlock
from streamload.loader.state import attempt_in
from streamload.ranks import distributed, heartbeats, monitor
from streamload.ranks.agreement import Agreement
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support.jobs import FIRST_HOST, ROWS, expected_batches, in_switch, join, make, together
from tests.support.kills import Child
from tests.support.networks import Switch
from tests.support.node_runs import FAULTS, job_of, run_job
from tests.support.nodes import Node, RankPlace, slow_link, start_node, why_no_nodes
from tests.support.tiers import until

needs_nodes = pytest.mark.skipif(bool(why_no_nodes()), reason=why_no_nodes())
LARGE = ShardOptions(padding_bytes=(3_000, 30_000))


@needs_nodes
@pytest.mark.parametrize(("nodes", "again"), [(2, 1), pytest.param(4, 3, marks=pytest.mark.deep)])
def test_a_run_that_lost_its_nodes_has_their_leases_at_once_when_it_starts_again(
    nodes: int, again: int, tmp_path: Path
) -> None:
    samples, shared = 4 * nodes * ROWS, tmp_path / "shared"
    write_shards(tmp_path / "data", [ROWS] * 4 * nodes, seed=5, options=LARGE)
    options = {"shared_cache": str(shared), "write_back": True, "num_samples": samples}

    def first_attempt(place: RankPlace, urls: str) -> None:
        join(place, FIRST_HOST)
        loader = make(urls, place.disk, nodes, **options)
        for step, _ in enumerate(loader):
            if step == 0:
                (tmp_path / f"state-{place.rank}").write_text(json.dumps(loader.state_dict()))
                place.stage.enter("saved")
                until(lambda: (tmp_path / "stopped").exists())

    def second_attempt(place: RankPlace, urls: str) -> Any:
        if again > 1:
            join(place, FIRST_HOST + nodes)
        states = [json.loads((tmp_path / f"state-{rank}").read_text()) for rank in range(nodes)]
        with make(urls, place.disk, again, **options) as loader:
            loader.load_state_dict(states)
            batches = [batch["key"] for batch in loader]
            attempts = [states[0]["run"], loader.state_dict()["run"]]
            if again > 1:
                torch.distributed.barrier()
            return [batches, loader.stats().shared_waits, attempts]

    def run(switch: Switch) -> Any:
        with ShardServer(tmp_path / "data", host=switch.address) as origin, ExitStack() as stack:
            urls = f"{origin.url}/{{00000..{4 * nodes - 1:05}}}.tar"

            def start(count: int, host: int, work: Callable[[RankPlace, str], Any]) -> list[Child]:
                made = [
                    Node(number, count, 1, host + number, tmp_path / f"node-{host + number}")
                    for number in range(count)
                ]
                return [
                    stack.enter_context(start_node(switch, node, lambda place: work(place, urls)))
                    for node in made
                ]

            first = start(nodes, FIRST_HOST, first_attempt)
            for node in first:
                assert node.stage.wait_for("saved", 100.0)
            origin.stop_after(0.5)
            (tmp_path / "stopped").touch()
            until(lambda: len([*shared.glob("leases/*")]) >= nodes)
            for node in first:
                node.kill()
            origin.go_on()
            last = start(again, FIRST_HOST + nodes, second_attempt)
            return [expected_batches(urls, tmp_path, samples), [node.finish(140.0)[0] for node in last]]

    expected, results = in_switch(run)
    assert together([batches for batches, *_ in results]) == expected[1:]
    assert all(after == [before[0], before[1] + 1] for _, _, (before, after) in results)
    if again == 1:
        assert results[0][1] == 0  # no fill waited


def cut(switch: Switch) -> None:
    switch.cut(FIRST_HOST + 3)
    time.sleep(2.0)
    switch.mend(FIRST_HOST + 3)


@needs_nodes
@pytest.mark.deep
@pytest.mark.parametrize("fault", ["nothing", "cut", "slow", "full"])
def test_four_nodes_have_the_batches_of_one_process_and_fetch_each_shard_once(
    fault: str, tmp_path: Path
) -> None:
    samples, shared, nodes, ranks = 32 * ROWS, tmp_path / "shared", 4, 2
    write_shards(tmp_path / "data", [ROWS] * 32, seed=5, options=LARGE)
    sizes = [path.stat().st_size for path in (tmp_path / "data").glob("*.tar")]
    options = {"shared_cache": str(shared), "write_back": True, "num_samples": samples, "ahead": "1MB"}
    options["groups"] = nodes // 2  # so that two nodes need each shard at the same time

    def read(place: RankPlace, urls: str) -> Any:
        join(place, FIRST_HOST)
        with make(urls, place.disk, nodes * ranks, **options) as loader:
            batches = []
            for step, batch in enumerate(loader):
                batches.append(batch["key"])
                if step == 3 and fault == "full" and place.rank == nodes * ranks - 1:
                    place.resize(shutil.disk_usage(place.node.place).used + 100_000)
                if step == 3:
                    (tmp_path / f"reading-{place.rank}").touch()
                torch.distributed.barrier()
            stats = loader.stats()
            torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return [batches, stats.origin_bytes, stats.shared_overtakes]

    def run(switch: Switch) -> Any:
        with ShardServer(tmp_path / "data", host=switch.address) as origin, ExitStack() as stack:
            urls = f"{origin.url}/{{00000..00031}}.tar"
            started = []
            for number in range(nodes):
                node = Node(number, nodes, ranks, FIRST_HOST + number, tmp_path / f"node-{number}")
                started.append(stack.enter_context(start_node(switch, node, lambda place: read(place, urls))))
            if fault == "slow":
                until(lambda: f"port{FIRST_HOST + 3}" in names_of_devices())
                slow_link(FIRST_HOST + 3, 3000)
            if fault == "cut":
                until(lambda: (tmp_path / f"reading-{nodes * ranks - 1}").exists())
                cut(switch)
            results = [rank for node in started for rank in node.finish(150.0)]
            expected = expected_batches(urls, tmp_path, samples, groups=nodes // 2)
            return [expected, results]

    expected, results = in_switch(run)
    assert together([batches for batches, *_ in results]) == expected
    fetched = sum(count for _, count, _ in results)
    if fault == "nothing":  # and once more where a busy machine made a holder so slow that it was overtaken
        overtakes = sum(count for *_, count in results)
        assert sum(sizes) <= fetched <= sum(sizes) + overtakes * max(sizes)
    else:
        assert fetched <= sum(sizes) * (1 + 1 / nodes) + max(sizes)


@needs_nodes
@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100, 104))
def test_a_random_job_in_trouble_is_exact_and_is_resumed_exactly(seed: int, tmp_path: Path) -> None:
    assert run_job(job_of(seed), tmp_path) == ""


def test_random_jobs_have_all_faults() -> None:
    jobs = [job_of(seed) for seed in range(40)]
    assert {fault for job in jobs for fault in job.first.faults} == {*FAULTS}
    assert {job.first.nodes for job in jobs} == {2, 3, 4}
    assert {job.second.nodes for job in jobs} == {1, 2, 3, 4}


def names_of_devices() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


@needs_nodes
@pytest.mark.parametrize("killed", [1, 2])
def test_a_node_killed_in_a_decision_ends_it_on_the_others_with_its_rank_host_and_node(
    killed: int, tmp_path: Path
) -> None:
    def decide(place: RankPlace) -> str:
        heartbeats.SILENT_SECONDS = heartbeats.GONE_SECONDS = 2.0
        monitor._POLL_SECONDS = 0.2
        join(place, FIRST_HOST)
        ranks = distributed.ranks_of(3)
        assert ranks is not None
        ranks.be_on(place.node.number)
        monitor.RankMonitor(ranks, ControlBlock(1), lambda compare: compare(0.0), lambda: None)
        agreement = Agreement(3)
        agreement.decide("the weights", 0, sum)
        place.stage.enter("decided")
        if place.rank == killed:
            time.sleep(100.0)
        with pytest.raises(RankFailed) as caught:
            agreement.decide("the weights", 0, sum)
        if place.rank == 0:
            until((tmp_path / "read").exists)  # the store ends with it
        else:
            (tmp_path / "read").touch()
        return str(caught.value)

    def run(switch: Switch) -> Any:
        with ExitStack() as stack:
            places = [Node(number, 3, 1, FIRST_HOST + number, tmp_path / f"{number}") for number in range(3)]
            nodes = [stack.enter_context(start_node(switch, place, decide)) for place in places]
            for node in nodes:
                assert node.stage.wait_for("decided", 100.0)
            nodes[killed].kill()
            return [node.finish(100.0)[0] for number, node in enumerate(nodes) if number != killed]

    for message in in_switch(run):
        assert f"rank {killed} of 3 on node-{killed} (node {killed}): no heartbeat for " in message
        assert "one of 3 ranks ended while all agreed on the weights: " in message


def test_a_state_names_the_run_and_counts_how_often_it_was_loaded(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [ROWS] * 2, seed=5)
    urls = str(tmp_path / "data" / "{00000..00001}.tar")

    def state_after(loaded: Any, **options: Any) -> Any:
        with make(urls, tmp_path / "cache", 1, num_samples=2 * ROWS, **options) as loader:
            if loaded is not None:
                loader.load_state_dict(loaded)
            next(iter(loader))
            return loader.state_dict()

    writing = {"shared_cache": str(tmp_path / "shared"), "write_back": True}
    assert "run" not in state_after(None)
    first = state_after(None, **writing)
    run, attempt = first["run"]
    assert attempt == 1
    second = state_after(first, **writing)
    assert second["run"] == [run, 2]
    assert state_after([second, second], **writing)["run"] == [run, 3]
    assert state_after(second)["run"] == [run, 3]
    assert state_after(None, **writing)["run"][0] != run
    unmarked = state_after(None)
    assert state_after(unmarked, **writing)["run"][1] == 1


@pytest.mark.parametrize("run", [[], ["x", 1], ["1" * 16, 0], ["1" * 16, True], ["1" * 16], "1", 5])
def test_a_state_with_a_damaged_run_is_refused(run: Any) -> None:
    with pytest.raises(StateMismatch, match="not a valid state"):
        attempt_in({"run": run})
