"""Where a result comes from: a commit of this history, a clean tree, a machine, a date.

A result that says all four can be measured again and compared. Those that don't yet are in TO_MEASURE_AGAIN;
the README shows no others without. A result that has all four may still be old: `old` names these.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.markdown import Result, table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MOST_COMMITS = 400
"""A result is old after so many commits."""
TO_MEASURE_AGAIN = {
    *("arrival", "bucket_groups", "facts", "features", "gpu_feed", "handover"),
    *("handover_gpu", "mixing_policies", "naflex_step", "nodes", "prepared"),
    *("scale", "start", "strategies", "verification"),
}
"""Results that lack something of this. The list may only get shorter: measure them in a clean tree."""


class Unproven(ValueError):
    """A page shows a result that doesn't say where it comes from."""


def lacks(result: Result) -> list[str]:
    """Return what is missing to know where a result comes from; the parts of a result count, too."""
    missing = [f"the {part}" for part in ("date", "machine") if not result.get(part)]
    commit = result.get("commit")
    if not commit:
        missing.append("the commit")
    elif commit.endswith("+"):
        missing.append(f"a clean tree: files differed from {commit[:-1]}")
    elif not re.fullmatch("[0-9a-f]{7,40}", commit):
        missing.append(f"a commit: {commit!r}")
    elif commits_since(commit) is None:
        missing.append(f"a commit of this history: {commit}")
    for part in ("store", "rows"):
        missing += _lacks_in(result.get(part), part)
    return missing


def _lacks_in(part: object, name: str) -> Iterator[str]:
    """What parts that were measured at another time lack: those with a date of their own."""
    rows = part if isinstance(part, list) else [part]
    dated = [row for row in rows if isinstance(row, dict) and "date" in row]
    for missing in sorted({missing for row in dated for missing in lacks({"machine": "its own", **row})}):
        yield f"{missing} (in {name})"


def refuse_unproven(name: str, result: Result) -> None:
    """Raise Unproven if a result lacks something and isn't listed."""
    if name not in TO_MEASURE_AGAIN and (missing := lacks(result)):
        raise Unproven(
            f"benchmarks/results/{name}.json lacks {', '.join(missing)}: measure it again, in a clean tree"
        )


def measured(results: dict[str, Result]) -> str:
    """Return a table of when, at which commit and on which machine each result was measured.

    Below it is a line with the versions of all packages. Scripts are linked as from a folder of docs/.
    """
    rows = [
        [
            f"[{name}](../../benchmarks/{result['benchmark']}.py)",
            result["date"],
            result.get("commit") or "–",
            str(rounds(result)),
            _machine(result),
        ]
        for name, result in sorted(results.items())
    ]
    lines = [table(["result", "date", "commit", "rounds", "machine"], rows)]
    if any(str(result.get("commit")).endswith("+") for result in results.values()):
        lines.append("A commit with + had uncommitted changes in its tree.")
    found: dict[str, set[str]] = {}
    for result in results.values():
        for versions in result.get("versions", {}).values():
            for package, version in versions.items():
                found.setdefault(package, set()).add(version)
    found.pop("streamload", None)  # the commit says more
    if found:
        each = (f"{package} {' and '.join(sorted(found[package]))}" for package in sorted(found))
        lines.append(f"Versions: {', '.join(each)}.")
    return "\n\n".join(lines)


def rounds(result: Result) -> int:
    """Return how many rounds a result has: by its rows, or by its seeds where rows don't say."""
    return len({row["round"] for row in result["rounds"] if "round" in row}) or len(result["seeds"])


def _machine(result: Result) -> str:
    on = result["machine"]
    device = f"{result['device']}; " if "device" in result else ""
    memory = f"{on['memory_bytes'] / 2**30:.0f} GiB"
    return f"{device}{on['cpu']}, {on['cores']} cores, {memory}, Linux {on['kernel']}"


def old(results: dict[str, Result]) -> dict[str, int]:
    """Return the results that are older than MOST_COMMITS, and how many commits ago each was measured."""
    ages = {name: commits_since(str(result.get("commit"))) for name, result in results.items()}
    return {name: age for name, age in ages.items() if age is not None and age > MOST_COMMITS}


def read_all(folder: Path = RESULTS) -> dict[str, Result]:
    """Read all results, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def is_history_whole() -> bool:
    """Return whether this is a clone with all of its history, so that commits can be looked up."""
    return bool(_positions())


def head() -> str:
    """Return the commit that is checked out."""
    return next(iter(_positions()))


def commits_since(commit: str) -> int | None:
    """Return how many commits ago a commit was; None if it isn't of this history, 0 where that isn't known.

    Files without their whole history, as in a shallow clone, can't tell: commits count as known there.
    """
    positions = _positions()
    if not positions:
        return 0
    return next((age for name, age in positions.items() if name.startswith(commit.removesuffix("+"))), None)


@functools.cache
def _positions() -> dict[str, int]:
    """The commits of this history with their places, the latest first; none where it isn't whole."""
    try:
        if _git("rev-parse", "--is-shallow-repository") != "false":
            return {}
        return {name: place for place, name in enumerate(_git("rev-list", "HEAD").split())}
    except (OSError, subprocess.CalledProcessError):
        return {}


def _git(*command: str) -> str:
    done = subprocess.run(["git", "-C", HERE, *command], capture_output=True, text=True, check=True)
    return done.stdout.strip()
