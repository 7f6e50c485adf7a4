"""Leave out samples with short captions, and count them: an extension of streamload in one file.

    python examples/drop_short_captions.py 's3://bucket/train-{000..255}.tar' --words 5

The number of words is a fact of each sample, computed once as its shard arrives. What is left out is counted
over all ranks at each step of a pass, and resumes with the loader's state. Without URLs it makes shards.
"""

import argparse
import contextlib
import io
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

import streamload
from streamload.extension import (
    BatchRows,
    Entry,
    Extension,
    Fact,
    RankPart,
    Run,
    WorkerPart,
    WorkerProcess,
)


def word_count(sample: Mapping[str, bytes]) -> int:
    """The number of words of a caption."""
    return len(sample["txt"].split())


@dataclass(frozen=True)
class DropShortCaptions(Extension):
    """Leaves out samples whose caption has fewer words."""

    words: int

    name = "short_captions"

    @property
    def own_facts(self) -> Mapping[str, Fact]:
        """The number of words, with a version that changes with its code."""
        return {"words": (word_count, "1")}

    def keep(self, entry: Entry) -> bool:
        """False leaves a sample out, before any of its bytes are decoded."""
        return entry.facts["words"] >= self.words

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """In each worker process: sends the count."""
        return LeftOutInWorker()

    def in_rank(self, run: Run) -> RankPart:
        """In the training process: adds it up over the ranks."""
        return LeftOutInRank(run)


class LeftOutInWorker(WorkerPart):
    """Sends how many samples of the pass were left out before the end of a batch's step."""

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        """Each sample is counted by one rank."""
        return rows.left_out[DropShortCaptions.name].to_bytes(8, "little")


class LeftOutInRank(RankPart):
    """Shows how many samples of the pass all ranks have left out."""

    def __init__(self, run: Run):
        self._run = run
        self._count = 0

    def yielded(self, part: bytes, values: dict[str, Any]) -> dict[str, Any]:
        """All ranks get their batch of a step: they add up their counts."""
        count = int.from_bytes(part, "little")
        self._count = self._run.agree("short captions", count, sum) if self._run.can_agree else count
        return {}

    def metrics(self) -> Mapping[str, float]:
        """What the run's page shows; it follows from the position in the pass, so a state needs nothing."""
        return {"of_pass": self._count}


CAPTIONS = ("a red square", "red", "a square that is red all over", "square")


@contextlib.contextmanager
def made_shards() -> Iterator[str]:
    """Two shards of 60 samples, of which every other one has a caption of one word."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(file, "JPEG")
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(2):
            with tarfile.open(Path(folder, f"{shard:05d}.tar"), "w") as tar:
                for number in range(60):
                    caption = CAPTIONS[number % len(CAPTIONS)].encode()
                    for name, payload in (("jpg", file.getvalue()), ("txt", caption)):
                        member = tarfile.TarInfo(f"{shard}{number:04d}.{name}")
                        member.size = len(payload)
                        tar.addfile(member, io.BytesIO(payload))
        yield folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?", help="shards of images and captions (jpg, txt)")
    parser.add_argument("--words", type=int, default=3, help="the fewest words of a caption")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with contextlib.nullcontext(args.urls) if args.urls else made_shards() as urls:
        loader = streamload.make_loader(
            urls,
            batch_size=args.batch_size,
            num_workers=args.workers,
            output="dict",
            batches=streamload.Batches(extensions=[DropShortCaptions(args.words)]),
        )
        with loader:
            used = sum(len(batch["text"]) for batch in loader)
            left_out = loader.stats().samples_left_out["short_captions"]
            print(f"{used} samples, {left_out} left out")


if __name__ == "__main__":
    main()
