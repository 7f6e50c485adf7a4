"""How fast a shard gets from the network's buffers into the tier.

Question: how many bytes a second of CPU time does one core fill, with all that a fill does (parse the tar,
look into the images' headers, checksum each sample, write data, names and index, publish), if the origin
costs nothing?

Command: python -m benchmarks.fill

The shipped `streamload.cache.fill.fill`, one thread, from an origin that hands out memory: shards of
photographs in chunks of at most `OriginOptions.chunk_bytes`, as a quick connection gives them, and of 64 KiB,
as a slower one does. Into a tier on tmpfs and into one on the disk, emptied after each fill. CPU is user and
system time of the process; what the kernel writes back later isn't in it, so the wall clock of the disk
stands beside it.

The steps are measured alone, on the same bytes in the same chunks: the scanner without checksums (parse),
with them (the difference is the checksum), writing the chunks to a file (write), appending the entries
(index). What they leave of the whole is claiming, reserving, publishing, and the loop.

Result: results/fill.json; docs/results/fetching.md has it as a table.

Explanation: payloads are never copied in Python: the parser hands on views, xxh3 reads them, and write()
gives them to the kernel, whose copy into pages is the largest part. What costs by the sample is about 40 µs.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import machine, turns
from benchmarks.contenders.job import versions
from streamload.cache.fill import Filled, fill
from streamload.cache.shard import shard_of
from streamload.cache.tier import Tier
from streamload.options import file_system
from streamload.origins.origin import OriginOptions, Version
from streamload.shards.samples import Entry, ShardScanner
from tests.support.indexes import WrittenIndex

SHARDS, SAMPLES_PER_SHARD = 4, 384
MEMORY = Path("/dev/shm")
CHUNKS = {"": OriginOptions().chunk_bytes, ", chunks of 64 KiB": 64 << 10}
TARGET = 800e6

Row = dict[str, Any]
Work = Callable[[Path], object]


def main() -> None:
    given = turns.arguments(__doc__, rounds=9, names=["streamload"])
    shards, per_shard = (2, 64) if given.quick else (SHARDS, SAMPLES_PER_SHARD)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        directory, total_bytes = stack.enter_context(turns.photographs(shards * per_shard, per_shard))
        memory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="streamload-bench-", dir=MEMORY))
        )
        tars = [path.read_bytes() for path in sorted((directory / "shards").glob("*.tar"))]
        places = {"tmpfs": memory, "disk": directory}
        all_works = works(tars, places)
        for round_ in range(given.rounds):
            for label, place, work in turns.rotated(all_works, round_):
                row = {"label": label, "contender": "streamload", "round": round_}
                row["load_before"] = machine.load()
                rows.append(row | measured(work, place, total_bytes))
    medians = turns.medians(rows)
    turns.write(
        given,
        "fill",
        {
            "settings": {
                "samples": shards * per_shard,
                "shards": shards,
                "bytes": total_bytes,
                "chunk_bytes": CHUNKS[""],
                "file_systems": {name: file_system(place).kind for name, place in places.items()},
            },
            "versions": {"streamload": versions("streamload", "xxhash", "numpy")},
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target(
                    f"fill into {place}, bytes/s of CPU time",
                    medians[f"fill into {place}"]["bytes_per_cpu_second"],
                    at_least=TARGET,
                )
                for place in places
            ],
        },
    )


def works(tars: list[bytes], places: dict[str, Path]) -> list[tuple[str, Path, Work]]:
    """All that is measured: its label, where it works, and what it does in an empty directory there."""
    found: list[tuple[str, Path, Work]] = []
    for words, size in CHUNKS.items():
        for name, place in places.items():
            found.append((f"fill into {name}{words}", place, lambda d, s=size: fill_all(tars, d, s)))
    size, memory = CHUNKS[""], places["tmpfs"]
    entries = scanned(tars, size)
    found.append(("parse alone", memory, lambda _: scanned(tars, size, checksums=False)))
    found.append(("parse and checksum alone", memory, lambda _: scanned(tars, size)))
    found.append(("index alone, on tmpfs", memory, lambda d: indexed(entries, d)))
    for name, place in places.items():
        found.append((f"write alone, {name}", place, lambda d: written(tars, d, size)))
    return found


def measured(work: Work, place: Path, total_bytes: int) -> Row:
    """The time that some work takes, and what that makes of the bytes."""
    with turns.empty_directory(place) as directory:  # making and emptying it is no part of the work
        began, cpu_before = time.monotonic(), time.process_time()
        work(directory)
        cpu_seconds, seconds = time.process_time() - cpu_before, time.monotonic() - began
    return {
        "cpu_seconds": cpu_seconds,
        "seconds": seconds,
        "bytes_per_cpu_second": total_bytes / cpu_seconds,
        "bytes_per_second": total_bytes / seconds,
        "cpu_ns_per_byte": cpu_seconds / total_bytes * 1e9,
    }


class MemoryOrigin:
    """Gives out a shard that lies in memory; opening, and each chunk, cost next to nothing."""

    def __init__(self, url: str, tar: bytes, chunk_bytes: int) -> None:
        self.url = url
        self.version = Version(len(tar), '"as-it-is"')
        self._tar, self._chunk_bytes = memoryview(tar), chunk_bytes
        self._start = 0

    def open(self, start: int = 0, expected: Version | None = None) -> "MemoryOrigin":
        self._start = start
        return self

    def chunks(self) -> Iterator[memoryview]:
        for start in range(self._start, len(self._tar), self._chunk_bytes):
            yield self._tar[start : start + self._chunk_bytes]

    def close(self) -> None:
        pass


def fill_all(tars: list[bytes], directory: Path, chunk_bytes: int) -> None:
    """Fill all shards into a new tier."""
    tier = Tier(directory / "tier", 2 * sum(map(len, tars)) + (1 << 20))
    for number, tar in enumerate(tars):
        shard = shard_of(f"http://origin.invalid/{number:05d}.tar", None)
        part = tier.claim(shard.digest)
        assert part is not None
        origin = MemoryOrigin(shard.url, tar, chunk_bytes)
        outcome = fill(part, shard, lambda o=origin: o, next_use=lambda: 0.0, stop=threading.Event())
        assert outcome.result is Filled.PUBLISHED


def scanned(tars: list[bytes], chunk_bytes: int, *, checksums: bool = True) -> list[list[list[Entry]]]:
    """The entries of each chunk of each shard."""
    found = []
    for tar in tars:
        scanner = ShardScanner(checksums=checksums)
        view = memoryview(tar)
        starts = range(0, len(view), chunk_bytes)
        found.append([scanner.feed(view[start : start + chunk_bytes]) for start in starts])
        scanner.finish()
    return found


def indexed(entries: list[list[list[Entry]]], directory: Path) -> None:
    """Append entries as they came."""
    for number, of_shard in enumerate(entries):
        (directory / str(number)).mkdir()
        with WrittenIndex(directory / str(number), {}) as index:
            for some in of_shard:
                index.append(some)
            index.finish()


def written(tars: list[bytes], directory: Path, chunk_bytes: int) -> None:
    """Write chunks to files."""
    for number, tar in enumerate(tars):
        view = memoryview(tar)
        with open(directory / str(number), "wb", buffering=0) as file:
            for start in range(0, len(view), chunk_bytes):
                file.write(view[start : start + chunk_bytes])


if __name__ == "__main__":
    main()
