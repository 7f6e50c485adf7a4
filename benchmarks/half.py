"""Three epochs with room for half of the data.

Question: when its cache may hold half of the data, does a loader keep to that, what does it fetch again in
each epoch, and how fast is it?

Command: python -m benchmarks.half

96 shards over a server on loopback without a limit of its rate, 2 workers, 3 epochs, the work of warm.py.
The limit is half of the shards' bytes, given as each loader's documentation has it: streamload `cache_size`,
webdataset `cache_size`, LitData `max_cache_size`, MosaicML Streaming `cache_limit`. The other peers have no
cache that could be limited. Samples are shuffled over a window whose shards the limit has room for, 500
samples: streamload `shuffle`, webdataset `.shuffle`, MosaicML Streaming `shuffle_block_size`; LitData
shuffles inside a chunk.

- held: what the files below the cache's directory take on the disk, looked at ten times a second; the most
  of each epoch. A look takes its time: what goes and what comes meanwhile may both count, so a shard more
  than the limit is no breach of it.
- fetched: what the server sent in an epoch. A pass reads each shard once, so half of the data is the least
  that an epoch after the first can fetch when the half that is kept is of use.
- One that doesn't come to its end in five minutes is killed; that, or a peer's own error: `failures`.

Result: results/half.json; docs/results/other-loaders.md has it as a table.

Explanation: with shards in another order in each epoch, the least recently used is the wrong one to delete
nearly always; streamload deletes the one whose next visit is farthest, which it knows from its plan, and
keeps to its limit as it reserves room before it fills.
"""

from pathlib import Path

from benchmarks import link, machine, near, turns, watch
from benchmarks.contenders.job import Job
from benchmarks.peers import LITDATA, MOSAIC, STREAMLOAD, WEBDATASET
from benchmarks.turns import Contender, Row

CONTENDERS = [STREAMLOAD, WEBDATASET, LITDATA, MOSAIC]
SHARDS, SAMPLES_PER_SHARD, SHUFFLE = 96, 32, 500
QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD, QUICK_SHUFFLE = 16, 8, 8
EPOCHS = 3
FAST = 1e12  # no limit on the link
LIMIT_SECONDS, QUICK_LIMIT_SECONDS = 300, 60


def main() -> None:
    given = turns.arguments(__doc__, rounds=2, names=[contender.name for contender in CONTENDERS])
    full, quick = (SHARDS, SAMPLES_PER_SHARD, SHUFFLE), (QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD, QUICK_SHUFFLE)
    shards, per_shard, shuffle = quick if given.quick else full
    places, contenders = turns.interpreters(given), turns.chosen(given, CONTENDERS)
    rows: list[Row] = []
    failures: list[Row] = []
    with turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes):
        conversions = near.converted(contenders, places, directory / "shards", shards)
        with link.serving(directory / "shards", FAST) as line:
            for round_ in range(given.rounds):
                for contender in turns.rotated(contenders, round_):
                    job = Job(
                        contender.data(line.url, shards),
                        samples=shards * per_shard,
                        epochs=EPOCHS,
                        seed=round_,
                        packages=places.packages(),
                        shuffle=shuffle,
                        cache_bytes=total_bytes // 2,
                        **contender.job,
                    )
                    seconds = QUICK_LIMIT_SECONDS if given.quick else LIMIT_SECONDS
                    try:
                        rows += measure(contender, job, places.of(contender), directory, line, seconds)
                    except turns.TookTooLong as error:
                        failures.append({"contender": contender.name, "round": round_, "reason": str(error)})
                    except turns.Failed as error:
                        if contender is STREAMLOAD:
                            raise
                        failures.append(
                            {"contender": contender.name, "round": round_, "reason": error.reason}
                        )
    ours = [row["held_bytes"] for row in rows if row["contender"] == STREAMLOAD.name]
    settings = {
        "samples": shards * per_shard,
        "shards": shards,
        "bytes": total_bytes,
        "limit_bytes": total_bytes // 2,
        "shuffle": shuffle,
        "epochs": EPOCHS,
        "batch_size": Job.batch_size,
        "workers": Job.workers,
        "tokenizer": Job.tokenizer,
        "limit_seconds": seconds,
    }
    turns.write(
        given,
        "half",
        {
            **turns.content(given, settings, rows),
            "conversions": conversions,
            "failures": failures,
            "targets": [
                turns.target(
                    "the most that streamload held, bytes",
                    max(ours, default=None),
                    at_most=total_bytes // 2 + total_bytes // shards,
                )
            ],
        },
    )


def measure(
    contender: Contender, job: Job, python: Path, directory: Path, line: link.Link, limit_seconds: float
) -> list[Row]:
    """A row for each epoch of one run."""
    load = machine.load()
    with turns.empty_directory(directory) as cache, watch.folder(cache) as held:
        with_cache = Job(**{**vars(job), "cache_dir": str(cache)})
        ran = turns.run(contender, with_cache, python, limit_seconds=limit_seconds)
    rows, began = [], ran.started
    for number, epoch in enumerate(ran.epochs, start=1):
        rows.append(
            {
                "label": f"{contender.name}, epoch {number}",
                "contender": contender.name,
                "round": job.seed,
                "epoch": number,
                "load_before": load,
                "held_bytes": held.peak_bytes(began, epoch.ended),
                "fetched_bytes": line.fetched_bytes(began, epoch.ended),
                "images": epoch.images,
                "images_per_second": epoch.images / (epoch.ended - epoch.began),
                "limits": ran.result.limits,
                "versions": ran.result.versions,
            }
        )
        began = epoch.ended
    return rows


if __name__ == "__main__":
    main()
