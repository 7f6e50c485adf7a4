"""Ranks that scale.py starts as real clients of torch.distributed's store: processes with a connection each.

They are forked after the imports and have no gloo mesh, so that hundreds fit on one machine. Standard output
is a JSON of what the store's process spent for each of their common steps, and of the slowest rank's seconds.

    python -m benchmarks.scale_store 256
    python -m benchmarks.scale_store 32 --gloo      sockets that decisions of mixing= open beside a gloo mesh
"""

import ctypes
import json
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed
from torch.distributed import TCPStore

from benchmarks.contenders.job import versions
from streamload.ranks import distributed
from streamload.ranks.agreement import Agreement

STEPS = ("start", "report", "read", "decide", "beat", "look")
"""The decision at the start of a run; an outage reported by all, and read by all; one decision of mixing=; a
heartbeat of each rank, and rank 0's look at all of them."""
_LONGEST = timedelta(seconds=600)
_POLL_SECONDS = 0.1
_RANKS_PER_NODE = 8
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_REASON = (
    "30 s for https://host/{:06d}.tar; https://host is down (HTTP 503), retried until 12:00:00 "
    "(STREAMLOAD_ORIGIN_WAIT)"
)

Row = dict[str, Any]


def main() -> None:
    """Measure so many ranks."""
    logging.disable(logging.CRITICAL)
    ranks = int(sys.argv[1])
    row = sockets_by_mixing(ranks) if "--gloo" in sys.argv else store_costs(ranks)
    print(json.dumps(row | {"versions": versions("streamload", "torch")}))


def store_costs(ranks: int) -> Row:
    """CPU seconds of the store's process, and seconds of the slowest rank, for each of STEPS."""
    shared = np.frombuffer(mmap.mmap(-1, 8 * 2 * ranks), np.float64).reshape(2, ranks)
    done, seconds = shared  # by rank: the number of its last step, and how long that took
    done[:] = -1
    gates = [os.pipe() for _ in STEPS]  # closed when a step may be taken: nobody looks again and again
    port = _free_port()

    def serve() -> None:
        for _, write in gates:
            os.close(write)
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        time.sleep(_LONGEST.total_seconds())
        del store

    def be_rank(rank: int) -> None:
        for _, write in gates:
            os.close(write)
        steps = _steps_of(rank, ranks, port)
        done[rank] = 0
        for number, ((gate, _), name) in enumerate(zip(gates, STEPS, strict=True), 1):
            os.read(gate, 1)
            began = time.perf_counter()
            steps[name]()
            seconds[rank] = time.perf_counter() - began
            done[rank] = number
        time.sleep(_LONGEST.total_seconds())

    row: Row = {"ranks": ranks}
    with _forked(serve) as (server,), _forked(be_rank, ranks):
        _wait_until(lambda: done.min() >= 0)  # all are connected
        for number, ((gate, write), name) in enumerate(zip(gates, STEPS, strict=True), 1):
            before = _cpu_seconds(server)
            os.close(write)
            _wait_until(lambda number=number: done.min() >= number)  # type: ignore[misc]
            row[f"{name}_cpu_seconds"] = _cpu_seconds(server) - before
            row[f"{name}_slowest_seconds"] = float(seconds.max())
            os.close(gate)
    return row


def sockets_by_mixing(ranks: int) -> Row:
    """The most sockets that a rank has more after decisions of all ranks, beside a gloo mesh."""
    opened, before = np.frombuffer(mmap.mmap(-1, 8 * 2 * ranks), np.float64).reshape(2, ranks)
    opened[:] = -1
    port = _free_port()

    def be_rank(rank: int) -> None:
        address = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
        torch.distributed.all_reduce(torch.ones(1))
        before[rank] = _sockets()
        agreement = Agreement(ranks)
        for _ in range(3):
            agreement.decide("the weights", rank, sum)
        opened[rank] = _sockets() - before[rank]
        time.sleep(_LONGEST.total_seconds())

    with _forked(be_rank, ranks):
        _wait_until(lambda: opened.min() >= 0)
    return {"ranks": ranks, "sockets_before": int(before.max()), "sockets_by_mixing": int(opened.max())}


def _steps_of(rank: int, ranks: int, port: int) -> dict[str, Callable[[], Any]]:
    """What one rank does in each step, by a connection of its own."""
    store = _client(port)
    distributed.store_of = lambda _: store  # type: ignore[assignment]
    torch.distributed.get_rank = lambda group=None: rank  # type: ignore[assignment]
    distributed._AGREE_SECONDS = _LONGEST.total_seconds()
    joined = distributed.ranks_of(ranks)
    assert joined is not None
    joined.be_on(rank // _RANKS_PER_NODE)
    agreement = Agreement(ranks)
    return {
        "start": lambda: distributed.agree("widths/0", rank, max, ranks),
        "report": lambda: joined.report("waits", _REASON.format(rank)),
        "read": joined.read_reports,
        "decide": lambda: agreement.decide("the weights", rank, sum),
        "beat": lambda: joined.heartbeats.beat(joined.host),
        "look": lambda: rank or joined.heartbeats.look(),
    }


def _client(port: int) -> TCPStore:
    deadline = time.monotonic() + _LONGEST.total_seconds()
    while True:
        try:
            return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_LONGEST)
        except RuntimeError:  # the server isn't there yet
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


@contextmanager
def _forked(work: Callable[..., None], count: int | None = None) -> Iterator[list[int]]:
    """Processes that do some work, each with its number if there is a count; killed when the block ends."""
    processes = []
    try:
        for number in range(1 if count is None else count):
            process = os.fork()
            if not process:
                try:
                    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
                    work() if count is None else work(number)
                finally:
                    os._exit(1)
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LONGEST.total_seconds()
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError("ranks don't come to their next step")
        time.sleep(_POLL_SECONDS)


def _cpu_seconds(process: int) -> float:
    """CPU time of a process by its CPU clock (clock_getcpuclockid): /proc has it in hundredths alone."""
    return time.clock_gettime((~process << 3) | 2)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _sockets() -> int:
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link).startswith("socket:") for link in links)


if __name__ == "__main__":
    main()
