"""Tests that fail are run again, by themselves: which are forgiven, which aren't, and what is kept of it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUPPORT = """
    from pathlib import Path

    def fails(name, *times):
        '''Fail in these runs of a test, counted from 1.'''
        count = Path(name).stat().st_size + 1 if Path(name).exists() else 1
        with open(name, "a") as file:
            file.write(".")
        assert count not in times
"""


class Project:
    """A folder with tests of its own, run as the Makefile runs ours."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "pytest.ini").write_text("[pytest]\nmarkers = deep\n")
        (folder / "counted.py").write_text(textwrap.dedent(SUPPORT))

    def write(self, file: str, *lines: str) -> None:
        path = self.folder / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["import os, pytest", "from counted import fails", *lines, ""]))

    def run(self, marks: str = "not deep", processes: int = 0) -> tuple[int, str]:
        """Returns the exit status, and what is said last."""
        command = [sys.executable, ROOT / ".ci" / "reruns.py", "part", str(processes), marks, "tests"]
        plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist"}  # most cost a second
        environ = {**os.environ, **plugins, "PYTHONPATH": f"{self.folder}:{ROOT}"}
        done = subprocess.run(
            command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=150, check=False
        )
        return done.returncode, done.stdout[done.stdout.rindex("\npart, ") :]

    def runs_of(self, name: str) -> int:
        return (self.folder / name).stat().st_size


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_two_failures_that_pass_by_themselves_are_forgiven_and_listed_last_and_kept(project):
    project.write("shards/test_a.py", "def test_race(): fails('a', 1)", "def test_right(): fails('b')")
    project.write("urls/test_b.py", "@pytest.mark.parametrize('x', ['y z'])", "def test_c(x): fails('c', 1)")
    status, text = project.run()
    assert status == 0
    forgiven = ["tests/shards/test_a.py::test_race", "tests/urls/test_b.py::test_c[y z]"]
    assert text.splitlines()[-2:] == [f"    {test}" for test in forgiven]
    assert "2 tests forgiven" in text
    assert (project.runs_of("a"), project.runs_of("b"), project.runs_of("c")) == (2, 1, 2)
    kept = (project.folder / ".pytest_cache/reruns/part.jsonl").read_text()
    assert json.loads(kept)["forgiven"] == forgiven
    status, text = project.run()
    assert (status, "no tests forgiven" in text) == (0, True)
    shown = [sys.executable, ROOT / ".ci" / "reruns.py", "--show", "part", "other"]
    shown = subprocess.run(shown, cwd=project.folder, capture_output=True, text=True, check=True).stdout
    assert [line.partition(",")[0] for line in shown.splitlines()] == ["part", "other: no run yet"]


def test_a_test_that_fails_again_fails_and_so_does_one_that_is_skipped_then(project):
    project.write("shards/test_a.py", "def test_wrong(): fails('a', 1, 2)")
    status, text = project.run()
    assert (status, "didn't pass by itself: tests/shards/test_a.py::test_wrong" in text) == (1, True)
    project.write(
        "shards/test_a.py",
        "def test_skips():",
        "    os.path.exists('b') and pytest.skip()",
        "    fails('b', 1)",
    )
    status, text = project.run()
    assert (status, "didn't pass by itself: tests/shards/test_a.py::test_skips" in text) == (1, True)


def test_more_than_two_failures_fail_and_none_is_run_again(project):
    project.write("shards/test_a.py", *(f"def test_{x}(): fails('{x}', 1)" for x in "abc"))
    status, text = project.run()
    assert (status, "3 tests failed, and only 1 to 2" in text) == (1, True)
    assert [project.runs_of(name) for name in "abc"] == [1, 1, 1]


@pytest.mark.parametrize(("times", "expected"), [((1,), 0), ((1, 2), 1), ((1, 3), 1)])
def test_a_test_of_a_room_where_a_race_may_be_a_wrong_sample_has_to_pass_twice(times, expected, project):
    project.write("cache/test_a.py", f"def test_race(): fails('a', {str(times)[1:-1]})")
    status, text = project.run()
    assert (status, "didn't pass by itself" in text) == (expected, bool(expected))
    assert project.runs_of("a") == (times[-1] if expected else 3)


def test_such_a_test_is_not_forgiven_in_two_runs_in_a_row_and_one_of_another_room_is(project):
    project.write("ipc/test_a.py", "def test_race(): fails('a', 1, 4, 8)")
    project.write("shards/test_b.py", "def test_slow(): fails('b', 1, 3)")
    assert project.run()[0] == 0
    status, text = project.run()
    assert (status, "run before, too: tests/ipc/test_a.py::test_race" in text) == (1, True)
    assert project.run()[0] == 0
    assert project.run()[0] == 0


def test_a_crash_of_a_worker_is_not_forgiven(project):
    lines = ("    if not os.path.exists('died'):", "        os.mkdir('died')", "        os._exit(1)")
    project.write("shards/test_a.py", "def test_dies():", *lines)
    status, text = project.run(processes=2)
    assert status == 1
    assert "a process crashed, or a file can't be imported: tests/shards/test_a.py::test_dies" in text


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "os._exit(0)"])
def test_a_run_that_does_not_come_to_its_end_is_not_forgiven(end, project):
    project.write("shards/test_a.py", "def test_race(): fails('a', 1)", f"def test_end(): {end}")
    status, text = project.run()
    assert status != 0
    assert "not forgiven" in text
    assert project.runs_of("a") == 1


@pytest.mark.parametrize("processes", [0, 2])
def test_a_file_that_cant_be_imported_is_not_forgiven(processes, project):
    """Also beside a test that would be: with xdist both end with one status."""
    project.write("shards/test_a.py", "raise ImportError")
    project.write("shards/test_b.py", "def test_race(): fails('b', 1)")
    status, text = project.run(processes=processes)
    assert (status > 0, "not forgiven" in text) == (True, True)


def test_a_record_that_was_cut_is_as_none(project):
    project.write("shards/test_a.py", "def test_race(): fails('a', 1)")
    assert project.run()[0] == 0
    record = project.folder / ".pytest_cache/reruns/part.jsonl"
    record.write_text(record.read_text()[:-9])
    assert project.run()[0] == 0


def test_failures_outside_of_a_tests_own_code_count_and_marks_select(project):
    project.write(
        "shards/test_a.py",
        "@pytest.fixture",
        "def broken():",
        "    yield",
        "    fails('a', 1)",
        "@pytest.mark.deep",
        "def test_leaves(broken): pass",
        "def test_quick(): fails('b', 1)",
    )
    status, text = project.run("deep")
    assert (status, text.splitlines()[-1]) == (0, "    tests/shards/test_a.py::test_leaves")
    assert not (project.folder / "b").exists()
