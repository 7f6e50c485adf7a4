"""The log of decisions: what is written is read, resumed and replayed; whatever is altered is found."""

from __future__ import annotations

import json
import logging
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.errors import DecisionsError, OptionError
from streamload.order.events import UNIT, WEIGHTS, shares_of
from streamload.steering.decisions import SEQUENCE, DecisionLog, LogPlace, read_lines
from streamload.steering.replay import Replay

RUN = {"order": {"seed": 3, "batch": 12}, "policy": "Progress", "every": 200}


def since(position: int = 0, sequence: int = 0, weights: tuple[float, ...] = (1.0, 1.0)) -> dict[str, object]:
    shares = list(shares_of(weights, (0.0, 0.0)))
    begun = {"step": position // 12, "epoch": sequence, "sequence": sequence, "position": position}
    return {**begun, "changes": [[position, shares]], "weights": list(weights)}


def line(position: int, weights: tuple[float, ...], sequence: int = 0) -> dict[str, object]:
    shares = list(shares_of(weights, (0.0, 0.0)))
    place = {"step": position // 12, "epoch": sequence, "sequence": sequence, "position": position}
    return {**place, "weights": list(weights), "shares": shares, "reason": "test"}


def written(path: Path, count: int = 4) -> DecisionLog:
    log = DecisionLog(path, RUN)
    log.begin(None, since())
    for number in range(1, count + 1):
        log.add(WEIGHTS, line(24 * number, (1.0, float(number))))
    return log


def share_at(replay: Replay, sequence: int, position: int) -> float:
    shares = replay.events(sequence, position)[0].value["shares"]
    return float(shares[1] / UNIT)


def test_a_replay_has_the_weights_of_each_position(tmp_path: Path) -> None:
    written(tmp_path / "log")
    replay = Replay(tmp_path / "log")
    for position, weight in [(0, 1), (23, 1), (24, 1), (47, 1), (48, 2), (95, 3), (96, 4), (10**6, 4)]:
        assert share_at(replay, 0, position) == pytest.approx(weight / (1 + weight), abs=1e-8)
    assert [one.position for one in replay.events(0, 50)] == [48, 72, 96]


def test_a_later_change_drops_those_after_its_position(tmp_path: Path) -> None:
    log = written(tmp_path / "log")
    log.add(WEIGHTS, line(30, (3.0, 1.0)))
    replay = Replay(tmp_path / "log")
    assert [one.position for one in replay.events(0, 0)] == [0, 24, 30]


def test_each_sequence_has_its_own_changes(tmp_path: Path) -> None:
    log = written(tmp_path / "log")
    log.add(SEQUENCE, since(0, 7, (9.0, 1.0)))
    log.add(WEIGHTS, line(36, (1.0, 9.0), 7))
    replay = Replay(tmp_path / "log")
    assert [one.position for one in replay.events(0, 0)] == [0, 24, 48, 72, 96]
    assert [(one.position, one.value["weights"]) for one in replay.events(7, 0)] == [
        (0, (9, 1)),
        (36, (1, 9)),
    ]
    assert [(one.position, one.value["weights"]) for one in replay.events(8, 0)] == [(0, (1, 9))]


def test_every_edited_byte_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "log")
    text = (tmp_path / "log").read_bytes()
    altered = tmp_path / "altered"
    for place in range(len(text)):
        altered.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with pytest.raises(DecisionsError):
            Replay(altered)


def test_a_line_that_is_missing_or_moved_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "log")
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    altered = tmp_path / "altered"
    for rest in (
        [*lines[:2], *lines[3:]],
        [lines[0], lines[2], lines[1], *lines[3:]],
        lines[1:],
        [*lines[:2], lines[1], *lines[2:]],
        [*lines[:-1], lines[-1][:-1]],
        [],
    ):
        altered.write_bytes(b"".join(rest))
        with pytest.raises(DecisionsError):
            Replay(altered)


@pytest.mark.parametrize("text", [b"", b"\n", b"{}\n", b"no log\n", b'{"kind": "run"}\n', b"\x00" * 100])
def test_another_file_is_no_log(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(text)
    with pytest.raises(DecisionsError):
        Replay(tmp_path / "log")
    with pytest.raises(DecisionsError, match="No such file"):
        Replay(tmp_path / "none")


def test_a_line_with_a_right_checksum_and_no_sense_is_an_error(tmp_path: Path) -> None:
    for values in ({"shares": [1, 2]}, {"shares": [UNIT, 0, 0]}, {"position": "x"}, {"weights": None}):
        log = written(tmp_path / "log")
        log.add(WEIGHTS, {**line(240, (1.0, 2.0)), **values})
        with pytest.raises(DecisionsError, match="isn't a log of decisions"):
            Replay(tmp_path / "log")
        (tmp_path / "log").unlink()


@given(before=st.integers(0, 6), later=st.integers(0, 6))
def test_a_resumed_run_drops_what_was_written_after_its_state(
    before: int, later: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    written(path.with_name("uncut"), before + 2)
    place = written(path, before).place
    ahead = DecisionLog(path, RUN)
    ahead.begin(place, since())
    for number in range(later):  # by a run that was killed, and had other decisions
        ahead.add(WEIGHTS, line(1000 + number, (5.0, 1.0)))
    again = DecisionLog(path, RUN)
    again.begin(place, since())
    for number in range(before + 1, before + 3):
        again.add(WEIGHTS, line(24 * number, (1.0, float(number))))
    assert path.read_bytes() == path.with_name("uncut").read_bytes()


def test_a_log_that_lacks_lines_of_the_state_begins_anew_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    place = written(path).place
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    log = DecisionLog(path, RUN)
    log.begin(place, since(120, 0, (1.0, 4.0)))
    log.add(WEIGHTS, line(144, (1.0, 5.0)))
    assert "has decisions of another run; it is now" in caplog.text
    assert len((tmp_path / "log.old").read_bytes().splitlines()) == 3
    replay = Replay(path)
    assert share_at(replay, 0, 130) == pytest.approx(0.8, abs=1e-8)
    with pytest.raises(DecisionsError, match="begins at step 10"):
        replay.events(0, 119)
    again = DecisionLog(path, RUN)
    again.begin(log.place, since(150))  # a state after that is found in the new file
    again.add(WEIGHTS, line(168, (1.0, 6.0)))
    assert [values["kind"] for values, _ in read_lines(path)] == ["run", "weights", "weights"]


def test_a_file_of_another_run_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path)
    before = path.read_bytes()
    DecisionLog(path, {**RUN, "order": {"seed": 4}}).begin(LogPlace(), since())
    assert (tmp_path / "log.old").read_bytes() == before
    with pytest.raises(DecisionsError, match="another seed: 4, and this is 3"):
        Replay(path).check_run({"seed": 3})


def test_a_file_that_can_not_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder", tmp_path / "file" / "log"):
        with pytest.raises(OptionError, match="can't be written"):
            DecisionLog(path, RUN).begin(None, since())


def test_a_disk_that_fails_later_is_one_warning_and_lines_follow_once_it_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    written(tmp_path / "uncut")
    log = written(path, 1)
    path.rename(tmp_path / "away")
    with caplog.at_level(logging.WARNING):
        for number in (2, 3):
            log.add(WEIGHTS, line(24 * number, (1.0, float(number))))
    assert caplog.text.count("the training goes on without") == 1
    (tmp_path / "away").rename(path)
    log.add(WEIGHTS, line(96, (1.0, 4.0)))
    assert "are written to" in caplog.text
    assert path.read_bytes() == (tmp_path / "uncut").read_bytes()


def test_a_line_is_written_whole_or_not_at_all_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(tmp_path / "uncut")
    log = written(path, 1)
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))  # as a disk with 50 bytes left
    try:
        log.add(WEIGHTS, line(48, (1.0, 2.0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size
    for number in (3, 4):
        log.add(WEIGHTS, line(24 * number, (1.0, float(number))))
    assert path.read_bytes() == (tmp_path / "uncut").read_bytes()


def test_another_process_that_writes_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    log = written(path, 1)
    with path.open("ab") as file:
        file.write(b"something\n")
    log.add(WEIGHTS, line(48, (1.0, 2.0)))
    assert "another process changed it" in caplog.text


def test_lines_are_json(tmp_path: Path) -> None:
    written(tmp_path / "log")
    lines = [json.loads(text) for text in (tmp_path / "log").read_text().splitlines()]
    assert [one["kind"] for one in lines] == ["run", *["weights"] * 4]
    assert lines[2]["weights"] == [1.0, 2.0]
