"""Run tests; run a few that fail again, by themselves; forgive those that pass then, and write down which.

    reruns.py PART PROCESSES MARKS [FILE ...]
    reruns.py --show PART ...

A busy machine may fail a test that waits, so a failure is forgiven where the test passes by itself. But a
race that loses 30 % of the time passes so in 91 % of runs: it may not hide. What isn't forgiven:

- more than MOST failures in a run of a part; none is run again then;
- a test of STRICT rooms unless it passes twice by itself, or that failed in the part's run before as well;
- a crash of a worker, an interrupted run, an error outside of tests.

The first run has PROCESSES processes and the tests that MARKS select, as by pytest's -m; later ones have one.
The last runs of each part are in .pytest_cache/reruns/PART.jsonl, one a line, in each checkout; `--show`
prints the last one of each.
"""

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MOST = 2
STRICT = ("cache", "loader", "origins", "order", "ipc", "derived")
"""Rooms of tests where a race may be a wrong sample."""
KEPT_RUNS = 50
RECORDS = Path(".pytest_cache/reruns")
_TESTS_FAILED = 1  # pytest's exit status; others are: interrupted, internal error, wrong usage, no tests

Record = dict[str, Any]


def main() -> int:
    """Run a part's tests, or show what the last runs forgave."""
    if sys.argv[1] == "--show":
        for part in sys.argv[2:]:
            print(*shown(part), sep="\n")
        return 0
    part, processes, marks, *files = sys.argv[1:]
    before = records(part)
    date = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M}"
    in_parallel = ["--numprocesses", processes, "--dist", "worksteal"]
    status, outcomes = run(part, ["-m", marks, *in_parallel, *files])
    record: Record = {"date": date, "failed": outcomes["failed"], "forgiven": [], "refused": ""}
    if status == _TESTS_FAILED:
        record["refused"] = refusal(part, outcomes, before[-1]["failed"] if before else [])
        if not record["refused"]:
            record["forgiven"], status = outcomes["failed"], 0
    elif status:
        record["refused"] = f"pytest ended with {status}"
    write(part, [*before, record])
    print("", *shown(part), sep="\n", flush=True)
    return status


def refusal(part: str, outcomes: Record, failed_before: list[str]) -> str:
    """Run the failed tests again; returns why they aren't forgiven, "" if they are."""
    failed: list[str] = outcomes["failed"]
    if outcomes["crashed"]:
        return f"a process crashed, or a file can't be imported: {', '.join(outcomes['crashed'])}"
    if not 1 <= len(failed) <= MOST:
        return f"{len(failed)} tests failed, and only 1 to {MOST} are run again"
    strict = [test for test in failed if is_strict(test)]
    for chosen in (failed, strict):
        if chosen:
            status, again = run(part, chosen)
            if status or not set(chosen) <= set(again["passed"]):
                return f"didn't pass by itself: {', '.join(set(chosen) - set(again['passed']))}"
    if twice := [test for test in strict if test in failed_before]:
        return f"failed in the run before, too: {', '.join(twice)}"
    return ""


def is_strict(test: str) -> bool:
    """Return whether a test, by its node id, is of one of the STRICT rooms."""
    return re.match(rf"tests/({'|'.join(STRICT)})/", test) is not None


def run(part: str, arguments: list[str]) -> tuple[int, Record]:
    """Run pytest with the cache directory of a part; returns its exit status and the outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        command = [sys.executable, "-u", "-m", "pytest", "-p", "tests.support.outcomes", "--outcomes", path]
        command += ["-o", f"cache_dir=.pytest_cache/{part}"]
        environ = {
            name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
        }
        status = subprocess.run([*command, *arguments], env=environ, check=False).returncode
        if path.exists():
            return status, json.loads(path.read_text())
    return status or 1, {"passed": [], "failed": [], "crashed": ["pytest"]}


def records(part: str) -> list[Record]:
    """The last runs of a part, the latest last; none if they can't be read."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return [json.loads(line) for line in (RECORDS / f"{part}.jsonl").read_text().splitlines()]
    return []


def write(part: str, runs: list[Record]) -> None:
    """Keep the last runs of a part."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(run) for run in runs[-KEPT_RUNS:]]
    (RECORDS / f"{part}.jsonl").write_text("\n".join(lines) + "\n")


def shown(part: str) -> list[str]:
    """The last run of a part in words: what was forgiven, and why the rest wasn't."""
    if not (runs := records(part)):
        return [f"{part}: no run yet"]
    last = runs[-1]
    if last["refused"]:
        return [f"{part}, {last['date']}: not forgiven, as {last['refused']}"]
    count = len(last["forgiven"])
    head = f"{part}, {last['date']}: {count or 'no'} test{'s' * (count != 1)} forgiven"
    return [head, *(f"    {test}" for test in last["forgiven"])]


if __name__ == "__main__":
    sys.exit(main())
