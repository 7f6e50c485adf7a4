"""`streamload mixing`: what was decided in a run."""

import json
import sys

import pytest

from streamload.cli import main
from streamload.order.events import WEIGHTS
from streamload.steering.decisions import DecisionLog


@pytest.fixture
def streamload(capsys, monkeypatch):
    """Run the command in this process; its exit code, its output and its errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["streamload", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as exc:
            code = exc.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def log(tmp_path):
    """A log of three decisions, of which the second reported nothing of a."""
    path = tmp_path / "decisions.jsonl"
    written = DecisionLog(path, {"order": "x"})
    written.begin(None, {"step": 0, "epoch": 0, "sequence": 0, "position": 0, "changes": [], "weights": []})
    for turn, loss in enumerate((3.0, None, 2.0), 1):
        sources = [
            {"name": "a", "share": 0.75, "samples": 750, "passes": None, "loss": loss, "reported": 10,
             "alignment": 0.1 * turn, "evaluation": None, "bad": 0},
            {"name": "b", "share": 0.25, "samples": 250, "passes": 0.5 * turn, "loss": 1.0, "reported": 10,
             "alignment": None, "evaluation": 4.0, "bad": 1},
        ]  # fmt: skip
        line = {
            "step": 100 * turn,
            "epoch": 0,
            "sequence": 0,
            "position": turn,
            "weights": None,
            "shares": None,
        }
        written.add(WEIGHTS, {**line, "reason": f"turn {turn}", "sources": sources})
    written.add(WEIGHTS, {"step": 350, "weights": [1, 1], "shares": [1, 1], "reason": "set_weights"})
    return path


def test_names_of_sources_move_no_cursor_and_turn_no_text(streamload, tmp_path):
    name, path = "\x1b[2J\x1b]0;title\x07cat\u202egod", tmp_path / "decisions.jsonl"
    written = DecisionLog(path, {"order": "x"})
    written.begin(None, {"step": 0, "epoch": 0, "sequence": 0, "position": 0, "changes": [], "weights": []})
    source = {"name": name, "share": 1.0, "samples": 10}
    written.add(WEIGHTS, {"step": 1, "weights": None, "shares": None, "reason": "", "sources": [source]})
    code, out, _ = streamload("mixing", "show", path)
    assert code == 0
    assert r"\x1b[2J\x1b]0;title\x07cat\u202egod" in out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)


def test_a_run_s_decisions_are_shown(streamload, log):
    code, out, _ = streamload("mixing", "show", log)
    assert code == 0
    assert "turn 2" in out
    assert "75.0%" in out
    found = json.loads(streamload("mixing", "show", log, "--json")[1])
    assert found["losses"] == {"a": [3.0, None, 2.0], "b": [1.0, 1.0, 1.0]}
    assert found["alignment"]["a"] == pytest.approx([0.1, 0.2, 0.3])
    assert found["evaluation"] == {"a": [None] * 3, "b": [4.0] * 3}
    assert found["steps"] == [100, 200, 300]


def test_an_altered_log_fails(streamload, log):
    log.write_text(log.read_text().replace('"share": 0.75', '"share": 0.76', 1))
    code, _, error = streamload("mixing", "show", log)
    assert code == 2
    assert "altered" in error


def test_a_log_without_decisions_fails(streamload, tmp_path):
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path, {"order": "x"})
    log.begin(None, {"step": 0, "epoch": 0, "sequence": 0, "position": 0, "changes": [], "weights": []})
    log.add(WEIGHTS, {"step": 350, "weights": [1, 1], "shares": [1, 1], "reason": "set_weights"})
    code, _, error = streamload("mixing", "show", path)
    assert code == 2
    assert "nothing to show" in error
