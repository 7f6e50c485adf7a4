"""Run cases, and compare what they give with the record; or record it.

Runs (`tests/oracle/run.py`) are stopped and resumed, from their own states and from those of the record.
Cache directories (`tests/oracle/caches.py`) are made anew, and read as the record has them.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.oracle import caches
from tests.oracle.cases import Case, draw
from tests.oracle.place import RECORDED_AT, root, running
from tests.oracle.record import (
    CHANGES,
    OLD,
    PLACE,
    Difference,
    Values,
    differences,
    environment,
    expected,
    read_lines,
    write_lines,
)
from tests.oracle.run import resume, run, strings

_RUNS, _CACHES, _ENVIRONMENT = (PLACE / f"{name}.jsonl" for name in ("runs", "caches", "environment"))


def replay(names: Sequence[str] = (), every: int = 1, jobs: int = 2) -> Iterator[Difference]:
    """Run cases again, and compare.

    Args:
        names: of cases; none: all.
        every: only each so manyth of these.
        jobs: how many run at a time.

    Yields:
        What differs.
    """
    cases = recorded_cases()
    runs = {line["case"]["name"]: line["values"] for line in read_lines(_RUNS)}
    values = _expected(cases, runs)
    (recorded_in,) = read_lines(_ENVIRONMENT)
    recorded_in.pop("why", None)
    wanted = [name for name in values if not names or name in names][::every]
    calls = [
        (
            name,
            (_replayed_run, (cases[name], runs[name])) if name in cases else (_replayed_cache, name),
        )
        for name in wanted
    ]
    with running(jobs) as run_all:
        for name, result in zip(wanted, run_all(_attempt, calls), strict=True):
            if isinstance(result, str):
                yield Difference(name, "error", None, result)
            else:
                yield from differences(name, values[name], result, recorded_in)


def _expected(cases: Mapping[str, Case], runs: Mapping[str, Values]) -> dict[str, Values]:
    """What each case and each cache directory gives, by the record and all changes that were meant."""
    recorded = {name: _comparable(cases[name], values) for name, values in runs.items()}
    recorded |= {line["name"]: line["values"] for line in read_lines(_CACHES)}
    return expected(recorded, read_lines(CHANGES))


def recorded_cases() -> dict[str, Case]:
    """The runs of the record, by name."""
    return {line["case"]["name"]: Case.from_json(line["case"]) for line in read_lines(_RUNS)}


def record_again(jobs: int, why: str) -> None:
    """Record the runs of the record again, as today's loaders can't read its states; directories stay.

    Args:
        jobs: how many run at a time.
        why: is recorded with them.
    """
    cases = recorded_cases()
    values = _expected(cases, {line["case"]["name"]: line["values"] for line in read_lines(_RUNS)})
    with running(jobs, RECORDED_AT) as run_all:
        calls = [(name, (_recorded_run, case)) for name, case in cases.items()]
        runs = dict(zip(cases, run_all(_attempt, calls), strict=True))
    if failed := [f"{name}: {result}" for name, result in runs.items() if isinstance(result, str)]:
        raise AssertionError("\n".join(failed))
    write_lines(_RUNS, [{"case": case.to_json(), "values": runs[name]} for name, case in cases.items()])
    write_lines(_CACHES, [{"name": kind, "values": values[kind]} for kind in caches.KINDS])
    write_lines(_ENVIRONMENT, [{**environment(), "why": why}])
    write_lines(CHANGES, [])


def record(count: int, jobs: int, why: str) -> None:
    """Record cache directories, and runs that are drawn; what can't be run is shown, and another one drawn.

    Args:
        count: of runs.
        jobs: how many run at a time.
        why: is recorded with them.
    """
    PLACE.mkdir(exist_ok=True)
    write_lines(CHANGES, [])
    with running(jobs, RECORDED_AT) as run_all:
        made = list(run_all(_packed, [(kind, kind) for kind in caches.KINDS]))
        caches.write_archive([tar for _, tar in made])
        used = list(run_all(caches.used, [(kind, kind) for kind in caches.KINDS]))
        write_lines(
            _CACHES,
            [
                {"name": kind, "values": {**values, **reading}}
                for kind, (values, _), reading in zip(caches.KINDS, made, used, strict=True)
            ],
        )
        lines: list[dict[str, Any]] = []
        seed = 0
        while len(lines) < count:
            cases = [draw(f"r{number:03d}", number) for number in range(seed, seed + count - len(lines))]
            seed += len(cases)
            calls = [(case.name, (_recorded_run, case)) for case in cases]
            for case, result in zip(cases, run_all(_attempt, calls), strict=True):
                if isinstance(result, str):
                    print(f"{case.name}: {result.splitlines()[-1]:.200}", flush=True)
                else:
                    lines.append({"case": case.to_json(), "values": result})
    write_lines(_RUNS, lines)
    write_lines(_ENVIRONMENT, [{**environment(), "why": why}])


def _attempt(call: tuple[Callable[[Any], Values], Any]) -> Values | str:
    """What a case gives; or its error."""
    function, argument = call
    try:
        return function(argument)
    except Exception:
        return traceback.format_exc()


def _recorded_run(case: Case) -> Values:
    outcome = run(case)
    if not outcome.steps:
        raise AssertionError("it has no step")
    return {
        **strings(outcome),
        "numbers": {**outcome.numbers, "cut": outcome.cut},
        "states": outcome.states,
    }


def _replayed_run(item: tuple[Case, Values]) -> Values:
    """What a run gives today, and what follows the states of the record."""
    case, recorded = item
    outcome = run(case)
    values = {
        **strings(outcome),
        "numbers": {**outcome.numbers, "cut": outcome.cut},
        "states": outcome.states,
    }
    moved = {f"file://{RECORDED_AT}/": f"file://{root()}/"} if case.is_local else {}
    rest = resume(case, recorded["states"], recorded["numbers"]["epochs left"], "third", moved)
    after = {OLD + kind: digests for kind, digests in strings(rest).items()}
    return _comparable(case, {**values, **after})


def _replayed_cache(kind: str) -> Values:
    """What a directory of this kind has today, and what is read from that of the record."""
    values = caches.made(kind)
    caches.clear()
    return {**values, **caches.used(kind)}


def _packed(kind: str) -> tuple[Values, bytes]:
    return caches.made(kind), caches.packed(kind)


def _comparable(case: Case, values: Values) -> Values:
    """Values with states that are alike in all runs.

    They lack what had arrived of each shard, where local shards are, and which times were measured.
    """
    states = [json.loads(json.dumps(state)) for state in values["states"]]
    for state in states:
        del state["checksum"]
        state.pop("fingerprint", None)  # it has versions of libraries
        state.pop("step_times", None)
        if case.is_local:
            del state["data"]
        for group in state["at"].values():
            for source in group["sources"]:
                source.pop("begun", None)
                source["cursor"].pop("done", None)
        for reports in (state.get("steering", {}), *state.get("reports", {}).values()):
            reports.pop("sizes", None)
    return {**values, "states": states}
