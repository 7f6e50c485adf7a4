"""Images a second by the number of workers.

Question: how does each loader's speed grow with its workers, when the bytes are near?

Command: python -m benchmarks.scaling

The work, the photographs and the measured second epoch are those of warm.py, with 1, 2 and 4 workers. What
is to be read is how near twice the workers come to twice the images, up to the machine's cores; beyond them
nothing is to be gained, and what is lost by too many is overhead. The consumer has a process of its own, and
so takes a part of a core for itself.

Contenders: streamload (default transform), open_clip's loader, webdataset with cache_dir.

Result: results/scaling.json; docs/results/other-loaders.md has it as a table.

Explanation: in all of them workers decode on their own; what doesn't scale is what the training's process
does for each batch: receiving it, and copying it where its memory isn't shared.
"""

from benchmarks import near, turns
from benchmarks.peers import OPEN_CLIP, STREAMLOAD, WEBDATASET

CONTENDERS = [STREAMLOAD, OPEN_CLIP, WEBDATASET]
WORKERS = (1, 2, 4)
QUICK_WORKERS = (1, 2)


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=[contender.name for contender in CONTENDERS])
    workers = QUICK_WORKERS if given.quick else WORKERS
    with near.ready(given, CONTENDERS) as data:
        rows = [
            {**data.run(contender, round_, label(contender.name, count), workers=count), "workers": count}
            for round_ in range(given.rounds)
            for contender, count in turns.rotated(
                [(contender, count) for contender in data.contenders for count in workers], round_
            )
        ]
    content = data.content(given, rows, workers=list(workers))
    medians = content["medians"]
    turns.write(
        given,
        "scaling",
        {
            **content,
            "ratios": {
                f"images_per_second, {count} workers against 1": {
                    contender.name: turns.ratio(
                        medians, "images_per_second", label(contender.name, count), label(contender.name, 1)
                    )
                    for contender in data.contenders
                }
                for count in workers[1:]
            },
            "targets": [],
        },
    )


def label(name: str, workers: int) -> str:
    return f"{name}, {workers} worker{'s' if workers > 1 else ''}"


if __name__ == "__main__":
    main()
