"""Images a second when the bytes are near.

Question: how many images a second does each loader hand over when every shard lies in local files, and how
much CPU time does an image cost (user and system, all processes)?

Command: python -m benchmarks.warm

All do the same work (contenders/workload.py): the same photographs, 2 workers, batches of 64, captions to
ids by open_clip's own tokenizer, one channel of every image read by the consumer. An epoch goes before the
measured one: in it streamload and webdataset fill their caches from a local server; open_clip, which has no
cache, is given the paths. What streamload does more than the others: it verifies the checksum of each
sample that it reads.

Contenders: streamload with its default transform (the pixels of open_clip's within one level of 255), and
the same as uint8 batches; for each the floor (streamload/bench/floor.py): bare processes that do this work as
fast as it could be made here, and keep no order, verify nothing and hand nothing over, so that nobody reads
their batches; streamload with preprocess=open_clip's function, run as given; open_clip's loader; webdataset
with cache_dir and open_clip's function.

Result: results/warm.json; docs/performance.md has it as a table.

Explanation: decoding, resizing and normalising are nearly all of the work. The default transform does them
by simplejpeg and torch's uint8 resize, with one image in the cache of the CPU at a time, into shared memory
that is used again; the others by Pillow and torchvision, with a copy of each batch through fresh shared
memory.
"""

from pathlib import Path
from typing import Any

from benchmarks import machine, turns
from benchmarks.contenders.workload import Job
from benchmarks.turns import Contender
from streamload.testing.server import ShardServer

CONTENDERS = [
    Contender("streamload", "streamload_", {"preprocess": "default"}),
    Contender("streamload, uint8", "streamload_", {"preprocess": "default", "images": "uint8"}),
    Contender("floor", "floor", {"preprocess": "default"}),
    Contender("floor, uint8", "floor", {"preprocess": "default", "images": "uint8"}),
    Contender("streamload, open_clip's preprocess", "streamload_"),
    Contender("open_clip", "openclip"),
    Contender("webdataset, cache_dir", "webdataset_"),
]
SHARDS = 8
SAMPLES_PER_SHARD = 384  # with these every worker has the same share: nobody has to read a shard twice


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=[contender.name for contender in CONTENDERS])
    shards, per_shard = (2, 128) if given.quick else (SHARDS, SAMPLES_PER_SHARD)
    places = turns.interpreters(given)
    contenders = turns.chosen(given, CONTENDERS)
    rows: list[dict[str, Any]] = []
    with (
        turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes),
        ShardServer.spawn(directory / "shards") as server,
    ):
        for round_ in range(given.rounds):
            for contender in turns.rotated(contenders, round_):
                near = str(directory / "shards") if contender.adapter in ("openclip", "floor") else server.url
                cache = directory / f"cache-{contender.adapter}"
                cache.mkdir(exist_ok=True)
                job = Job(
                    **{
                        "urls": turns.pattern(near, shards),
                        "samples": shards * per_shard,
                        "epochs": 2,
                        "seed": round_,
                        "tokenizer": "open_clip" if places.open_clip is not None else "words",
                        "cache_dir": str(cache),
                        "packages": places.packages(),
                        **contender.job,
                    }
                )
                rows.append(measure(contender, job, places.of(contender), round_))
    versions = turns.versions(rows)
    medians = turns.medians(rows)
    speed = {name: turns.ratio(medians, "images_per_second", name, "open_clip") for name in medians}
    turns.write(
        given,
        "warm",
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
                "images_per_second against open_clip": speed,
                "images_per_second against the floor": against_floor(medians, "images_per_second"),
                "cpu_us_per_image against the floor": against_floor(medians, "cpu_us_per_image"),
            },
            "targets": [
                turns.target(
                    "default transform, × open_clip's images/s", speed.get("streamload"), at_least=2.6
                ),
                turns.target(
                    "preprocess as given, × open_clip's images/s",
                    speed.get("streamload, open_clip's preprocess"),
                    at_least=1.0,
                ),
                *floor_targets(medians),
                turns.target(
                    "default transform, × the fastest peer's images/s",
                    over_fastest_peer(medians),
                    at_least=1.9,
                ),
            ],
        },
    )


OF_THE_FLOOR = {"streamload, uint8": ("floor, uint8", 1.05, 0.97), "streamload": ("floor", 1.12, 0.92)}
"""The floor that each is compared with; the most of its CPU time; the least of its images a second."""


def against_floor(medians: dict[str, dict[str, Any]], metric: str) -> dict[str, float | None]:
    return {name: turns.ratio(medians, metric, name, floor) for name, (floor, *_) in OF_THE_FLOOR.items()}


def floor_targets(medians: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for name, (floor, most_cpu, least_speed) in OF_THE_FLOOR.items():
        cpu = turns.ratio(medians, "cpu_us_per_image", name, floor)
        speed = turns.ratio(medians, "images_per_second", name, floor)
        found.append(turns.target(f"{name}: × the CPU time of {floor}", cpu, at_most=most_cpu))
        found.append(turns.target(f"{name}: × the images/s of {floor}", speed, at_least=least_speed))
    return found


def over_fastest_peer(medians: dict[str, dict[str, Any]]) -> float | None:
    """How many times as fast as the fastest of those that aren't ours."""
    peers = [
        row["images_per_second"]
        for name, row in medians.items()
        if not name.startswith(("streamload", "floor"))
    ]
    if not peers or "streamload" not in medians:
        return None
    return medians["streamload"]["images_per_second"] / max(peers)


def measure(contender: Contender, job: Job, python: Path, round_: int) -> dict[str, Any]:
    load = machine.load()
    ran = turns.run(contender, job, python)
    last = ran.epochs[-1]
    seconds = last.ended - last.began
    return {
        "label": contender.name,
        "contender": contender.name,
        "round": round_,
        "load_before": load,
        "images": last.images,
        "seconds": seconds,
        "images_per_second": last.images / seconds,
        "cpu_us_per_image": last.cpu_seconds / last.images * 1e6,
        "first_batch_seconds": last.first_batch - last.began,
        "channel_mean": last.channel_mean,
        "versions": ran.result.versions,
    }


if __name__ == "__main__":
    main()
