"""The order in which open_clip's own loader gives samples, made by its own code on stand-ins for them.

The pipeline is what `get_wds_dataset` builds for a training, with all its constants. Its tar reader is
replaced by one that gives (shard, number) pairs, and what decodes is taken out, so that batching follows on
the shuffle. Each worker of each rank is run to its end, one after the other, told who it is by the variables
that webdataset reads; its batches then take turns with those of the rank's other workers, as a DataLoader's
do. The shuffle draws from Python's generator, seeded here by run, rank, worker and epoch; in a training the
clock seeds it.
"""

import itertools
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.contenders.job import versions

_SHUFFLE = 5


class StandIn:
    """In place of the tar reader: the samples of each shard as (shard, number); counts those that it gave."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.given = 0

    def __call__(self, shards: Iterable[dict[str, Any]]) -> Iterator[tuple[int, int]]:
        for shard in shards:
            number = int(Path(shard["url"]).stem)
            for sample in range(self.sizes[number]):
                self.given += 1
                yield number, sample


def main() -> None:
    job = json.loads(sys.argv[1])
    ranks, workers, batch, epochs = (job[name] for name in ("ranks", "workers", "batch", "epochs"))
    reader = StandIn(job["sizes"])
    info, dataset = training(job, reader)
    steps = dataset.nsamples * workers
    found = np.empty((2, epochs, steps, ranks, batch), np.int32)
    most_held = 0
    for rank, worker in itertools.product(range(ranks), range(workers)):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), WORKER=str(worker), NUM_WORKERS=str(workers))
        for epoch in range(epochs):
            info.set_epoch(epoch)
            draws = random.Random(f"{job['seed']} {rank} {worker} {epoch}")
            dataset.pipeline[_SHUFFLE].kw["rng"] = draws
            before = reader.given
            for turn, pair in enumerate(dataset):
                found[:, epoch, turn * workers + worker, rank] = pair
                most_held = max(most_held, reader.given - before - (turn + 1) * batch)
    shards, samples = found.reshape(2, epochs, steps, ranks * batch)
    np.savez(job["out"], shards=shards, samples=samples)
    print(
        json.dumps(
            {"held": most_held * workers * ranks, "versions": versions("open_clip_torch", "webdataset")}
        )
    )


def training(job: dict[str, Any], reader: StandIn) -> tuple[Any, Any]:
    """What open_clip makes of a training on these shards, and its pipeline on the stand-in."""
    from benchmarks.torchvision_stub import define_torchvision_schemas

    define_torchvision_schemas()
    from open_clip_train import data

    data.tarfile_to_samples_nothrow = reader
    arguments = SimpleNamespace(
        train_data=f"{{00000..{len(job['sizes']) - 1:05d}}}.tar",
        train_num_samples=sum(job["sizes"]),
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        seed=job["seed"],
        batch_size=job["batch"],
        workers=job["workers"],
        world_size=job["ranks"],
    )
    info = data.get_wds_dataset(arguments, preprocess_img=None, is_train=True, tokenizer=None)
    dataset = info.dataloader.pipeline[0].dataset
    stages = dataset.pipeline
    if (
        stages[4] is not reader
        or "_shuffle" not in str(stages[_SHUFFLE])
        or "_batched" not in str(stages[-1])
    ):
        raise RuntimeError(f"open_clip's pipeline isn't the one that is known here: {stages}")
    del stages[_SHUFFLE + 1 : -1]
    return info, dataset


if __name__ == "__main__":
    main()
