"""Count a training's captions by script: an extension of streamload in one file.

    python examples/count_scripts.py 's3://bucket/train-{000..255}.tar'

Each batch has the script of each caption as `script` int64[N], an index into SCRIPTS. The counts of all ranks
are a metric of the run, and resume with its state. Without URLs it makes shards of captions in five scripts.
"""

import argparse
import collections
import contextlib
import io
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import streamload
from streamload.errors import OptionError, StateMismatch
from streamload.extension import (
    BatchInfo,
    BatchRows,
    Extension,
    Fact,
    LoaderOptions,
    RankPart,
    Run,
    WorkerPart,
    WorkerProcess,
)

SCRIPTS = ("other", "latin", "greek", "cyrillic", "hebrew", "arabic", "devanagari", "cjk", "hangul")


def script_of(sample: Mapping[str, bytes]) -> int:
    """The script of most letters of a caption: a fact of the sample, computed once as its shard arrives."""
    letters = filter(str.isalpha, sample["txt"].decode())
    names = collections.Counter(unicodedata.name(letter, "").partition(" ")[0].lower() for letter in letters)
    name = max(names, key=names.__getitem__, default="other")
    return SCRIPTS.index(name) if name in SCRIPTS else 0


@dataclass(frozen=True)
class CountScripts(Extension):
    """Counts captions by script."""

    name = "count_scripts"

    @property
    def own_facts(self) -> Mapping[str, Fact]:
        """The script of each caption, with a version that changes with its code."""
        return {"script": (script_of, "1")}

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse an evaluation, whose ranks may have different numbers of batches."""
        if not options.train:
            raise OptionError("CountScripts() is for training")

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """In each worker process: reads the scripts of a batch's rows."""
        return ScriptsInWorker()

    def in_rank(self, run: Run) -> RankPart:
        """In the training process: counts them."""
        return ScriptsInRank(run)


class ScriptsInWorker(WorkerPart):
    """Sends the script of each row of a batch to the rank: a byte each."""

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        """The scripts of the rows, in their order in the batch."""
        scripts = np.zeros(len(rows), np.uint8)
        for shard_rows in rows.by_shard():
            scripts[shard_rows.places] = [entry.facts["script"] for entry in shard_rows.entries()]
        return scripts.tobytes()


class ScriptsInRank(RankPart):
    """Counts the scripts of the batches that all ranks have yielded."""

    def __init__(self, run: Run):
        self._run = run
        self._counts = [0] * len(SCRIPTS)
        self._scripts = torch.empty(0, dtype=torch.int64)

    def yielded(self, part: bytes, values: dict[str, Any]) -> dict[str, Any]:
        """Take what the worker's part sent with the batch that the training gets next."""
        scripts = np.frombuffer(part, np.uint8).astype(np.int64)
        self._scripts = torch.from_numpy(scripts)
        counts = np.bincount(scripts, minlength=len(SCRIPTS)).tolist()
        if not self._run.can_agree:
            raise OptionError(
                "CountScripts() adds the counts of all ranks: initialise torch.distributed first"
            )
        self._counts = _sum([self._counts, self._run.agree("the counts of scripts", counts, _sum)])
        return {}

    def values(self, info: BatchInfo) -> dict[str, Any]:
        """What the batch gets."""
        return {"script": self._scripts}

    def metrics(self) -> Mapping[str, float]:
        """What the run's page shows."""
        return {name: count for name, count in zip(SCRIPTS, self._counts, strict=True) if count}

    def state(self, position: int) -> dict[str, Any]:
        """What the loader's state records."""
        return {"count_scripts": dict(zip(SCRIPTS, self._counts, strict=True))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue after a state."""
        saved = state.get("count_scripts", {})
        try:
            self._counts = [int(saved.get(name, 0)) for name in SCRIPTS]
        except (AttributeError, TypeError, ValueError):
            raise StateMismatch(f"not counts of scripts: {saved!r:.100}") from None


def _sum(counts_of_ranks: list[list[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*counts_of_ranks, strict=True)]


CAPTIONS = ("a red square", "красный квадрат", "ένα κόκκινο τετράγωνο", "مربع أحمر", "빨간 사각형")


@contextlib.contextmanager
def made_shards() -> Iterator[str]:
    """Two shards of 60 samples, whose captions are in five scripts in turn."""
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
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with contextlib.nullcontext(args.urls) if args.urls else made_shards() as urls:
        loader = streamload.make_loader(
            urls,
            batch_size=args.batch_size,
            num_workers=args.workers,
            output="dict",
            batches=streamload.Batches(extensions=[CountScripts()]),
        )
        with loader:
            for batch in loader:
                assert len(batch["script"]) == len(batch["text"])
            for name, count in loader.state_dict()["count_scripts"].items():
                if count:
                    print(f"{name}: {count} captions")


if __name__ == "__main__":
    main()
