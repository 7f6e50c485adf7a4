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

from benchmarks import machine, reliability
from benchmarks.faults import __doc__ as description
from benchmarks.faults.matrix import ROWS, Sources, run_row

RESULTS = Path(__file__).resolve().parents[1] / "results" / "faults.json"


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
        "--out", type=Path, help="file for the JSON; without --rows: benchmarks/results/faults.json"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.getLogger("streamload").addHandler(
        logging.NullHandler()
    )  # what it warns of is what is done to it
    numbers = {int(number) for number in given.rows.split(",")} if given.rows else None
    rows = [row for row in ROWS if numbers is None or row.number in numbers]
    results = []
    with Sources() as sources:
        for row in rows:
            full = max(len(row.variants), round(row.count * given.share))
            count = given.count or ((row.short or len(row.variants)) if given.short else full)
            result = run_row(row, sources, count, short=given.short, with_peer=not given.no_peer)
            results.append(result)
            print(reliability.said(result), flush=True)
    out = given.out or (RESULTS if numbers is None and not given.short and not given.count else None)
    if out is not None:
        content = {
            "benchmark": "faults",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "machine": machine.describe(),
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in ("streamload", "webdataset", "torch")},
            },
            "seeds": "attempt n of a row has seed n",
            "temporary_files_on": _kind_of(tempfile.gettempdir()),
            "strace": shutil.which("strace") is not None,
            "rows": results,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return 0 if all(reliability.passed(result) for result in results) else 1


def _kind_of(directory: str) -> str:
    from streamload.settings import file_system

    return file_system(Path(directory)).kind


if __name__ == "__main__":
    sys.exit(main())
