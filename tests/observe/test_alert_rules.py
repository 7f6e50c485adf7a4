"""docker/alerts.yml: each rule fires, clears, and stays silent where nothing is wrong, by promtool."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamload.observe.exposition import exposition
from tests.observe.test_exposition import full_page
from tests.support import promtool

RULES = Path(__file__).parents[2] / "docker" / "alerts.yml"
RANK = {"instance": "node:9434", "job": "streamload", "run": "a1", "rank": "0"}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a rule sees: it is silent in the first minute, fires at minute `fires`, is clear at `clears`.

    Values are those of promtool: "start+step xCOUNT" by 15 s.
    """

    trouble: dict[str, str]
    silent: dict[str, str]
    fires: int = 5
    clears: int = 20
    labels: tuple[tuple[str, str], ...] = ()
    severity: str = "warning"


def grows(by: float, bad: float, after: float | None = None) -> str:
    """A counter that grows by `by` in 15 s for a minute, by `bad` for 9 minutes, and then as at first."""
    at_first = 4 * by
    then = at_first + 36 * bad
    return f"0+{by}x4 {at_first + bad}+{bad}x35 {then + (by if after is None else after)}+{by}x60"


def is_at(usual: float, bad: float) -> str:
    return f"{usual}x4 {bad}x35 {usual}x60"


WAIT, OTHER_RANK = "streamload_data_wait_seconds_sum", '{rank="1"}'
CASES = {
    "StreamloadStalled": Case(
        {"streamload_waiting_seconds": is_at(0, 45), "streamload_still_seconds": "0x100"},
        {"streamload_waiting_seconds": is_at(0, 20), "streamload_still_seconds": is_at(0, 500)},
        severity="critical",
    ),
    "StreamloadDataWait": Case({WAIT: grows(0.1, 4)}, {WAIT: grows(0.1, 1)}),
    "StreamloadOriginErrors": Case(
        {
            "streamload_origin_requests_total": grows(10, 10),
            "streamload_origin_retries_total": grows(0, 5),
            "streamload_origin_outages_total": "0x100",
        },
        {
            "streamload_origin_requests_total": grows(100, 100),
            "streamload_origin_retries_total": grows(0, 5),
            "streamload_origin_outages_total": "0x100",
        },
    ),
    "StreamloadCacheThrash": Case(
        {
            "streamload_shards_evicted_total": grows(0, 3),
            "streamload_tier_hits_total": grows(9, 1),
            "streamload_tier_misses_total": grows(1, 9),
            "streamload_epoch": "1x100",
        },
        {  # the first epoch, in which no shard can be there
            "streamload_shards_evicted_total": grows(0, 3),
            "streamload_tier_hits_total": "0x100",
            "streamload_tier_misses_total": grows(9, 9),
            "streamload_epoch": "0x100",
        },
        fires=7,
        clears=24,
    ),
    "StreamloadSourceStarved": Case(
        {
            WAIT: grows(0.1, 4),
            'streamload_source_wait_seconds_total{source="slow"}': grows(0.1, 20),
            'streamload_source_wait_seconds_total{source="fast"}': grows(0.1, 0.1),
        },
        {  # the only source
            WAIT: grows(0.1, 4),
            'streamload_source_wait_seconds_total{source="slow"}': grows(0.1, 20),
        },
        labels=(("source", "slow"),),
    ),
    "StreamloadMemoryTight": Case(
        {"streamload_device_memory_ratio": is_at(0.9, 0.99)},
        {"streamload_device_memory_ratio": is_at(0.9, 0.95)},
    ),
    "StreamloadRunGone": Case(
        {'streamload_run_info{host="node",pid="7"}': "1x18 stale"},
        {'streamload_run_info{host="node",pid="7"}': "1x100"},
        labels=(("host", "node"), ("pid", "7")),
        clears=7,
        severity="info",
    ),
    "StreamloadStraggler": Case(
        {WAIT: grows(0.1, 6), WAIT + OTHER_RANK: grows(0.1, 0.1)},
        {WAIT: grows(0.1, 6), WAIT + OTHER_RANK: grows(0.1, 6)},
    ),
}


def series(values: dict[str, str]) -> list[dict[str, str]]:
    """promtool's input series: the labels of a rank, but for those that a name brings."""
    found = []
    for given, numbers in values.items():
        name, _, own = given.partition("{")
        labels = RANK | dict(re.findall(r'(\w+)="([^"]*)"', own))
        text = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
        found.append({"series": f"{name}{{{text}}}", "values": numbers})
    return found


def promtool_tests(name: str, case: Case) -> list[dict[str, Any]]:
    """promtool's tests of one rule: without trouble it never fires; with it, it does, and ends."""
    (rule,) = [rule for rule in rules() if rule["alert"] == name]
    labels = RANK | dict(case.labels) | {"severity": case.severity}

    def at(minute: int, fires: bool) -> dict[str, Any]:
        return {
            "eval_time": f"{minute}m",
            "alertname": name,
            "exp_alerts": [{"exp_labels": labels}] if fires else [],
        }

    silent = [at(minute, False) for minute in range(25)]
    trouble = [at(0, False), at(1, False), at(case.fires, True), at(case.clears, False)]
    assert rule["annotations"].keys() == {"summary", "description"}
    return [
        {"interval": "15s", "input_series": series(case.silent), "alert_rule_test": silent},
        {"interval": "15s", "input_series": series(case.trouble), "alert_rule_test": trouble},
    ]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def without_annotations(folder: Path) -> Path:
    """The rules without their texts, which promtool would compare to the letter."""
    content = yaml.safe_load(RULES.read_text())
    for rule in content["groups"][0]["rules"]:
        rule.pop("annotations")
    path = folder / "rules.yml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_every_rule_has_a_case() -> None:
    assert [rule["alert"] for rule in rules()] == list(CASES)


@promtool.needs_promtool
def test_prometheus_has_nothing_against_the_rules() -> None:
    done = promtool.run("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(CASES)} rules found" in done.stdout


@promtool.needs_promtool
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_a_rule_fires_clears_and_stays_silent(name: str, tmp_path: Path) -> None:
    rules_path = without_annotations(tmp_path)
    tests = {
        "rule_files": [str(rules_path)],
        "evaluation_interval": "5s",
        "tests": promtool_tests(name, CASES[name]),
    }
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump(tests))
    done = promtool.run("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool.needs_promtool
def test_the_text_of_an_alert_names_the_rank_and_what_was_measured(tmp_path: Path) -> None:
    (rule,) = [rule for rule in rules() if rule["alert"] == "StreamloadDataWait"]
    labels = RANK | {"severity": "warning"}
    summary = "Rank 0 of run a1 waits 26.67% of its time for data."
    expected = {"summary": summary, "description": " ".join(rule["annotations"]["description"].split())}
    alert = {"exp_labels": labels, "exp_annotations": expected}
    tests = [
        {
            "interval": "15s",
            "input_series": series(CASES["StreamloadDataWait"].trouble),
            "alert_rule_test": [
                {"eval_time": "5m", "alertname": "StreamloadDataWait", "exp_alerts": [alert]},
            ],
        }
    ]
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5s", "tests": tests}))
    done = promtool.run("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_ask_for_metrics_that_are_exported() -> None:
    exported = set(re.findall(r"^(streamload_\w+)", exposition([full_page()]), re.M))
    for rule in rules():
        asked = set(re.findall(r"\bstreamload_\w+", rule["expr"]))
        assert asked
        assert asked <= exported, rule["alert"]
