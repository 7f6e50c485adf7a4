"""Leases: one of many works on a task, what the dead had is taken over, and no clock is believed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from streamload.cache.shared import folder as folder_module
from streamload.cache.shared.leases import DAEMONS, Leases, holder_of, leased, second
from streamload.cache.shared.objects import Objects
from streamload.errors import SharedTierError
from streamload.options import FileSystem
from streamload.topology import RunAttempt
from tests.support.kills import Child, Stage
from tests.support.s3 import S3Server

Make = Callable[..., Leases]


@pytest.fixture(params=["folder", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Objects]:
    if request.param == "folder":
        yield Objects(str(tmp_path / "shared"))
        return
    with S3Server() as server:
        server.create_bucket("bucket")
        yield Objects("s3://bucket/shared", server.storage_options)


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def made(objects: Objects, lease_seconds: float = 3600.0, **options: Any) -> Leases:
            return stack.enter_context(closing(Leases(objects, lease_seconds=lease_seconds, **options)))

        yield made


def unavailable(*_: object) -> float:
    raise SharedTierError("the store doesn't tell")


def leave_lease(objects: Objects, seconds_ago: float = 0.0, beat: int = 1, **facts: Any) -> None:
    """Leave the lease of a task as a process of another machine did that died so long ago."""
    lease = {"format": 1, "holder": "ab" * 8, "beat": beat, "address": f"{'0' * 32}.5.5", **facts}
    objects.write("leases/task.json", json.dumps(lease).encode())
    if seconds_ago:
        moment = time.time() - seconds_ago
        os.utime(objects.target("leases/task.json"), (moment, moment))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_unit_has_one_holder_until_it_is_given_back(objects: Objects, make: Make) -> None:
    one, other = make(objects), make(objects)
    assert one.take("task")
    assert one.take("task")
    assert not other.take("task")
    assert other.busy() == {"task"}
    assert one.busy() == set()
    one.release("task")
    assert other.take("task")
    assert objects.names("leases") == ["leases/task.json"]


def test_a_heartbeat_that_is_on_its_way_replaces_no_lease_of_the_next_holder(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = Objects(str(tmp_path / "shared"))
    one, other = make(objects, first_beat_seconds=0.01), make(Objects(str(tmp_path / "shared")))
    write, release = objects.write, threading.Thread(target=one.release, args=("task",))

    def write_late(name: str, data: bytes) -> None:
        release.start()
        release.join(0.2)  # it may have to wait for this heartbeat
        other.take("task")
        write(name, data)

    monkeypatch.setattr(objects, "write", write_late)
    assert one.take("task")
    until(lambda: release.ident is not None)
    release.join()
    one.close()
    assert other.take("task")
    assert holder_of(objects.read("leases/task.json") or b"") == other.holder


def test_a_later_attempt_of_a_run_has_the_leases_of_an_earlier_one_at_once(
    objects: Objects, make: Make
) -> None:
    first = RunAttempt.launched("data", {})
    dead, again = make(objects, attempt=first), make(objects, attempt=first.next({}))
    assert dead.take("task")
    assert not again.is_held("task")
    assert again.take("task")
    assert again.taken_over == 1
    assert dead.is_held("task")
    assert not dead.take("another") or not again.is_held("another")


@pytest.mark.parametrize(
    "attempt", [None, RunAttempt("1" * 16, 1), RunAttempt("1" * 16, 2), RunAttempt.launched("data", {})]
)
def test_no_other_attempt_has_them_before_they_expire_fails(
    attempt: RunAttempt | None, tmp_path: Path, make: Make
) -> None:
    objects = Objects(str(tmp_path / "shared"))
    assert make(objects, attempt=RunAttempt("1" * 16, 2)).take("task")
    assert not make(objects, attempt=attempt).take("task")


def test_a_heartbeat_has_the_progress_and_comes_soon_at_first(tmp_path: Path, make: Make) -> None:
    objects = Objects(str(tmp_path / "shared"))
    holder, other = (
        make(objects, address="a.1.2", first_beat_seconds=0.05, tells_progress=True),
        make(objects),
    )
    assert holder.take("task")
    seen = other.holder_at("task")
    assert seen is not None
    assert (seen.address, seen.arrived, seen.size) == ("a.1.2", 0, 0)
    holder.progress("task", 300, 1000)
    until(lambda: (now := other.holder_at("task")) is not None and (now.arrived, now.size) == (300, 1000))
    assert other.holder_at("nothing") is None


def test_a_daemon_tells_when_it_sends_its_next_heartbeat_but_no_progress(folder: Objects, make: Make) -> None:
    holder, other = make(folder, address="a.1.2", first_beat_seconds=60.0, attempt=DAEMONS), make(folder)
    assert holder.take("task")
    holder.progress("task", 5, 100)
    assert json.loads(folder.read("leases/task.json") or b"")["due"] == 60.0
    seen = other.holder_at("task")
    assert seen is not None
    assert (seen.arrived, seen.size, seen.progress_seconds) == (0, 0, 0.0)


def test_a_holder_learns_that_it_was_overtaken(tmp_path: Path, make: Make) -> None:
    objects = Objects(str(tmp_path / "shared"))
    holder, faster = make(objects, first_beat_seconds=0.05, tells_progress=True), make(objects)
    assert holder.take("task")
    assert holder.overtaken_at is None
    assert faster.take(second("task"))
    until(lambda: holder.overtaken_at is not None)


@pytest.mark.parametrize("value", [-1, "5", True, float("nan"), float("inf"), [], None])
def test_a_lease_with_impossible_numbers_is_one_without(value: object, tmp_path: Path, make: Make) -> None:
    objects = Objects(str(tmp_path / "shared"))
    names = ("seconds", "due", "bytes", "size", "run", "attempt", "host")
    content = {"format": 1, "holder": "ab" * 8, **dict.fromkeys(names, value)}
    objects.write("leases/task.json", json.dumps(content).encode())
    seen = make(objects, attempt=RunAttempt.launched("data", {})).holder_at("task")
    assert seen is not None
    assert seen.host == ("5" if value == "5" else "")
    assert (seen.arrived, seen.size, seen.progress_seconds) == (0, 0, 0.0)


class Stuttering(MemoryFileSystem):
    """A store that does what it is asked for, while its answer is lost: sent again, it finds what it did."""

    protocol = "stuttering"
    answer: OSError

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        super().pipe_file(path, value, mode=mode, **more)
        if "leases/" in path:
            raise self.answer


def test_a_lease_is_taken_where_only_the_answer_was_lost(make: Make) -> None:
    fsspec.register_implementation("stuttering", Stuttering, clobber=True)
    objects = Objects("stuttering://tier")
    one, other = make(objects), make(objects)
    Stuttering.answer = FileExistsError("it is there")
    assert one.take("a")
    Stuttering.answer = TimeoutError("no answer")
    with pytest.raises(SharedTierError):
        one.take("b")
    assert one.take("b")
    assert one.held() == {"a", "b"}
    assert one.taken_over == 0
    assert not other.take("a")
    assert not other.take("b")


def test_closing_gives_all_back(objects: Objects) -> None:
    leases = Leases(objects)
    assert leases.take("a")
    assert leases.take("b")
    leases.close()
    assert objects.names("leases") == []


def test_of_many_who_take_at_once_one_has_it(tmp_path: Path, make: Make) -> None:
    objects = Objects(str(tmp_path / "shared"))
    many = [make(objects) for _ in range(8)]
    gate, won = threading.Barrier(8), []

    def take(leases: Leases) -> None:
        gate.wait()
        won.append(leases.take("task"))

    threads = [threading.Thread(target=take, args=(leases,)) for leases in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Objects:
    return Objects(str(tmp_path / "shared"))


def test_a_dead_holders_lease_is_taken_over_when_it_stood_still(folder: Objects, make: Make) -> None:
    def die(stage: Stage) -> None:
        Leases(folder).take("task")
        os._exit(0)

    with Child(die) as child:
        child.join(30)
    heir = make(folder, lease_seconds=0.3)
    assert not heir.take("task")
    until(lambda: heir.take("task"))
    assert heir.taken_over == 1


def test_of_many_who_see_a_holder_gone_at_once_one_has_what_it_held(folder: Objects) -> None:
    lease = {"format": 1, "holder": "ab" * 8, "beat": 1, "address": "here.1"}
    folder.write("leases/task.json", json.dumps(lease).encode())
    gate, won = threading.Barrier(8), []

    def take(leases: Leases) -> None:
        gate.wait()
        won.append(leases.take("task"))

    with ExitStack() as stack:
        many = [
            stack.enter_context(
                closing(Leases(folder, has_gone=lambda address: address == "here.1", settle_seconds=1.0))
            )
            for _ in range(8)
        ]
        threads = [threading.Thread(target=take, args=(leases,)) for leases in many]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(won) == 1


def test_a_living_holder_keeps_what_it_has(folder: Objects, make: Make) -> None:
    holder, other = make(folder, lease_seconds=0.2), make(folder, lease_seconds=2.0)
    assert holder.take("task")
    contents = set()

    def look() -> bool:
        assert not other.take("task")
        contents.add(folder.read("leases/task.json"))
        return len(contents) >= 8  # it has shown life so often

    until(look)


@pytest.mark.parametrize("hours_off", [-1, 1])
def test_the_times_of_nodes_dont_matter(
    objects: Objects, make: Make, monkeypatch: pytest.MonkeyPatch, hours_off: int
) -> None:
    time_of_day = time.time
    holder = make(objects)
    assert holder.take("task")
    monkeypatch.setattr(time, "time", lambda: time_of_day() + 3600 * hours_off)
    assert not make(objects, lease_seconds=600.0).take("task")
    assert holder.take("another")
    monkeypatch.undo()
    assert not make(objects, lease_seconds=600.0).take("another")


def test_a_newcomer_takes_what_has_stood_still_by_the_stores_own_times(objects: Objects, make: Make) -> None:
    leave_lease(objects)
    heirs = []

    def look() -> bool:  # each of them for the first time
        time.sleep(0.2)
        heirs.append(make(objects, lease_seconds=0.2))
        return heirs[-1].take("task")

    until(look)
    assert heirs[-1].taken_over == 1
    assert objects.names() == ["leases/task.json"]


def test_a_newcomer_watches_only_as_long_as_the_store_cant_tell(folder: Objects, make: Make) -> None:
    leave_lease(folder, seconds_ago=4000.0)
    time_now = 0.0
    newcomer = make(folder, lease_seconds=6000.0, clock=lambda: time_now)  # all but 3000 s of that count
    assert not newcomer.take("task")
    time_now = 4500.0
    assert not newcomer.take("task")
    time_now = 5001.0
    assert newcomer.take("task")


def test_who_shows_life_is_watched_again_for_the_whole_time(folder: Objects, make: Make) -> None:
    leave_lease(folder, seconds_ago=4000.0)
    time_now = 0.0
    newcomer = make(folder, lease_seconds=3000.0, clock=lambda: time_now)
    assert not newcomer.take("task")
    leave_lease(folder, seconds_ago=9000.0, beat=2)
    assert not newcomer.take("task")
    time_now = 2999.0
    assert not newcomer.take("task")
    time_now = 3001.0
    assert newcomer.take("task")


def test_within_a_run_the_store_is_asked_when_a_heartbeat_is_late(folder: Objects, make: Make) -> None:
    leave_lease(folder, seconds_ago=3600.0, run="1" * 16, attempt=2, due=4.0)
    time_now = 0.0
    restarted = make(folder, lease_seconds=30.0, attempt=RunAttempt("1" * 16, 2), clock=lambda: time_now)
    assert not restarted.take("task")
    assert not restarted.take("task")
    time_now = 7.0
    assert not restarted.is_held("task")
    assert restarted.take("task")


def test_within_a_run_a_missing_heartbeat_is_enough_and_the_node_is_named(
    folder: Objects, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    time_now = 0.0
    own, other = (
        make(folder, lease_seconds=30.0, address=f"{'1' * 32}.7.7", attempt=attempt, clock=lambda: time_now)
        for attempt in (RunAttempt("1" * 16, 2), RunAttempt("2" * 16, 9))
    )
    for beat in (1, 2):
        leave_lease(folder, beat=beat, run="1" * 16, attempt=2, due=4.0, host="node-7")
        assert not own.take("task")
        assert not other.take("task")
        time_now += 9.9
        assert not own.take("task")
    time_now += 0.2
    assert not other.take("task")
    assert own.take("task")
    assert "node-7 has died" in caplog.text


@pytest.mark.parametrize("attempt", [None, DAEMONS, RunAttempt("1" * 16, 2)])
@pytest.mark.parametrize(("due", "silent"), [(7.5, 14.125), (1.0, 10.0)])
def test_a_daemon_without_heartbeats_is_waited_for_by_nobody(
    due: float, silent: float, attempt: RunAttempt | None, folder: Objects, make: Make
) -> None:
    time_now = 0.0
    other = make(folder, lease_seconds=60.0, attempt=attempt, clock=lambda: time_now)
    leave_lease(folder, due=due, **DAEMONS._asdict())
    assert not other.take("task")
    time_now = silent - 0.1
    assert not other.take("task")
    time_now = silent + 0.1
    assert other.take("task")


def test_who_holds_many_leases_says_that_each_is_renewed_less_often(folder: Objects, make: Make) -> None:
    time_now = 0.0
    holder = make(
        folder, lease_seconds=60.0, first_beat_seconds=1.0, beat_seconds=5.0, clock=lambda: time_now
    )
    for number in range(100):
        assert holder.take(f"task-{number}")
    intervals = set()
    for _ in range(8):
        time_now += 60.0
        assert len(holder._due()) == 100
        intervals.add(holder._mine["task-7"].interval)
    assert max(intervals) == 20.0


@pytest.mark.parametrize("reason", ["its writers' times", "none", "read-only"])
def test_without_times_of_the_stores_own_a_lease_is_watched(
    reason: str, folder: Objects, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_lease(folder, seconds_ago=3600.0)
    if reason == "its writers' times":
        monkeypatch.setattr(folder_module, "file_system", lambda path: FileSystem("/", "lustre"))
    elif reason == "none":
        monkeypatch.setattr(folder, "modified", unavailable)
    else:
        monkeypatch.setattr(folder_module.SharedFolder, "now", unavailable)
    assert not make(folder, lease_seconds=30.0).take("task")


def test_who_writes_nothing_there_asks_nothing_fails(
    folder: Objects, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_lease(folder, seconds_ago=3600.0)
    monkeypatch.setattr(folder_module.SharedFolder, "now", lambda self: pytest.fail("it wrote"))
    assert make(folder, lease_seconds=30.0).is_held("task")


def test_who_was_stopped_and_goes_on_leaves_the_lease_to_its_heir(folder: Objects, make: Make) -> None:
    holder = make(folder, lease_seconds=0.2)
    assert holder.take("task")
    heir = json.dumps({"format": 1, "holder": "ab" * 8, "beat": 1}).encode()

    def is_lost() -> bool:
        folder.write("leases/task.json", heir)  # as it is after a long SIGSTOP of the holder
        return not holder.held()  # a heartbeat that was under way may have written over it

    until(is_lost)
    assert holder.lost == 1
    holder.release("task")
    assert folder.read("leases/task.json") == heir


def test_who_is_known_to_have_gone_isnt_waited_for(folder: Objects, make: Make) -> None:
    lease = {"format": 1, "holder": "ab" * 8, "beat": 1, "address": "here.1"}
    folder.write("leases/task.json", json.dumps(lease).encode())
    folder.write("leases/other.json", json.dumps({**lease, "address": "there.1"}).encode())
    with closing(Leases(folder, has_gone=lambda address: address == "here.1")) as heir:
        assert heir.take("task")
        assert not heir.take("other")
        assert heir.taken_over == 1


@pytest.mark.parametrize("content", [b"", b"{", b"7", b'{"holder": 7}', b'{"holder": "../x"}', b"\xff" * 99])
def test_a_forged_lease_expires_like_any_other(folder: Objects, make: Make, content: bytes) -> None:
    folder.write("leases/task.json", content)
    assert holder_of(content) == ""
    leases = make(folder, lease_seconds=0.2)
    assert not leases.take("task")
    until(lambda: leases.take("task"))


def test_what_the_dead_left_where_nothing_is_to_do_is_removed(folder: Objects, make: Make) -> None:
    for task in ("dead", "alive"):
        folder.write(f"leases/{task}.json", b"a holder's")
    leases = make(folder, lease_seconds=0.2)

    def look() -> bool:
        folder.write("leases/alive.json", time.monotonic_ns().to_bytes(8, "little"))
        leases.tidy(leases.busy())
        return folder.names("leases") == ["leases/alive.json"]

    until(look)


def test_a_unit_whose_name_could_lead_elsewhere_is_refused(folder: Objects, make: Make) -> None:
    for name in ("", "a/b", "../a", "a b", 300 * "a"):
        with pytest.raises(ValueError, match="name of a task"):
            make(folder).take(name)


def test_a_store_that_takes_nothing_is_one_typed_error(tmp_path: Path, make: Make) -> None:
    (tmp_path / "shared").write_text("a file where the folder should be")
    leases = make(Objects(str(tmp_path / "shared")))
    with pytest.raises(SharedTierError):
        leases.take("task")


def test_foreign_names_are_no_leases() -> None:
    names = ["leases/ab.json", "leases/ab.txt", "leases/x/y.json", "other/ab.json"]
    assert leased(names) == ["ab"]
