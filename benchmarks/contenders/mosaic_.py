"""MosaicML Streaming: shards converted by its MDSWriter, read by its StreamingDataset.

A sample is a photograph's bytes and a caption; its shards are as large as the tars. It brings no downloader
for HTTP; `DOWNLOADER_MAPPINGS` takes the one below.
"""

import time
from pathlib import Path
from typing import Any

from benchmarks.contenders import tars
from benchmarks.contenders.job import Job, Result, versions
from benchmarks.contenders.workload import Transform, converting, train
from benchmarks.torchvision_stub import define_torchvision_schemas

define_torchvision_schemas()  # streaming imports torchvision, which may be made for another torch
import streaming  # noqa: E402
from streaming.base.storage import download  # noqa: E402

LIMITS = (
    "reads its own format only: a conversion first, and the data twice",
    "HTTP needs a downloader that the user writes",
    "a shard is read when it has arrived whole",
)


class Http(download.CloudDownloader):
    """A shard by one request, published by one rename."""

    @staticmethod
    def _client_identifier() -> str:
        return "http"

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        Path(tars.download(remote, local)).rename(local)

    def clean_up(self) -> None:
        pass


class Photographs(streaming.StreamingDataset):
    def __init__(self, transform: Transform, **options: Any) -> None:
        super().__init__(**options)
        self._transform = transform

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return self._transform(sample["image"], sample["caption"])


def convert(job: Job, folder: Path) -> None:
    paths = tars.addresses(job.urls)
    columns = {"image": "bytes", "caption": "str"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=tars.piece_bytes(paths)) as writer:
        for path in paths:
            for image, caption in tars.samples(path):
                writer.write({"image": image, "caption": caption})


def main() -> None:
    job = Job.from_argument()
    names = ("mosaicml-streaming", "torchvision", "torch", "pillow")
    if job.convert_to is not None:
        converting(convert, job, names)
        return
    download.DOWNLOADER_MAPPINGS["http"] = Http
    streaming.base.util.clean_stale_shared_memory()
    far = job.urls.startswith("http")
    making = time.monotonic()
    dataset = Photographs(
        Transform(job),
        remote=job.urls if far else None,
        local=job.cache_dir if far else job.urls,
        batch_size=job.batch_size,
        shuffle=True,
        shuffle_seed=job.seed,
        shuffle_block_size=job.shuffle,
        cache_limit=job.cache_bytes,
    )
    loader = streaming.StreamingDataLoader(
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
