"""What the benchmarks beside the peers are made of: environments, runs that don't end, kept batches, charts.

Nothing is downloaded: what these environments ask for is there.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import charts, machine, module_cache, overview, peer_tables, turns
from benchmarks.contenders.job import Job
from benchmarks.contenders.workload import Kept, train
from benchmarks.environments import build
from benchmarks.peers import LITDATA, OPEN_CLIP, PEERS, SPDL, STREAMLOAD
from benchmarks.turns import Contender
from benchmarks.worlds import picture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pins(tmp_path, monkeypatch):
    """A folder of pins of our own, beside which environments are built."""
    folder = tmp_path / "pins"
    folder.mkdir()
    monkeypatch.setattr(build, "FOLDER", folder)
    return folder


def test_every_peer_has_an_environment_and_every_environment_an_adapter():
    wanted = {peer.environment for peer in (*PEERS, *module_cache.CONTENDERS)} - {"own", "open_clip"}
    assert wanted == set(build.names())
    for peer in PEERS:
        assert (ROOT / f"benchmarks/contenders/{peer.adapter}.py").is_file()


def test_every_pin_is_exact():
    for name in build.names():
        lines = (build.FOLDER / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert pins
        assert all("==" in pin for pin in pins), name


def test_an_environment_with_other_pins_or_without_its_parent_is_not_ready(pins, tmp_path):
    requirements, stamp = pins / "one.txt", tmp_path / "one/.ready"
    requirements.write_text("pytest==1\n")
    stamp.parent.mkdir()
    assert not build.is_ready("one", tmp_path)
    stamp.write_text(f"{build._pins('one')}\n{sysconfig.get_path('purelib')}\n")
    assert build.is_ready("one", tmp_path)
    requirements.write_text("pytest==2\n")
    assert not build.is_ready("one", tmp_path)
    stamp.write_text(f"{build._pins('one')}\n{tmp_path / 'nowhere'}\n")
    assert not build.is_ready("one", tmp_path)


@pytest.mark.deep
def test_one_that_cannot_be_built_is_named_and_the_others_are_children_of_ours_built_once(
    pins, tmp_path, capfd
):
    (pins / "bad.txt").write_text(f"{tmp_path / 'no-such-package'}\n")
    (pins / "good.txt").write_text(f"pytest=={version('pytest')}\n")
    assert build.build_all(["bad", "good"], tmp_path) == 1
    said = capfd.readouterr().err
    assert "bad could not be built: ERROR" in said
    assert "no-such-package" in said
    assert [build.is_ready(name, tmp_path) for name in ("bad", "good")] == [False, True]
    code = "import sys, pytest; print(sys.prefix, pytest.__file__)"
    found = subprocess.check_output([build.python_of("good", tmp_path), "-c", code], text=True).split()
    assert found == [str(tmp_path / "good"), pytest.__file__]

    left = tmp_path / "good/left-there"
    left.touch()
    assert build.build_all(["good"], tmp_path) == 0
    assert left.exists()


def test_spdl_finds_ffmpeg_by_its_own_names(tmp_path):
    wheel, beside = tmp_path / "av.libs", tmp_path / "spdl/io/lib"
    wheel.mkdir()
    beside.mkdir(parents=True)
    for name in ("libavcodec-e57b519c.so.62.11.100", "libswscale-6b69be0e.so.9.1.100", "libdrm-b02.so.2"):
        (wheel / name).write_text(name)
    build.lend_ffmpeg(tmp_path)
    assert {path.name: path.read_text() for path in beside.iterdir()} == {
        "libavcodec.so.62": "libavcodec-e57b519c.so.62.11.100",
        "libswscale.so.9": "libswscale-6b69be0e.so.9.1.100",
    }


def test_an_unknown_environment_is_refused_with_those_that_there_are():
    command = [sys.executable, "-m", "benchmarks.environments.build", "spdl", "lidtata"]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no environment is called lidtata" in ended.stderr
    assert "litdata" in ended.stderr


def test_a_peer_whose_environment_is_not_there_is_left_out_aloud(tmp_path, capsys):
    wanted = [SPDL.name, STREAMLOAD.name, OPEN_CLIP.name]
    given = argparse.Namespace(
        python=Path(sys.executable), openclip_python=tmp_path / "none", peers=tmp_path, contenders=wanted
    )
    assert turns.chosen(given, [STREAMLOAD, LITDATA, OPEN_CLIP, SPDL]) == [STREAMLOAD]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" is left out: no ")[0] for line in said] == [OPEN_CLIP.name, SPDL.name]
    assert said[1].endswith(str(tmp_path / "spdl"))


def test_a_contender_that_does_not_end_is_killed_with_its_children(tmp_path):
    child = tmp_path / "child"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {child}\nwait\n")
    python.chmod(0o755)
    with pytest.raises(turns.TookTooLong, match="the slow one was killed after 1 s"):
        turns.run(Contender("the slow one", "none"), Job("", 0, 1, 0), python, limit_seconds=1)
    pid = int(child.read_text())
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.02)


def test_a_contender_that_fails_is_told_of_by_its_last_words_without_paths(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho Traceback >&2\necho 'Error: no /tmp/x/y.bin here. Do this.' >&2\nexit 3\n"
    )
    python.chmod(0o755)
    with pytest.raises(turns.Failed) as caught:
        turns.run(Contender("the broken one", "none"), Job("", 0, 1, 0), python)
    assert caught.value.reason == "the broken one ended with 3: Error: no …/y.bin here"


IN_TURN = """#!{python}
import sys
sys.path.insert(0, {root!r})
from benchmarks.contenders.job import Epoch, Job, Result
job = Job(**__import__("json").loads(sys.argv[3]))
for epoch in range(job.epochs):
    job.await_turn(epoch)
    if epoch == {fails_in}:
        sys.exit("Error: no more")
    with open({log!r}, "a") as log:
        log.write(f"{{job.seed}} begins {{epoch}}\\n")
        log.flush()
        __import__("time").sleep(0.05)
        log.write(f"{{job.seed}} ends {{epoch}}\\n")
Result(0.0, [Epoch(0.0)] * job.epochs, {{}}).print()
"""


def in_turn(tmp_path, fails_in=None):
    """Two contenders, known by their seeds, and where they note what they do."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(IN_TURN.format(python=sys.executable, root=str(ROOT), log=str(log), fails_in=fails_in))
    python.chmod(0o755)
    jobs = [(Contender(name, "none"), Job("", 0, 6, seed), python) for seed, name in enumerate("ab")]
    return jobs, log


@pytest.mark.deep
def test_turns_never_overlap_and_every_second_time_their_order_is_reversed(tmp_path):
    jobs, log = in_turn(tmp_path)
    ran = turns.run_in_turn(jobs)
    assert [len(one.epochs) for one in ran] == [6, 6]
    order = ["0 0", "0 1", "1 0", "1 1", "0 2", "0 3", "1 2", "1 3", "1 4", "1 5", "0 4", "0 5"]
    lines = [f"{seed} {what} {epoch}" for seed, epoch in map(str.split, order) for what in ("begins", "ends")]
    assert log.read_text().splitlines() == lines


@pytest.mark.deep
def test_one_that_fails_in_its_turn_is_told_of_and_one_that_never_ends_is_killed(tmp_path):
    jobs, _ = in_turn(tmp_path, fails_in=4)
    with pytest.raises(turns.Failed) as caught:
        turns.run_in_turn(jobs)
    assert caught.value.reason == "b ended with 1: Error: no more"
    jobs[0][2].write_text("#!/bin/sh\nsleep 300\n")
    with pytest.raises(turns.TookTooLong, match="a was killed after 1 s"):
        turns.run_in_turn(jobs, limit_seconds=1)


@pytest.mark.deep
def test_one_that_ends_while_it_waits_for_its_turn_is_told_of(tmp_path):
    jobs, _ = in_turn(tmp_path)
    early = tmp_path / "early"
    early.write_text(f"#!/bin/sh\necho {turns.READY}\necho enough >&2\nexit 3\n")
    early.chmod(0o755)
    (a, job, _), b = jobs  # b's start takes long enough for a to be gone when its turn comes
    with pytest.raises(turns.Failed, match=r"a ended with 3:\nenough"):
        turns.run_in_turn([(a, job, early), b])


def is_running(pid):
    """Whether a process is there, and more than a name that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_kept_batch_that_changes_is_found():
    batches = [(torch.full((2, 3), float(number)), torch.zeros(2, dtype=torch.int64)) for number in range(5)]
    kept = Kept(3)
    for batch in batches:
        kept.add(batch)
    batches[0][0][0, 0] = -1  # no longer kept
    assert kept.changed() == 0
    batches[2][0][1, 2] = -1
    batches[4][1][0] = 7
    assert kept.changed() == 2


def test_waiting_is_the_time_without_a_batch_and_not_the_step():
    def slow():
        for _ in range(3):
            time.sleep(0.05)
            yield torch.zeros(2, 3, 224, 224), torch.zeros(2, 77, dtype=torch.int64)

    epoch = train(slow(), Job("", 6, 1, 0, batch_size=2, step_seconds=0.2), 0)
    assert epoch.images == 6
    assert 0.1 <= epoch.waited_seconds <= epoch.ended - epoch.first_batch - 0.6


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_marked_where_code_was_changed_and_not_for_the_results_before(tmp_path):
    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    code, result = tmp_path / "code.py", tmp_path / "benchmarks/results/warm.json"
    result.parent.mkdir(parents=True)
    for file in (code, result):
        file.write_text("1\n")
    assert machine.commit(tmp_path) is None
    git("init", "--quiet")
    assert machine.commit(tmp_path) is None
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    name = git("rev-parse", "--short", "HEAD")
    assert machine.commit(tmp_path) == name
    result.write_text("2\n")
    assert machine.commit(tmp_path) == name
    code.write_text("2\n")
    assert machine.commit(tmp_path) == f"{name}+"


def test_a_bar_is_as_long_as_its_value_and_ours_has_its_colour():
    rows = [charts.Bar("streamload", 400, 380, 500, True), charts.Bar("a < b", 100, 100, 100)]
    drawing = ElementTree.fromstring(charts.bars("title", rows, limit=250))
    _, *boxes = drawing.iter("{http://www.w3.org/2000/svg}rect")
    assert float(boxes[0].get("width")) == pytest.approx(4 * float(boxes[1].get("width")), rel=0.01)
    assert [box.get("fill") for box in boxes] == [charts.OURS, charts.THEIRS]
    assert {"title", "streamload", "a < b", "400", "100"} <= set(drawing.itertext())


def test_panels_have_a_scale_each():
    one, other = charts.Bar("streamload", 400, 400, 400, True), charts.Bar("streamload", 0.5, 0.5, 0.5, True)
    drawing = ElementTree.fromstring(charts.panels("title", {"images": ([one], 0), "seconds": ([other], 1)}))
    _, *boxes = drawing.iter("{http://www.w3.org/2000/svg}rect")
    assert boxes[0].get("width") == boxes[1].get("width")
    assert {"images", "400", "seconds", "0.5"} <= set(drawing.itertext())


def test_the_fastest_peer_is_neither_ours_nor_a_floor():
    speeds = {"streamload": 9, "streamload, uint8": 9, "floor": 9, "open_clip": 1, "SPDL": 2}
    warm = {"medians": {name: {"images_per_second": speed} for name, speed in speeds.items()}}
    assert overview.fastest_peer(warm) == "SPDL"


def test_lines_go_up_where_values_do():
    drawing = ElementTree.fromstring(
        charts.lines("title", "workers", {"one": [(1, 200), (2, 390), (4, 400)]})
    )
    (line,) = drawing.iter("{http://www.w3.org/2000/svg}polyline")
    (_, low), (_, middle), (_, high) = [map(float, point.split(",")) for point in line.get("points").split()]
    assert (low - high) / (low - middle) == pytest.approx(200 / 190, rel=0.01)


def test_a_picture_without_points_has_no_panel():
    drawn = picture.drawing(
        "<nothing>", {"loss": {"a": [(1, float("nan"))]}, "share": {"a": [(1, 0.5), (2, 0.5)]}}
    )
    assert "&lt;nothing&gt;" in drawn
    assert ">loss<" not in drawn
    assert ElementTree.fromstring(drawn) is not None


def test_one_that_was_killed_stands_in_the_table():
    result = {
        "settings": {"epochs": 3, "limit_bytes": 5e6, "bytes": 10e6},
        "rounds": [],
        "medians": {},
        "seeds": [0, 1],
        "failures": [{"contender": "slow", "round": 1, "reason": "slow was killed after 300 s"}],
    }
    assert peer_tables.half(result).splitlines()[-1] == (
        "| slow | slow was killed after 300 s (1 of 2 rounds) | – | – |"
    )
