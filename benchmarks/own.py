"""Images a second of the loaders on shards of your own.

Question: how many images a second does each loader yield from given shards in local files, and how much CPU
time does an image cost?

Command: python -m benchmarks.own 'shards/{00000..00007}.tar'

The work is that of warm.py; so are streamload and the floor, and the peers are those that read plain tars.
The first shards that have enough samples are read, remote ones from a copy. Samples need a .jpg or .jpeg and
a .txt; two workers need at least two shards. `streamload bench` says what limits streamload alone.

Result: own.json in the current directory.
"""

from pathlib import Path

from benchmarks import near, turns
from benchmarks.contenders.job import Job
from benchmarks.peers import FLOOR, PEERS, STREAMLOAD, STREAMLOAD_COMPILED
from streamload.profile.data import prepare

CONTENDERS = [
    STREAMLOAD,
    STREAMLOAD_COMPILED,
    FLOOR,
    *(peer for peer in PEERS if peer.reads != "converted"),
]
SAMPLES, QUICK_SAMPLES = near.SHARDS * near.SAMPLES_PER_SHARD, 256


def main() -> None:
    names = [contender.name for contender in CONTENDERS]
    given = turns.arguments(__doc__, rounds=3, names=names, urls="as for make_loader")
    given.out = given.out or Path("own.json")
    wanted = QUICK_SAMPLES if given.quick else SAMPLES
    with turns.scratch() as directory:
        shards = directory / "shards"
        shards.mkdir()
        found = prepare(given.urls, wanted, Job.batch_size, None, directory / "tier")
        for number, path in enumerate(found.paths):
            (shards / f"{number:05d}.tar").symlink_to(Path(path).resolve())
        data = near.Near(
            contenders=turns.chosen(given, CONTENDERS),
            places=turns.interpreters(given),
            directory=directory,
            url=str(shards),
            shards=len(found.paths),
            samples=found.usable,
            total_bytes=found.size_bytes,
            conversions={},
        )
        rows = [
            data.run(contender, round_)
            for round_ in range(given.rounds)
            for contender in turns.rotated(data.contenders, round_)
        ]
    turns.write(given, "own", {**data.content(given, rows), "targets": []})


if __name__ == "__main__":
    main()
