"""LitData: shards converted by `optimize`, read by its StreamingDataset and StreamingDataLoader.

Its sample is what `optimize` was given, a photograph's bytes and a caption; chunks are as large as the
shards. It brings no downloader for HTTP: `register_downloader`, made for that, takes the one below.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # else it asks pypi.org

import litdata
from litdata.streaming.downloader import Downloader, register_downloader
from litdata.streaming.resolver import Dir

from benchmarks.contenders import tars
from benchmarks.contenders.job import Job, Result, versions
from benchmarks.contenders.workload import Transform, converting, train

LIMITS = (
    "reads its own format only: a conversion first, and the data twice",
    "samples are shuffled inside a chunk only",
    "HTTP needs a downloader that the user writes",
)


class Http(Downloader):
    """A chunk by one request, published by one rename."""

    def download_file(self, remote_filepath: str, local_filepath: str) -> None:
        if not os.path.exists(local_filepath):
            self._publish_file(tars.download(remote_filepath, local_filepath), local_filepath)


class Photographs(litdata.StreamingDataset):
    def __init__(self, transform: Transform, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._transform = transform

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return self._transform(sample["image"], sample["caption"])


def convert(job: Job, folder: Path) -> None:
    paths = tars.addresses(job.urls)
    litdata.optimize(
        samples,
        paths,
        str(folder),
        chunk_bytes=tars.piece_bytes(paths),
        num_workers=job.workers,
        verbose=False,
    )


def samples(path: str) -> Iterator[dict[str, Any]]:
    for image, caption in tars.samples(path):
        yield {"image": image, "caption": caption}


def main() -> None:
    job = Job.from_argument()
    names = ("litdata", "torchvision", "torch", "pillow")
    if job.convert_to is not None:
        converting(convert, job, names)
        return
    register_downloader("http", Http)
    far = job.urls.startswith("http")
    making = time.monotonic()
    dataset = Photographs(
        Transform(job),
        Dir(url=job.urls) if far else job.urls,
        cache_dir=job.cache_dir if far else None,
        shuffle=True,
        drop_last=True,
        seed=job.seed,
        max_cache_size=job.cache_bytes,
    )
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.workers,
        drop_last=True,
        persistent_workers=job.workers > 0,
    )
    if job.takes_up:
        loader.load_state_dict(job.saved_state())
    imported = time.monotonic()
    epochs = [train(loader, job, epoch, loader.state_dict) for epoch in range(job.epochs)]
    Result(imported, epochs, versions(*names), limits=LIMITS, making=making).print()


if __name__ == "__main__":
    main()
