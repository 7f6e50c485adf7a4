"""Runs cases of all targets on all processors; the first that fails is shown so that it can be run again.

Case `n` of a target is made from (seed, n) alone, whatever process it comes to. A process has a limit on its
memory and each case one on its time: what runs away is a failure too.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import re
import resource
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from . import sanitized

TARGETS = ("tars", "indexes", "urls", "kernels", "trainings", "troubles", "decoders")
COSTS = {"trainings": 1000, "troubles": 3000, "decoders": 3000}
"""A case of these takes as long as so many of the others: where those are asked for, one is run."""
MEMORY_BYTES = 512 << 20
CASE_SECONDS = 60.0

_BLOCK_CASES = 500


class Failure(NamedTuple):
    """A case that didn't hold."""

    target: str
    seed: int
    number: int
    case: str
    trace: str

    def __str__(self) -> str:
        again = f"--target {self.target} --seed {self.seed} --case {self.number}"
        return f"{self.trace}\ninput: {self.case}\nrun it again with {again}"


class TookTooLong(Exception):
    """A case took more than CASE_SECONDS of processor time."""


def run(
    target: str, cases: int, seed: int, processes: int | None = None
) -> tuple[Counter[str], Failure | None]:
    """Run the first `cases` cases of a seed: how many ended in which way, and the first failure."""
    ends: Counter[str] = Counter()
    blocks = [(target, seed, at, min(at + _BLOCK_CASES, cases)) for at in range(0, cases, _BLOCK_CASES)]
    context = multiprocessing.get_context("spawn")
    with (
        _scratch() as directory,
        ProcessPoolExecutor(
            min(processes or os.cpu_count() or 1, len(blocks)), context, _begin, (directory,)
        ) as pool,
    ):
        for done in as_completed([pool.submit(_run_block, block) for block in blocks]):
            try:
                found, failure = done.result()
            except BrokenProcessPool:
                return ends, _ended(target, seed, Path(directory))
            ends += found
            if failure is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return ends, failure
    return ends, None


def run_here(target: str, cases: int, seed: int, first: int = 0) -> tuple[Counter[str], Failure | None]:
    """The same in this process, from case `first` on."""
    with _scratch() as directory:
        before, tempfile.tempdir = tempfile.tempdir, directory
        try:
            return _run_block((target, seed, first, first + cases))
        finally:
            tempfile.tempdir = before


def _begin(directory: str) -> None:
    """Prepare a process: its place for files, its limit."""
    tempfile.tempdir = directory
    held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert held is not None
    limit = int(held[1]) * 1024 + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _ended(target: str, seed: int, directory: Path) -> Failure:
    """The failure of a process that ended without a word of its own, in the case that it was at."""
    numbers = sorted(int(path.read_text()) for path in directory.glob("case-*"))
    said = f"a process ended, in one of the cases {', '.join(map(str, numbers))}"
    return Failure(target, seed, numbers[0], "that of these", said)


def _run_block(block: tuple[str, int, int, int]) -> tuple[Counter[str], Failure | None]:
    name, seed, start, stop = block
    sanitized.load()
    target: Any = importlib.import_module(f"{__package__}.{name}")
    rng = random.Random()
    ends: Counter[str] = Counter()
    before = signal.signal(signal.SIGVTALRM, _too_long)
    at = os.open(f"{tempfile.gettempdir()}/case-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for number in range(start, stop):
            os.pwrite(at, b"%-20d" % number, 0)
            rng.seed(seed << 40 | number)
            case = None
            signal.setitimer(signal.ITIMER_VIRTUAL, CASE_SECONDS)
            try:
                case = target.make(rng)
                ends[target.check(case, rng)] += 1
            except Exception:
                return ends, Failure(name, seed, number, _shown(case), traceback.format_exc())
    finally:
        os.close(at)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return ends, None


def _too_long(number: int, frame: object) -> None:
    raise TookTooLong(f"more than {CASE_SECONDS:g} s")


def _shown(case: object) -> str:
    text = repr(case)
    return text if len(text) < 200_000 else f"{text[:100_000]} … {len(text)} characters"


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """A directory for files, in memory where that can be had."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=f"streamload-test-{os.getpid()}-", dir=place) as directory:
        yield directory
