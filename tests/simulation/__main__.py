"""Run seeds: `python -m tests.simulation --seeds 0:10000 --jobs 2`."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks import machine

from .campaign import results, summary, told
from .planted import BUGS


def main() -> int:
    """Print each failing seed; 1 if there was one."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="first:stop")
    parser.add_argument("--jobs", type=int, default=1, help="how many seeds at once")
    parser.add_argument(
        "--plant", choices=sorted(BUGS), help="a bug to be found; stops at the first seed that does"
    )
    parser.add_argument("--trace", action="store_true", help="print every call of a seed")
    parser.add_argument(
        "--keep-going", action="store_true", help="tell of all failing seeds, not only of the first ten"
    )
    parser.add_argument("--out", type=Path, help="file for a JSON of how it went; none by default")
    arguments = parser.parse_args()
    first, stop = map(int, arguments.seeds.split(":"))
    failed: list[int] = []
    happened: Counter[str] = Counter()
    steps, done, began = 0, 0, time.perf_counter()
    for result in results(range(first, stop), arguments.jobs, arguments.plant, trace=arguments.trace):
        happened.update(result.happened)
        steps += result.steps
        done += 1
        if result.failure is not None:
            failed.append(result.seed)
            print(told(result, arguments.plant), flush=True)
            if arguments.plant or (len(failed) >= 10 and not arguments.keep_going):
                break
    print(f"{done:,} seeds, {len(failed)} failed{f': {failed}' if failed else ''}; {steps:,} calls")
    print(summary(happened))
    seconds = round(time.perf_counter() - began)
    print(f"{seconds} s", file=sys.stderr)
    if arguments.out is not None:
        content = {
            "benchmark": "simulation",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "commit": machine.commit(),
            "machine": machine.describe(),
            "planted": arguments.plant,
            "first_seed": first,
            "seeds": done,
            "failed": failed,
            "calls": steps,
            "happened": dict(sorted(happened.items())),
            "jobs": arguments.jobs,
            "seconds": seconds,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
