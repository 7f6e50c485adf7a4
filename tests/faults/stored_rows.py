"""Row 43: processes that store rows of features are killed, beside others that store and read them."""

import functools
import random
import signal
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from streamload.cache import memory
from streamload.cache.inventory import foreign
from streamload.cache.locks import is_locked
from streamload.cache.tier import Tier
from streamload.columns.columns import Address, is_address
from streamload.derived.store.catalog import open_catalog, verify
from streamload.derived.store.database import DATABASE, FILES
from streamload.derived.store.row_store import CacheLevel, RowPlace, RowStore
from streamload.derived.store.sealed import KEY_BYTES, seal
from tests.faults.oracle import Attempt, DiskWatch
from tests.faults.rows import Row
from tests.support.kills import Child, Moment, Stage

_WRITERS = 4
_KILLS = 34
_ROWS = 400
_BATCH = 16
_ROW_BYTES = 8000
_LAYOUT = b'["t","uint8",[8000]]'
_LITTLE_BYTES = 2 << 20
_ALLOWED = 1.05
"""Of so small a limit: what a killed transaction leaves in the log is emptied by the next one."""
_LABEL = "it"
_LONGEST_SECONDS = {"": 0.06, "opening": 0.004, "reading": 0.002, "storing": 0.004}
"""How long after the start of what it does a writer is killed at the latest."""


def writers(attempt: Attempt) -> None:
    """Four processes store and read the same rows; whenever one is killed another takes its place.

    Copies in memory are in a directory of the attempt's own, so that what is left there is known to be its.
    """
    with (
        tempfile.TemporaryDirectory(dir=memory.PLACE, prefix="streamload-fault-") as shm,
        mock.patch.object(memory, "PLACE", Path(shm)),
    ):
        _kill_writers(attempt)
        copies = [str(path) for path in Path(shm).glob("*/*")]
        attempt.check("T", not copies, f"left in memory: {copies}")


def _kill_writers(attempt: Attempt) -> None:
    is_little, is_copied = attempt.variant == "little room", attempt.variant == "memory"
    place = RowPlace(
        str(attempt.place),
        CacheLevel.MEMORY if is_copied else CacheLevel.DISK,
        memory_bytes=_LITTLE_BYTES if is_copied else None,
        cache_size=_LITTLE_BYTES if is_little else "1GB",
    )
    seen: set[int] = set()
    reader = RowStore(replace(place, level=CacheLevel.DISK))
    with DiskWatch(place.root.parent) as watch, ExitStack() as stack:
        living = [_start(attempt, place, stack) for _ in range(_WRITERS)]
        for _ in range(_KILLS):
            victim = living.pop(0)
            victim.join(60)
            attempt.check(
                "L", victim.status == -signal.SIGKILL, f"a writer ended by itself: {victim.error[-600:]}"
            )
            attempt.happened[f"killed while {victim.killed_in or 'starting'}"] += 1
            _look(attempt, reader, seen, is_little)
            living.append(_start(attempt, place, stack))
        for writer in living:
            writer.kill()
        _finish(attempt, place)
    if is_little:
        watch.check(attempt, int(_ALLOWED * _LITTLE_BYTES))
    _look(attempt, reader, seen, is_little)
    reader.close()
    _check_what_is_left(attempt, place)


def _start(attempt: Attempt, place: RowPlace, stack: ExitStack) -> Child:
    doing = attempt.rng.choice(list(_LONGEST_SECONDS))
    moment = Moment(doing, attempt.rng.uniform(0, _LONGEST_SECONDS[doing]))
    seed = attempt.rng.random()
    return stack.enter_context(Child(lambda stage: _store_for_ever(stage, place, seed), kill_at=moment))


def _store_for_ever(stage: Stage, place: RowPlace, seed: float) -> None:
    rng = random.Random(seed)
    stage.enter("opening")
    store = RowStore(place)
    while True:
        _read_and_store(stage, store, rng.sample(range(_ROWS), _BATCH))


def _read_and_store(stage: Stage, store: RowStore, numbers: Sequence[int]) -> None:
    stage.enter("reading")
    _, wrong = _read(store, numbers)
    if wrong:
        raise AssertionError(f"rows with other bytes were read: {wrong}")
    stage.enter("storing")
    of_calls, of_samples = (
        [at for at in numbers if is_address(_key(at)) == is_of_sample] for is_of_sample in (False, True)
    )
    store.write([(_key(at), seal(_key(at), _LAYOUT, _body(at), at)) for at in of_calls], _LABEL)
    store.write_columns([(_key(at), _LAYOUT, _body(at)) for at in of_samples], _LABEL)


def _read(store: RowStore, numbers: Sequence[int]) -> tuple[set[int], list[int]]:
    """The rows that are there, and those of them with other bytes."""
    found = store.read([_key(at) for at in numbers], _LABEL)
    there = {at for at in numbers if _key(at) in found}
    return there, [at for at in there if bytes(found[_key(at)].body) != _body(at)]


def _finish(attempt: Attempt, place: RowPlace) -> None:
    """Who comes after the kills stores and reads as if there had been none."""

    def work(stage: Stage) -> Any:
        store = RowStore(place)
        for start in range(0, _ROWS, _BATCH):
            _read_and_store(stage, store, range(start, start + _BATCH))
        found = len(_read(store, range(_ROWS))[0])
        counts = store.counts
        store.close()
        return [found, counts.refused, counts.corrupt]

    with Child(work) as child:
        found, refused, corrupt = child.finish(60)
    least = _ROWS if attempt.variant != "little room" else _BATCH
    attempt.check("N", found >= least, f"{found} rows are there after all were stored")
    attempt.check("N", not refused, f"{refused} rows were refused")
    attempt.check("B", not corrupt, f"{corrupt} rows or databases were corrupt")


def _look(attempt: Attempt, reader: RowStore, seen: set[int], is_little: bool) -> None:
    """B, N: every row that can be read is exact; and it stays, where there is room for all."""
    there, wrong = _read(reader, range(_ROWS))
    attempt.check("B", not wrong, f"other bytes in rows {wrong[:5]}")
    attempt.check("B", not reader.counts.corrupt, f"{reader.counts.corrupt} rows or databases were corrupt")
    attempt.check("N", is_little or seen <= there, f"rows that were read before are gone: {seen - there}")
    seen |= there


def _check_what_is_left(attempt: Attempt, place: RowPlace) -> None:
    """T, C: only the table, a file for its lock, which is free, and columns; all verifies."""
    root = place.root
    strange = [str(entry.path) for entry in foreign(Tier.open(root.parent))]
    attempt.check("T", not strange, f"left: {strange}")
    left = {str(path.relative_to(root)) for path in root.rglob("*")}
    attempt.check("T", DATABASE in left <= {"lock", "reserved", *FILES}, f"left: {sorted(left)}")
    attempt.check("T", not is_locked(root / "lock"), "still locked")
    with open_catalog(root) as catalog:
        damages = [damage.cause for found in verify(catalog) for damage in found.damages]
    attempt.check("C", not damages, f"damaged: {damages[:3]}")


def _key(number: int) -> bytes:
    """Of a call, or of a sample of one of three shards."""
    if number % 2:
        return number.to_bytes(KEY_BYTES, "big")
    return Address(bytes(16), bytes([number % 3] * 16), number, number + 1).pack()


@functools.cache
def _body(number: int) -> bytes:
    return random.Random(number).randbytes(_ROW_BYTES)


ROWS = [
    Row(
        43,
        "row writers killed",
        "SIGKILL of a process that stores rows of features, at a random time; 4 on one store "
        "(K: within 5 % of 2 MiB)",
        "NBTKCL",
        "A kill takes no row that was stored, leaves none half-stored, and stops no other writer",
        writers,
        count=30,
        variants=("room for all", "little room", "memory"),
        short=6,
    )
]
