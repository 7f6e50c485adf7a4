"""A Ray cluster that fills a shared tier: Ray's own local clusters, real commands, a real server."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.companion import FactsCarrier
from streamload.cache.shard import prepared_form, shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.shared.leases import DAEMONS, Leases
from streamload.cache.shared.objects import Objects
from streamload.cache.shared.sharing import SharedOptions
from streamload.cache.shared.tier import SharedTier
from streamload.cache.tier import Tier
from streamload.daemon.options import ServiceOptions
from streamload.daemon.ray_executor import RayExecutor, connect
from streamload.daemon.ray_task import Job, own_version
from streamload.daemon.service import Service
from streamload.daemon.warm import warm
from streamload.derived.prepare.preparation import Preparation, prepared_tar
from streamload.errors import ClusterError, OptionError
from streamload.facts.recipes import read_facts
from streamload.facts.shard_facts import ShardFacts
from streamload.features.named import named
from streamload.metrics import Counters
from streamload.origins.origin import OriginOptions
from streamload.prefetch.scheduler import FillRequest
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support.kills import Child, Stage
from tests.support.pages import get
from tests.support.ray_cluster import RayCluster

COMMAND = [sys.executable, "-m", "streamload"]
SHARDS = 6
RECIPE = "jpeg-32-q90"
PREPARATION = Preparation.parse(RECIPE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "origin", [5] * SHARDS)
    with ShardServer(tmp_path / "origin") as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    place = tmp_path_factory.mktemp("nodes")
    with RayCluster({"RAY_TMPDIR": str(place / "missing")}) as cluster:  # Ray hasn't run on a fresh machine
        for number in range(2):
            cluster.add_node({"STREAMLOAD_CACHE_DIR": str(place / str(number))})
        yield cluster


def run(command: list[str], *more: str, within: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command `within` a directory: Ray's workers look there for modules first."""
    return subprocess.run(
        [*command, *more], capture_output=True, text=True, timeout=150, check=False, cwd=within
    )


def pattern(server: ShardServer) -> str:
    return f"{server.url}/{{00000..{SHARDS - 1:05d}}}.tar"


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 180  # nodes start processes that import, on cores that are all busy
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def held(server: ShardServer, place: Path) -> list[bool]:
    """Of each shard, whether it is in the shared tier as it is at its origin."""
    tier = SharedTier(Objects(str(place)), Counters())
    found = []
    for path in sorted(server.root.glob("*.tar")):
        shard = shard_of(f"{server.url}/{path.name}", None)
        there = tier.look(shard)
        content = None if there is None else tier.read(shard, there, 0, there.size)
        found.append(content == path.read_bytes())
    return found


def prepared(server: ShardServer, place: Path) -> list[Path]:
    """Where the prepared shards are in a shared tier that is a folder."""
    shards = [shard_of(f"{server.url}/{path.name}", None) for path in sorted(server.root.glob("*.tar"))]
    forms = [prepared_form(shard, PREPARATION.name) for shard in shards]
    return [path for form in forms for path in place.glob(f"prepared/{form.recipe}/{form.digest}/*.tar")]


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_the_nodes_of_a_cluster_fill_a_shared_tier(
    server: ShardServer, cluster: RayCluster, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    warm = [*COMMAND, "warm", pattern(server), "--ray", cluster.address, "--shared-cache", str(shared)]
    done = run(warm)
    assert done.returncode == 0, done.stderr
    assert f"{SHARDS} of {SHARDS} shards are held" in done.stdout
    assert held(server, shared) == [True] * SHARDS
    sizes = sum(path.stat().st_size for path in server.root.glob("*.tar"))
    assert sum(request.sent for request in server.log) == sizes  # each byte once
    assert Objects(str(shared)).names("probes") == []

    asked = len(server.log)
    (server.root / "00006.tar").write_bytes((server.root / "00000.tar").read_bytes())
    more = f"{server.url}/{{00000..00007}}.tar"
    done = run([*warm[:-5], more, *warm[-4:]])
    assert done.returncode == 1
    assert "7 of 8 shards are held (8 listed shards), 1 brought" in done.stdout
    assert re.search(r"00007\.tar: \S+: .*404", done.stdout)
    assert {request.path for request in server.log[asked:]} == {"00006.tar", "00007.tar"}


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_the_nodes_of_a_cluster_prepare(server: ShardServer, cluster: RayCluster, tmp_path: Path) -> None:
    shared = ["--shared-cache", str(tmp_path / "shared")]
    done = run([*COMMAND, "warm", pattern(server), "--ray", cluster.address, *shared, "--prepare", RECIPE])
    assert done.returncode == 0, done.stderr
    assert f"{SHARDS} of {SHARDS} shards are held" in done.stdout
    places = prepared(server, tmp_path / "shared")
    assert [place.read_bytes() for place in places] == [
        b"".join(prepared_tar([path.read_bytes()], PREPARATION, path.name))
        for path in sorted(server.root.glob("*.tar"))
    ]


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_daemon_goes_on_until_it_is_told_to_end(
    server: ShardServer, cluster: RayCluster, tmp_path: Path, port: int
) -> None:
    shared = tmp_path / "shared"
    late = server.root / "00003.tar"
    late.rename(late.with_suffix(".late"))
    command = [*COMMAND, "daemon", pattern(server), "--ray", cluster.address, "--shared-cache", str(shared)]
    page = f"127.0.0.1:{port}"
    command += ["--listen", page, "--notices", "none", "--concurrency", "2", "--bandwidth", "50MB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        until(lambda: held_names(shared) == SHARDS - 1)
        late.with_suffix(".late").rename(late)
        until(lambda: held_names(shared) == SHARDS)
        until(lambda: f"\nstreamload_daemon_shards_held {SHARDS}\n" in get(f"http://{page}/metrics")[1])
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=90)
        assert process.returncode == 0
    assert f"{SHARDS} of {SHARDS} shards are held" in said
    assert "told to end by SIGTERM" in said
    assert held(server, shared) == [True] * SHARDS


def held_names(shared: Path) -> int:
    return sum(name.endswith("/index") for name in Objects(str(shared)).names("shards"))


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_node_with_another_streamload_is_named(server: ShardServer, tmp_path: Path) -> None:
    other = tmp_path / "other" / "streamload-99.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: streamload\nVersion: 99.0\n")
    with RayCluster({"PYTHONPATH": str(other.parent)}) as cluster:
        cluster.add_node()
        done = run(
            [*COMMAND, "warm", pattern(server), "--ray", cluster.address],
            *("--shared-cache", str(tmp_path / "shared")),
            within=tmp_path,
        )
    assert done.returncode == 2
    assert f"it has streamload 99.0, and {own_version()} is wanted" in done.stderr
    assert server.log == []


def options(tmp_path: Path, **more: Any) -> ServiceOptions:
    given = {"urls": ("http://h/{0..3}.tar",), "shared_cache": str(tmp_path / "shared"), "ray": "h:6379"}
    return ServiceOptions(**{**given, "listen": "none", "notices": "none", **more})


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"shared_cache": None}, "needs a shared cache"),
        ({"into": "local"}, "needs a shared cache"),
        ({"urls": ("/data/{0..3}.tar",)}, "can't bring files of this machine"),
        ({"bandwidth": "10MB"}, "needs --concurrency"),
        ({"ray": "nonsense"}, "is no address"),
        ({"ray": "host:port"}, "is no address"),
    ],
)
def test_what_no_cluster_can_do_is_refused_before_one_is_asked(
    more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=why):
        Service(options(tmp_path, **more))


def test_where_nobody_or_somebody_else_answers_is_no_cluster(server: ShardServer, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ClusterError, match="nobody answers"):
            connect(f"127.0.0.1:{port}")
    with pytest.raises(ClusterError, match="is no Ray cluster"):
        connect(server.url.removeprefix("http://"))


def test_ray_is_imported_only_when_it_is_asked_for_and_missed_in_words(tmp_path: Path) -> None:
    code = f"""
        import sys
        import streamload.cli, streamload.cli.daemon
        from streamload.daemon.options import ServiceOptions
        from streamload.daemon.service import Service
        import streamload.daemon.ray_executor
        assert not any(name == "ray" or name.startswith("ray.") for name in sys.modules)
        sys.modules["ray"] = None  # as if it were not installed
        sys.argv = "streamload warm http://h/0.tar --ray auto --shared-cache".split() + [{str(tmp_path)!r}]
        streamload.cli.main()
    """
    done = run([sys.executable, "-c", textwrap.dedent(code)])
    assert done.returncode == 2
    assert 'pip install "streamload[ray]"' in done.stderr


def fetched(
    job: Job, url: str, by: Preparation | None = None, version: str | None = None, **changes: str
) -> dict[str, Any]:
    """What `bring` says, in a process of its own."""
    shard = shard_of(url, None)
    if by is not None:
        shard = prepared_form(shard, by.name)
    packed = pickle.dumps((replace(shard, **changes), by))
    code = f"""
        import json
        from streamload.daemon.ray_task import bring
        print(json.dumps(bring({version or own_version()!r}, {pickle.dumps(job)!r}, {packed!r})))
    """
    done = run([sys.executable, "-c", textwrap.dedent(code)])
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def job(tmp_path: Path, **more: Any) -> Job:
    shared = SharedOptions(str(tmp_path / "shared"))
    shared.open_objects().write("probes/sign", b"here")
    given = {
        "sign": "probes/sign",
        "cache_dir": str(tmp_path / "tier"),
        "cache_size": "1GB",
        "rest_seconds": 0,
    }
    return Job(shared, **{**given, **more})


def test_a_unit_is_brought_once_and_says_what_it_took(server: ShardServer, tmp_path: Path) -> None:
    url = f"{server.url}/00001.tar"
    size = (server.root / "00001.tar").stat().st_size
    first, again = fetched(job(tmp_path), url), fetched(job(tmp_path), url)
    assert (first["size"], first["arrived"]) == (size, size)
    assert (again["size"], again["arrived"]) == (0, 0)
    assert held(server, tmp_path / "shared")[1]


@pytest.mark.deep
def test_a_unit_is_prepared_of_what_the_shared_tier_has(server: ShardServer, tmp_path: Path) -> None:
    url = f"{server.url}/00001.tar"
    assert fetched(job(tmp_path), url)["arrived"] > 0
    first, again = fetched(job(tmp_path), url, PREPARATION), fetched(job(tmp_path), url, PREPARATION)
    (place,) = prepared(server, tmp_path / "shared")
    assert (first["size"], first["arrived"]) == (place.stat().st_size, 0)
    assert (again["size"], again["arrived"]) == (0, 0)


def test_a_node_with_another_streamload_is_unfit(server: ShardServer, tmp_path: Path) -> None:
    answer = fetched(job(tmp_path), f"{server.url}/00001.tar", version="99.0")
    assert answer["unfit"] == f"it has streamload {own_version()}, and 99.0 is wanted"
    assert server.log == []


@pytest.mark.deep
def test_a_node_with_other_libraries_is_unfit(server: ShardServer, tmp_path: Path) -> None:
    answer = fetched(job(tmp_path), f"{server.url}/00001.tar", PREPARATION, recipe=f"{RECIPE}-v1-torch0.1")
    assert answer["unfit"].startswith(f"shards are derived by {PREPARATION.name} there")
    assert server.log == []


def test_a_node_that_sees_another_shared_tier_is_unfit(server: ShardServer, tmp_path: Path) -> None:
    answer = fetched(job(tmp_path, sign="probes/elsewhere"), f"{server.url}/00001.tar")
    assert "is another one there" in answer["unfit"]
    assert server.log == []


def test_a_node_that_knows_a_shard_by_another_name_is_unfit(server: ShardServer, tmp_path: Path) -> None:
    answer = fetched(job(tmp_path), f"{server.url}/00001.tar", digest="0" * 32)
    assert "another identity" in answer["unfit"]
    assert server.log == []


def test_a_node_whose_disk_cant_be_used_says_that_it_isnt_the_units_fault(
    server: ShardServer, tmp_path: Path
) -> None:
    (tmp_path / "tier").write_text("not a directory")
    answer = fetched(job(tmp_path), f"{server.url}/00001.tar")
    assert "trouble" in answer
    quick = OriginOptions(attempts=1)
    answer = fetched(
        job(tmp_path, cache_dir=str(tmp_path / "good"), origin=quick), f"{server.url}/nothing.tar"
    )
    assert "404" in answer["why"]


def test_a_unit_whose_lease_another_has_is_left_to_it(server: ShardServer, tmp_path: Path) -> None:
    url = f"{server.url}/00001.tar"
    objects, shard = Objects(str(tmp_path / "shared")), shard_of(url, None)
    with closing(Leases(objects, attempt=DAEMONS)) as others:
        assert others.take(shard.digest)
        answer = fetched(job(tmp_path), url)
        assert answer["busy"]
        assert server.log == []
    answer = fetched(job(tmp_path), url)
    assert answer["size"] == (server.root / "00001.tar").stat().st_size
    assert objects.names("leases") == []


def caption_bytes(sample: dict[str, Any]) -> float:
    return float(len(sample["txt"]))


def facts_in(objects: Objects) -> list[str]:
    return [name for name in objects.names("shards") if name.rpartition("/")[2].startswith("facts.")]


def test_the_facts_of_a_unit_are_made_of_what_the_shared_tier_has(
    server: ShardServer, tmp_path: Path
) -> None:
    url, objects = f"{server.url}/00001.tar", Objects(str(tmp_path / "shared"))
    assert fetched(job(tmp_path), url)["arrived"] > 0
    sent = len(server.log)
    forms = {"length": named("tests.daemon.test_ray:caption_bytes")}
    column = read_facts(forms, "jpg", "txt", None)["length"]
    with_facts = job(tmp_path, facts=(column,), cache_dir=str(tmp_path / "other"))
    first, again = (fetched(with_facts, url) for _ in range(2))
    assert first["size"] == (server.root / "00001.tar").stat().st_size
    assert (again["size"], again["arrived"]) == (0, 0)
    assert len(server.log) == sent
    assert len(facts_in(objects)) == 1
    warm(url, cache_dir=tmp_path / "trainer", shared_cache=objects.url, facts=[column])
    facts = ShardFacts(FactsCarrier())
    with closing(ShardView(Tier(tmp_path / "trainer"), shard_of(url, None))) as view:
        assert facts.extend(view, [column], view.count)
    captions = [members["txt"] for _, members in read_oracle(server.root / "00001.tar")]
    assert facts.values(column).tolist() == [len(caption) for caption in captions]
    assert len(server.log) == sent


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_the_nodes_of_a_cluster_make_facts(server: ShardServer, cluster: RayCluster, tmp_path: Path) -> None:
    objects = Objects(str(tmp_path / "shared"))
    warm = [*COMMAND, "warm", pattern(server), "--ray", cluster.address, "--shared-cache", objects.url]
    assert run(warm).returncode == 0
    sent = len(server.log)
    done = run([*warm, "--facts", "length=tests.daemon.test_ray:caption_bytes"])
    assert done.returncode == 0, done.stderr
    assert len(facts_in(objects)) == SHARDS
    assert len(server.log) == sent


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_each_node_of_a_cluster_fills_its_own_cache_with_facts(server: ShardServer, tmp_path: Path) -> None:
    objects, nodes = Objects(str(tmp_path / "shared")), [tmp_path / "node-0", tmp_path / "node-1"]
    command = [*COMMAND, "warm", pattern(server), "--into", "local", "--facts"]
    command += ["length=tests.daemon.test_ray:caption_bytes", "--shared-cache", objects.url, "--write-back"]
    with RayCluster() as cluster:
        for node in nodes:
            cluster.add_node({"STREAMLOAD_CACHE_DIR": str(node), "STREAMLOAD_CACHE_SIZE": "1GB"})
        done = run([*command, "--ray", cluster.address, "--json"])
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [each["report"] for each in json.loads(done.stdout)]
    assert {report["cache_dir"] for report in reports} == {str(node) for node in nodes}
    assert [(each["shards_complete"], each["shards_with_facts"]) for each in reports] == [
        (SHARDS, SHARDS)
    ] * 2
    sizes = sum(path.stat().st_size for path in server.root.glob("*.tar"))
    assert sum(each.sent for each in server.log if each.path.endswith(".tar")) == sizes
    assert objects.names("leases") == []


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_node_that_cant_be_filled_is_named_and_the_others_are(server: ShardServer, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("not a directory")
    with RayCluster() as cluster:
        for name in ("good", "bad"):
            cluster.add_node({"STREAMLOAD_CACHE_DIR": str(tmp_path / name)})
        done = run([*COMMAND, "warm", pattern(server), "--into", "local", "--ray", cluster.address])
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{SHARDS} of {SHARDS} shards are in {tmp_path / 'good'}" in done.stdout
    assert f"{tmp_path / 'bad'}" in done.stdout


def train(server: ShardServer, tmp_path: Path) -> subprocess.Popen[str]:
    """A training that stores what it fetches, one shard after the other."""
    code = f"""
        import streamload
        from streamload import Cache, Order, Workers
        loader = streamload.make_loader(
            {pattern(server)!r}, batch_size=5, num_workers=1, shuffle=0, num_samples={5 * SHARDS},
            cache_dir={str(tmp_path / "trainer")!r}, cache_size="1GB", order=Order(lanes=1),
            cache=Cache(shared={str(tmp_path / "shared")!r}, write_back=True),
            workers=Workers(map_sample=lambda sample: {{"key": sample["__key__"]}}),
        )
        with loader:
            keys = [key for batch in loader for key in batch["key"]]
        print(len(set(keys)))
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_training_and_a_daemon_beside_a_cluster_fetch_nothing_twice(
    server: ShardServer, cluster: RayCluster, tmp_path: Path
) -> None:
    shared = ["--shared-cache", str(tmp_path / "shared")]
    server.stop_after(0.5)  # all of them have begun something before anything is stored
    warm = [*COMMAND, "warm", pattern(server), "--ray", cluster.address, *shared]
    daemon = [*COMMAND, "daemon", pattern(server), *shared, "--cache-dir", str(tmp_path / "node"), "--once"]
    daemon += ["--listen", "none", "--notices", "none", "--concurrency", "1"]
    with (
        train(server, tmp_path) as trainer,
        subprocess.Popen(warm, stdout=subprocess.PIPE, text=True) as by_ray,
        subprocess.Popen(daemon, stdout=subprocess.PIPE, text=True) as alone,
    ):
        objects = Objects(str(tmp_path / "shared"))
        until(lambda: len(server.log) >= 3)
        server.go_on()
        results = [process.communicate(timeout=180)[0] for process in (trainer, by_ray, alone)]
        assert [process.returncode for process in (trainer, by_ray, alone)] == [0, 0, 0], results
    assert results[0].strip() == str(5 * SHARDS)
    assert held(server, tmp_path / "shared") == [True] * SHARDS
    sizes = sum(path.stat().st_size for path in server.root.glob("*.tar"))
    assert sum(each.sent for each in server.log if each.path.endswith(".tar")) == sizes
    assert objects.names("leases") == []


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_what_a_dead_daemon_had_is_brought_by_the_cluster(
    server: ShardServer, cluster: RayCluster, tmp_path: Path
) -> None:
    objects = Objects(str(tmp_path / "shared"))
    shards = [shard_of(f"{server.url}/{path.name}", None) for path in sorted(server.root.glob("*.tar"))]

    def die(stage: Stage) -> None:
        leases = Leases(objects, attempt=DAEMONS, first_beat_seconds=1.0, beat_seconds=5.0)
        assert leases.take(shards[0].digest)
        os.kill(os.getpid(), signal.SIGKILL)

    with Child(die) as child:
        child.join(30.0)
    done = run([*COMMAND, "warm", pattern(server), "--ray", cluster.address, "--shared-cache", objects.url])
    assert done.returncode == 0, done.stderr
    assert held(server, tmp_path / "shared") == [True] * SHARDS
    assert objects.names("leases") == []


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_units_left_to_others_are_brought_once_these_died_and_dropped_once_nobody_wants_them(
    cluster: RayCluster, tmp_path: Path
) -> None:
    write_shards(tmp_path / "origin", [1] * 20)
    objects = Objects(str(tmp_path / "shared"))

    def die(stage: Stage) -> None:
        leases = Leases(objects, attempt=DAEMONS, first_beat_seconds=1.0, beat_seconds=5.0)
        assert leases.take(shards[-1].digest)
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        ShardServer(tmp_path / "origin") as server,
        closing(Leases(objects, attempt=DAEMONS)) as others,
        closing(Leases(objects, attempt=DAEMONS)) as ours,
        contextlib.ExitStack() as stack,
    ):
        shards = [shard_of(f"{server.url}/{path.name}", None) for path in sorted(server.root.glob("*.tar"))]
        assert all(others.take(shard.digest) for shard in shards[:-1])
        with Child(die) as child:
            child.join(30.0)
        ray = connect(cluster.address)
        stack.callback(ray.shutdown)
        executor = RayExecutor(ray, job(tmp_path), cpus=0.1, leases=ours, counts=Counters())
        stack.callback(executor.close)
        wanted = [FillRequest(shard, float(place)) for place, shard in enumerate(shards)]
        executor.want(wanted[:-1])
        until(lambda: not any(executor.has_begun(shard) for shard in shards[:-1]))
        executor.want(wanted)
        until(lambda: executor.has_begun(shards[-1]))  # until its node has seen the lease
        results = executor.results.drain(180.0)
        assert [(result.shard, result.error) for result in results] == [(shards[-1], "")]
        executor.want(wanted[:1])
        others.close()
        results = executor.results.drain(180.0)
        assert [(result.shard, result.error) for result in results] == [(shards[0], "")]
        assert [each.path.rpartition("/")[2] for each in server.log] == ["00019.tar", "00000.tar"]
