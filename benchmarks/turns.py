"""Runs contenders in turn: every round each of them once, the order rotated, each in a process of its own.

So what the machine does at some moment falls on all of them alike, and what is read are medians and ratios.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.contenders.workload import Epoch, Job, Result
from benchmarks.process_tree import MemoryWatch
from streamload.bench.rounds import Row
from streamload.bench.rounds import medians as medians
from streamload.bench.rounds import rotated as rotated

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
_LIMIT_SECONDS = 900


@dataclass(frozen=True)
class Contender:
    """A loader in one configuration.

    Attributes:
        name: in results.
        adapter: the module in contenders/ that runs it.
        job: what differs from the other contenders' job.
    """

    name: str
    adapter: str
    job: dict[str, Any] = field(default_factory=dict)

    @property
    def needs_open_clip(self) -> bool:
        return self.adapter == "openclip" or self.job.get("preprocess", "open_clip") == "open_clip"


@dataclass(frozen=True)
class Interpreters:
    """Where contenders run: open_clip pins an older webdataset than the rest, so it has its own."""

    own: Path
    open_clip: Path | None

    def of(self, contender: Contender) -> Path:
        if contender.adapter == "openclip" and self.open_clip is not None:
            return self.open_clip
        return self.own

    def packages(self) -> str | None:
        """open_clip's environment, to stand behind the packages of the other."""
        if self.open_clip is None:
            return None
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return subprocess.check_output([self.open_clip, "-c", code], text=True).strip()


@dataclass(frozen=True)
class Ran:
    """One run of a contender."""

    started: float
    result: Result
    memory: MemoryWatch | None

    @property
    def epochs(self) -> list[Epoch]:
        return self.result.epochs


def arguments(description: str | None, rounds: int, names: Sequence[str]) -> argparse.Namespace:
    """What every benchmark can be told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small form that only shows that it works")
    parser.add_argument("--rounds", type=int, help=f"default {rounds}, with --quick 1")
    parser.add_argument("--contenders", nargs="+", choices=names, default=list(names), metavar="NAME")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv/bin/python")
    parser.add_argument("--openclip-python", type=Path, default=ROOT / ".venv-openclip/bin/python")
    parser.add_argument(
        "--out", type=Path, help="file for the JSON; default benchmarks/results/NAME.json, none with --quick"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contenders and shards go with it
    given.rounds = given.rounds or (1 if given.quick else rounds)
    return given


def interpreters(given: argparse.Namespace) -> Interpreters:
    return Interpreters(given.python, given.openclip_python if given.openclip_python.exists() else None)


def chosen(given: argparse.Namespace, all_of_them: Sequence[Contender]) -> list[Contender]:
    """The contenders asked for; those that need open_clip only where it is installed."""
    found = [contender for contender in all_of_them if contender.name in given.contenders]
    if interpreters(given).open_clip is None:
        for contender in found:
            if contender.needs_open_clip:
                print(f"{contender.name} is left out: no {given.openclip_python}", file=sys.stderr)
        found = [contender for contender in found if not contender.needs_open_clip]
    return found


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary directory for all that a benchmark makes."""
    with tempfile.TemporaryDirectory(prefix="streamload-bench-") as directory:
        yield Path(directory)


@contextlib.contextmanager
def photographs(samples: int, samples_per_shard: int) -> Iterator[tuple[Path, int]]:
    """Shards of photographs in a temporary directory, and their bytes."""
    from streamload.testing.photographs import write_photograph_shards

    with scratch() as directory:
        paths = write_photograph_shards(directory / "shards", samples, samples_per_shard)
        yield directory, sum(path.stat().st_size for path in paths)


@contextlib.contextmanager
def empty_directory(parent: Path) -> Iterator[Path]:
    """A directory for one run's cache, removed with all that is in it."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="cache-") as directory:
        yield Path(directory)


def pattern(base: str, shards: int) -> str:
    """The URL pattern of shards below a base."""
    return f"{base}/{{00000..{shards - 1:05d}}}.tar"


def run(contender: Contender, job: Job, python: Path, watch_memory: bool = False) -> Ran:
    """Run a contender to its end.

    Raises:
        RuntimeError: it failed, or took longer than a quarter of an hour.
    """
    command = [str(python), "-m", f"benchmarks.contenders.{contender.adapter}", job.to_argument()]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environ = {name: value for name, value in environ.items() if not name.startswith(("STREAMLOAD_", "WDS_"))}
    with tempfile.TemporaryFile("w+") as errors:
        started = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        timer = threading.Timer(_LIMIT_SECONDS, process.kill)
        timer.start()
        watch = MemoryWatch(process.pid) if watch_memory else None
        try:
            with watch or contextlib.nullcontext():
                output = process.communicate()[0]
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{contender.name} ended with {process.returncode}:\n{errors.read()[-4000:]}")
    said = json.loads(output)
    said["epochs"] = [Epoch(**epoch) for epoch in said["epochs"]]
    return Ran(started, Result(**said), watch)


def write(given: argparse.Namespace, name: str, content: Row) -> None:
    """Write a benchmark's result where it belongs; say the medians."""
    content = {
        "benchmark": name,
        "quick": given.quick,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine.describe(),
        **content,
    }
    out = given.out or (None if given.quick else RESULTS / f"{name}.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps({key: content[key] for key in ("medians", "targets")}, indent=1))


def versions(rows: Sequence[Row]) -> Row:
    """Take the versions out of rows; they are the same in each round."""
    return {row["contender"]: row.pop("versions") for row in rows}


def target(
    claim: str, value: float | None, at_most: float | None = None, at_least: float | None = None
) -> Row:
    """What is to be reached, and whether it is."""
    met = None
    if value is not None:
        met = value <= at_most if at_most is not None else at_least is not None and value >= at_least
    return {"claim": claim, "value": value, "at_most": at_most, "at_least": at_least, "met": met}


def ratio(medians_: dict[str, Row], metric: str, of: str, to: str) -> float | None:
    if of not in medians_ or to not in medians_:
        return None
    return medians_[of][metric] / medians_[to][metric]
