"""streamload, with the check of each sample that it reads timed, or left out: here and in its workers.

What ships has no such switch: the function that compares is replaced before the workers are forked.
"""

import multiprocessing
import time

from benchmarks.contenders import streamload_
from benchmarks.contenders.job import Job
from streamload.cache import shard_copy
from streamload.shards.samples import Entry

_shipped = shard_copy.verified


def main() -> None:
    job = Job.from_argument()
    checked = multiprocessing.Array("q", [0, 0, 0])  # samples, bytes, nanoseconds: of all workers together

    def timed(entry: Entry, data: memoryview) -> shard_copy.Members | None:
        began = time.thread_time_ns()
        members = _shipped(entry, data)
        took = time.thread_time_ns() - began
        with checked.get_lock():
            checked[0] += 1
            checked[1] += len(data)
            checked[2] += took
        return members

    shard_copy.verified = {"shipped": _shipped, "timed": timed, "off": Entry.payloads}[job.checks]
    so_far = []
    result = streamload_.run(job, after_epoch=lambda: so_far.append(list(checked)), start_method="fork")
    last = [now - before for now, before in zip(so_far[-1], [[0, 0, 0], *so_far][-2], strict=True)]
    result.notes["checked"] = dict(zip(("samples", "bytes", "ns"), last, strict=True))
    result.print()


if __name__ == "__main__":
    main()
