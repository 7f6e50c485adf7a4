"""Shards packed once, beside reading the Parquet files that they were made of, with the bytes near.

    python -m benchmarks.converted

Question: what does it cost to convert, and what is a sample cheaper in each epoch after it?

Photographs with captions in Parquet files with row groups of 100, as the `datasets` library writes them. All
contenders decode by the same function and have 2 workers; runs take turns, with the order rotated.

- streamload, shards: of `streamload pack`, in its shuffled order.
- Parquet, buffer: row groups in random order, and a shuffle buffer of 250 rows, as streaming data sets do it.
  Rows of groups that come at different times don't meet in it.
- Parquet, any row: each row is drawn from all, as a sampler draws them; its row group is read for it.
- first_batch_seconds: from the process's first line on. cpu_us: CPU time of a sample, of all processes, in
  epoch 2.
- pack: samples a second of `streamload pack` with 1 and 2 processes, with its start.

Result: results/converted.json.
"""

import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine, process_tree, turns
from benchmarks.contenders.job import versions

SAMPLES, GROUP, FILES = 1_000, 100, 2
QUICK_SAMPLES = 400
BATCH, WORKERS, EPOCHS, BUFFER = 32, 2, 2, 250


def main() -> None:
    began = time.monotonic()
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(run(began, sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))))
        return
    given = turns.arguments(__doc__, rounds=3, names=list(CONTENDERS))
    samples = QUICK_SAMPLES if given.quick else SAMPLES
    rows: list[dict[str, Any]] = []
    with turns.photographs(samples, samples // FILES) as (directory, _):
        size_bytes = write_parquet(directory / "shards", directory / "parquet")
        for round_ in range(given.rounds):
            rows += [packed(given.python, directory, jobs, round_, samples) for jobs in (1, 2)]
            for name in turns.rotated(given.contenders, round_):
                with turns.empty_directory(directory) as cache:
                    rows.append(measured(given.python, name, directory, cache, round_))
        packed_bytes = sum(path.stat().st_size for path in (directory / "packed-2").glob("*.tar"))
    medians = turns.medians(rows)
    turns.write(
        given,
        "converted",
        {
            "settings": {"samples": samples, "rows of a group": GROUP, "batch": BATCH, "workers": WORKERS},
            "bytes": {"parquet": size_bytes, "shards": packed_bytes},
            "versions": turns.versions(rows),
            "seeds": [0],
            "rounds": rows,
            "medians": medians,
            "ratios": {
                f"cpu_us, {name}": turns.ratio(medians, "cpu_us", name, "streamload, shards")
                for name in given.contenders
            },
            "targets": [
                turns.target(
                    f"CPU time of a sample, {name}, × shards",
                    turns.ratio(medians, "cpu_us", name, "streamload, shards"),
                    at_least=least,
                )
                for name, least in (("Parquet, buffer", 0.95), ("Parquet, any row", 2.0))
            ],
        },
    )


def write_parquet(shards: Path, folder: Path) -> int:
    """Write the samples of the shards as the `datasets` library does; return the bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    from streamload.testing.shards import read_oracle

    folder.mkdir()
    paths = sorted(shards.glob("*.tar"))
    for number, path in enumerate(paths):
        rows = [
            {"image": {"bytes": members["jpg"], "path": f"{key}.jpg"}, "caption": members["txt"].decode()}
            for key, members in read_oracle(path)
        ]
        name = folder / f"train-{number:05d}-of-{len(paths):05d}.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), name, row_group_size=GROUP)
    return sum(path.stat().st_size for path in folder.iterdir())


def packed(python: Path, directory: Path, jobs: int, round_: int, samples: int) -> dict[str, Any]:
    """A row of one conversion."""
    target = directory / f"packed-{jobs}"
    subprocess.run(["rm", "-rf", str(target)], check=True)
    load, began = machine.load(), time.monotonic()
    command = [str(python), "-m", "streamload", "pack", str(directory / "parquet"), str(target)]
    command += ["--jobs", str(jobs), "--samples-per-shard", str(samples // 8)]
    subprocess.run(command, check=True, env=turns.environment(), stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    return {
        "label": f"pack, {jobs} jobs",
        "contender": "pack",
        "round": round_,
        "load_before": load,
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "versions": versions("streamload", "webdataset", "pyarrow"),
    }


def measured(python: Path, name: str, directory: Path, cache: Path, round_: int) -> dict[str, Any]:
    """A row of one contender."""
    load = machine.load()
    data = directory / ("packed-2" if name.startswith("streamload") else "parquet")
    command = [str(python), "-m", "benchmarks.converted", "--run", name, str(data), str(cache)]
    output = subprocess.check_output(
        command, env=turns.environment(), cwd=turns.ROOT, text=True, timeout=turns.LIMIT_SECONDS
    )
    row = {"label": name, "contender": name, "round": round_, "load_before": load}
    row |= json.loads(output.splitlines()[-1])
    print(f"{name}: {row['samples_per_second']:,.0f}/s, {row['cpu_us']:,.0f} us", file=sys.stderr)
    return row


def run(began: float, name: str, data: Path, cache: Path) -> dict[str, Any]:
    """Two epochs of a contender."""
    first, found = 0.0, {}
    with CONTENDERS[name](data, cache) as loader:
        for _ in range(EPOCHS):
            start, cpu, seen = time.monotonic(), process_tree.cpu_seconds(), 0
            for images, texts in loader:
                first = first or time.monotonic() - began
                assert images.shape[1:] == (3, 64, 64)
                seen += len(texts)
            seconds = time.monotonic() - start
            found = {"seconds": seconds, "samples_per_second": seen / seconds}
            found["cpu_us"] = (process_tree.cpu_seconds() - cpu) / seen * 1e6
    return {
        **found,
        "first_batch_seconds": first,
        "versions": versions("streamload", "torch", "numpy", "pyarrow"),
    }


def pixels(image: Any) -> torch.Tensor:
    """The work on an image, which each contender does."""
    image = image.convert("RGB").resize((64, 64))
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def shards_(data: Path, cache: Path) -> Any:
    """Read the shards by streamload."""
    import streamload

    return streamload.make_loader(
        str(data), None, num_workers=WORKERS, batch_size=BATCH, preprocess=pixels, cache_dir=cache
    )


class _Closed:
    """A DataLoader as a context manager."""

    def __init__(self, dataset: Any, **options: Any):
        self._loader = torch.utils.data.DataLoader(
            dataset, BATCH, num_workers=WORKERS, persistent_workers=True, drop_last=True, **options
        )

    def __enter__(self) -> Any:
        return self._loader

    def __exit__(self, *_: object) -> None:
        pass


def value(row: dict[str, Any]) -> tuple[torch.Tensor, str]:
    """Decode a row."""
    from PIL import Image

    return pixels(Image.open(io.BytesIO(row["image"]["bytes"]))), row["caption"]


class Buffered(torch.utils.data.IterableDataset[Any]):
    """Row groups in random order, and a shuffle buffer."""

    def __init__(self, data: Path, _: Path):
        self._paths, self._epoch = sorted(map(str, data.iterdir())), 0

    def __iter__(self) -> Iterator[Any]:
        from pyarrow import parquet

        worker, rng, buffer = torch.utils.data.get_worker_info(), random.Random(self._epoch), []
        self._epoch += 1
        assert worker is not None
        files = [parquet.ParquetFile(path) for path in self._paths]
        groups = [(file, group) for file in files for group in range(file.num_row_groups)]
        rng.shuffle(groups)
        for file, group in groups[worker.id :: WORKERS]:
            for row in file.read_row_group(group).to_pylist():
                buffer.append(row)
                if len(buffer) > BUFFER:
                    place = rng.randrange(len(buffer))
                    buffer[place], buffer[-1] = buffer[-1], buffer[place]
                    yield value(buffer.pop())
        rng.shuffle(buffer)
        yield from map(value, buffer)


class AnyRow(torch.utils.data.Dataset[Any]):
    """Each row by its number: its row group is read for it."""

    def __init__(self, data: Path, _: Path):
        from pyarrow import parquet

        self._paths = sorted(map(str, data.iterdir()))
        self._files: list[Any] = []
        rows = [parquet.read_metadata(path).num_rows for path in self._paths]
        self._places = [(file, row) for file, count in enumerate(rows) for row in range(count)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Any:
        from pyarrow import parquet

        self._files = self._files or [parquet.ParquetFile(path) for path in self._paths]
        file, row = self._places[number]
        table = self._files[file].read_row_group(row // GROUP)
        return value(table.slice(row % GROUP, 1).to_pylist()[0])


CONTENDERS: dict[str, Any] = {
    "streamload, shards": shards_,
    "Parquet, buffer": lambda data, cache: _Closed(Buffered(data, cache)),
    "Parquet, any row": lambda data, cache: _Closed(AnyRow(data, cache), shuffle=True),
}


if __name__ == "__main__":
    main()
