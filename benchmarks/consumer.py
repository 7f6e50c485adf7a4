"""Waiting, for a consumer that takes as long as a GPU's step would.

Question: with the bytes near, how much of the time of a training whose steps take so long is spent waiting
for the next batch?

Command: python -m benchmarks.consumer

The work, the photographs and the measured second epoch are those of warm.py, but after each batch of 64 the
consumer sleeps as long as a device would take that trains on 100, 200 or 400 images a second. Waiting is the
time from asking for a batch to having it, from the second batch on; its share is that of the epoch from the
first batch to the end. What can't be waited for less: where the loader gives r images a second at most and
the device takes s, r < s, the share is at least 1 - r / s.

Contenders: those of warm.py, streamload with its default transform only.

Result: results/consumer.json; docs/results/other-loaders.md has it as a table.

Explanation: a sleeping consumer leaves both cores to the workers, as a training on a device does. Batches
that were made during a step are there at its end, so a loader that is faster than the device is waited for
only where its batches come unevenly.
"""

from benchmarks import near, turns
from benchmarks.contenders.job import Job
from benchmarks.peers import PEERS, STREAMLOAD

CONTENDERS = [STREAMLOAD, *PEERS]
SPEEDS = (100, 200, 400)
QUICK_SPEEDS = (400,)


def main() -> None:
    given = turns.arguments(__doc__, rounds=2, names=[contender.name for contender in CONTENDERS])
    speeds = QUICK_SPEEDS if given.quick else SPEEDS
    with near.ready(given, CONTENDERS) as data:
        rows = [
            {
                **data.run(
                    contender,
                    round_,
                    f"{contender.name} at {speed} images/s",
                    step_seconds=Job.batch_size / speed,
                ),
                "consumed_per_second": speed,
            }
            for round_ in range(given.rounds)
            for contender, speed in turns.rotated(
                [(contender, speed) for speed in speeds for contender in data.contenders], round_
            )
        ]
    content = data.content(given, rows, consumed_per_second=list(speeds))
    turns.write(given, "consumer", {**content, "targets": []})


if __name__ == "__main__":
    main()
