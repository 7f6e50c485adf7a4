"""`streamload daemon --prepare`: prepared shards ahead of a training, whatever becomes of the daemons."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamload.cache.shard import prepared_form
from streamload.cli.options import preparation_of
from streamload.daemon import publication
from streamload.daemon.demand import PrefetchWindow
from streamload.daemon.followed import FollowedDemand
from streamload.daemon.options import DaemonOptions, ServiceOptions
from streamload.daemon.plan_file import PlannedSource, PlanProgress, plan_of
from streamload.daemon.recipes import Recipes
from streamload.daemon.service import Service
from streamload.derived.prepare.preparation import Preparation, prepared_tar
from streamload.order.plan import OrderOptions
from streamload.testing.shards import ShardOptions
from streamload.urls import expand_urls
from tests.support import flat
from tests.support.commands import run_forked
from tests.support.kills import Child, Stage
from tests.support.s3 import S3Server
from tests.support.sharing import Origin, Place, opened
from tests.support.tiers import until

COUNTS = (14, 9, 20, 11)
SHARDS = len(COUNTS)
RECIPE = "jpeg-32-q90"
PREPARATION = Preparation.parse(RECIPE)
OTHER = "jpeg-32-q90-v1-torch9.9.9-pillow99.0-simplejpeg9.9-00000000"
Batches = list[tuple[torch.Tensor, list[str]]]


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(tmp_path / "data", COUNTS, options=ShardOptions(image_side=(40, 90)))
    yield made
    made.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "shared"), {})


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def command(origin: Origin, root: Path, *more: str) -> list[str]:
    return [
        "daemon",
        *origin.urls,
        "--cache-dir",
        str(root),
        "--cache-size",
        "1GB",
        "--notices",
        "none",
        *more,
    ]


def epoch_of(origin: Origin, cache: Path, place: Place | None, **options: Any) -> tuple[Batches, Any]:
    given: dict[str, Any] = {"batch_size": 5, "num_workers": 0, "cache_size": "1TB", "prepare": RECIPE}
    if place is not None:
        given |= {"shared_cache": place.url, "shared_cache_options": place.options}
    with flat.make_loader(origin.urls, cache_dir=cache, **{**given, **options}) as loader:
        return [(images, list(texts)) for images, texts in loader], loader.stats()


def are_equal(some: Batches, others: Batches) -> bool:
    return len(some) == len(others) > 0 and all(
        torch.equal(images, theirs) and texts == their_texts
        for (images, texts), (theirs, their_texts) in zip(some, others, strict=True)
    )


def brought(origin: Origin, place: Place) -> int:
    """How many prepared shards a shared tier has, each whole: byte for byte what comes of its shard."""
    tier, _ = opened(place)
    count = 0
    for number, path in enumerate(origin.paths):
        form = prepared_form(origin.shard(number), PREPARATION.name)
        held = tier.look(form)
        if held is not None:
            with contextlib.closing(tier.stream(form, held, 0, threading.Event())) as stream:
                data = b"".join(stream.chunks())
            assert data == b"".join(prepared_tar([path.read_bytes()], PREPARATION, path.name))
            count += 1
    return count


def daemon(place: Place, root: Path, **more: Any) -> Child:
    """A daemon in a process of its own, to be killed."""
    given: dict[str, Any] = {
        "shared_cache": place.url,
        "cache_dir": root,
        "cache_size": "1GB",
        "notices": "none",
        "listen": "none",
        "lease_seconds": 1.0,
        "daemon": DaemonOptions(look_seconds=0.05, retry_seconds=0.1),
        **more,
    }

    def work(stage: Stage) -> Any:
        with Service(ServiceOptions(**given, prepare=preparation_of(RECIPE))) as service:
            stage.enter("running")
            status = service.run()
        return [status.done, status.held, status.wanted, status.failed]

    return Child(work)


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.deep)])
def test_a_training_takes_what_a_daemon_prepared_and_nothing_from_the_origin(
    origin: Origin, tmp_path: Path, kind: str, place: Place, request: pytest.FixtureRequest
) -> None:
    more: list[str] = []
    if kind == "s3":
        server: S3Server = request.getfixturevalue("s3")
        place = Place(f"s3://bucket/{random.getrandbits(64):x}/tier", server.storage_options)
        more = ["--shared-cache-options", json.dumps(server.storage_options)]
    given = command(origin, tmp_path / "spot", "--prepare", RECIPE, "--shared-cache", place.url, *more)
    done = run_forked([*given, "--once", "--listen", "none"])
    assert done.returncode == 0, done.stderr
    assert (
        f"{SHARDS} of {SHARDS} shards are held ({SHARDS} listed shards, prepared as {RECIPE}" in done.stdout
    )
    assert brought(origin, place) == SHARDS
    assert origin.sent == origin.bytes
    found, seen = epoch_of(origin, tmp_path / "node", place)
    assert (seen.origin_bytes, seen.shared_hits) == (0, SHARDS)
    assert origin.sent == origin.bytes
    made, _ = epoch_of(origin, tmp_path / "alone", None)
    assert are_equal(found, made)
    again = run_forked([*given, "--once", "--listen", "none"])
    assert f"{SHARDS} of {SHARDS} shards are held" in again.stdout
    assert "0 brought, 0 B arrived" in again.stdout


def test_without_a_shared_cache_they_are_held_on_this_node(origin: Origin, tmp_path: Path) -> None:
    done = run_forked(command(origin, tmp_path / "node", "--prepare", RECIPE, "--once", "--listen", "none"))
    assert done.returncode == 0, done.stderr
    found, seen = epoch_of(origin, tmp_path / "node", None)
    assert seen.origin_bytes == 0
    made, _ = epoch_of(origin, tmp_path / "alone", None)
    assert are_equal(found, made)


@pytest.mark.parametrize("into", [[], ["--into", "local"]])
def test_they_are_prepared_of_what_the_shared_cache_has(
    origin: Origin, tmp_path: Path, place: Place, into: list[str]
) -> None:
    origin.warm(tmp_path / "one", place, write_back=True)
    sent = origin.sent
    given = command(origin, tmp_path / "spot", "--prepare", RECIPE, "--shared-cache", place.url, *into)
    assert run_forked([*given, "--once", "--listen", "none"]).returncode == 0
    assert origin.sent == sent
    assert brought(origin, place) == (0 if into else SHARDS)
    assert len(list((tmp_path / "spot" / "shards").iterdir())) == SHARDS


def test_a_recipe_that_is_none_is_said(origin: Origin, tmp_path: Path) -> None:
    done = run_forked(command(origin, tmp_path / "node", "--prepare", "raw-"))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "streamload: 'raw-' is not a recipe for prepared images: give raw, raw-SIZE or jpeg-"
    )
    assert done.stderr.count("\n") == 1
    assert origin.sent == 0


def test_a_shard_that_cant_be_prepared_is_named(origin: Origin, tmp_path: Path, place: Place) -> None:
    origin.paths[1].write_bytes(b"<html>")
    given = command(origin, tmp_path / "spot", "--prepare", RECIPE, "--shared-cache", place.url)
    done = run_forked([*given, "--once", "--listen", "none"])
    assert done.returncode == 1
    assert f"{origin.urls[1]}#{PREPARATION.name}: " in done.stdout
    assert "web page" in done.stdout
    assert len(list(Path(place.url).glob("prepared/*/*/index"))) == SHARDS - 1


def test_killed_daemons_leave_nothing_half_and_the_next_ones_go_on(
    origin: Origin, tmp_path: Path, place: Place
) -> None:
    origin.server.bytes_per_second_per_connection = origin.bytes / 2
    rng = random.Random(8)
    for number in range(8):
        with daemon(place, tmp_path / f"node-{number % 2}", urls=tuple(origin.urls)) as child:
            assert child.stage.wait_for("running", 60)
            threading.Event().wait(rng.uniform(0.0, 0.4))
            child.kill()
        brought(origin, place)
    with daemon(place, tmp_path / "node-0", urls=tuple(origin.urls), once=True) as child:
        assert child.finish(60)[1:] == [SHARDS, SHARDS, {}]
    assert brought(origin, place) == SHARDS
    assert not list(Path(place.url).glob("leases/*"))
    found, seen = epoch_of(origin, tmp_path / "trainer", place)
    assert (seen.origin_bytes, seen.shared_errors) == (0, 0)
    made, _ = epoch_of(origin, tmp_path / "alone", None)
    assert are_equal(found, made)


@pytest.mark.deep
def test_sigterm_in_the_middle_hands_back_and_stores_nothing_half(
    origin: Origin, tmp_path: Path, place: Place
) -> None:
    origin.server.stop_after(0.5)
    given = command(origin, tmp_path / "spot", "--prepare", RECIPE, "--shared-cache", place.url)
    shell = [sys.executable, "-m", "streamload", *given, "--listen", "none", "--grace", "0.2"]
    with subprocess.Popen(shell, stdout=subprocess.PIPE) as process:
        try:
            until(lambda: len(origin.server.log) >= 1 and list(Path(place.url).glob("leases/*")))
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert not list(Path(place.url).glob("leases/*"))
    assert brought(origin, place) == 0
    origin.server.go_on()
    assert run_forked([*given, "--once", "--listen", "none"]).returncode == 0
    assert brought(origin, place) == SHARDS


def test_two_daemons_share_the_work_and_prepare_nothing_twice(
    origin: Origin, tmp_path: Path, place: Place
) -> None:
    origin.server.bytes_per_second_per_connection = origin.bytes / 2
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                daemon(
                    place,
                    tmp_path / name,
                    urls=tuple(origin.urls),
                    once=True,
                    concurrency=1,
                    lease_seconds=30.0,
                )
            )
            for name in ("a", "b")
        ]
        done = [child.finish(60)[0] for child in children]
    assert sum(done) == SHARDS
    assert min(done) >= 1
    assert origin.sent == origin.bytes
    assert brought(origin, place) == SHARDS


def published(place: Place, origin: Origin, prepare: str, prepared: str) -> str:
    """Publish a run as a trainer does; its name."""
    objects = place.objects()
    plan, _ = plan_of(
        [PlannedSource(SHARDS, OrderOptions(1, 1, 2, 8))], False, expand_urls(origin.urls), None, prepare
    )
    objects.write(f"runs/{plan.run}/plan.json", plan.written())
    objects.write(f"runs/{plan.run}/group-0.json", PlanProgress(0, 0, ((0, 0),), prepared=prepared).written())
    return plan.run


@pytest.mark.parametrize(
    ("recipes", "prepare", "prepared", "brings", "warns"),
    [
        (Recipes(None, Preparation.parse), RECIPE, PREPARATION.name, PREPARATION.name, ""),
        (Recipes(None, Preparation.parse), "", "", "", ""),
        (Recipes(None, Preparation.parse), RECIPE, OTHER, "", "it is brought the shards as they are"),
        (Recipes(None, None), RECIPE, PREPARATION.name, "", ""),
        (Recipes(PREPARATION), RECIPE, PREPARATION.name, PREPARATION.name, ""),
        (Recipes(PREPARATION), "", PREPARATION.name, PREPARATION.name, ""),
        (Recipes(PREPARATION), "", "", PREPARATION.name, "looks for no prepared shards"),
        (Recipes(PREPARATION), RECIPE, OTHER, PREPARATION.name, "it won't see these"),
    ],
)
def test_a_run_is_brought_what_it_looks_for_unless_the_user_says_what(
    origin: Origin,
    place: Place,
    caplog: pytest.LogCaptureFixture,
    recipes: Recipes,
    prepare: str,
    prepared: str,
    brings: str,
    warns: str,
) -> None:
    run = published(place, origin, prepare, prepared)
    followed = FollowedDemand(place.objects(), None, PrefetchWindow(size_bytes=1 << 40), recipes=recipes)
    for _ in range(2):
        tasks = followed.look(lambda task: 1.0)
    assert len(tasks) == SHARDS
    assert {task.recipe for task in tasks} == {brings}
    plain = {origin.shard(number) for number in range(SHARDS)}
    assert set(tasks) == ({prepared_form(shard, brings) for shard in plain} if brings else plain)
    assert followed.describe() == f"run {run}, 1 groups, epoch 0" + (
        f", prepared as {brings}" if brings else ""
    )
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(warns)
    assert all(warns in line for line in said)


@pytest.mark.parametrize("recipe", ["raw-4097", "raw-0", "jpeg-256-q101", "raw-", "auto", "none"])
def test_a_plan_that_asks_for_no_recipe_is_refused(
    origin: Origin, tmp_path: Path, place: Place, recipe: str
) -> None:
    run = published(place, origin, recipe, "")
    followed = FollowedDemand(
        place.objects(), None, PrefetchWindow(size_bytes=1), recipes=Recipes(None, Preparation.parse)
    )
    assert followed.look(lambda task: 1.0) == []
    assert (
        f"the plan of run {run} asks for prepared shards: {recipe!r} is not a recipe" in followed.describe()
    )


@pytest.mark.parametrize("recipe", [RECIPE, "raw"])
def test_a_daemon_prepares_what_a_run_asks_for(
    origin: Origin, tmp_path: Path, place: Place, recipe: str
) -> None:
    name = Preparation.parse(recipe).name
    published(place, origin, recipe, name)
    given = ["daemon", "--shared-cache", place.url, "--cache-dir", str(tmp_path / "a"), "--notices", "none"]
    given += ["--origin", origin.server.url]
    done = run_forked([*given, "--once", "--listen", "none"])
    assert done.returncode == 0, done.stderr
    assert len(list(Path(place.url).glob(f"prepared/{name}/*/index"))) == SHARDS
    assert not list(Path(place.url).glob("shards/*"))
    done = run_forked([*given, "--once", "--listen", "none", "--prepare", "none"])
    assert done.returncode == 0, done.stderr
    assert len(list(Path(place.url).glob("shards/*/index"))) == SHARDS


@pytest.mark.deep
def test_a_daemon_follows_a_training_and_prepares_what_it_asks_for(
    origin: Origin, tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "EVERY_SECONDS", 0.02)
    given = {"prepare": RECIPE, "lanes": 1, "ahead": 1, "batch_size": 5, "num_workers": 0}
    made, _ = epoch_of(origin, tmp_path / "alone", None, **given)
    options = {**given, "cache_size": "1GB", "shared_cache": place.url}
    with flat.make_loader(origin.urls, cache_dir=tmp_path / "node", **options) as loader:
        batches = iter(loader)
        found = [next(batches)]
        until(lambda: len(place.objects().names("runs")) == 2)
        assert brought(origin, place) == 0
        command = ["daemon", "--shared-cache", place.url, "--cache-dir", str(tmp_path / "spot")]
        command += ["--origin", origin.server.url]
        done = run_forked([*command, "--notices", "none", "--once", "--listen", "none"])
        assert done.returncode == 0, done.stderr
        assert f"prepared as {PREPARATION.name}" in done.stdout
        prepared = brought(origin, place)
        assert prepared > 0
        assert not list(Path(place.url).glob("shards/*"))
        found += batches
        assert loader.stats().shared_hits > 0
    assert are_equal([(images, list(texts)) for images, texts in found], made)
