"""The hand-over alone: batches that cost nothing to make, from workers to the training loop.

Question: what do the slots, the queues and the order of delivery leave of what one copy of each batch allows,
and what is left when one of the cores is busy with something else?

    python -m benchmarks.handover

With 2 and 4 workers, and with 8 and 15 where there are as many cores; to the accelerator where there is one.

Batches of 512 images of 224 × 224 as uint8 (77 MB). Workers take a slot and hand it over as it is, by the
parts of the loader: buffers, queues, claims, the order. The consumer copies each batch once, as the loader's
thread to a device does; on a device it is that thread, into pinned memory and on.

- hand-over: bytes a second beside those of the copy alone, of batches that lie in as many slots, in turn with
  it in the same process. Context switches and CPU time are those of a batch; waits are shares of the time:
  of the consumer for a batch, of a worker for something to do.
- busy core: a batch costs 200 ms of a worker's CPU time, each worker has a core, and another process spins on
  the first one, as if that core were half as fast: it shares its units with another thread, or its time with
  another guest of the machine. Where the scheduler may move processes, all get their share sooner or later.
  "in turn" deals every n-th batch to each of n workers, as a DataLoader does; "claimed" is the loader's.
  Batches a second beside the same without that process; what remains of the cores is the most there can be.

Result: results/handover.json; docs/results/costs.md has it as tables.
"""

import contextlib
import itertools
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks import turns
from benchmarks.contenders.job import versions
from benchmarks.turns import Row
from streamload.device import feed_for
from streamload.ipc import ControlBlock, Numbers
from streamload.ipc.buffers import BufferPool, buffers_for
from streamload.ipc.queues import context_with_queues
from streamload.loader.epoch import InOrder
from streamload.metrics import Counters
from streamload.worker.messages import Batch, Failed, OrderStep, RowSources
from streamload.worker.states import SealedStates

SHAPE, QUICK_SHAPE = (512, 224, 224, 3), (64, 224, 224, 3)
SMALL = (8, 8, 8, 3)
BATCHES, QUICK_BATCHES = 200, 12
WORK_SECONDS, QUICK_WORK_SECONDS, WORKED = 0.2, 0.02, 60
AHEAD = 2
"""Batches that each worker makes ahead; the loader's default."""
GENERATION = 2
HELD = 3
WORKERS = 2, 4, 8, 15
Deal = Literal["claimed", "in turn"]
OF_THE_COPY = 0.8


class Blank(IterableDataset[Batch | Failed]):
    """Batches of which only the memory is taken, or that cost nothing but CPU time.

    Args:
        deal: which worker makes which batch.
        batches: how many.
        shape: of their images.
        work_seconds: the CPU time that one takes.
        pools: the slots of each worker.
    """

    def __init__(
        self, deal: Deal, batches: int, shape: tuple[int, ...], work_seconds: float, pools: list[BufferPool]
    ):
        self.deal, self.batches, self.shape, self.work_seconds = deal, batches, shape, work_seconds
        self.pools = pools
        self.control = ControlBlock(1 + len(pools))

    def __iter__(self) -> Iterator[Batch | Failed]:
        info = get_worker_info()
        assert info is not None
        pool, counts = self.pools[info.id], Counters(self.control.counters[info.id + 1])
        ahead, waited = AHEAD * info.num_workers, 0.0
        claimed: Iterator[int] = iter(Numbers(self.control.claims, GENERATION))
        if self.work_seconds:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[info.id % len(cores)]})
        since = time.monotonic()
        numbers = claimed if self.deal == "claimed" else itertools.count(info.id, info.num_workers)
        for number in itertools.takewhile(lambda number: number < self.batches, numbers):
            while number >= self.control.taken + ahead:
                time.sleep(0.002)
            waited += time.monotonic() - since
            image = pool.empty(self.shape, torch.uint8)
            until = time.thread_time() + self.work_seconds
            while time.thread_time() < until:
                pass
            image = torch.empty(self.shape, dtype=torch.uint8) if image is None else image
            values = pool.hand_over({"image": image}, counts)
            used = resource.getrusage(resource.RUSAGE_SELF)
            values["worker"] = (
                info.id,
                used.ru_nvcsw + used.ru_nivcsw,
                used.ru_utime + used.ru_stime,
                waited,
                counts.value("fresh_tensors"),
                time.monotonic(),
            )
            since = time.monotonic()
            yield Batch(
                values,
                number,
                GENERATION,
                OrderStep(number, number + 1, SealedStates({}), {}),
                RowSources(self.shape[0], []),
                [],
            )


def handed_over(
    workers: int, deal: Deal, batches: int, shape: tuple[int, ...], work_seconds: float, device: torch.device
) -> Row:
    """Receive all batches, copy each, and return what it took."""
    dataset = Blank(deal, batches, shape, work_seconds, buffers_for(workers, AHEAD + HELD))
    source: DataLoader[Batch | Failed] = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        collate_fn=_same,
        prefetch_factor=AHEAD,
        multiprocessing_context=context_with_queues("fork"),
        in_order=deal == "in turn",
    )
    feed = None if device.type == "cpu" else feed_for(device)
    copied = torch.zeros(shape, dtype=torch.uint8)
    first: dict[int, tuple[float, ...]] = {}
    last: dict[int, tuple[float, ...]] = {}
    arriving = InOrder(iter(source))
    start = cpu = switches = waited = 0.0
    measured = 0
    for number in range(batches):
        asked = time.monotonic()
        batch = arriving.next(_nothing)
        arrived = time.monotonic()
        dataset.control.take(number + 1)
        worker, *used = batch.values.pop("worker")
        if feed is None:
            copied.copy_(batch.values["image"])
        else:
            feed.send(batch.values)()
        del batch
        if number < 2 * AHEAD * workers:  # slots are made, and their pages
            first[worker] = (number, *used)
            own = resource.getrusage(resource.RUSAGE_SELF)
            start, cpu = time.monotonic(), own.ru_utime + own.ru_stime
            switches, waited = own.ru_nvcsw + own.ru_nivcsw, 0.0
            continue
        waited += arrived - asked
        measured += 1
        last[worker] = (number, *used)
    seconds = time.monotonic() - start
    own = resource.getrusage(resource.RUSAGE_SELF)
    if feed is not None:
        feed.close()
    spent = [
        [after - before for before, after in zip(first[worker][1:], last[worker][1:], strict=True)]
        for worker in first.keys() & last.keys()
    ]
    return {
        "seconds": seconds,
        "batches_per_second": measured / seconds,
        "bytes_per_second": measured * copied.nbytes / seconds,
        "consumer_waits": waited / seconds,
        "consumer_cpu_ms": 1e3 * (own.ru_utime + own.ru_stime - cpu) / measured,
        "consumer_switches": (own.ru_nvcsw + own.ru_nivcsw - switches) / measured,
        "workers_wait": statistics.fmean(each[2] / each[4] for each in spent),
        "worker_cpu_ms": 1e3 * sum(each[1] for each in spent) / measured,
        "worker_switches": sum(each[0] for each in spent) / measured,
        "fresh_tensors": sum(each[3] for each in spent),
    }


def copied_alone(workers: int, batches: int, shape: tuple[int, ...]) -> Row:
    """Copy as many batches that lie in as many slots."""
    slots = [torch.zeros(shape, dtype=torch.uint8).share_memory_() for _ in range((AHEAD + 1) * workers)]
    copied = torch.zeros(shape, dtype=torch.uint8)
    begin = time.monotonic()
    for number in range(batches):
        copied.copy_(slots[number % len(slots)])
    seconds = time.monotonic() - begin
    return {"seconds": seconds, "bytes_per_second": batches * copied.nbytes / seconds}


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Another process spins on the first of this process's cores."""
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    spinning = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=["streamload"])
    shape = QUICK_SHAPE if given.quick else SHAPE
    batches = QUICK_BATCHES if given.quick else BATCHES
    work_seconds = QUICK_WORK_SECONDS if given.quick else WORK_SECONDS
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    all_workers = [n for n in WORKERS if n <= max(4, len(os.sched_getaffinity(0)))]
    rows: list[Row] = []

    def add(label: str, round_: int, workers: int, row: Row) -> Row:
        rows.append({"label": label, "contender": label, "round": round_, "workers": workers, **row})
        return rows[-1]

    torch.set_num_threads(1)
    for round_, workers in itertools.product(range(given.rounds), all_workers):
        count = batches + 2 * AHEAD * workers
        alone = add(f"copy alone, {workers}", round_, workers, copied_alone(workers, batches, shape))
        row = handed_over(workers, "claimed", count, shape, 0.0, device)
        row["of_the_copy"] = row["bytes_per_second"] / alone["bytes_per_second"]
        add(f"hand-over, {workers} workers", round_, workers, row)
        for deal in ("in turn", "claimed"):
            worked = min(batches, WORKED) + 2 * AHEAD * workers
            quiet = handed_over(workers, deal, worked, SMALL, work_seconds, torch.device("cpu"))
            with busy_core():
                busy = handed_over(workers, deal, worked, SMALL, work_seconds, torch.device("cpu"))
            busy["of_the_quiet"] = busy["batches_per_second"] / quiet["batches_per_second"]
            add(f"a core is busy, {workers} workers, {deal}", round_, workers, busy)
    medians = turns.medians(rows)
    turns.write(
        given,
        "handover",
        {
            "settings": {
                "shape": list(shape),
                "batches": batches,
                "work_seconds": work_seconds,
                "device": str(device),
                "workers": all_workers,
            },
            "versions": {"streamload": versions("streamload", "torch")},
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target(
                    f"hand-over of {workers} workers, × one copy of each batch",
                    medians[f"hand-over, {workers} workers"]["of_the_copy"],
                    at_least=OF_THE_COPY,
                )
                for workers in all_workers
            ],
        },
    )


def _same(batch: Any) -> Any:
    return batch


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
