"""``python -m tests.fuzzing --cases N --seed S``: fuzz tar parser, index reader and URL parser."""

from __future__ import annotations

import argparse
import os
import sys
import time

from .runner import TARGETS, Failure, run, run_here


def main() -> int:
    """Run what was asked for; 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this; may be given again")
    parser.add_argument("--case", type=int, help="run this case alone, as a failure says")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    for target in asked.target or TARGETS:
        began = time.monotonic()
        if asked.case is None:
            ends, failure = run(target, asked.cases, asked.seed, asked.processes)
        else:
            ends, failure = run_here(target, 1, asked.seed, asked.case)
        took = max(time.monotonic() - began, 1e-9)
        counts = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
        print(f"{target}: {ends.total():,} cases of seed {asked.seed} in {took:.0f} s: {counts}", flush=True)
        if failure is not None:
            return _complain(failure)
    return 0


def _complain(failure: Failure) -> int:
    print(failure, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
