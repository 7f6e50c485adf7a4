"""How much memory is free: of the machine, of each container around the process, of the tmpfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamload.cache import memory
from streamload.cache.memory import free_memory, taken_ratio
from tests.support.disks import small_disk, why_no_small_disk
from tests.support.kills import Child

GB = 10**9
UNLIMITED = "9223372036854771712"  # what version 1 has for "no limit"


def a_machine(root: Path, memberships: str, mounts: str, available_bytes: int = 64 * GB) -> Path:
    """The files of a machine by which a process learns its limits, in a directory."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_bytes // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(memberships)
    (root / "proc/self/mountinfo").write_text(mounts)
    return root


def a_cgroup(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / f"memory.{name}").write_text(f"{content}\n")


def v2(root: Path, own: str = "/job/step", shown: str = "/", **options: int) -> Path:
    mounts = f"30 23 0:26 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    return a_machine(root, f"0::{own}\n", mounts, **options)


def found(root: Path) -> tuple[int, str]:
    free_bytes, bound = (
        free_memory(Path("/dev/shm"), root).free_bytes,
        free_memory(Path("/dev/shm"), root).bound,
    )
    return free_bytes, bound


@pytest.fixture(autouse=True)
def a_large_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tmpfs of the machine that runs the tests must not be what bounds them."""
    usage = memory.shutil.disk_usage
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000 * GB))


def test_without_a_container_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert found(v2(tmp_path)) == (64 * GB // 1024 * 1024, "memory")


def test_the_tightest_cgroup_up_the_path_sets_the_bound(tmp_path: Path) -> None:
    top = v2(tmp_path) / "sys/fs/cgroup"
    a_cgroup(top / "job/step", max="max", high="max", current=2 * GB)
    a_cgroup(top / "job", max=8 * GB, high="max", current=3 * GB)
    a_cgroup(top / "another", max=1, high=1, current=1)
    assert found(tmp_path) == (5 * GB, "the container's memory (/sys/fs/cgroup/job/memory.max)")
    a_cgroup(top / "job/step", max=3 * GB)
    assert found(tmp_path) == (GB, "the container's memory (/sys/fs/cgroup/job/step/memory.max)")


def test_memory_high_counts_as_it_slows_down_whoever_is_beyond(tmp_path: Path) -> None:
    a_cgroup(v2(tmp_path) / "sys/fs/cgroup/job/step", max=8 * GB, high=4 * GB, current=3 * GB)
    assert found(tmp_path) == (GB, "the container's memory (/sys/fs/cgroup/job/step/memory.high)")


def test_pages_of_files_that_nobody_used_lately_are_free(tmp_path: Path) -> None:
    a_cgroup(v2(tmp_path) / "sys/fs/cgroup/job/step", max=8 * GB, high="max", current=7 * GB)
    stat = f"anon {4 * GB}\ninactive_file {2 * GB}\nactive_file {GB}"
    a_cgroup(tmp_path / "sys/fs/cgroup/job/step", stat=stat)
    assert found(tmp_path)[0] == 3 * GB


def test_what_is_taken_is_of_the_container_that_has_least_left_without_pages_of_files(tmp_path: Path) -> None:
    top = v2(tmp_path, available_bytes=0) / "sys/fs/cgroup"
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\nHugePages_Free: 0\n")
    assert taken_ratio(tmp_path) == pytest.approx(0.1)
    stat = f"anon {4 * GB}\ninactive_file {2 * GB}\nactive_file {GB}"
    a_cgroup(top / "job/step", max=8 * GB, high="max", current=7 * GB, stat=stat)
    assert taken_ratio(tmp_path) == pytest.approx(0.5)
    a_cgroup(top / "job", max="max", high=5 * GB, current=4.5 * 10**9)
    assert taken_ratio(tmp_path) == pytest.approx(0.5)  # a file that isn't a number
    a_cgroup(top / "job", current=9 * GB)
    assert taken_ratio(tmp_path) == 1.0


def test_where_nothing_tells_nothing_is_taken(tmp_path: Path) -> None:
    assert taken_ratio(tmp_path) == 0.0


def test_a_container_that_is_full_has_nothing_free(tmp_path: Path) -> None:
    a_cgroup(v2(tmp_path) / "sys/fs/cgroup/job/step", max=GB, high="max", current=2 * GB)
    assert found(tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        ("/docker/abc", "/docker/abc"),  # the path of the host, of which the container is shown its part
        ("/docker/abc", "/"),  # a path that isn't there
        ("/", "/"),  # a namespace of its own
        ("/../other", "/"),  # of a process that was moved out of it
    ],
)
def test_a_container_that_sees_its_own_cgroup_as_the_highest(own: str, shown: str, tmp_path: Path) -> None:
    a_cgroup(v2(tmp_path, own, shown) / "sys/fs/cgroup", max=8 * GB, high="max", current=GB)
    a_cgroup(tmp_path / "sys/fs/other", max=1, high="max", current=0)
    assert found(tmp_path) == (7 * GB, "the container's memory (/sys/fs/cgroup/memory.max)")


def test_version_1_has_a_hierarchy_of_its_own_for_memory(tmp_path: Path) -> None:
    mounts = (
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/me\\040mory rw,relatime - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    a_machine(tmp_path, "4:memory:/slurm/job\n1:cpu:/\n0::/\n", mounts)
    top = tmp_path / "sys/fs/cgroup/me mory"
    stat = f"inactive_file 1\ntotal_inactive_file {GB}"
    a_cgroup(top / "slurm/job", limit_in_bytes=6 * GB, usage_in_bytes=3 * GB, stat=stat)
    a_cgroup(top / "slurm", limit_in_bytes=UNLIMITED, usage_in_bytes=50 * GB)
    where = "the container's memory (/sys/fs/cgroup/me mory/slurm/job/memory.limit_in_bytes)"
    assert found(tmp_path) == (4 * GB, where)


def test_a_machine_that_tells_nothing_leaves_the_size_of_the_tmpfs(tmp_path: Path) -> None:
    assert found(tmp_path) == (1000 * GB, "/dev/shm")


@pytest.mark.skipif(bool(why_no_small_disk()), reason=why_no_small_disk())
def test_a_small_tmpfs_sets_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    place = tmp_path / "shm"

    def work(stage: object) -> list[object]:
        small_disk(place, 1 << 20)
        (place / "taken").write_bytes(bytes(1 << 19))
        there = free_memory(place / "not/yet")
        return [there.free_bytes, there.bound]

    with Child(work) as child:
        assert child.finish(30) == [1 << 19, str(place / "not/yet")]
