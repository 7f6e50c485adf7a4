"""Where each microsecond goes: the CPU time of a warm epoch, stage by stage.

Question: what of the CPU time that an image costs is decoding and resizing, and what is everything else?

Command: python -m benchmarks.stages

The warm epoch of warm.py, with the functions of the journey wrapped by clocks (contenders/staged.py): each
counts its own time in the thread where it runs, without that of the stages inside it, over both workers. The
clocks cost something themselves, about 0.4 µs a call and a lock, which is in the numbers: some 15 µs an
image. "rank" is all of the training's own process, the consumer's reading of every image included. "the
rest" is what the processes' CPU time is beyond that: the DataLoader's own code in the workers, fills that
have nothing to do, the interpreter.

Result: results/stages.json; docs/performance.md has it as a table.

Explanation: a stage that only takes care of an image costs more in place than alone: the pixels of each image
push its code and its data out of the processor's caches. So what needs no pixels is done for sixteen samples
in a row.
"""

from typing import Any

from benchmarks import near, turns
from benchmarks.contenders.staged import STAGES
from benchmarks.turns import Contender

CONTENDERS = [
    Contender("float32", "staged", {"preprocess": "default"}),
    Contender("uint8", "staged", {"preprocess": "default", "images": "uint8"}),
]
BOOKKEEPING = ("order", "what is wanted and done", "entry")
HAND_OVER = ("hand-over", "rank")


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=[contender.name for contender in CONTENDERS])
    with near.ready(given, CONTENDERS) as data:
        rows = [
            staged(data.run(contender, round_, notes=["stages"]))
            for round_ in range(given.rounds)
            for contender in turns.rotated(data.contenders, round_)
        ]
    content = data.content(given, rows, stages=[*STAGES, "rank", "the rest"])
    medians = content["medians"]
    turns.write(
        given,
        "stages",
        {
            **content,
            "targets": [
                turns.target(
                    "hand-over of a uint8 image, worker and rank, µs",
                    of(medians, "uint8", HAND_OVER),
                    at_most=120,
                ),
                turns.target("index and order, µs a sample", of(medians, "uint8", BOOKKEEPING), at_most=25),
                turns.target("tokenizing, µs a caption", of(medians, "uint8", ("tokenize",)), at_most=20),
            ],
        },
    )


def staged(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the microseconds of each stage, and of what is in none."""
    spent = {name: ns / 1e3 / row["images"] for name, ns in row.pop("stages").items()}
    return {**row, **spent, "the rest": row["cpu_us_per_image"] - sum(spent.values())}


def of(medians: dict[str, dict[str, Any]], contender: str, stages: tuple[str, ...]) -> float | None:
    if contender not in medians:
        return None
    return sum(medians[contender][stage] for stage in stages)


if __name__ == "__main__":
    main()
