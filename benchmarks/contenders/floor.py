"""The floor of streamload/profile/floor.py: bare processes that do the work and hand nothing over."""

import re
import time

from benchmarks.contenders.job import TURN, Epoch, Job, Result, versions
from benchmarks.contenders.workload import tokenizer
from streamload.profile import floor


def main() -> None:
    job = Job.from_argument()
    folder, first, last = re.fullmatch(r"(.*)/\{(\d+)\.\.(\d+)\}\.tar", job.urls).groups()  # type: ignore[union-attr]
    paths = [f"{folder}/{number:0{len(first)}d}.tar" for number in range(int(first), int(last) + 1)]
    tokenize = tokenizer(job)
    imported = time.monotonic()

    def run(passes: int) -> list[floor.Pass]:
        return floor.run(
            paths,
            workers=job.workers,
            form=job.images,
            batch_size=job.batch_size,
            tokenizer=tokenize,
            passes=passes,
            by_libraries=job.by_libraries,
        )

    passes = []
    if job.in_turn:
        for epoch in range(0, job.epochs, TURN):
            job.await_turn(epoch)
            passes += run(TURN)
    else:
        passes = run(job.epochs)
    epochs = [
        Epoch(
            began=once.started,
            first_batch=once.started,
            ended=once.ended,
            batches=once.images // job.batch_size,
            images=once.images,
            cpu_seconds=once.cpu_seconds,
        )
        for once in passes
    ]
    Result(imported, epochs, versions("streamload", "torch", "simplejpeg")).print()


if __name__ == "__main__":
    main()
