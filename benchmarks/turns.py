"""Runs contenders in turn: every round each of them once, the order rotated, each in a process of its own.

So what the machine does at some moment falls on all of them alike, and what is read are medians and ratios.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from benchmarks import machine, watch
from benchmarks.contenders.job import JITTERED, READY, TURN, Epoch, Job, Result
from benchmarks.environments import build as environments
from benchmarks.watch import Watch
from streamload.profile.run import Row
from streamload.profile.run import medians as medians
from streamload.profile.run import rotated as rotated

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
LIMIT_SECONDS = 900


@dataclass(frozen=True)
class Contender:
    """A loader in one configuration.

    Attributes:
        name: in results.
        adapter: the module in contenders/ that runs it.
        job: what differs from the other contenders' job.
        environment: "own", "open_clip", or the name of a peer's.
        reads: shards by "url", which it keeps once they are there; by "path" when they are near, as it keeps
            none; or "converted", its own format.
    """

    name: str
    adapter: str
    job: dict[str, Any] = field(default_factory=dict)
    environment: str = "own"
    reads: Literal["url", "path", "converted"] = "url"

    @property
    def needs_open_clip(self) -> bool:
        return self.environment == "open_clip" or self.job.get("preprocess", "open_clip") in (
            "open_clip",
            JITTERED,
        )

    def data(self, base: str, shards: int) -> str:
        """What it is told to read of what lies below a directory or URL."""
        return f"{base}/{self.environment}" if self.reads == "converted" else pattern(base, shards)


@dataclass(frozen=True)
class Interpreters:
    """Where contenders run: open_clip pins an older webdataset than the rest, and each peer its own."""

    own: Path
    open_clip: Path | None
    peers: Path

    def of(self, contender: Contender) -> Path:
        if contender.environment == "open_clip" and self.open_clip is not None:
            return self.open_clip
        if contender.environment in environments.names():
            return environments.python_of(contender.environment, self.peers)
        return self.own

    def missing(self, contender: Contender) -> Path | None:
        """What a contender needs that isn't there."""
        if contender.needs_open_clip and self.open_clip is None:
            return ROOT / ".venv-openclip"
        named = contender.environment
        if named in environments.names() and not environments.is_ready(named, self.peers):
            return self.peers / named
        return None

    def packages(self) -> str | None:
        """open_clip's environment, to stand behind the packages of the other."""
        if self.open_clip is None:
            return None
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return subprocess.check_output([self.open_clip, "-c", code], text=True).strip()


class TookTooLong(RuntimeError):
    """A contender didn't come to its end."""


class Failed(RuntimeError):
    """A contender ended by an error."""

    @property
    def reason(self) -> str:
        """Its first line and the first sentence of the last one, without paths."""
        first, *said = [line for line in str(self).splitlines() if line.strip()]
        last = re.sub(r"/\S*/", "…/", said[-1]).partition(". ")[0] if said else ""
        return f"{first} {last}".rstrip()


@dataclass(frozen=True)
class Ran:
    """One run of a contender."""

    started: float
    result: Result
    memory: Watch | None

    @property
    def epochs(self) -> list[Epoch]:
        return self.result.epochs


def arguments(
    description: str | None, rounds: int, names: Sequence[str], urls: str | None = None
) -> argparse.Namespace:
    """What every benchmark can be told; `urls` is the help of URLs, where it reads shards of the user's."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if urls is not None:
        parser.add_argument("urls", nargs="+", help=urls)
    parser.add_argument("--quick", action="store_true", help="a small form that only shows that it works")
    parser.add_argument("--rounds", type=int, help=f"default {rounds}, with --quick 1")
    parser.add_argument("--contenders", nargs="+", choices=names, default=list(names), metavar="NAME")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv/bin/python")
    parser.add_argument("--openclip-python", type=Path, default=ROOT / ".venv-openclip/bin/python")
    parser.add_argument(
        "--peers", type=Path, default=environments.PEERS, help="the peers' environments; default .venv-peers"
    )
    parser.add_argument(
        "--out", type=Path, help="file for the JSON; default benchmarks/results/NAME.json, none with --quick"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contenders and shards go with it
    given.rounds = given.rounds or (1 if given.quick else rounds)
    if not given.quick and given.out is None and (why := machine.why_not_repeatable()):
        raise SystemExit(f"{why}: a committed result is of a commit; or say --out FILE")
    return given


def interpreters(given: argparse.Namespace) -> Interpreters:
    there = given.openclip_python if given.openclip_python.exists() else None
    return Interpreters(given.python, there, given.peers)


def chosen(given: argparse.Namespace, all_of_them: Sequence[Contender]) -> list[Contender]:
    """The contenders asked for whose environments are there; the others are left out aloud."""
    places, found = interpreters(given), []
    for contender in all_of_them:
        if contender.name not in given.contenders:
            continue
        if missing := places.missing(contender):
            print(f"{contender.name} is left out: no {missing}", file=sys.stderr)
        else:
            found.append(contender)
    return found


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary directory for all that a benchmark makes."""
    with tempfile.TemporaryDirectory(prefix="streamload-bench-") as directory:
        yield Path(directory)


@contextlib.contextmanager
def photographs(
    samples: int, samples_per_shard: int, members: Sequence[str] = ("jpg", "txt")
) -> Iterator[tuple[Path, int]]:
    """Shards of photographs in a temporary directory, and their bytes."""
    from examples.photograph_shards import write_photograph_shards

    with scratch() as directory:
        paths = write_photograph_shards(directory / "shards", samples, samples_per_shard, members=members)
        yield directory, sum(path.stat().st_size for path in paths)


@contextlib.contextmanager
def empty_directory(parent: Path) -> Iterator[Path]:
    """A directory for one run's cache, removed with all that is in it."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="cache-") as directory:
        yield Path(directory)


def pattern(base: str, shards: int) -> str:
    """The URL pattern of shards below a base."""
    return f"{base}/{{00000..{shards - 1:05d}}}.tar"


def environment() -> dict[str, str]:
    """What a measured process has around it: no settings of the user's, one thread, this checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("STREAMLOAD_", "WDS_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(
    contender: Contender,
    job: Job,
    python: Path,
    watch_memory: bool = False,
    limit_seconds: float = LIMIT_SECONDS,
) -> Ran:
    """Run a contender to its end.

    Raises:
        TookTooLong: it didn't end in time, and was killed.
        Failed: it ended by an error.
    """
    with _Running(contender, job, python, limit_seconds) as running:
        memory = watch.memory(running.pid) if watch_memory else None
        with memory or contextlib.nullcontext():
            result = running.result()
    return Ran(running.started, result, memory)


def run_in_turn(
    jobs: Sequence[tuple[Contender, Job, Path]], limit_seconds: float = LIMIT_SECONDS
) -> list[Ran]:
    """Run contenders at the same time that take TURN epochs each in turn, while the others wait.

    Every second time in reverse, so that what a machine does within a minute falls on all of them alike.

    Args:
        jobs: contenders, their jobs, with as many epochs each, of two turns at least, and where they run.
        limit_seconds: for all of it.

    Raises:
        TookTooLong: one didn't end in time.
        Failed: one ended by an error.
    """
    turns = jobs[0][1].epochs // TURN
    with contextlib.ExitStack() as stack:
        running = []
        for contender, job, python in jobs:
            asked = dataclasses.replace(job, in_turn=True)
            running.append(stack.enter_context(_Running(contender, asked, python, limit_seconds)))
            running[-1].wait_until_ready()
        for turn in range(1, turns):
            for one in running if turn % 2 else reversed(running):
                one.go_on()
                if turn < turns - 1:
                    one.wait_until_ready()
                else:
                    one.result()
        return [Ran(one.started, one.result(), None) for one in running]


class _Running:
    """A contender in a process of its own; a context manager that ends it, and all that it has started."""

    def __init__(self, contender: Contender, job: Job, python: Path, limit_seconds: float):
        self._contender = contender
        self._limit_seconds = limit_seconds
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (until __exit__)
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            [str(python), "-m", f"benchmarks.contenders.{contender.adapter}", job.to_argument()],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._is_late = False
        self._limit = threading.Timer(limit_seconds, self._end_late)
        self._limit.start()
        self._result: Result | None = None

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def wait_until_ready(self) -> None:
        """Wait until it waits for its turn."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.rstrip() == READY:
                return
        self._raise()

    def go_on(self) -> None:
        """It is its turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._raise()

    def result(self) -> Result:
        """Wait until it has ended."""
        if self._result is None:
            output = self._process.communicate()[0]
            if self._process.returncode:
                self._raise()
            said = json.loads(output.splitlines()[-1])
            said["epochs"] = [Epoch(**epoch) for epoch in said["epochs"]]
            self._result = Result(**said)
        return self._result

    def _raise(self) -> NoReturn:
        code = self._process.wait()
        if self._is_late:
            raise TookTooLong(f"{self._contender.name} was killed after {self._limit_seconds:.0f} s")
        self._errors.seek(0)
        raise Failed(f"{self._contender.name} ended with {code}:\n{self._errors.read()[-4000:]}")

    def _end_late(self) -> None:
        self._is_late = True  # before the kill: who sees the process's end looks at this
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its workers, too


def write(given: argparse.Namespace, name: str, content: Row) -> None:
    """Write a benchmark's result where it belongs; say the medians."""
    content = {
        "benchmark": name,
        "quick": given.quick,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": machine.commit(),
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


def content(given: argparse.Namespace, settings: Row, rows: list[Row]) -> Row:
    """What the result of a benchmark beside the peers holds; what is the same in each round is taken out."""
    return {
        "settings": settings,
        "versions": versions(rows),
        "limits": {row["contender"]: row.pop("limits") for row in rows},
        "seeds": list(range(given.rounds)),
        "rounds": rows,
        "medians": medians(rows),
    }


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
