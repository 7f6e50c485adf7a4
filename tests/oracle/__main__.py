"""Compare today's batches, states and cache directories with the record, or change the record.

python -m tests.oracle replay [NAME …]             # all cases, or some; --every 4: each fourth
python -m tests.oracle accept --why "…" [NAME …]   # differences that are meant: a line of changes.jsonl
python -m tests.oracle record --why "…"            # the same runs again, where old states can't be read
python -m tests.oracle record --why "…" --cases 9  # a new record of so many runs
"""

from __future__ import annotations

import argparse
import sys

from tests.oracle.record import CHANGES, as_change, read_lines, write_lines
from tests.oracle.replay import record, record_again, replay


def main() -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["replay", "accept", "record"])
    parser.add_argument("names", nargs="*", help="of cases; all by default")
    parser.add_argument("--every", type=int, default=1, help="only each so manyth case")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--why", help="with accept and record: why cases give something else now")
    parser.add_argument("--cases", type=int, help="with record: how many are drawn")
    options = parser.parse_args()
    if options.command != "replay" and not options.why:
        parser.error(f"{options.command} needs --why")
    if options.command == "record":
        if options.cases is None:
            record_again(options.jobs, options.why)
        else:
            record(options.cases, options.jobs, options.why)
        return 0
    differences = []
    for difference in replay(options.names, options.every, options.jobs):
        print(difference, flush=True)
        differences.append(difference)
    if options.command == "accept" and differences:
        write_lines(CHANGES, [*read_lines(CHANGES), as_change(differences, options.why)])
        return 0
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
