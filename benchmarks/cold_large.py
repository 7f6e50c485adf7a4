"""Two epochs over HTTP, from nothing, of ten times as many samples as the window holds.

Question: how long is the first epoch, compared with the longer of download and compute, where the data is
large? cold.py asks it of a set that is smaller than the window.

Command: python -m benchmarks.cold_large

As cold.py, with streamload alone: 98,304 samples in 256 shards, 10.6 GB, over a link of 80 MB/s. The shards
are 24 under 256 names: by their URLs each is one of its own, to be fetched and cached as such. They and the
cache take 12 GB on the disk of temporary files.

Result: results/cold_large.json; docs/results/fetching.md has it as a table.

Explanation: in the first pass the window opens to an eighth of what has been read, behind 4,096 samples by a
quarter of what comes, and to 10,000 samples at most; on average half of that comes after the last byte. Of
3,072 samples it is a sixteenth, of these a twentieth, and the more the less.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import cold, turns
from benchmarks.peers import STREAMLOAD
from benchmarks.turns import Row

SHARDS, SAMPLES_PER_SHARD, NAMES = 24, 384, 256
QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD, QUICK_NAMES = 1, 128, 2
RATE = 80e6


def main() -> None:
    given = turns.arguments(__doc__, rounds=2, names=[STREAMLOAD.name])
    full, quick = (SHARDS, SAMPLES_PER_SHARD, NAMES), (QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD, QUICK_NAMES)
    shards, per_shard, names = quick if given.quick else full
    places = turns.interpreters(given)
    rows: list[Row] = []
    with turns.photographs(shards * per_shard, per_shard) as (directory, _), _named(directory, names) as data:
        total_bytes = sum(path.stat().st_size for path in (data / "shards").glob("*.tar"))
        for round_ in range(given.rounds):
            job = {"samples": names * per_shard, "epochs": 2, "seed": round_, **STREAMLOAD.job}
            python, is_quick = places.of(STREAMLOAD), given.quick
            rows += cold.measure(STREAMLOAD, job, python, data, names, total_bytes, (RATE,), is_quick)
    settings = cold.settings(names * per_shard, names, total_bytes, (RATE,))
    content = turns.content(given, settings, rows)
    targets = cold.targets(content["medians"], (RATE,))
    turns.write(given, "cold_large", {**content, "targets": targets})


@contextmanager
def _named(directory: Path, names: int) -> Iterator[Path]:
    """A directory whose shards are those of another one, under so many names."""
    there = sorted((directory / "shards").glob("*.tar"))
    with turns.empty_directory(directory) as data:
        (data / "shards").mkdir()
        for name in range(names):
            (data / "shards" / f"{name:05d}.tar").hardlink_to(there[name % len(there)])
        yield data


if __name__ == "__main__":
    main()
