"""Run targets of the Makefile and write how long each took into CONTRIBUTING.md's table (`make times`).

    times.py TARGET ...

The last cell of a target's row gets the minutes, the cores, the day and the commit. A target that fails
ends the run, and its row stays as it was.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path("CONTRIBUTING.md")


def main() -> None:
    """Time each target, in turn; a row is written when its target has ended."""
    targets = sys.argv[1:]
    circumstances()  # what can't be known is said before the targets take their time
    for target in targets:
        with_time(PAGE.read_text(), target, "")
    for target in targets:
        began = time.monotonic()
        if subprocess.run(["make", target], check=False).returncode:
            raise SystemExit(f"make {target} failed: its row in {PAGE} stays as it was")
        duration = in_words(time.monotonic() - began)
        print(f"make {target}: {duration}", flush=True)
        PAGE.write_text(with_time(PAGE.read_text(), target, f"{duration} ({circumstances()})"))


def with_time(page: str, target: str, cell: str) -> str:
    """The page with another last cell in the row of `make TARGET`."""
    row = re.compile(rf"^(\| `make {re.escape(target)}` \|.*\|)[^|\n]*\|$", re.MULTILINE)
    page, rows = row.subn(lambda match: f"{match[1]} {cell} |", page)
    if rows != 1:
        raise SystemExit(f"{PAGE} has {rows} rows that begin with | `make {target}` |; expected 1")
    return page


def in_words(seconds: float) -> str:
    """Minutes and seconds, as `11 min 20 s`."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def circumstances() -> str:
    """Cores that may be used, the day, and the commit with a + where tracked files differ from it."""
    commit = _git("rev-parse", "--short", "HEAD").strip()
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":(exclude){PAGE}")
    cores, today = len(os.sched_getaffinity(0)), time.strftime("%Y-%m-%d")
    return f"{cores} cores, {today}, {commit}{'+' * bool(changed)}"


def _git(*command: str) -> str:
    answer = subprocess.run(["git", *command], check=False, stdout=subprocess.PIPE, text=True)
    if answer.returncode:
        raise SystemExit(f"git {command[0]} fails here, as it says above: times are of a commit")
    return answer.stdout


if __name__ == "__main__":
    main()
