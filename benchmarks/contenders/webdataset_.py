"""webdataset with cache_dir, in the fluid form of its documentation, with open_clip's transform."""

import time
from typing import Any

import webdataset as wds

from benchmarks.contenders.job import Job, Result, versions
from benchmarks.contenders.workload import open_clip_preprocess, tokenizer, train

SHARD_SHUFFLE = 100
SAMPLE_SHUFFLE = 1000
"""Both as its documentation has them."""

LIMITS = ("a shard is read when it has arrived whole", "no more workers than shards")


def main() -> None:
    job = Job.from_argument()
    preprocess, tokenize = open_clip_preprocess(), tokenizer(job)

    def ids(caption: str) -> Any:
        return tokenize(caption)[0]

    dataset = (
        wds.WebDataset(
            job.urls,
            shardshuffle=SHARD_SHUFFLE,
            cache_dir=job.cache_dir,
            cache_size=-1 if job.cache_bytes is None else job.cache_bytes,
            seed=job.seed,
        )
        .shuffle(job.shuffle or SAMPLE_SHUFFLE)
        .decode("pilrgb")
        .to_tuple("jpg", "txt")
        .map_tuple(preprocess, ids)
        .batched(job.batch_size, partial=False)
    )
    loader = wds.WebLoader(
        dataset, batch_size=None, num_workers=job.workers, persistent_workers=job.workers > 0
    )
    imported = time.monotonic()
    epochs = [train(loader, job, epoch) for epoch in range(job.epochs)]
    names = ("webdataset", "torchvision", "torch", "pillow")
    Result(imported, epochs, versions(*names), limits=LIMITS).print()


if __name__ == "__main__":
    main()
