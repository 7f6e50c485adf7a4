"""A plugin for pytest that writes which tests of a run passed and failed; `.ci/reruns.py` loads it.

It runs in the process that the user started, not in the workers of xdist. A test whose fixtures fail before
or after it has failed. A worker's crash is listed apart, as it also ends what other tests of the worker
share; so is a file that can't be imported.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file for the outcomes of a run's tests, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(path))


class _Outcomes:
    def __init__(self, path: Path):
        self._path = path
        self._passed: set[str] = set()
        self._failed: dict[str, None] = {}
        self._crashed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if (
            report.failed
        ):  # a file that can't be imported: with xdist the exit status is that of a failed test
            self._crashed.append(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self._crashed.append(crashitem)

    def pytest_sessionfinish(self) -> None:
        outcomes = {
            "passed": sorted(self._passed - self._failed.keys()),
            "failed": list(self._failed),
            "crashed": self._crashed,
        }
        self._path.write_text(json.dumps(outcomes))
