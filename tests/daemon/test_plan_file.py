"""Published plans: what comes next by them is what the loader reads next; all else is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.cache.shard import Shard, ShardList
from streamload.cache.shared.objects import Objects
from streamload.daemon import followed as followed_
from streamload.daemon import plan_file
from streamload.daemon.demand import PrefetchWindow, in_order
from streamload.daemon.followed import Coming, FollowedDemand
from streamload.daemon.options import parse_groups
from streamload.daemon.plan_file import (
    PlannedSource,
    PlanProgress,
    RunPlan,
    names_of,
    plan_of,
    runs_in,
)
from streamload.errors import OptionError, PlanError
from streamload.order.group import GroupOrder
from streamload.order.plan import OrderOptions
from streamload.urls import expand_urls

SHARDS = expand_urls("https://host/d/{000..029}.tar")
MORE = expand_urls("s3://bucket/{00..11}.tar")


def plan(groups: int = 2, *, one_pass: bool = False, two: bool = False, hints: Any = None) -> RunPlan:
    order = OrderOptions(7, groups, 3, 100, hints=hints)
    sources = [PlannedSource(len(SHARDS), order)]
    if two:
        sources.append(PlannedSource(len(MORE), OrderOptions(8, groups, 1, 50)))
    made, why = plan_of(sources, one_pass, SHARDS + MORE if two else SHARDS, None)
    assert not why
    return made


def follower(made: RunPlan, group: int, epoch: int, passes: int | None = None) -> GroupOrder:
    (source,) = made.sources
    return GroupOrder(source.order, source.count, group, epoch, passes=passes)


@pytest.mark.parametrize("hints", [None, np.arange(1, 31)])
@pytest.mark.parametrize("group", [0, 1])
def test_what_comes_by_the_plan_is_what_lanes_open_next(group: int, hints: Any) -> None:
    made = RunPlan.read(plan(hints=hints).run, plan(hints=hints).written())
    order, coming = follower(made, group, 3), Coming(made)
    for _ in range(40):
        progress = PlanProgress(group, 3, (order.front,))
        expected = list(dict.fromkeys(order.coming_shards(12).tolist()))
        assert coming.of(progress, len(expected)) == expected
        order.advance(ARRIVALS)


class Arrivals:
    def arrived(self, shard: int) -> tuple[np.ndarray[Any, Any], bool]:
        return np.arange(10), True


ARRIVALS: Any = Arrivals()


def test_an_epoch_of_one_pass_is_followed_by_the_next_one() -> None:
    made = plan(groups=1, one_pass=True)
    front = (0, len(SHARDS) - 2)
    rest = follower(made, 0, 4, 1).coming_shards(99).tolist()[-2:]
    after = [s for s in follower(made, 0, 5, 1).coming_shards(99).tolist() if s not in rest]
    assert Coming(made).of(PlanProgress(0, 4, (front,)), 99) == rest + after


def test_none_comes_twice_and_all_of_a_group_come() -> None:
    made = plan(two=True)
    found = [Coming(made).of(PlanProgress(group, 0, ((1, 9), (0, 3))), 10**6) for group in (0, 1)]
    assert all(len(set(shards)) == len(shards) for shards in found)
    assert set(found[0]) | set(found[1]) == set(range(len(SHARDS) + len(MORE)))


def test_a_source_comes_as_often_as_it_has_lanes() -> None:
    coming = Coming(plan(groups=1, two=True)).of(PlanProgress(0, 0, ((0, 0), (0, 0))), 12)
    assert sum(place >= len(SHARDS) for place in coming) == 3


def test_what_readers_fetch_themselves_is_left_to_them() -> None:
    made = plan()
    everything = Coming(made).of(PlanProgress(0, 0, ((0, 0),)), 9)
    assert Coming(made).of(PlanProgress(0, 0, ((0, 0),), ahead=4), 5) == everything[4:]


def test_the_progress_of_a_group_is_estimated_by_another_ones_share_of_its_shards() -> None:
    made = plan(hints=np.array([100] * 3 + [1] * 27))
    coming = Coming(made)
    sizes = {len(coming.of(PlanProgress(group, 0, ((0, 0),)), 10**6)): group for group in (0, 1)}
    small, large = sorted(sizes)
    for place in (0, large // 2, large):
        front = PlanProgress(sizes[large], 2, ((1, place),))
        estimated = coming.estimated(sizes[small], front)
        assert estimated == PlanProgress(sizes[small], 2, ((1, place * small // large),))


def test_groups_are_served_in_turn() -> None:
    assert in_order([[1, 2, 3], [4], [5, 1]]) == [1, 4, 5, 2, 3]


def test_the_same_run_has_the_same_name_on_all_nodes_and_another_one_another() -> None:
    assert plan().run == plan().run
    assert plan().written() == plan().written()
    others = [plan(groups=3), plan(one_pass=True), plan(two=True), plan(hints=np.ones(30, np.int64))]
    assert len({plan().run, *(other.run for other in others)}) == 5


def prepared_plan(prepare: str) -> RunPlan:
    made, _ = plan_of([PlannedSource(30, OrderOptions(7, 2, 3, 100))], False, SHARDS, None, prepare)
    return made


def test_a_run_on_prepared_images_is_another_and_says_by_which_recipe() -> None:
    assert prepared_plan("") == plan()
    made = prepared_plan("raw-256")
    assert len({plan().run, made.run, prepared_plan("raw-224").run}) == 3
    assert RunPlan.read(made.run, made.written()).prepare == "raw-256"
    assert RunPlan.read(plan().run, plan().written()).prepare == ""
    for name in ("", "raw-256-v1-torch2.9.1-pillow12.0.0-simplejpeg1.8.2-0123abcd"):
        progress = PlanProgress(1, 3, ((0, 4),), prepared=name)
        assert PlanProgress.read(made, 1, progress.written()) == progress


def test_a_signature_doesnt_make_another_run_and_isnt_told() -> None:
    signed = expand_urls("https://host/d/{000..029}.tar?X-Amz-Signature=SECRET&X-Amz-Date=1")
    sources = [PlannedSource(30, OrderOptions(7, 2, 3, 100))]
    made, why = plan_of(sources, False, signed, None)
    assert (made.run, why) == (plan().run, "")
    assert b"SECRET" not in made.written()


@pytest.mark.parametrize(
    "pattern", ["/data/{000..029}.tar", "https://host/{000..029}.tar?key=SECRET", "pipe:cat {000..029}.tar"]
)
def test_what_cant_be_told_is_left_out_of_the_plan(pattern: str) -> None:
    made, why = plan_of([PlannedSource(30, OrderOptions(7, 2, 3, 100))], False, expand_urls(pattern), None)
    assert why
    assert b"SECRET" not in made.written()
    assert RunPlan.read(made.run, made.written()).shards is None
    assert made.names == names_of(expand_urls(pattern), None)


def test_progress_survives_being_written() -> None:
    made = plan(two=True)
    progress = PlanProgress(1, 3, ((0, 4), (2, 1)), 2, 1000.0, 0.25, 9)
    assert PlanProgress.read(made, 1, progress.written()) == progress
    assert len(progress.written()) < 400


PLAN = json.loads(plan().written())
PREPARED = json.loads(prepared_plan("raw-256").written())
PROGRESS = json.loads(PlanProgress(0, 0, ((0, 0),)).written())


def changed(value: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**value, **changes}).encode()


def source(**changes: Any) -> list[Any]:
    return [{**PLAN["sources"][0], **changes}]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"7",
        b"[" * 100_000,
        plan().written()[:-9],
        changed(PLAN, format=2),
        changed(PLAN, format="1"),
        changed(PLAN, names="x"),
        changed(PLAN, names=PLAN["names"][::-1]),
        changed(PLAN, prepare="raw-256"),
        changed(PREPARED, prepare="raw-257"),
        changed(PLAN, prepare=""),
        changed(PLAN, prepare=None),
        changed(PLAN, prepare=256),
        changed(PLAN, prepare="../../etc"),
        changed(PLAN, prepare="raw-256\n"),
        changed(PLAN, prepare=100_000 * "a"),
        changed(PLAN, one_pass=1),
        changed(PLAN, sources=[]),
        changed(PLAN, sources=7),
        changed(PLAN, sources=source(count=10**12)),
        changed(PLAN, sources=source(count=29)),
        changed(PLAN, sources=source(count=True)),
        changed(PLAN, sources=source(groups=0)),
        changed(PLAN, sources=source(groups=10**9)),
        changed(PLAN, sources=source(lanes=0)),
        changed(PLAN, sources=source(window=-1)),
        changed(PLAN, sources=source(seed=10**99)),
        changed(PLAN, sources=source(seed=8)),
        changed(PLAN, sources=source(hints=[1])),
        changed(PLAN, sources=source(hints=[-1] * 30)),
        changed(PLAN, shards=["pipe:cat /etc/passwd"] * 30),
        changed(PLAN, shards=["/etc/passwd"] * 30),
        changed(PLAN, shards=[["https://host/", 0, 31, 1, 3, ".tar"]]),
        json.dumps({k: v for k, v in PLAN.items() if k != "shards"}).encode(),
    ],
    ids=range(35),
)
def test_a_plan_that_is_cut_forged_or_of_another_version_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match=plan().run):
        RunPlan.read(plan().run, data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        PlanProgress(0, 0, ((0, 0),)).written()[:-5],
        changed(PROGRESS, format=2),
        changed(PROGRESS, group=1),
        changed(PROGRESS, fronts=[]),
        changed(PROGRESS, fronts=[[0, 0], [0, 0]]),
        changed(PROGRESS, fronts=[[0]]),
        changed(PROGRESS, fronts=[[0, -1]]),
        changed(PROGRESS, epoch=-1),
        changed(PROGRESS, ahead="many"),
        changed(PROGRESS, prepared=None),
        changed(PROGRESS, prepared="raw-256/../x"),
        changed(PROGRESS, prepared=201 * "a"),
        changed(PROGRESS, mean_bytes=float("nan")),
        changed(PROGRESS, shards_per_second=float("inf")),
    ],
    ids=range(16),
)
def test_progress_that_is_cut_forged_or_of_another_version_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="group 0"):
        PlanProgress.read(plan(), 0, data)


@given(st.integers(0, 2**53), st.integers(0, 2**53), st.integers(0, 2**53), st.integers(0, 2**53))
def test_whatever_place_is_told_is_one_of_the_order(epoch: int, pass_: int, place: int, ahead: int) -> None:
    found = Coming(plan()).of(PlanProgress(1, epoch, ((pass_, place),), ahead), 20)
    assert set(found) <= set(range(len(SHARDS)))


def test_a_list_too_long_to_be_read_is_published_without_its_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_file.PLAN_LIMIT_BYTES <= 8 << 20
    monkeypatch.setattr(plan_file, "PLAN_LIMIT_BYTES", 2_000)
    many = expand_urls([f"https://host/{name:040x}.tar" for name in range(50)])
    sources = [PlannedSource(len(many), OrderOptions(7, 2, 3, 100))]
    made, why = plan_of(sources, False, many, None)
    assert "2,000 are read" in why
    assert made.shards is None
    monkeypatch.undo()
    assert plan_of(sources, False, many, None)[0].run == made.run


def follow(tmp_path: Path) -> tuple[Objects, FollowedDemand]:
    objects = Objects(str(tmp_path / "shared"))
    objects.write(f"runs/{plan().run}/group-0.json", PlanProgress(0, 0, ((0, 0),)).written())
    return objects, FollowedDemand(objects, None, PrefetchWindow(size_bytes=1 << 40))


def test_a_plan_that_is_refused_is_looked_into_again_only_when_it_holds_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    objects, followed = follow(tmp_path)
    read: list[bytes] = []

    def reads(run: str, data: bytes) -> RunPlan:
        read.append(data)
        return RunPlan.read(run, data)

    monkeypatch.setattr(followed_, "RunPlan", SimpleNamespace(read=reads))
    name = f"runs/{plan().run}/plan.json"
    for bad in (b"{", b"[" * 5_000):
        objects.write(name, bad)
        for _ in range(3):
            assert followed.look(lambda shard: 1.0) == []
            assert "isn't JSON" in followed.describe()
    assert read == [b"{", b"[" * 5_000]
    assert len(caplog.records) == 2
    objects.write(name, plan().written())
    assert len(followed.look(lambda shard: 1.0)) > 0


def test_a_plan_larger_than_any_honest_one_is_refused_and_the_others_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, followed = follow(tmp_path)
    other = prepared_plan("")
    monkeypatch.setattr(followed_, "PLAN_LIMIT_BYTES", 10_000)
    objects.write(f"runs/{'0' * 16}/plan.json", b" " * 10_001)
    objects.write(f"runs/{other.run}/plan.json", other.written())
    followed = FollowedDemand(objects, None, PrefetchWindow(size_bytes=1 << 40), names=["0" * 16, other.run])
    assert len(followed.look(lambda shard: 1.0)) > 0
    assert "more than 10,000 bytes" in followed.describe()


def test_progress_that_is_refused_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    objects, followed = follow(tmp_path)
    objects.write(f"runs/{plan().run}/plan.json", plan().written())
    objects.write(f"runs/{plan().run}/group-0.json", b"{")
    for _ in range(3):
        assert followed.look(lambda shard: 1.0) == []
    assert len(caplog.records) == 1


def test_runs_are_found_by_the_names_of_their_files() -> None:
    names = [
        "runs/0123456789abcdef/plan.json",
        "runs/0123456789abcdef/group-0.json",
        "runs/0123456789abcdef/group-12.json",
        "runs/0123456789abcdef/group-01.json",
        "runs/0123456789abcdee/group-0.json",
        "runs/else/plan.json",
        "runs/0123456789abcdef/other",
    ]
    assert runs_in(names) == {"0123456789abcdef": [0, 12]}


def publish_groups(
    objects: Objects, groups: int, shards: int, places: Sequence[int], seed: int = 7
) -> RunPlan:
    """The files of a run whose groups are at these places of their first pass."""
    listed = expand_urls(f"https://host/{{000000..{shards - 1:06d}}}.tar")
    made, _ = plan_of([PlannedSource(shards, OrderOptions(seed, groups, 4, 100))], False, listed, None)
    objects.write(f"runs/{made.run}/plan.json", made.written())
    for group, place in zip(range(groups), places, strict=True):
        progress = PlanProgress(group, 0, ((0, place),), 3, 1e6)
        objects.write(f"runs/{made.run}/{progress.name}", progress.written())
    return made


class Asked(Objects):
    """Notes what it is asked for."""

    def __init__(self, url: str):
        super().__init__(url)
        self.read_names: list[str] = []
        self.lists = 0

    def read(self, name: str, limit_bytes: int = 1 << 20) -> bytes | None:
        self.read_names.append(name)
        return super().read(name, limit_bytes)

    def times(self, folder: str = "") -> dict[str, float | None]:
        self.lists += 1
        return super().times(folder)

    def modified(self, name: str) -> float | None:
        raise AssertionError(f"asked for the time of {name}")


@pytest.mark.parametrize(
    ("groups", "shards"), [(40, 4_000), pytest.param(1_000, 100_000, marks=pytest.mark.deep)]
)
def test_a_look_asks_for_a_list_and_two_groups_and_makes_only_the_shards_of_the_window(
    groups: int, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = Asked(str(tmp_path))
    made = publish_groups(objects, groups, shards, [10] * groups)
    shards_made: list[int] = []
    make = ShardList.__getitem__

    def noted(self: ShardList, place: int) -> Shard:
        shards_made.append(place)
        return make(self, place)

    monkeypatch.setattr(ShardList, "__getitem__", noted)
    followed = FollowedDemand(objects, None, PrefetchWindow(size_bytes=(groups + 5) * 1_000_000))
    tasks: list[Shard] = []
    for look in range(3):
        objects.read_names.clear()
        objects.lists = 0
        shards_made.clear()
        tasks = followed.look(lambda shard: 1e6)
        assert objects.lists == 1
        assert len(objects.read_names) == (3 if look == 0 else 2)  # first the plan, too
        assert len(shards_made) == len(tasks) + 1 == groups + 6
    coming, listed = Coming(made), ShardList(made.shards or expand_urls("x.tar"), None)
    exact = [coming.of(PlanProgress(group, 0, ((0, 10),), 3), 2) for group in range(groups)]
    assert tasks == [listed[k] for k in in_order(exact)[: groups + 5]]


def test_what_a_group_reads_is_read_in_turn_and_estimated_meanwhile(tmp_path: Path) -> None:
    groups, shards = 8, 800
    objects = Asked(str(tmp_path))
    made = publish_groups(objects, groups, shards, [10] * groups)
    followed = FollowedDemand(objects, None, PrefetchWindow(size_bytes=groups * 1_000_000))
    for _ in range(groups // 2):
        followed.look(lambda shard: 1e6)
    progress_files = {name for name in objects.read_names if "group-" in name}
    assert len(progress_files) == groups == len(objects.read_names) - 1
    followed.look(lambda shard: 1e6)
    assert len(objects.read_names) == groups + 1  # none has changed
    newer = PlanProgress(5, 0, ((0, 50),), 3, 1e6)
    objects.write(f"runs/{made.run}/{newer.name}", newer.written())
    for group in range(groups):  # the others were written long before
        path = tmp_path / "runs" / made.run / f"group-{group}.json"
        moment = path.stat().st_mtime - (0 if group == 5 else 60)
        os.utime(path, (moment, moment))
    followed = FollowedDemand(objects, None, PrefetchWindow(size_bytes=groups * 1_000_000))
    for _ in range(groups // 2):
        tasks = followed.look(lambda shard: 1e6)
    coming, listed = Coming(made), ShardList(made.shards or expand_urls("x.tar"), None)
    expected = [coming.of(PlanProgress(group, 0, ((0, 50),), 3), 1)[0] for group in range(groups)]
    assert tasks == [listed[k] for k in expected]


def test_the_newest_of_several_runs_is_followed_which_is_said_and_files_of_old_ones_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    objects = Asked(str(tmp_path))
    runs = [publish_groups(objects, 2, 40, [0, 0], seed).run for seed in (1, 2, 3)]
    for run, days in zip(runs, (8, 6, 0), strict=True):
        for path in (tmp_path / "runs" / run).iterdir():
            moment = path.stat().st_mtime - 86400 * days
            os.utime(path, (moment, moment))
    followed = FollowedDemand(objects, None, PrefetchWindow(size_bytes=1 << 40))
    for _ in range(2):
        assert len(followed.look(lambda shard: 1.0)) == 40 - 2 * 3  # those that readers fetch themselves
        assert runs[2] in followed.describe()
    (record,) = caplog.records
    assert f"the one whose files are newest is followed: {runs[2]}" in record.getMessage()
    assert set(runs_in(objects.times("runs"))) == set(runs[1:])
    kept = FollowedDemand(objects, None, PrefetchWindow(size_bytes=1 << 40), names=[runs[1]])
    assert len(kept.look(lambda shard: 1.0)) == 40 - 2 * 3


def test_daemons_with_a_share_of_the_groups_each_bring_all_shards_between_them(tmp_path: Path) -> None:
    objects = Objects(str(tmp_path))
    made = publish_groups(objects, 5, 60, [0] * 5)
    by_daemon = []
    for ordinal in range(3):
        shares = [parse_groups(f"{ordinal}/3")]
        followed = FollowedDemand(objects, None, PrefetchWindow(size_bytes=1 << 40), groups=shares)
        for _ in range(2):  # two files of progress are read in a look
            tasks = followed.look(lambda shard: 1.0)
        by_daemon.append({shard.url for shard in tasks})
    coming, listed = Coming(made), ShardList(made.shards or expand_urls("x.tar"), None)
    by_group = [coming.of(PlanProgress(group, 0, ((0, 0),), 3), 60) for group in range(5)]
    expected = [
        {listed[k].url for group in range(first, 5, 3) for k in by_group[group]} for first in range(3)
    ]
    assert by_daemon == expected
    assert list(parse_groups("4")) == [4]


@pytest.mark.parametrize("text", ["", "-1", "3/3", "1/0", "a", "1/2/3", "1/", "/2", "1.5"])
def test_what_is_no_group_and_no_share_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="neither a group"):
        parse_groups(text)
