"""A listed source → shards, by several processes; continued after a kill.

What a shard has follows from the source and the options, so each is made by itself, with the same bytes each
time. Until all are whole, `.packing.json` says of which source and options the shards are, and the counts of
those that are whole; sizes.json is written last.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from streamload.errors import OptionError, StreamloadError
from streamload.pack.arrow import Rows
from streamload.pack.rows import PackSample, unlike, without_dots
from streamload.pack.sources import Listing
from streamload.pack.writer import SIZES, TAR_OPTIONS, is_readable, lock, publish, write_json

Counts = tuple[int, dict[str, int]]
"""Number of samples, and of samples left out by reason, which completes "left out: 3 …"."""


class PackShard(NamedTuple):
    """A shard to write. `seed`: of the order of its samples; None: they are in order."""

    path: Path
    pieces: Sequence[PackSample | Rows]
    seed: int | None

    @property
    def total(self) -> int:
        """Number of samples, with those that turn out to be left out."""
        return sum(len(piece.chosen) if isinstance(piece, Rows) else 1 for piece in self.pieces)


def plan(listing: Listing, target: Path, most: int, prefix: str, shuffle: bool) -> list[PackShard]:
    """Cut a source into shards of at most so many samples; groups of rows stay whole where they fit."""
    pieces: list[PackSample | Rows] = []
    for piece in listing.pieces:
        pieces += piece.parts(most, shuffle) if isinstance(piece, Rows) else [piece]
    if shuffle:
        random.Random(0).shuffle(pieces)
    contents: list[list[PackSample | Rows]] = []
    room = 0
    for piece in pieces:
        count = len(piece.chosen) if isinstance(piece, Rows) else 1
        if count > room:
            contents.append([])
            room = most
        contents[-1].append(piece)
        room -= count
    return [
        PackShard(target / f"{prefix}{number:05d}.tar", content, number if shuffle else None)
        for number, content in enumerate(contents)
    ]


def write_shard(shard: PackShard) -> Counts:
    """Write a shard; no file if all of its samples are left out.

    Raises:
        OptionError: a row is malformed.
    """
    from webdataset.writer import TarWriter

    left_out: Counter[str] = Counter()
    uses: Counter[str] = Counter()
    count = 0
    part = shard.path.with_name(f".{shard.path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file, TarWriter(file, **TAR_OPTIONS) as tar:
            for sample in _in_order(shard):
                if isinstance(sample, str):
                    left_out[sample] += 1
                    continue
                key = without_dots(sample.key)
                if not is_readable(key, sample.members):
                    left_out["whose key is none that a loader reads"] += 1
                    continue
                count += 1
                members = {
                    name: data if isinstance(data, bytes) else data.read_bytes()
                    for name, data in sample.members.items()
                }
                tar.write({"__key__": unlike(key, uses), **members})
        if count:
            publish(part, shard.path)
    finally:
        part.unlink(missing_ok=True)
    return count, dict(left_out)


def _in_order(shard: PackShard) -> Iterator[PackSample | str]:
    if shard.seed is None or not any(isinstance(piece, Rows) for piece in shard.pieces):
        for piece in shard.pieces:
            yield from piece.samples() if isinstance(piece, Rows) else [piece]
        return
    samples = [*_in_order(shard._replace(seed=None))]
    random.Random(shard.seed).shuffle(samples)
    yield from samples


def write_shards(
    listing: Listing, shards: Sequence[PackShard], target: Path, jobs: int, show: Callable[[int], None]
) -> tuple[dict[str, int], dict[str, int]]:
    """Write the shards that aren't whole yet, then sizes.json.

    Args:
        jobs: processes to use.
        show: called with numbers of samples that are done.

    Returns:
        Samples of each shard, by its name, and samples left out by reason.

    Raises:
        OptionError: there is nothing to pack, or `target` has other shards, or is being written.
    """
    target.mkdir(parents=True, exist_ok=True)
    release = lock(target, listing)
    try:
        return _write_shards(listing, shards, target, jobs, show)
    finally:
        release()


def _write_shards(
    listing: Listing, shards: Sequence[PackShard], target: Path, jobs: int, show: Callable[[int], None]
) -> tuple[dict[str, int], dict[str, int]]:
    notes, digest = target / ".packing.json", xxh3_128()
    for shard in shards:
        digest.update(repr((shard.path.name, *shard[1:])).encode("utf-8", "surrogateescape"))
    done = _begun(target, notes, digest.hexdigest())
    missing = [shard for shard in shards if shard.path.name not in done]
    show(sum(shard.total for shard in shards) - sum(shard.total for shard in missing))
    write_json(notes, [digest.hexdigest(), done])
    try:
        for shard, counts in _made(missing, min(jobs, len(missing))):
            done[shard.path.name] = counts
            write_json(notes, [digest.hexdigest(), done])
            show(shard.total)
        left_out = sum((Counter(why) for _, why in done.values()), Counter(listing.left_out))
        sizes = {shard.path.name: count for shard in shards if (count := done[shard.path.name][0])}
        if not sizes:
            why = ", ".join(f"{count:,} {why}" for why, count in left_out.items()) or "there is no image"
            raise OptionError(f"nothing to pack: {why}")
    except BaseException:
        if not any(target.glob("*.tar")):
            notes.unlink()
        raise
    if listing.classes is not None:
        write_json(target / "classes.json", listing.classes)
    write_json(target / SIZES, sizes)
    notes.unlink()
    return sizes, dict(left_out)


def _begun(target: Path, notes: Path, digest: str) -> dict[str, Counts]:
    """Counts of the shards that the same command has made before it was killed.

    Raises:
        OptionError: the folder has shards of something else.
    """
    notes_before: tuple[str, dict[str, Counts]] | None = (
        json.loads(notes.read_bytes()) if notes.exists() else None
    )
    present = [path.name for path in (*sorted(target.glob("*.tar")), target / SIZES) if path.exists()]
    if present and notes_before is None:
        raise OptionError(f"{target} has {present[0]} already: give an empty folder")
    if notes_before is not None and notes_before[0] != digest:
        raise OptionError(
            f"{target} has shards of another call that was stopped, or the source has changed since: repeat "
            f"that call, or give an empty folder"
        )
    for part in target.glob(".*.part"):
        part.unlink(missing_ok=True)
    counts = {} if notes_before is None else notes_before[1]
    return {name: count for name, count in counts.items() if not count[0] or name in present}


def _made(shards: Sequence[PackShard], jobs: int) -> Iterator[tuple[PackShard, Counts]]:
    """Write shards; yield each that is whole."""
    if jobs <= 1:
        yield from ((shard, write_shard(shard)) for shard in shards)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["webdataset.writer", __name__])
    children = {*multiprocessing.active_children()}
    pool = ProcessPoolExecutor(jobs, context, initializer=_end_with_parent)
    try:
        by_future = {pool.submit(write_shard, shard): shard for shard in shards}
        for future in as_completed(by_future):
            yield by_future[future], future.result()
    except BrokenProcessPool as exc:
        raise StreamloadError(
            "a process of --jobs was killed, perhaps for its memory: continue with fewer (the same command)"
        ) from exc
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in {*multiprocessing.active_children()} - children:
            child.terminate()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
