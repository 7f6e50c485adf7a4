"""Runs the rows and writes what came of them; see the package's docstring."""

import argparse
import datetime
import importlib.metadata
import json
import logging
import platform
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine, reliability
from tests.faults import __doc__ as description
from tests.faults.matrix import ROWS, Sources, run_row

RESULTS = reliability.RESULTS / "faults.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="numbers, with commas between them; all by default")
    parser.add_argument("--count", type=int, help="attempts at each row; by default each has its own number")
    parser.add_argument("--share", type=float, default=1.0, help="of each row's own number of attempts")
    parser.add_argument("--short", action="store_true", help="each form of each fault once, small")
    parser.add_argument("--no-peer", action="store_true", help="leave webdataset out")
    parser.add_argument(
        "--out",
        type=Path,
        help="file for the JSON, whose other rows stay; default, for all rows: results/faults.json",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # What it warns of is what is done to it here.
    logging.getLogger("streamload").addHandler(logging.NullHandler())
    numbers = {int(number) for number in given.rows.split(",")} if given.rows else None
    rows = [row for row in ROWS if numbers is None or row.number in numbers]
    out = given.out or (None if numbers or given.short or given.count else RESULTS)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    if out == RESULTS and (why := machine.why_not_repeatable()):
        raise SystemExit(f"{why}: a committed result is of a commit; or say --out FILE")
    results: list[dict[str, Any]] = []
    with Sources() as sources:
        for row in rows:
            full = max(len(row.variants), round(row.count * given.share))
            count = given.count or ((row.short or len(row.variants)) if given.short else full)
            result = run_row(row, sources, count, short=given.short, with_peer=not given.no_peer)
            results.append(result | {"date": today, "commit": machine.commit()})
            print(reliability.said(result), flush=True)
            if out is not None:  # after each row: a run that is broken off leaves what it has
                _write(out, results)
    return 0 if all(reliability.passed(result) for result in results) else 1


def _write(out: Path, results: list[dict[str, Any]]) -> None:
    """Write the results; rows in the file that were not run this time stay."""
    fresh = {(result["row"], result["name"]) for result in results}
    before = json.loads(out.read_text())["rows"] if out.exists() else []
    still = {(row.number, row.name) for row in ROWS} - fresh
    rows = results + [row for row in before if (row["row"], row["name"]) in still]
    content = {
        "benchmark": "faults",
        "date": max(row["date"] for row in rows),
        "commit": machine.commit(),
        "machine": machine.describe(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("streamload", "webdataset", "torch")},
        },
        "seeds": "attempt n of a row has seed n",
        "temporary_files_on": _kind_of(tempfile.gettempdir()),
        "strace": shutil.which("strace") is not None,
        "killed_in": reliability.killed_in(rows),
        "rows": sorted(rows, key=lambda row: (row["row"], row["name"])),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _kind_of(directory: str) -> str:
    from streamload.options import file_system

    return file_system(Path(directory)).kind


if __name__ == "__main__":
    sys.exit(main())
