"""streamload with the stages of its journey timed, in the workers and in the rank, by the thread's clock.

What ships has no such clocks: functions are wrapped before the workers are forked. A stage's time is its own,
without that of the stages inside it.
"""

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.contenders import streamload_
from benchmarks.contenders.job import Job
from streamload.batches import images
from streamload.batches.tokenize import BatchTokenizer
from streamload.cache import shard_copy
from streamload.ipc.buffers import BufferPool
from streamload.shards.index import IndexReader
from streamload.transforms import kernel, plan, resize
from streamload.transforms.plan import PlannedTransform
from streamload.worker import loop, reader
from streamload.worker.sampler import Sampler, Step

Owner = Any

STAGES: dict[str, list[tuple[Owner, str]]] = {
    "order": [(Sampler, "at"), (Step, "_take"), (Step, "states"), (Step, "spans"), (reader.Reader, "has")],
    "what is wanted and done": [(reader.Reader, "_want"), (reader.Reader, "end_batch")],
    "entry": [(IndexReader, "entries")],
    "read": [(reader.Reader, "sample")],
    "checksum": [(shard_copy, "verified")],
    "header": [(images, "jpeg_size")],
    "box": [(PlannedTransform, "draw")],
    "decode": [(images, "decode_there")],
    "resize": [
        (resize._TORCH_KERNELS, "bicubic"),
        *([(kernel, "resize_into")] if kernel.resize_into else []),
    ],
    "normalise": [(plan, "normalise_into")],
    "tokenize": [(BatchTokenizer, "__call__")],
    "hand-over": [(BufferPool, "empty"), (BufferPool, "hand_over")],
    "between the stages": [(loop.WorkerLoop, "_make")],
}


class Clocks:
    """Nanoseconds by stage, of all workers together."""

    def __init__(self, stages: list[str]) -> None:
        self._spent = multiprocessing.Array("q", [0] * len(stages))
        self._inside = threading.local()

    def timed(self, stage: int, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            outer = getattr(self._inside, "ns", 0)
            self._inside.ns = 0
            began = time.thread_time_ns()
            try:
                return function(*given, **named)
            finally:
                took = time.thread_time_ns() - began
                with self._spent.get_lock():
                    self._spent[stage] += took - self._inside.ns
                self._inside.ns = outer + took

        return run

    def read(self) -> list[int]:
        return list(self._spent)


def main() -> None:
    job = Job.from_argument()
    clocks = Clocks(list(STAGES))
    for stage, functions in enumerate(STAGES.values()):
        for owner, name in functions:
            if isinstance(owner, dict):
                owner[name] = clocks.timed(stage, owner[name])
            else:
                setattr(owner, name, clocks.timed(stage, getattr(owner, name)))
    so_far = [([0] * len(STAGES), 0)]
    rank = os.getpid()

    def note() -> None:
        assert os.getpid() == rank
        so_far.append((clocks.read(), time.process_time_ns()))

    result = streamload_.run(job, after_epoch=note, start_method="fork")
    (before, rank_before), (now, rank_now) = so_far[1], so_far[-1]  # behind the first epoch
    spent = dict(zip(STAGES, (late - early for late, early in zip(now, before, strict=True)), strict=True))
    result.notes["stages"] = {**spent, "rank": rank_now - rank_before}
    result.print()


if __name__ == "__main__":
    main()
