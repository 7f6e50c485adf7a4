"""`streamload mixing`: what was decided in a run, and what a policy would decide from its reports."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from streamload.cli import main
from streamload.errors import OptionError
from streamload.order.events import WEIGHTS
from streamload.steering.decisions import DecisionLog
from streamload.steering.picture import drawing


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
def reports(tmp_path):
    """A CSV of 40 intervals in which only a's loss falls."""
    path = tmp_path / "losses.csv"
    lines = ["step,source,loss"]
    for step in range(500, 20_001, 500):
        lines += [
            f"{step},a,{1 + 2 * (1 + step / 300) ** -0.4 + step % 3 * 1e-4}",
            f"{step},b,{9 + step % 7 * 1e-3}",
        ]
    path.write_text("\n".join(lines) + "\n")
    return path


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
    name = "\x1b[2J\x1b]0;title\x07cat\u202egod"
    losses = "".join(f"{step},{name},{5 / step}\n{step},b,1\n" for step in (1, 2, 3))
    (tmp_path / "losses.csv").write_text(f"step,source,loss\n{losses}")
    picture = tmp_path / "out.svg"
    code, out, _ = streamload("mixing", "simulate", tmp_path / "losses.csv", "--svg", picture)
    assert code == 0
    for text in (out, picture.read_text()):
        assert r"\x1b[2J\x1b]0;title\x07cat\u202egod" in text
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_a_policy_is_asked_with_the_losses_of_a_csv(streamload, reports):
    code, out, _ = streamload("mixing", "simulate", reports, "--svg", reports.with_suffix(".svg"), "--json")
    assert code == 0
    root = ElementTree.fromstring(reports.with_suffix(".svg").read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) >= 4  # shares and losses of each source
    found = json.loads(out)
    assert found["steps"][-1] == 20_000
    assert found["shares"]["a"][-1] > 0.7 > found["shares"]["a"][0]
    assert found["losses"]["b"][0] == pytest.approx(9.0, abs=0.01)


def test_other_policies_come_from_files_and_modules(streamload, reports, tmp_path, monkeypatch):
    (tmp_path / "schedule.json").write_text('{"1000": {"a": 3, "b": 1}}')
    (tmp_path / "target.json").write_text('{"a": 1.0, "b": 1.0}')
    shares = {}
    (tmp_path / "by_hand.py").write_text("def even(summary): return {'a': 1, 'b': 1}\n")
    monkeypatch.chdir(tmp_path)  # a command's own folder is on the path of modules, not this one
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for policy in (f"schedule={tmp_path}/schedule.json", f"target={tmp_path}/target.json", "by_hand:even"):
        code, out, _ = streamload("mixing", "simulate", reports, "--policy", policy, "--json")
        assert code == 0
        shares[policy.partition("=")[0]] = json.loads(out)["shares"]["b"][-1]
    sys.modules.pop("by_hand", None)
    assert shares == {"schedule": 0.25, "target": pytest.approx(0.88, abs=0.03), "by_hand:even": 0.5}


def test_a_run_s_decisions_are_shown(streamload, log, tmp_path):
    code, out, _ = streamload("mixing", "show", log, "--svg", tmp_path / "out.svg")
    assert code == 0
    assert "turn 2" in out
    assert "75.0%" in out
    drawn = (tmp_path / "out.svg").read_text()
    assert "alignment" in drawn
    assert "held-out loss" in drawn
    found = json.loads(streamload("mixing", "show", log, "--json")[1])
    assert found["losses"] == {"a": [3.0, None, 2.0], "b": [1.0, 1.0, 1.0]}
    assert found["steps"] == [100, 200, 300]


def test_a_log_whose_run_a_policy_is_asked_of_counts_samples_over_its_lines(streamload, log):
    found = json.loads(streamload("mixing", "simulate", log, "--json")[1])
    assert set(found["reasons"]) == {"not yet"}


def test_an_altered_log_fails(streamload, log):
    log.write_text(log.read_text().replace('"share": 0.75', '"share": 0.76', 1))
    code, _, error = streamload("mixing", "show", log)
    assert code == 2
    assert "altered" in error


@pytest.mark.parametrize(
    ("text", "problem"),
    [("step,source,loss\n", "nothing to show"), ("step,source\nx,a\n", "expected a CSV"),
     ("a,b\n1,2\n", "expected a CSV"), ("step,source,loss\n0,a,1\n", "expected a number from 1")],
)  # fmt: skip
def test_a_csv_that_can_not_be_read_fails(streamload, tmp_path, text, problem):
    path = tmp_path / "losses.csv"
    path.write_text(text)
    code, _, error = streamload("mixing", "simulate", path)
    assert code == 2
    assert problem in error


@pytest.mark.parametrize(
    "policy", ["softmax", "schedule=", "schedule=none.json", "target=none.json", "no.such:one"]
)
def test_a_policy_that_is_not_there_fails(streamload, reports, policy):
    code, _, error = streamload("mixing", "simulate", reports, "--policy", policy)
    assert code == 2
    assert "expected" in error or "no.such" in error


def test_a_picture_without_points_has_no_panel():
    drawn = drawing("<nothing>", {"loss": {"a": [(1, float("nan"))]}, "share": {"a": [(1, 0.5), (2, 0.5)]}})
    assert "&lt;nothing&gt;" in drawn
    assert ">loss<" not in drawn
    assert ElementTree.fromstring(drawn) is not None


def test_a_signal_that_is_no_option_is_an_option_error():
    from streamload.cli.mixing import policy_of

    with pytest.raises(OptionError, match="expected"):
        policy_of("exp3")
