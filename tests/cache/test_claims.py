"""Room for shards that are claimed, needed sooner, and whose sizes aren't known yet."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from streamload.cache import budget
from streamload.cache.demand import DemandFile
from streamload.cache.fill import Filled, Outcome, fill
from streamload.cache.part import Part, reserved_bytes
from streamload.cache.shard import Shard, prepared_form
from streamload.cache.tier import Tier
from streamload.origins.origin import Origin, Stream, Version

A, B, C = (letter * 32 for letter in "abc")
SHARD_BYTES = 60 << 10


def tar_of(size_bytes: int) -> bytes:
    """A tar with one sample of this size."""
    packed, header = io.BytesIO(), tarfile.TarInfo("a.bin")
    header.size = size_bytes
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(header, io.BytesIO(bytes(size_bytes)))
    return packed.getvalue()


class Plan:
    """A tier with room for some shards, and a run that visits A, B and C."""

    def __init__(self, root: Path, shards: float):
        self.tier = Tier(root, int(shards * (SHARD_BYTES + (20 << 10))) + (20 << 10))
        self.run = DemandFile(self.tier.root / "runs")
        self.run.announce([A, B, C])

    def claim(self, digest: str) -> Part:
        part = self.tier.claim(digest)
        assert part is not None
        return part

    def publish(self, digest: str) -> None:
        part = self.claim(digest)
        assert part.reserve(SHARD_BYTES, 0)
        (part.path / "names").write_bytes(b"")
        (part.path / "data").write_bytes(os.urandom(SHARD_BYTES))
        part.publish()


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[Plan]:
    plan = Plan(tmp_path / "tier", 1)
    yield plan
    plan.run.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that waited for a claim would wait for ever."""
    monkeypatch.setattr(budget, "PATIENCE_SECONDS", 1e9)


@pytest.mark.usefixtures("patient")
def test_the_last_room_is_left_to_a_claim_that_is_needed_sooner(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    sooner, later = plan.claim(A), plan.claim(B)
    waits, sleep = threading.Event(), time.sleep
    granted: list[bool] = []

    def poll(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", poll)
    newcomer = threading.Thread(target=lambda: granted.append(later.reserve(SHARD_BYTES, 1)))
    newcomer.start()
    assert waits.wait(60)
    assert sooner.reserve(SHARD_BYTES, 0)
    newcomer.join(60)
    assert granted == [False]


class HeldBack(Origin):
    """An origin, and its stream, whose bytes come once `may_come` is set."""

    def __init__(self, data: bytes):
        self.url = "held:back"
        self.may_come = threading.Event()
        self._data = data

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        return cast(Stream, self)

    @property
    def version(self) -> Version:  # type: ignore[override]  # the stream's
        return Version(size=len(self._data) // 2, etag="1")

    def chunks(self) -> Iterator[bytes]:
        assert self.may_come.wait(60)
        yield self._data


@pytest.mark.usefixtures("patient")
def test_the_last_room_is_left_to_a_shard_that_is_prepared_and_needed_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, sleep, waits = Plan(tmp_path / "tier", 2.2), time.sleep, threading.Event()
    form = prepared_form(Shard("https://host/a.tar", "https://host/a.tar", A), "raw-32")
    part, origin = plan.claim(form.digest), HeldBack(tar_of(SHARD_BYTES))
    outcomes: list[Outcome] = []

    def make() -> None:
        outcomes.append(fill(part, form, lambda: origin, next_use=lambda: 0.0, stop=threading.Event()))

    maker = threading.Thread(target=make)
    maker.start()
    while not (part.path / "reserved").exists():
        sleep(0.01)
    later, granted = plan.claim(B), list[bool]()

    def poll(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", poll)
    newcomer = threading.Thread(target=lambda: granted.append(later.reserve(reserved_bytes(SHARD_BYTES), 1)))
    newcomer.start()
    is_held_up = waits.wait(20)
    origin.may_come.set()
    maker.join(60)
    newcomer.join(60)
    assert is_held_up
    assert [outcome.result for outcome in outcomes] == [Filled.PUBLISHED]
    assert granted == [False]
    plan.run.close()


@pytest.mark.usefixtures("patient")
def test_a_newcomer_goes_on_once_the_claim_takes_less_than_was_left_for_it(tmp_path: Path) -> None:
    plan = Plan(tmp_path / "tier", 1.6)
    sooner, later = plan.claim(A), plan.claim(B)
    granted: list[bool] = []
    newcomer = threading.Thread(target=lambda: granted.append(later.reserve(SHARD_BYTES, 1)))
    newcomer.start()
    assert sooner.reserve(1 << 10, 0)
    newcomer.join(60)
    assert granted == [True]
    plan.run.close()


def test_a_claim_that_never_learns_its_size_holds_up_nobody_for_good(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "PATIENCE_SECONDS", 0.05)
    sooner, later = plan.claim(A), plan.claim(B)
    while not later.reserve(SHARD_BYTES, 1):
        pass
    sooner.discard()


@pytest.mark.usefixtures("patient")
def test_a_claim_that_ends_leaves_its_room(plan: Plan) -> None:
    sooner, later = plan.claim(A), plan.claim(B)
    granted: list[bool] = []
    newcomer = threading.Thread(target=lambda: granted.append(later.reserve(SHARD_BYTES, 1)))
    newcomer.start()
    sooner.discard()
    newcomer.join(60)
    assert granted == [True]


@pytest.mark.usefixtures("patient")
def test_a_dead_fillers_claim_is_not_waited_for(plan: Plan) -> None:
    child = os.fork()
    if not child:
        plan.tier.claim(A)
        os._exit(0)
    os.waitpid(child, 0)
    assert plan.tier.parts(A)
    assert plan.claim(B).reserve(SHARD_BYTES, 1)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("order", [[B, A], [B], []], ids=["later", "by nobody", "no plan"])
def test_a_claim_that_is_not_needed_sooner_is_not_waited_for(plan: Plan, order: list[str]) -> None:
    plan.run.announce(order)
    plan.claim(A)
    assert plan.claim(B).reserve(SHARD_BYTES, 1)


@pytest.mark.usefixtures("patient")
def test_room_that_both_can_have_by_eviction_is_not_waited_for(tmp_path: Path) -> None:
    plan = Plan(tmp_path / "tier", 2)
    for digest in ("d" * 32, "e" * 32):
        plan.publish(digest)
    sooner, later = plan.claim(A), plan.claim(B)
    assert later.reserve(SHARD_BYTES, 1)
    assert len(list(plan.tier.own("shards"))) == 1, "only what the newcomer itself takes was evicted"
    assert sooner.reserve(SHARD_BYTES, 0)
    plan.run.close()


@pytest.mark.usefixtures("patient")
def test_a_shard_that_grows_has_its_place_already(plan: Plan) -> None:
    later = plan.claim(B)
    assert later.reserve(SHARD_BYTES // 2, 1)
    plan.claim(A)
    assert later.reserve(SHARD_BYTES, 1)


@pytest.mark.usefixtures("patient")
def test_without_room_for_the_newcomer_alone_it_is_refused_at_once(plan: Plan) -> None:
    first, _, later = plan.claim(C), plan.claim(A), plan.claim(B)
    plan.run.announce([C, A, B])
    assert first.reserve(SHARD_BYTES, 0)
    assert not later.reserve(SHARD_BYTES, 2)
