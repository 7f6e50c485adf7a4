"""What it costs that each sample is verified whenever it is read.

Question: of the CPU time of a warm epoch (user and system, all processes), how much goes into comparing the
bytes of each sample with their checksum?

Command: python -m benchmarks.verification

The warm epoch of warm.py, with streamload's default transform and a cheap tokenizer, so that the rest is as
small as it gets. In one contender each call of the check is timed, by the CPU clock of its thread and in the
process where it happens (the clock's own time, about a microsecond, counts); its share of the epoch's CPU
time is the answer. As a cross-check, another has the check taken out, in its own process: the difference in
CPU time. That is a small difference of large numbers, so it says little more than that the first isn't far
off.

Result: results/verification.json; docs/results/costs.md has it as a table.

Explanation: xxh3_64 reads some 10 GB/s, and the bytes are in the CPU's cache: pread has just put them there,
and the decoder will read them next.
"""

from typing import Any

from benchmarks import machine, turns
from benchmarks.contenders.job import Job
from benchmarks.turns import Contender
from streamload.testing.server import ShardServer

CONTENDERS = [
    Contender("timed", "checked", {"preprocess": "default", "checks": "timed"}),
    Contender("without the check", "checked", {"preprocess": "default", "checks": "off"}),
]
SHARDS, SAMPLES_PER_SHARD = 8, 384


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=[contender.name for contender in CONTENDERS])
    shards, per_shard = (2, 64) if given.quick else (SHARDS, SAMPLES_PER_SHARD)
    contenders = turns.chosen(given, CONTENDERS)
    rows: list[dict[str, Any]] = []
    with (
        turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes),
        ShardServer.spawn(directory / "shards") as server,
    ):
        (directory / "cache").mkdir()
        for round_ in range(given.rounds):
            for contender in turns.rotated(contenders, round_):
                job = Job(
                    urls=turns.pattern(server.url, shards),
                    samples=shards * per_shard,
                    epochs=2,
                    seed=round_,
                    cache_dir=str(directory / "cache"),
                    **contender.job,
                )
                rows.append(measure(contender, job, given))
    versions = turns.versions(rows)
    medians = turns.medians(rows)
    turns.write(
        given,
        "verification",
        {
            "settings": {
                "samples": shards * per_shard,
                "shards": shards,
                "bytes": total_bytes,
                "batch_size": job.batch_size,
                "workers": job.workers,
                "tokenizer": job.tokenizer,
            },
            "versions": versions,
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "ratios": {
                "CPU time without the check": turns.ratio(
                    medians, "cpu_us_per_image", "without the check", "timed"
                )
            },
            "targets": [
                turns.target(
                    "verification, % of the CPU time of a warm epoch",
                    100 * medians["timed"]["share"] if "timed" in medians else None,
                    at_most=1.0,
                )
            ],
        },
    )


def measure(contender: Contender, job: Job, given: Any) -> dict[str, Any]:
    load = machine.load()
    ran = turns.run(contender, job, given.python)
    last, checked = ran.epochs[-1], ran.result.notes["checked"]
    return {
        "label": contender.name,
        "contender": contender.name,
        "round": job.seed,
        "load_before": load,
        "images": last.images,
        "checked": checked["samples"],
        "checked_bytes": checked["bytes"],
        "check_us_per_image": checked["ns"] / 1e3 / last.images,
        "cpu_us_per_image": last.cpu_seconds / last.images * 1e6,
        "share": checked["ns"] / 1e9 / last.cpu_seconds,
        "versions": ran.result.versions,
    }


if __name__ == "__main__":
    main()
