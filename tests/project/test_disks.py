"""Disks that are full, read-only or broken, for one process alone."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disks import (
    failing_calls,
    limited_file_size,
    read_only,
    resize_disk,
    shown_instead,
    small_disk,
    why_no_small_disk,
    why_no_strace,
)
from tests.support.kills import Child

needs_mounts = pytest.mark.skipif(bool(why_no_small_disk()), reason=why_no_small_disk())


def errno_of(action: Callable[[], object]) -> int:
    try:
        action()
    except OSError as error:
        return error.errno or 0
    return 0


@needs_mounts
def test_a_small_disk_is_full_for_its_own_process_only(tmp_path: Path) -> None:
    place = tmp_path / "disk"

    def work(stage: object) -> list[int]:
        small_disk(place, 1 << 16)
        found = [errno_of(lambda: (place / "a").write_bytes(bytes(1 << 17)))]
        resize_disk(place, 1 << 20)
        found.append(errno_of(lambda: (place / "a").write_bytes(bytes(1 << 17))))
        read_only(place)
        return [*found, errno_of(lambda: (place / "b").touch())]

    with Child(work) as child:
        assert child.finish(30) == [errno.ENOSPC, 0, errno.EROFS]
    assert not list(place.iterdir())


@needs_mounts
def test_a_disk_runs_out_of_inodes(tmp_path: Path) -> None:
    def work(stage: object) -> list[int]:
        small_disk(tmp_path / "disk", 1 << 20, inodes=3)  # one is its root
        return [errno_of((tmp_path / "disk" / name).touch) for name in "abc"]

    with Child(work) as child:
        assert child.finish(30) == [0, 0, errno.ENOSPC]


@needs_mounts
def test_another_file_is_shown_to_one_process_only(tmp_path: Path) -> None:
    real, other = tmp_path / "real", tmp_path / "other"
    real.write_text("real")
    other.write_text("other")

    def work(stage: object) -> str:
        shown_instead(other, real)
        return real.read_text()

    with Child(work) as child:
        assert child.finish(30) == "other"
    assert real.read_text() == "real"


def test_files_may_not_grow_beyond_a_limit(tmp_path: Path) -> None:
    def work(stage: object) -> list[int]:
        with limited_file_size(1000):
            found = [errno_of(lambda: (tmp_path / "a").write_bytes(bytes(1001)))]
        return [*found, errno_of(lambda: (tmp_path / "a").write_bytes(bytes(1001)))]

    with Child(work) as child:
        assert child.finish(30) == [errno.EFBIG, 0]


@pytest.mark.skipif(bool(why_no_strace()), reason=why_no_strace())
def test_calls_on_one_file_fail(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    script = "import os, sys; [print(os.pread(os.open(p, 0), 1, 0)) for p in sys.argv[1:]]"
    command = [sys.executable, "-c", script, str(tmp_path / "b"), str(tmp_path / "a")]
    command = failing_calls(command, "pread64", "EIO", when="1", path=tmp_path / "a", log=tmp_path / "log")
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    assert ended.stdout == "b'b'\n"
    assert "Input/output error" in ended.stderr
    assert (tmp_path / "log").read_text().count("(INJECTED)") == 1
