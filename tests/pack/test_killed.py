"""`streamload pack`, killed and continued: each sample once, and the bytes of a run that wasn't."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from streamload.errors import OptionError
from streamload.pack.making import plan, write_shards
from streamload.pack.rows import PackColumns
from streamload.pack.sources import list_source

ROWS = 300


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A Parquet file of which some rows are left out: of one shard all, so that it has no file."""
    start, path = b"\xff\xd8\xff", tmp_path_factory.mktemp("table") / "a.parquet"
    rows = [
        {
            "image": start + random.Random(n).randbytes(500),
            "caption": f"{n}" if n % 7 and not 100 <= n < 110 else "",
        }
        for n in range(ROWS)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    return path


def pack(table, target, most=10, jobs=1, shuffle=True):
    listing = list_source(str(table), PackColumns(), False, None)
    shards = plan(listing, target, most, "", shuffle)
    return write_shards(listing, shards, target, jobs, lambda count: None)


def files(target):
    return {path.name: path.read_bytes() for path in target.iterdir()}


@pytest.fixture(scope="module")
def whole(table, tmp_path_factory):
    """What a run that wasn't killed has made."""
    target = tmp_path_factory.mktemp("whole")
    sizes, left_out = pack(table, target)
    assert sum(sizes.values()) + left_out["without a caption"] == ROWS
    assert len(sizes) == ROWS // 10 - 1
    return files(target), left_out


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 14, 15, 16, 17, 59])
def test_a_kill_at_any_step_is_continued_to_the_same_bytes(table, whole, tmp_path, step, number):
    target = tmp_path / "out"
    child = os.fork()
    if child == 0:
        owner = os if step == "fsync" else Path
        calls, function = itertools.count(), getattr(owner, step)

        def killing(*arguments):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        setattr(owner, step, killing)
        pack(table, target)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert not (target / "sizes.json").exists()
    for path in target.glob("*.tar"):  # half a shard has no such name
        assert path.read_bytes() == whole[0][path.name]
    _, left_out = pack(table, target)
    assert files(target) == whole[0]
    assert left_out == whole[1]


def test_another_source_or_options_are_not_mixed_in(table, whole, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    one, *_ = sorted(name for name in whole[0] if name.endswith(".tar"))
    listing = list_source(str(table), PackColumns(), False, None)
    shards = plan(listing, target, 10, "", True)
    stop = itertools.count()

    def stopping(count):
        if count and next(stop) == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_shards(listing, shards, target, 1, stopping)
    assert (target / one).read_bytes() == whole[0][one]
    before = files(target)
    for options in ({"most": 20}, {"shuffle": False}):
        with pytest.raises(OptionError, match="has shards of another call that was stopped"):
            pack(table, target, **options)
    assert files(target) == before
    pack(table, target)
    assert files(target) == whole[0]
    with pytest.raises(OptionError, match=r"has 00000\.tar already"):
        pack(table, target)


def test_two_commands_do_not_write_into_one_folder(table, tmp_path):
    listing = list_source(str(table), PackColumns(), False, None)
    shards = plan(listing, tmp_path, 10, "", True)
    refused = []

    def show(_):
        with pytest.raises(OptionError, match="is being written by another"):
            pack(table, tmp_path)
        refused.append(True)

    sizes, _ = write_shards(listing, shards[:3], tmp_path, 1, show)
    assert len(refused) == 4
    assert files(tmp_path).keys() == {*sizes, "sizes.json"}


def test_an_error_before_the_first_shard_leaves_nothing(tmp_path):
    parquet.write_table(pa.Table.from_pylist([{"image": 1, "caption": "a"}]), tmp_path / "a.parquet")
    with pytest.raises(OptionError, match="expected a path"):
        pack(tmp_path / "a.parquet", tmp_path / "out")
    assert files(tmp_path / "out") == {}


@pytest.mark.deep
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_processes_of_jobs_end_with_the_command_and_the_next_one_continues(table, whole, tmp_path, end):
    target, rng, kills = tmp_path / "out", random.Random(end), 0
    command = [sys.executable, "-m", "streamload", "pack", str(table), str(target), "--json"]
    command += ["--samples-per-shard", "10", "--jobs", "2"]
    while True:
        before = len([*target.glob("*.tar")]) if target.exists() else 0
        wanted = before + rng.randint(6, 14)
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as packing:
            while packing.poll() is None and len([*target.glob("*.tar")]) < wanted:
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.003)
            packing.send_signal(end)
            output, _ = packing.communicate()
        if packing.returncode == 0:
            break
        assert packing.returncode in {-signal.SIGKILL, 143}
        kills += 1
        while is_group_there(packing.pid):  # the test's time limit ends this
            time.sleep(0.01)
        for path in target.glob("*.tar"):
            assert path.read_bytes() == whole[0][path.name]
    assert kills >= 2
    assert files(target) == whole[0]
    assert json.loads(output)["left_out"] == whole[1]


def is_group_there(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.deep
def test_a_killed_process_of_jobs_is_an_error_and_no_wait(table, whole, tmp_path):
    target = tmp_path / "out"
    command = [sys.executable, "-m", "streamload", "pack", str(table), str(target), "--jobs", "2"]
    command += ["--samples-per-shard", "10"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, text=True) as packing:
        while not (parts := [*target.glob(".*.tar.*.part")]):
            time.sleep(0.0005)
        os.kill(int(parts[0].name.split(".")[3]), signal.SIGKILL)
        _, errors = packing.communicate()
    assert packing.returncode == 2
    assert "a process of --jobs was killed" in errors
    pack(table, target)
    assert files(target) == whole[0]
