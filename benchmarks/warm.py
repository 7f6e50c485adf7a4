"""Images a second when the bytes are near.

Question: how many images a second does each loader hand over when every shard lies in local files, and how
much CPU time does an image cost (user and system, all processes)?

Command: python -m benchmarks.warm

All do the same work (contenders/workload.py): the same photographs, 2 workers, batches of 64, captions to
ids by open_clip's own tokenizer, one channel of every image read by the consumer. An epoch goes before the
measured one (near.py). What streamload does more than the others: it verifies the checksum of each sample
that it reads.

Contenders: streamload with its default transform (open_clip's pixels), and as uint8 batches; for both the
floor (streamload/profile/floor.py): bare processes that do this work as fast as it could be made here, and
keep no order, verify nothing and hand nothing over, so that nobody reads their batches (overhead.py compares
them in more rounds); the default with a consumer that keeps the last 10 batches and looks at the end whether
their bytes are still those that came (memory that is used again must not change under a user); streamload
with preprocess=open_clip's function, compiled, and as given; the same with colour jitter in it, compiled,
beside open_clip's own loader with that; and the peers, each as its own documentation recommends for this
work, in an environment of its own (environments/). open_clip's loader, webdataset with cache_dir, Hugging
Face datasets, LitData, MosaicML Streaming and Megatron-Energon run open_clip's function; SPDL and DALI, which
bring their own decoders and resizers, those. SPDL, whose workers are threads, also runs with 4 of them (torch
has one thread in each process). LitData and MosaicML Streaming read a format of their own: what making it
took, and its bytes, are in the table, and so is the index that Megatron-Energon and DALI make.

Result: results/warm.json; docs/results/other-loaders.md has it as a table.

Explanation: decoding, resizing and normalising are nearly all of the work. The default transform does
them by simplejpeg and a resize that normalises, with one image in the cache of the CPU at a time, into
shared memory that is used again; most of the others by Pillow and torchvision, with a copy of each batch
through fresh shared memory.
"""

from benchmarks import near, turns
from benchmarks.peers import (
    FLOOR,
    FLOOR_UINT8,
    OPEN_CLIP_JITTERED,
    PEERS,
    SPDL_4_THREADS,
    STREAMLOAD,
    STREAMLOAD_AS_GIVEN,
    STREAMLOAD_COMPILED,
    STREAMLOAD_JITTERED,
    STREAMLOAD_KEPT,
    STREAMLOAD_UINT8,
)
from benchmarks.turns import Row

CONTENDERS = [
    STREAMLOAD,
    STREAMLOAD_UINT8,
    FLOOR,
    FLOOR_UINT8,
    STREAMLOAD_KEPT,
    STREAMLOAD_COMPILED,
    STREAMLOAD_AS_GIVEN,
    STREAMLOAD_JITTERED,
    OPEN_CLIP_JITTERED,
    *PEERS,
    SPDL_4_THREADS,
]


def main() -> None:
    given = turns.arguments(__doc__, rounds=5, names=[contender.name for contender in CONTENDERS])
    with near.ready(given, CONTENDERS) as data:
        rows = [
            data.run(contender, round_)
            for round_ in range(given.rounds)
            for contender in turns.rotated(data.contenders, round_)
        ]
    content = data.content(given, rows)
    medians = content["medians"]
    speed = {name: turns.ratio(medians, "images_per_second", name, "open_clip") for name in medians}
    turns.write(
        given,
        "warm",
        {
            **content,
            "ratios": {
                "images_per_second against open_clip": speed,
            },
            "targets": [
                turns.target(
                    "default transform, × open_clip's images/s", speed.get(STREAMLOAD.name), at_least=2.6
                ),
                turns.target(
                    "default transform, × the images/s of the fastest peer",
                    against_fastest_peer(medians),
                    at_least=1.9,
                ),
                turns.target(
                    "open_clip's preprocess, compiled, × open_clip's images/s",
                    speed.get(STREAMLOAD_COMPILED.name),
                    at_least=2.5,
                ),
                turns.target(
                    "preprocess as given, × open_clip's images/s",
                    speed.get(STREAMLOAD_AS_GIVEN.name),
                    at_least=1.0,
                ),
                turns.target(
                    "with colour jitter, × the images/s of open_clip with it",
                    turns.ratio(
                        medians, "images_per_second", STREAMLOAD_JITTERED.name, OPEN_CLIP_JITTERED.name
                    ),
                    at_least=1.5,
                ),
                turns.target("kept batches that changed, of all rounds", changed(rows), at_most=0),
            ],
        },
    )


def against_fastest_peer(medians: dict[str, Row]) -> float | None:
    peers = (*PEERS, SPDL_4_THREADS)
    fastest = max(
        (medians[peer.name]["images_per_second"] for peer in peers if peer.name in medians), default=None
    )
    if fastest is None or STREAMLOAD.name not in medians:
        return None
    return medians[STREAMLOAD.name]["images_per_second"] / fastest


def changed(rows: list[Row]) -> int | None:
    """Of the batches that were kept; None where none were."""
    found = [row["changed_batches"] for row in rows if row["contender"] == STREAMLOAD_KEPT.name]
    return sum(found) if found else None


if __name__ == "__main__":
    main()
