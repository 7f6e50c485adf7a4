"""open_clip's own loader, called as its training calls it; it has no cache and its windows are constants."""

import logging
import time
from types import SimpleNamespace

from benchmarks.contenders.job import JITTERED, Job, Result, versions
from benchmarks.contenders.workload import open_clip_preprocess, tokenizer, train

LIMITS = (
    "no cache: each epoch fetches all again",
    "1,000 samples a worker before the first batch",
    "no more workers than shards",
)


def main() -> None:
    job = Job.from_argument()
    preprocess = open_clip_preprocess(job.preprocess == JITTERED)
    from open_clip_train import data

    logging.basicConfig(level=logging.WARNING)
    arguments = SimpleNamespace(
        train_data=job.urls,
        train_num_samples=job.samples,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        val_data=None,
        val_num_samples=None,
        seed=job.seed,
        batch_size=job.batch_size,
        workers=job.workers,
        world_size=1,
    )
    info = data.get_wds_dataset(arguments, preprocess, is_train=True, epoch=0, tokenizer=tokenizer(job))
    imported = time.monotonic()
    epochs = []
    for epoch in range(job.epochs):
        info.set_epoch(epoch)
        epochs.append(train(info.dataloader, job, epoch))
    names = ("open_clip_torch", "webdataset", "torchvision", "torch", "pillow")
    Result(imported, epochs, versions(*names), limits=LIMITS).print()


if __name__ == "__main__":
    main()
