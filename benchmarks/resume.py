"""A warm run that is cut in mid-epoch, and taken up by another process.

Question: how long does the first batch take after a resume, what is fetched again for it and for the rest of
the epoch, and is the rest what it would have been?

Command: python -m benchmarks.resume

One process goes through an epoch, so that what has a cache has filled it, and saves its loader's state in the
middle of the second. It then goes on to that epoch's end, to know what was to come. Another process makes its
loader, gives it the state and goes through what is left. 2 workers, batches of 64, open_clip's function where
the contender runs one, samples shuffled over 500 (a loader that keeps samples in memory for that has so many
for each worker; LitData shuffles inside a chunk); the captions end in their sample's number, which the
consumer notes.

Every contender does it as its own documentation has it: streamload, LitData and MosaicML Streaming by
state_dict and load_state_dict of their loaders, Hugging Face datasets with torchdata's StatefulDataLoader,
Megatron-Energon by save_state_rank and restore_state_rank of its savable loader, DALI by a checkpoint of its
pipeline. Those that can't do it at all are in the table with the reason. There are 24 shards, as a state of
Hugging Face datasets 5.2 is refused (IndexError) where a worker has fewer than its shuffle mixes, ten.

- first batch: from making the loader, imports done, and from the start of the process.
- fetched: what the server sent to the second process, up to its first batch and in all; the link carries
  40 MB/s. Megatron-Energon and DALI read local files, as they can't read over HTTP.
- lost, again: samples that were to come and didn't, and samples that weren't to come and did.
- in order: whether the rest came exactly as it was to come.

Result: results/resume.json; docs/results/other-loaders.md has it as a table.

Explanation: streamload's place in the order is a small value, and what it reads next follows from it; its
window of samples is made of references, not of samples, so nothing is read again to fill it.
"""

import collections
import io
import tarfile
from pathlib import Path

from benchmarks import link, machine, near, turns
from benchmarks.contenders import tars
from benchmarks.contenders.job import Job
from benchmarks.peers import (
    DALI,
    ENERGON,
    HUGGINGFACE,
    LITDATA,
    MOSAIC,
    OPEN_CLIP,
    SPDL,
    STREAMLOAD,
    WEBDATASET,
)
from benchmarks.turns import Contender, Interpreters, Row

CONTENDERS = [STREAMLOAD, LITDATA, MOSAIC, HUGGINGFACE, ENERGON, DALI]
LOCAL = (ENERGON, DALI)
CANNOT = {
    OPEN_CLIP.name: "goes on with the next epoch only",
    WEBDATASET.name: "has no state",
    SPDL.name: "has no state",
}
RATE = 40e6
SHARDS, SAMPLES_PER_SHARD, SHUFFLE = 24, 128, 500
QUICK_SAMPLES_PER_SHARD, QUICK_SHUFFLE = 16, 8
LIMIT_SECONDS = 300


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=[contender.name for contender in CONTENDERS])
    full, quick = (SHARDS, SAMPLES_PER_SHARD, SHUFFLE), (SHARDS, QUICK_SAMPLES_PER_SHARD, QUICK_SHUFFLE)
    shards, per_shard, shuffle = quick if given.quick else full
    places, contenders = turns.interpreters(given), turns.chosen(given, CONTENDERS)
    save_after = shards * per_shard // Job.batch_size // 2
    rows: list[Row] = []
    failures: list[Row] = []
    with turns.photographs(shards * per_shard, per_shard) as (directory, _):
        total_bytes = number_captions(directory / "shards")
        conversions = near.converted(contenders, places, directory / "shards", shards)
        with link.serving(directory / "shards", RATE) as line:
            for round_ in range(given.rounds):
                for contender in turns.rotated(contenders, round_):
                    base = str(directory / "shards") if contender in LOCAL else line.url
                    job = {
                        "urls": contender.data(base, shards),
                        "samples": shards * per_shard,
                        "seed": round_,
                        "tokenizer": "numbers",
                        "shuffle": shuffle,
                        "packages": places.packages(),
                        "save_after": save_after,
                        **contender.job,
                    }
                    try:
                        rows.append(measure(contender, job, places, directory, line))
                    except turns.TookTooLong as error:
                        failures.append({"contender": contender.name, "round": round_, "reason": str(error)})
    settings = {
        "samples": shards * per_shard,
        "shards": shards,
        "bytes": total_bytes,
        "batch_size": Job.batch_size,
        "workers": Job.workers,
        "shuffle": shuffle,
        "rate": RATE,
        "save_after": save_after,
        "limit_seconds": LIMIT_SECONDS,
    }
    ours = [row for row in rows if row["contender"] == STREAMLOAD.name]
    turns.write(
        given,
        "resume",
        {
            **turns.content(given, settings, rows),
            "conversions": conversions,
            "failures": failures,
            "cannot": CANNOT,
            "targets": [
                turns.target(
                    "bytes fetched again by streamload, of all rounds",
                    max((row["fetched_bytes"] for row in ours), default=None),
                    at_most=0,
                ),
                turns.target(
                    "samples lost or given again by streamload, of all rounds",
                    sum(row["lost"] + row["again"] for row in ours) if ours else None,
                    at_most=0,
                ),
                turns.target(
                    "rounds in which the rest came in another order",
                    sum(not row["in_order"] for row in ours) if ours else None,
                    at_most=0,
                ),
            ],
        },
    )


def number_captions(shards: Path) -> int:
    """Write the shards again, each caption with its sample's number behind it; their bytes."""
    number = total = 0
    for path in sorted(shards.glob("*.tar")):
        samples = list(tars.samples(path))
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for image, caption in samples:
                for extension, payload in (("jpg", image), ("txt", f"{caption} {number}".encode())):
                    member = tarfile.TarInfo(f"{number:09d}.{extension}")
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
                number += 1
        total += path.stat().st_size
    return total


def measure(contender: Contender, job: Row, places: Interpreters, directory: Path, line: link.Link) -> Row:
    load, python = machine.load(), places.of(contender)
    with turns.empty_directory(directory) as cache, turns.empty_directory(directory) as states:
        job = {**job, "cache_dir": str(cache), "state": str(states / "state")}
        first = turns.run(contender, Job(epochs=2, **job), python, limit_seconds=LIMIT_SECONDS)
        second = turns.run(
            contender, Job(epochs=1, takes_up=True, **job), python, limit_seconds=LIMIT_SECONDS
        )
        state_bytes = (states / "state").stat().st_size
    cut, (rest,) = first.epochs[-1], second.epochs
    to_come = cut.numbers[job["save_after"] * Job.batch_size :]
    missing, surplus = _differences(to_come, rest.numbers)
    return {
        "label": contender.name,
        "contender": contender.name,
        "round": job["seed"],
        "load_before": load,
        "is_local": contender in LOCAL,
        "first_batch_seconds": rest.first_batch - second.result.making,
        "start_to_first_batch_seconds": rest.first_batch - second.started,
        "fetched_to_first_batch_bytes": line.fetched_bytes(second.started, rest.first_batch),
        "fetched_bytes": line.fetched_bytes(second.started, float("inf")),
        "saving_seconds": cut.saving_seconds,
        "state_bytes": state_bytes,
        "to_come": len(to_come),
        "images": rest.images,
        "lost": missing,
        "again": surplus,
        "in_order": rest.numbers == to_come,
        "limits": second.result.limits,
        "versions": second.result.versions,
    }


def _differences(expected: list[int], found: list[int]) -> tuple[int, int]:
    """How many of the first the second lacks, and how many it has that the first lacks."""
    wanted, given = collections.Counter(expected), collections.Counter(found)
    return (wanted - given).total(), (given - wanted).total()


if __name__ == "__main__":
    main()
