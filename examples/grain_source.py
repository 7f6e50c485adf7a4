"""Documents from tars as a source of grain: cached and ordered by streamload, packed by grain, one state.

    python examples/grain_source.py 's3://bucket/text-{000..255}.tar' --length 2048

`Streamed` is all that a pipeline of grain needs (docs/guides/other-loops.md). Without URLs the script makes
shards. It stops in the middle, restores the state, and shows that the rest is the same.
"""

import argparse
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np

import streamload
from streamload.testing.shards import write_shards


class Streamed(grain.IterDataset):
    """The examples of a loader, one by one, in its order; each iterator makes a loader of its own."""

    def __init__(self, make_loader: Callable[[], streamload.Loader]):
        super().__init__()
        self._make_loader = make_loader

    def __iter__(self) -> "Examples":
        return Examples(self._make_loader())


class Examples(grain.DatasetIterator):
    """The state is the loader's before the batch in hand, and the number of its examples used."""

    def __init__(self, loader: streamload.Loader):
        super().__init__()
        self._loader = loader
        self.set_state({"loader": loader.state_dict(), "used": 0})

    def __next__(self) -> Any:
        if self._used == len(self._batch):
            self._before = self._loader.state_dict()
            self._batch, self._used = next(self._batches), 0
        self._used += 1
        return self._batch[self._used - 1]

    def get_state(self) -> dict[str, Any]:
        return {"loader": self._before, "used": self._used}

    def set_state(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        self._before, self._used = state["loader"], state["used"]
        self._batches = iter(self._loader)
        self._batch = next(self._batches) if self._used else []

    def close(self) -> None:
        self._loader.close()
        super().close()


def document(sample: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """The bytes of a text as tokens; each is predicted from those before it."""
    ids = np.frombuffer(sample["txt"], np.uint8).astype(np.int32)
    return {"input_ids": ids[:-1], "labels": ids[1:]}


def documents(urls: str, cache_dir: str, workers: int) -> Streamed:
    """The documents of some shards; a batch of the loader is a list of them."""
    return Streamed(
        lambda: streamload.make_loader(
            urls,
            batch_size=8,
            num_workers=workers,
            cache_dir=cache_dir,
            shards=streamload.Shards(image_key=None),
            workers=streamload.Workers(map_sample=document, collate=list),
        )
    )


def packed(source: Streamed, length: int) -> grain.IterDataset:
    """Rows of `length` tokens of whole documents, with their positions; labels of padding are -100."""
    return grain.experimental.FirstFitPackIterDataset(
        source,
        length_struct={"input_ids": length, "labels": length},
        padding_struct={"input_ids": 0, "labels": -100},
        num_packing_bins=4,
    )


def digest(row: Any) -> str:
    """A short name of a row's tokens."""
    return hashlib.blake2b(row["input_ids"].tobytes(), digest_size=8).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?")
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        urls = options.urls
        if urls is None:
            write_shards(f"{folder}/shards", [100] * 4)
            urls = f"{folder}/shards"
        rows = iter(packed(documents(urls, f"{folder}/cache", workers=0), options.length))
        used = [digest(row) for row in itertools.islice(rows, 20)]
        state = json.dumps(rows.get_state())
        rest = [digest(row) for row in rows]
        rows.close()

        resumed = iter(packed(documents(urls, f"{folder}/another cache", workers=2), options.length))
        resumed.set_state(json.loads(state))
        same = [digest(row) for row in resumed] == rest
        resumed.close()
    outcome = "the same" if same else "others"
    print(f"{len(used)} rows of {options.length} tokens; {len(rest)} after the state: {outcome}")


if __name__ == "__main__":
    main()
