"""What streamload costs above the floor, and in which of its stages.

Question: how much more CPU time than the least that is possible does an image take, how many fewer images a
second come of it, and where does that time go?

Command: python -m benchmarks.overhead

Warm epochs as warm.py has them, as float32 and as uint8 batches, and as uint8 batches of 256 in place of 64,
since much is spent once for each batch; each beside the floor of its kind (streamload/profile/floor.py), and
the batches of 64 beside the floor by the libraries alone, too, whose resize and normalising are torch's. An
epoch has three times as many images as warm.py's: its beginning and end, where not all cores are busy, are no
part of the question, and a gigabyte is more than most processors' caches hold, as a training's data is. The
contenders of a kind live at the same time and take turns of two epochs, while the others wait: what a machine
that others use, too, does from one minute to the next is more than what is looked for. The second epoch of
each turn is measured. A ratio is the median of those of all turns, each with the one beside it.

Then the same with the functions of the journey wrapped by clocks (contenders/staged.py): each counts its own
time in the thread where it runs, without that of the stages inside it, over both workers. The clocks cost
something themselves, which is in the stages' numbers, most of it "between the stages": compare the whole with
that of the plain contender. "rank" is all of the training's own process but for the consumer's reading of
every image. "the rest" is what the processes' CPU time is beyond that: the DataLoader's own code in the
workers, fills that have nothing to do, the interpreter.

Nobody reads the floor's images. So what the consumer takes for that, by the clock of its thread, is a row of
its own and isn't in the ratios of CPU time; in those of the images a second it is.

Result: results/overhead.json; docs/results/costs.md has it as tables.

Explanation: a stage that only takes care of an image costs more in place than alone: the pixels of each image
push its code and its data out of the processor's caches. So all that goes before the pixels is done for some
dozens of samples in a row.
"""

import statistics
from collections.abc import Sequence

from benchmarks import near, turns
from benchmarks.contenders.staged import STAGES
from benchmarks.peers import (
    FLOOR,
    FLOOR_OF_LIBRARIES,
    FLOOR_OF_LIBRARIES_UINT8,
    FLOOR_UINT8,
    STREAMLOAD,
    STREAMLOAD_UINT8,
)
from benchmarks.turns import Contender, Row

TIMED = [
    Contender("stages, float32", "staged", STREAMLOAD.job),
    Contender("stages, uint8", "staged", STREAMLOAD_UINT8.job),
]
LARGE_BATCHES = {"images": "uint8", "preprocess": "default", "batch_size": 256}
STREAMLOAD_LARGE = Contender("streamload, uint8, batches of 256", "streamload_", LARGE_BATCHES)
FLOOR_LARGE = Contender("floor, uint8, batches of 256", "floor", LARGE_BATCHES, reads="path")
CONTENDERS = [
    FLOOR_UINT8,
    FLOOR_OF_LIBRARIES_UINT8,
    STREAMLOAD_UINT8,
    FLOOR_LARGE,
    STREAMLOAD_LARGE,
    FLOOR,
    FLOOR_OF_LIBRARIES,
    STREAMLOAD,
    *TIMED,
]
OF_THE_FLOOR = (
    (STREAMLOAD_UINT8, FLOOR_UINT8, 1.05, 0.97),
    (STREAMLOAD_UINT8, FLOOR_OF_LIBRARIES_UINT8, 1.05, 0.97),
    (STREAMLOAD_LARGE, FLOOR_LARGE, 1.05, 0.97),
    (STREAMLOAD, FLOOR, 1.12, 0.92),
    (STREAMLOAD, FLOOR_OF_LIBRARIES, 1.12, 0.92),
)
"""Which floor each is compared with; the most of its CPU time; the least of its images a second."""
SHARDS = 24
EPOCHS, QUICK_EPOCHS = 3, 2
METRICS = ("loading_us_per_image", "images_per_second")
OF_STAGES = (
    ("hand-over of a uint8 image, worker and rank, µs", ("hand-over", "rank"), 120.0),
    ("index and order, µs a sample", ("order", "what is wanted and done", "entry"), 25.0),
    ("tokenizing, µs a caption", ("tokenize",), 20.0),
)


def main() -> None:
    given = turns.arguments(__doc__, rounds=4, names=[contender.name for contender in CONTENDERS])
    epochs = QUICK_EPOCHS if given.quick else EPOCHS
    with near.ready(given, CONTENDERS, SHARDS) as data:
        rows = [
            row
            for round_ in range(given.rounds)
            for kind in turns.rotated(kinds(data.contenders), round_)
            for row in measured(data, kind, round_, epochs)
        ]
    content = data.content(given, rows, stages=[*STAGES, "rank", "consumer", "the rest"], epochs=epochs)
    stages = content["medians"].get(TIMED[1].name)
    turns.write(
        given,
        "overhead",
        {
            **content,
            "ratios": {
                f"{own.name} beside {floor.name}, {metric}": by_turn(rows, own, floor, metric)
                for own, floor, *_ in OF_THE_FLOOR
                for metric in METRICS
            },
            "targets": [
                *floor_targets(rows),
                *(
                    turns.target(claim, stages and sum(stages[stage] for stage in parts), at_most=most)
                    for claim, parts, most in OF_STAGES
                ),
            ],
        },
    )


def kinds(contenders: Sequence[Contender]) -> list[list[Contender]]:
    """Those that are measured together: each with its floors."""
    together: dict[str, list[Contender]] = {}
    for own, floor, *_ in OF_THE_FLOOR:
        together.setdefault(own.name, [own]).append(floor)
    found = [
        [one for one in kind if one in contenders] for kind in [*together.values(), *([one] for one in TIMED)]
    ]
    return [kind for kind in found if kind]


def measured(data: near.Near, kind: list[Contender], round_: int, epochs: int) -> list[Row]:
    """The rows of contenders; with the microseconds of each stage, and of what is in none, where timed."""
    if kind[0] in TIMED:
        rows = [with_stages(data.run(kind[0], round_, notes=["stages"]))]
    else:
        rows = data.run_in_turn(kind, round_, epochs)
    for row in rows:
        row["loading_us_per_image"] = row["cpu_us_per_image"] - row["consumer_us_per_image"]
    return rows


def with_stages(row: Row) -> Row:
    spent = {name: ns / 1e3 / row["images"] for name, ns in row.pop("stages").items()}
    spent["consumer"] = row["consumer_us_per_image"]
    spent["rank"] -= spent["consumer"]
    return {**row, **spent, "the rest": row["cpu_us_per_image"] - sum(spent.values())}


def floor_targets(rows: list[Row]) -> list[Row]:
    found = []
    for own, floor, most_cpu, least_speed in OF_THE_FLOOR:
        cpu, speed = (by_turn(rows, own, floor, metric) for metric in METRICS)
        found += [
            turns.target(f"{own.name}: × the CPU time of {floor.name}", median(cpu), at_most=most_cpu),
            turns.target(f"{own.name}: × the images/s of {floor.name}", median(speed), at_least=least_speed),
        ]
    return found


def by_turn(rows: list[Row], own: Contender, floor: Contender, metric: str) -> list[float]:
    """The ratio of the two in each turn that both have."""
    found = {(row["contender"], row["round"], row.get("turn")): row[metric] for row in rows}
    return [
        value / found[floor.name, round_, turn]
        for (name, round_, turn), value in found.items()
        if name == own.name and (floor.name, round_, turn) in found
    ]


def median(ratios: list[float]) -> float | None:
    return statistics.median(ratios) if ratios else None


if __name__ == "__main__":
    main()
