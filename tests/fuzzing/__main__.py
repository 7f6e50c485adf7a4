"""``python -m tests.fuzzing --cases N --seed S``: fuzz parsers, the C code, and whole trainings."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import sanitized
from .runner import COSTS, TARGETS, Failure, run, run_here


def main() -> int:
    """Run what was asked for; 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument(
        "--cases",
        type=int,
        default=1_000_000,
        help="of each target; of trainings a thousandth, in trouble a third of that",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this; may be given again")
    parser.add_argument("--case", type=int, help="run this case alone, as a failure says")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--sources", type=Path, default=sanitized.SOURCES, help="of the C code")
    asked = parser.parse_args()
    for target in asked.target or TARGETS:
        if target == "kernels" and sanitized.PLACE not in os.environ:
            if why := sanitized.why_not():
                print(f"kernels: without sanitizers: {why}", flush=True)
            elif status := _sanitized(asked):
                return status
            else:
                continue
        began = time.monotonic()
        if asked.case is None:
            cases = -(-asked.cases // COSTS.get(target, 1))
            ends, failure = run(target, cases, asked.seed, asked.processes)
        else:
            ends, failure = run_here(target, 1, asked.seed, asked.case)
        took = max(time.monotonic() - began, 1e-9)
        counts = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
        print(f"{target}: {ends.total():,} cases of seed {asked.seed} in {took:.0f} s: {counts}", flush=True)
        if failure is not None:
            return _complain(failure)
    return 0


def _sanitized(asked: argparse.Namespace) -> int:
    """Fuzz the C code, built with sanitizers, in a process that has them; returns its status."""
    options = {
        "--cases": asked.cases,
        "--seed": asked.seed,
        "--case": asked.case,
        "--processes": asked.processes,
    }
    words = [str(word) for option, value in options.items() if value is not None for word in (option, value)]
    command = [sys.executable, "-m", str(__package__), "--target", "kernels", *words]
    with tempfile.TemporaryDirectory(prefix="streamload-sanitized-") as place:
        sanitized.build(Path(place), asked.sources)
        return subprocess.run(command, env=sanitized.environment(Path(place)), check=False).returncode


def _complain(failure: Failure) -> int:
    print(failure, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
