"""Images a second when the bytes are near.

Question: how many images a second does each loader hand over when every shard lies in local files, and how
much CPU time does an image cost (user and system, all processes)?

Command: python -m benchmarks.warm

All do the same work (contenders/workload.py): the same photographs, 2 workers, batches of 64, captions to
ids by open_clip's own tokenizer, one channel of every image read by the consumer. An epoch goes before the
measured one: in it streamload and webdataset fill their caches from a local server; open_clip, which has no
cache, is given the paths. What streamload does more than the others: it verifies the checksum of each
sample that it reads.

Contenders: streamload with its default transform (the pixels of open_clip's within one level of 255);
streamload with preprocess=open_clip's function, run as given; open_clip's loader; webdataset with cache_dir
and open_clip's function.

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
                near = str(directory / "shards") if contender.adapter == "openclip" else server.url
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
            "ratios": {"images_per_second against open_clip": speed},
            "targets": [
                turns.target(
                    "default transform, × open_clip's images/s", speed.get("streamload"), at_least=2.0
                ),
                turns.target(
                    "preprocess as given, × open_clip's images/s",
                    speed.get("streamload, open_clip's preprocess"),
                    at_least=1.0,
                ),
            ],
        },
    )


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
