"""Writes the tables of docs/results/faults.md from results/faults.json and results/simulation.json.

Command: python -m benchmarks.reliability
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.markdown import filled, table
from benchmarks.turns import RESULTS, ROOT

PAGE = ROOT / "docs/results/faults.md"
_LIFE = (
    "starting",
    "claiming",
    "taking over",
    "reserving",
    "evicting",
    "0–25 % filled",
    "25–50 % filled",
    "50–75 % filled",
    "75–100 % filled",
    "publishing",
    "reading",
)
"""The states of a shard's life in a process that fills it, about in the order in which they come."""


def main() -> None:
    result = json.loads((RESULTS / "faults.json").read_text())
    found = {
        "faults": rows(result),
        "kills": kills(result),
        "happened": happened(result),
        "machine": machine(result),
    }
    simulated = RESULTS / "simulation.json"
    if simulated.exists():
        found["simulation"] = simulation(json.loads(simulated.read_text()))
    PAGE.write_text(filled(PAGE.read_text(), found))


def passed(row: dict[str, Any]) -> bool:
    """Whether all attempts at a row passed, or none could be made."""
    return "left_out" in row or row["passes"] == row["attempts"]


def said(row: dict[str, Any]) -> str:
    """A row in a line, and under it what went wrong."""
    if "left_out" in row:
        return f"{row['row']:3} {row['name']}: left out: {row['left_out']}"
    happened = ", ".join(f"{name} {count}" for name, count in row["happened"].items())
    if "killed_in" in row:
        happened += " (" + ", ".join(f"{name} {count}" for name, count in row["killed_in"].items()) + ")"
    line = f"{row['row']:3} {row['name']}: {score(row)} in {row['seconds']} s; {happened}"
    if "webdataset" in row:
        line += f"; webdataset {score(row['webdataset'])} in {row['webdataset']['seconds']} s"
    return "\n".join([line, *(f"      {example}" for example in row["examples"])])


def score(found: dict[str, Any]) -> str:
    """Passes of attempts, and by which letters the others failed."""
    failed = ", ".join(f"{letter} {count}" for letter, count in found["failed"].items())
    return f"{found['passes']}/{found['attempts']}" + (f" ({failed})" if failed else "")


def rows(result: dict[str, Any]) -> str:
    head = ["#", "fault", "must hold", "it happened", "streamload", "webdataset", "what it shows"]
    body = []
    for row in result["rows"]:
        if "left_out" in row:
            ours, times = f"not run: {row['left_out']}", "–"
        else:
            ours, times = score(row), f"{sum(row['happened'].values()):,}×"
        theirs = score(row["webdataset"]) if "webdataset" in row else "–"
        fault = row["fault"].replace("|", "\\|")
        body.append([str(row["row"]), fault, " ".join(row["holds"]), times, ours, theirs, row["proves"]])
    return table(head, body)


def happened(result: dict[str, Any]) -> str:
    """How often each form of each fault happened."""
    lines = []
    for row in result["rows"]:
        if row.get("happened"):
            counts = ", ".join(f"{name} {count:,}" for name, count in row["happened"].items())
            lines.append(f"- {row['row']}, {row['name']}: {counts}")
    return "\n".join(lines)


def killed_in(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How many kills of all rows hit each state of a shard's life."""
    states: Counter[str] = Counter()
    for row in rows:
        states.update(row.get("killed_in", {}))
    return {state: states[state] for state in _LIFE} | dict(states)


def kills(result: dict[str, Any]) -> str:
    """Which states of a shard's life the kills hit, by row."""
    found = [row for row in result["rows"] if row.get("killed_in")]
    head = ["state", *(f"{row['row']}, {row['name']}" for row in found), "all"]
    body = [
        [state, *(f"{row['killed_in'].get(state, 0):,}" for row in found), f"{count:,}"]
        for state, count in killed_in(found).items()
    ]
    sums = [sum(row["killed_in"].values()) for row in found]
    return table(head, [*body, ["all", *(f"{count:,}" for count in (*sums, sum(sums)))]])


def simulation(result: dict[str, Any]) -> str:
    """How many seeds were simulated, how many failed, and what was in them."""
    happened = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in result["happened"].items())
    stop = result["first_seed"] + result["seeds"]
    failed = f"failed: {', '.join(map(str, result['failed']))}" if result["failed"] else "0 failed"
    return (
        f"{result['date']}: seeds {result['first_seed']:,} to {stop - 1:,}, {failed}; "
        f"{result['calls']:,} calls of the operating system. In them: {happened}."
    )


def machine(result: dict[str, Any]) -> str:
    on = result["machine"]
    found = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    date = max(row["date"] for row in result["rows"])
    strace = "with" if result["strace"] else "without"
    return (
        f"{date}; {on['cpu']}, {on['cores']} cores, Linux {on['kernel']}, tiers on "
        f"{result['temporary_files_on']}, {strace} strace; {found}"
    )


if __name__ == "__main__":
    main()
