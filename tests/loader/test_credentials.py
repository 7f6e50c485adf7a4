"""Credentials of a web server that end in mid-run: trainings, warm, daemons, tasks on other nodes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Shards
from streamload.cache.shard import shard_of
from streamload.cache.shared.objects import Objects
from streamload.cache.shared.sharing import SharedOptions
from streamload.cli.options import storage_options_of
from streamload.daemon.options import ServiceOptions
from streamload.daemon.plan_file import PlannedSource, plan_of
from streamload.daemon.ray_task import Job, bring, own_version
from streamload.daemon.service import Service
from streamload.errors import OptionError
from streamload.options import read_settings
from streamload.order.plan import OrderOptions
from streamload.origins.origin import OriginOptions
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from streamload.urls import expand_urls
from tests.support import flat
from tests.support.commands import run_forked

SHARDS = 24
_REQUESTS = 16
"""After which the token ends: more than are under way at once, so that shards have come by then."""
_LATE_SECONDS = 0.3
"""From the first refusal until there is a new token."""
_TOKEN_FILE = "TEST_TOKEN_FILE"


def token() -> str:
    return Path(os.environ[_TOKEN_FILE]).read_text()


def headers(url: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token()}"}


def sign(url: str) -> str:
    return f"{url}?X-Amz-Signature={token()}"


class Place:
    """A server whose token ends after some requests, and files that get the new one before or later."""

    def __init__(self, path: Path, server: ShardServer, shards: list[Path]) -> None:
        self.server, self.path = server, path
        self.urls = f"{server.url}/{{00000..{SHARDS - 1:05}}}.tar"
        self.keys = sorted(key for shard in shards for key, _ in read_oracle(shard))
        self.options_file, self.tier = path / "options.json", path / "tier"
        self.give("token-1")
        server.misbehave(
            "*", Fault(first=_REQUESTS, requires="token-1"), Fault(requires="token-2", status=403)
        )
        self.may_renew = threading.Event()
        self.may_renew.set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _renew(self) -> None:
        while not (self.refusals() and self.may_renew.is_set()):
            if self._over.wait(0.01):
                return
        self._over.wait(_LATE_SECONDS)
        self.give("token-2")

    def give(self, token: str) -> None:
        for file, text in (
            (Path(os.environ[_TOKEN_FILE]), token),
            (self.options_file, json.dumps({"headers": {"Authorization": f"Bearer {token}"}})),
        ):
            (fresh := file.with_suffix(".new")).write_text(text)
            fresh.replace(file)

    def loader(self, **options: Any) -> streamload.Loader:
        more = {"batch_size": 1, "with_keys": True, "cache_dir": self.tier, "cache_size": "1GB"}
        return flat.make_loader(self.urls, **{**more, **options})

    def refusals(self) -> int:
        return [request.status for request in self.server.log].count(403)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv(_TOKEN_FILE, str(tmp_path / "token"))
    shards = write_shards(tmp_path / "origin", [1] * SHARDS)
    with (
        ShardServer(tmp_path / "origin") as server,
        contextlib.closing(Place(tmp_path, server, shards)) as place,
    ):
        yield place


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"headers": headers}, "fork"),
        ({"sign": sign}, "fork"),
        pytest.param({"headers": headers}, "spawn", marks=pytest.mark.deep),
        pytest.param({"sign": sign}, "spawn", marks=pytest.mark.deep),
    ],
    ids=["headers", "sign", "headers spawn", "sign spawn"],
)
def test_a_training_goes_on_with_the_new_token_and_loses_no_sample(
    place: Place, options: dict[str, Any], method: str
) -> None:
    with place.loader(
        storage_options=options, num_workers=1, multiprocessing_context=method, on_error="raise"
    ) as loader:
        keys = sorted(key for _, _, origin in loader for key in origin["__key__"])
        assert loader.stats().shards_given_up == 0
    assert keys == place.keys
    assert place.refusals() > 0


@pytest.mark.parametrize("command", ["warm", "daemon"])
def test_a_command_reads_its_file_of_options_again(place: Place, command: str) -> None:
    tier = ["--cache-dir", str(place.tier), "--cache-size", "1GB"]
    more = ["--once", "--listen", "none", "--notices", "none"] if command == "daemon" else []
    done = run_forked([command, place.urls, *tier, "--storage-options", f"@{place.options_file}", *more])
    assert done.returncode == 0, done.stderr
    assert len(list((place.tier / "shards").iterdir())) == SHARDS
    assert place.refusals() > 0
    assert "token-" not in done.stdout + done.stderr


def test_a_task_on_another_node_reads_the_file_there_again(place: Place) -> None:
    settings = read_settings(shared_cache=str(place.path / "shared"))
    shared = SharedOptions.of(settings)
    assert shared is not None
    Objects(str(place.path / "shared")).write("probes/sign", b"one tier")
    job = Job(
        shared,
        "probes/sign",
        storage_options_of(f"@{place.options_file}"),
        cache_dir=str(place.tier),
        cache_size="1GB",
        origin=OriginOptions(outage_seconds=60),
    )
    assert "token-" not in repr(job)
    for url in expand_urls(place.urls):
        task = pickle.dumps((shard_of(url, None), None))
        assert "size" in bring(own_version(), pickle.dumps(job), task)
    assert place.refusals() > 0


def test_a_daemon_says_for_which_server_it_waits(place: Place) -> None:
    place.may_renew.clear()
    options = ServiceOptions(
        urls=(place.urls,),
        cache_dir=place.tier,
        cache_size="1GB",
        storage_options=storage_options_of(f"@{place.options_file}"),
        once=True,
        notices="none",
        listen="none",
    )
    reasons: dict[str, str] = {}

    def watch(service: Service) -> None:
        while not reasons:
            reasons.update(service.status().waiting_for)
            time.sleep(0.01)
        place.may_renew.set()

    with Service(options) as service:
        watcher = threading.Thread(target=watch, args=(service,), daemon=True)
        watcher.start()
        status = service.run()
        watcher.join()
    assert list(reasons) == [place.server.url]
    assert "403" in reasons[place.server.url]
    assert "token-" not in str(reasons)
    assert (status.held, status.failed, status.waiting_for) == (SHARDS, {}, {})


def test_functions_are_in_no_state_plan_or_text(place: Place) -> None:
    place.close()
    place.server.misbehave("*", Fault(requires="token-1"))
    states, keys = list[str](), list[Any]()
    for number, options in enumerate(({"headers": headers}, {"sign": sign}, {"headers": headers("")})):
        shards, cache = Shards(storage_options=options), place.path / str(number)
        with place.loader(storage_options=options, num_workers=0, seed=1, cache_dir=cache) as loader:
            batches = iter(loader)
            keys.append([next(batches)[2]["__key__"] for _ in range(3)])
            states.append(json.dumps(loader.state_dict()))
        plan = plan_of(
            [PlannedSource(SHARDS, OrderOptions(1, 1, 2, 100))], True, expand_urls(place.urls), options, ""
        )
        for text in (repr(shards), repr(loader), states[-1], repr(plan)):
            assert not any(word in text for word in ("function", "token-1", "headers", "sign"))
    assert keys == keys[:1] * 3
    facts = [
        json.loads(state) | {"at": None, "checksum": None} for state in states
    ]  # which has what had arrived, too
    assert facts == facts[:1] * 3


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # torch's, in front of the error
def test_a_function_that_cant_be_sent_to_workers_is_an_error_that_says_what_to_do(place: Place) -> None:
    loader = place.loader(
        storage_options={"headers": lambda url: {}}, num_workers=1, multiprocessing_context="spawn"
    )
    with pytest.raises(OptionError, match=r"storage_options= can't be sent .* at the top level of a module"):
        next(iter(loader))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headers": "Bearer hunter2"}, r"'headers'\] is str; expected a mapping"),
        ({"sign": "hunter2"}, r"'sign'\] is str; expected a function"),
    ],
)
def test_what_is_neither_a_function_nor_a_mapping_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        Shards(storage_options=options)
    assert "hunter2" not in str(caught.value)
