"""Many seeds, in several processes of which each has one core; each failing seed says how to run it again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator

from .planted import BUGS
from .story import Result, simulate


def results(seeds: range, jobs: int, bug: str | None = None, *, trace: bool = False) -> Iterator[Result]:
    """Simulate seeds, in order.

    Args:
        seeds: which.
        jobs: how many at once.
        bug: the name of one of `BUGS`, planted meanwhile.
        trace: print every call; for one job.
    """
    if jobs == 1:
        _settle(bug, None)
        yield from (simulate(seed, trace=trace) for seed in seeds)
        return
    context = multiprocessing.get_context("spawn")
    cores = context.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)) * jobs:
        cores.put(core)
    with context.Pool(jobs, _settle, (bug, cores)) as pool:
        yield from pool.imap(simulate, seeds, chunksize=4)


def _settle(bug: str | None, cores: multiprocessing.SimpleQueue[int] | None) -> None:
    """Threads that run in turn hand over much faster on one core."""
    if cores is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {cores.get()})
    if bug is not None:
        BUGS[bug]()


def told(result: Result, bug: str | None = None) -> str:
    """What is to be said of a failing seed."""
    plant = f" --plant {bug}" if bug else ""
    again = f"python -m tests.simulation --seeds {result.seed}:{result.seed + 1}{plant}"
    return f"seed {result.seed}: {result.failure}\n\nagain by: {again}"


def summary(happened: Counter[str]) -> str:
    """What the seeds had in them."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(happened.items()))
