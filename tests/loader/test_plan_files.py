"""A training says what it will read, and daemons that follow it change nothing but its waiting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload.cache.part import reserved_bytes
from streamload.cache.shared.objects import Objects
from streamload.daemon import publication
from streamload.daemon.demand import PrefetchWindow
from streamload.daemon.followed import Coming, FollowedDemand
from streamload.daemon.options import DaemonOptions, ServiceOptions
from streamload.daemon.plan_file import PlannedSource, PlanProgress, RunPlan, plan_of, runs_in
from streamload.daemon.service import Service
from streamload.errors import OptionError
from streamload.order.plan import OrderOptions
from streamload.origins.origin import OriginOptions
from streamload.origins.protocol import Named
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from streamload.urls import expand_urls
from tests.support import flat
from tests.support.kills import Child, Stage

SHARDS = 16
SECRET = "hunter2"


class Training:
    """A training on shards behind a server, with a shared tier."""

    def __init__(self, tmp_path: Path, server: Any):
        self.tmp_path, self.server = tmp_path, server
        self.pattern = f"{server.url}/{{00000..{SHARDS - 1:05d}}}.tar"
        self.shared = tmp_path / "shared"
        self.objects = Objects(str(self.shared))

    def loader(self, name: str = "trainer", **more: Any) -> streamload.Loader:
        given: dict[str, Any] = {
            "batch_size": 4,
            "num_workers": 0,
            "lanes": 2,
            "shuffle": 8,
            "ahead": 1,
            "cache_dir": self.tmp_path / name,
            "cache_size": "1GB",
            "shared_cache": str(self.shared),
            "map_sample": lambda sample: {"key": sample["__key__"], "size": len(sample["jpg"])},
        }
        return flat.make_loader(more.pop("urls", self.pattern), **{**given, **more})

    def keys(self, loader: streamload.Loader) -> list[Any]:
        return [batch["key"] for batch in loader]

    def plan(self) -> RunPlan:
        (run,) = runs_in(self.objects.names("runs"))
        return RunPlan.read(run, self.objects.read(f"runs/{run}/plan.json") or b"")

    def progress(self, group: int = 0) -> PlanProgress:
        plan = self.plan()
        return PlanProgress.read(plan, group, self.objects.read(f"runs/{plan.run}/group-{group}.json") or b"")

    def daemon(self, name: str, **more: Any) -> Child:
        given: dict[str, Any] = {
            "shared_cache": str(self.shared),
            "origins": (self.server.url,),
            "cache_dir": self.tmp_path / name,
            "cache_size": "1GB",
            "concurrency": 2,
            "notices": "none",
            "listen": "none",
            "daemon": DaemonOptions(
                look_seconds=0.05, retry_seconds=0.1, origin=OriginOptions(stall_seconds=1.0)
            ),
            "lease_seconds": 1.0,
        }
        asked = ServiceOptions(**{**given, **more})

        def work(stage: Stage) -> Any:
            with Service(asked) as service:
                stage.enter("running")
                status = service.run()
            return [status.done, status.held, status.wanted, status.failed, status.following]

        return Child(work)

    def held(self) -> set[str]:
        return {name.split("/")[1] for name in self.objects.names("shards") if name.endswith("/index")}


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setattr(publication, "EVERY_SECONDS", 0.02)
    write_shards(tmp_path / "origin", [6] * SHARDS)
    with ShardServer.spawn(tmp_path / "origin") as server:
        yield Training(tmp_path, server)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_published_is_what_the_training_reads_next(training: Training) -> None:
    with training.loader() as loader:
        seen = iter(loader)
        for _ in range(3):
            next(seen)
        until(lambda: runs_in(training.objects.names("runs")) and training.objects.names("runs")[1:])
        until(lambda: training.progress().fronts[0][1] > 0)
        progress = training.progress()
        coming = Coming(training.plan()).of(progress, SHARDS)
        asked_for = {request.path for request in training.server.log}
        rest = coming[: SHARDS - progress.fronts[0][1] - progress.ahead]
        assert rest
        assert not asked_for & {f"{place:05d}.tar" for place in rest}
        for _ in seen:
            pass


def test_lanes_and_window_that_were_cut_for_a_small_cache_are_published(training: Training) -> None:
    size = max(path.stat().st_size for path in (training.tmp_path / "origin").iterdir())
    with training.loader(lanes=None, shuffle=None, cache_size=4 * reserved_bytes(size)) as loader:
        seen = iter(loader)
        next(seen)
        until(lambda: runs_in(training.objects.names("runs")))
        ((_, lanes, window),) = loader.state_dict()["sources"]
        order = training.plan().sources[0].order
        assert (order.lanes, order.window) == (lanes, window)
        assert (lanes, window) < (8, 10_000)


def test_every_group_of_a_run_is_told_of_by_one_rank(tmp_path: Path, training: Training) -> None:
    (training.tmp_path / "origin" / "sizes.json").write_text(
        json.dumps({f"{place:05d}.tar": 6 for place in range(SHARDS)})
    )
    loaders = [training.loader(f"node-{rank}", rank=rank, world_size=2, groups=2) for rank in (0, 1)]
    with ExitStack() as stack:
        for rank, loader in enumerate(loaders):
            stack.enter_context(loader)
            next(iter(loader))
            until(lambda rank=rank: any(f"group-{rank}." in n for n in training.objects.names("runs")))
            assert sum("group-" in name for name in training.objects.names("runs")) == rank + 1
    assert training.plan().groups == 2


def test_no_secret_is_published(training: Training) -> None:
    host = training.server.url.removeprefix("http://")
    pattern = f"http://me:{SECRET}@{host}/{{00000..00015}}.tar?X-Amz-Signature={SECRET}"
    with training.loader(urls=pattern) as loader:
        next(iter(loader))
        until(lambda: len(training.objects.names("runs")) == 2)
    for path in training.shared.rglob("*.json"):
        assert SECRET not in path.read_text()
    assert training.plan().shards is not None


def test_what_cant_be_told_is_followed_with_the_users_own_urls(training: Training) -> None:
    command = f"cat {training.tmp_path}/origin/{{00000..00015}}.tar"
    with training.loader(urls=f"pipe:{command}") as loader:
        next(iter(loader))
        until(lambda: len(training.objects.names("runs")) == 2)
        assert training.plan().shards is None
        assert "cat" not in training.objects.read(training.objects.names("runs")[1]).decode()
        with training.daemon("a", once=True, runs=(training.plan().run,)) as child:
            done, _, _, _, following = child.finish(60)
            assert done == 0
            assert "give this daemon the same URLs" in following
        with training.daemon("b", once=True, runs=(training.plan().run,), urls=(f"pipe:{command}",)) as child:
            assert child.finish(60)[0] > 0


def test_a_daemon_holds_what_is_in_front_of_a_training(training: Training) -> None:
    with training.loader() as loader:
        seen = iter(loader)
        next(seen)
        until(lambda: len(training.objects.names("runs")) == 2)
        before = len(training.held())
        with training.daemon("a", once=True) as child:
            done, held, wanted, failed, _ = child.finish(60)
        assert done > 0
        assert (held, failed) == (wanted, {})
        assert len(training.held()) == before + done
        for _ in seen:
            pass
        assert loader.stats().shared_hits >= SHARDS // 2


@pytest.mark.deep
def test_daemons_that_come_and_go_change_no_batch(training: Training) -> None:
    with training.loader("alone", shared_cache="") as loader:
        expected = [training.keys(loader) for _ in range(2)]
    with ExitStack() as stack, training.loader() as loader:
        children: list[Child] = []
        found = []
        for _ in range(2):
            keys = []
            for number, batch in enumerate(loader):
                keys.append(batch["key"])
                if number % 4 == 0:
                    for child in children:
                        child.kill()
                    children = [stack.enter_context(training.daemon(f"n{n}")) for n in range(2)]
                time.sleep(0.01)
            found.append(keys)
        for child in children:
            child.kill()
    assert all(expected)
    assert found == expected


@pytest.mark.deep
def test_with_all_daemons_dead_it_goes_on_from_the_origin(training: Training) -> None:
    with training.loader("alone", shared_cache="") as loader:
        expected = training.keys(loader)
    with training.loader() as loader:
        seen = iter(loader)
        keys = [next(seen)["key"]]
        with training.daemon("a") as child:
            until(lambda: training.held())
            child.kill()
        keys += [batch["key"] for batch in seen]
    assert keys == expected


def test_a_shared_tier_that_takes_no_plan_costs_a_line(training: Training, caplog: Any) -> None:
    training.shared.write_text("no folder")
    with training.loader() as loader:
        assert len(training.keys(loader)) == SHARDS * 6 // 4
    assert sum("can't be published" in record.message for record in caplog.records) <= 1


@pytest.mark.parametrize(
    "forge",
    [
        lambda plan: b"",
        lambda plan: plan[: len(plan) // 2],
        lambda plan: plan.replace(b'"format": 1', b'"format": 2'),
        lambda plan: json.dumps({**json.loads(plan), "shards": ["pipe:touch {}"] * SHARDS}).encode(),
        lambda plan: json.dumps({**json.loads(plan), "shards": ["/etc/passwd"] * SHARDS}).encode(),
        lambda plan: plan.replace(b'.tar"', b'.zip"'),
        lambda plan: b"[" * 200_000,
    ],
)
@pytest.mark.sampled(3)
def test_a_forged_plan_is_refused_and_the_training_unaffected(
    training: Training, forge: Callable[[bytes], bytes]
) -> None:
    with training.loader() as loader:
        seen = iter(loader)
        next(seen)
        until(lambda: len(training.objects.names("runs")) == 2)
        run = training.plan().run
        name = f"runs/{run}/plan.json"
        training.objects.write(name, forge(training.objects.read(name) or b""))
        before = training.held()
        with training.daemon("a", once=True) as child:
            done, _, wanted, _, following = child.finish(60)
        assert (done, wanted) == (0, 0)
        assert run in following
        assert training.held() == before
        assert 1 + len(list(seen)) == SHARDS * 6 // 4


def test_a_daemon_with_another_endpoint_says_why_it_cant_follow(training: Training) -> None:
    shards = expand_urls("s3://bucket/{00..15}.tar")
    sources = [PlannedSource(SHARDS, OrderOptions(1, 1, 2, 8))]
    plan, _ = plan_of(sources, False, shards, {"endpoint_url": "https://one.example"})
    training.objects.write(f"runs/{plan.run}/plan.json", plan.written())
    training.objects.write(f"runs/{plan.run}/group-0.json", PlanProgress(0, 0, ((0, 0),)).written())
    with training.daemon("a", once=True, storage_options={"endpoint_url": "https://two.example"}) as child:
        done, _, _, _, following = child.finish(60)
    assert done == 0
    assert "storage options" in following


def test_a_group_that_tells_nothing_sound_is_left_out(training: Training) -> None:
    with training.loader() as loader:
        next(iter(loader))
        until(lambda: len(training.objects.names("runs")) == 2)
    run = training.plan().run
    training.objects.write(f"runs/{run}/group-0.json", b"{")
    followed = FollowedDemand(training.objects, None, PrefetchWindow(size_bytes=1 << 40))
    assert followed.look(lambda shard: 1.0) == []


def publish(training: Training, shards: list[str]) -> None:
    """A plan as anybody who may write to the shared tier could put it there."""
    listed = expand_urls(shards)
    plan, _ = plan_of([PlannedSource(len(listed), OrderOptions(1, 1, 2, 8))], False, listed, None)
    training.objects.write(f"runs/{plan.run}/plan.json", plan.written())
    training.objects.write(f"runs/{plan.run}/group-0.json", PlanProgress(0, 0, ((0, 0),)).written())


def test_a_plan_gets_no_credentials_and_no_address_of_this_network_but_of_what_the_user_named(
    training: Training,
) -> None:
    (training.tmp_path / "inside").mkdir()
    (training.tmp_path / "inside" / "x.tar").write_bytes(
        (training.tmp_path / "origin" / "00000.tar").read_bytes()
    )
    with ShardServer(training.tmp_path / "inside") as inside:
        port = inside.url.rpartition(":")[2]
        hosts = ["127.0.0.1", "localhost", "LOCALHOST.", "2130706433", "0x7f000001", "0177.1", "127.0.0.1."]
        planted = [f"http://{host}:{port}/x.tar" for host in (*hosts, "[::ffff:127.0.0.1]")]
        publish(training, [*planted, f"{training.server.url}/00001.tar"])
        secret = {"headers": {"Authorization": f"Bearer {SECRET}"}}
        with training.daemon("a", once=True, storage_options=secret) as child:
            done, _, wanted, failed, _ = child.finish(60)
        assert (done, wanted) == (1, len(planted) + 1)
        assert len(failed) == len(planted)
        assert all("--origin" in why or "no address" in why for why in failed.values())
        assert inside.log == []
        assert [r.headers["Authorization"] for r in training.server.log][-1] == f"Bearer {SECRET}"


def test_places_that_only_a_plan_names_are_logged(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    publish(training, [f"{training.server.url}/00000.tar", "s3://theirs/a.tar"])
    for origins, logged in (([training.server.url], True), ([training.server.url, "s3://theirs"], False)):
        caplog.clear()
        followed = FollowedDemand(
            training.objects, None, PrefetchWindow(size_bytes=1 << 40), named=Named.of(origins)
        )
        assert len(followed.look(lambda shard: 1.0)) == 2
        assert ("--origin s3://theirs" in caplog.text) is logged


def test_the_options_of_a_daemon_say_which_origins_a_plan_may_name(training: Training) -> None:
    for wrong in (
        "/data",
        "pipe:cat",
        "https://host/path",
        "host",
        "http://h?x=1",
        "hf://datasets/a/b/c.tar",
    ):
        with pytest.raises(OptionError, match="origin="):
            Service(ServiceOptions(shared_cache=str(training.shared), origins=(wrong,)))
