"""All rows, and how their attempts are made and counted."""

import gc
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tests.faults import (
    daemons,
    disk,
    guarded,
    hosts,
    images,
    killed,
    nodes,
    ordering,
    origin,
    peer,
    pipe,
    processes,
    ranks,
    resumed,
    small,
    stored_rows,
    stores,
    tampered,
    tier,
    together,
    tokens,
    versions,
)
from tests.faults.data import Data
from tests.faults.oracle import Attempt
from tests.faults.rows import Function, Row

_DATA_SEEDS = 3
"""So many different sets of shards are made for each kind; attempts take them in turn."""
_EXAMPLES = 5

ROWS: list[Row] = sorted(
    (
        row
        for module in (
            killed,
            disk,
            tampered,
            origin,
            stores,
            pipe,
            together,
            processes,
            ranks,
            resumed,
            daemons,
            hosts,
            guarded,
            images,
            nodes,
            tier,
            versions,
            ordering,
            small,
            stored_rows,
            tokens,
        )
        for row in module.ROWS
    ),
    key=lambda row: row.number,
)


class Sources:
    """Shards for attempts: sets that are the same are made once."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="streamload-faults-")
        self._made: dict[tuple[Any, ...], Data] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()
        self._place.cleanup()
        self._made.clear()

    def borrow(self, seed: int, *, spawn: bool = False, counts: Sequence[int] = (), **server: Any) -> Data:
        key = (seed % _DATA_SEEDS, spawn, tuple(counts), *sorted(server.items()))
        if key not in self._made:
            place = Path(self._place.name) / f"data-{len(self._made)}"
            made = Data(place, key[0], spawn=spawn, counts=list(counts), **server)
            self._made[key] = self._stack.enter_context(closing(made))
        return self._made[key]


def run_row(
    row: Row, sources: Sources, count: int, *, short: bool = False, with_peer: bool = True
) -> dict[str, Any]:
    """Make `count` attempts at a row and say how they went, as plain values."""
    result: dict[str, Any] = {
        "row": row.number,
        "name": row.name,
        "fault": row.fault,
        "holds": row.holds,
        "proves": row.proves,
    }
    if reason := row.needs():
        return result | {"left_out": reason}
    result |= _attempts(row.attempt, row, sources, count, short)
    if row.name in peer.BY_NAME and with_peer:
        function, most = peer.BY_NAME[row.name]
        result["webdataset"] = _attempts(function, row, sources, min(count, most), short)
    return result


def _attempts(function: Function, row: Row, sources: Sources, count: int, short: bool) -> dict[str, Any]:
    began = time.monotonic()
    happened: Counter[str] = Counter()
    killed_in: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    examples: list[str] = []
    passes = 0
    for number in range(count):
        variant = row.variants[number % len(row.variants)]
        attempt = _one(function, sources, number, variant, short)
        happened += attempt.happened
        killed_in += attempt.killed_in
        wrong = attempt.wrong or ([] if attempt.happened.total() else [("fault", "it did not happen")])
        passes += not wrong
        failed.update({letter for letter, _ in wrong})
        for letter, what in wrong[: max(0, _EXAMPLES - len(examples))]:
            examples.append(f"{letter}, attempt {number} ({variant}): {what}"[:1000])
    return {
        "attempts": count,
        "passes": passes,
        "happened": dict(sorted(happened.items())),
        **({"killed_in": dict(sorted(killed_in.items()))} if killed_in else {}),
        "failed": dict(sorted(failed.items())),
        "examples": examples,
        "seconds": round(time.monotonic() - began, 1),
    }


def _one(function: Function, sources: Sources, number: int, variant: str, short: bool) -> Attempt:
    """One attempt in a directory of its own. L: afterwards this process holds what it held before."""
    place = Path(tempfile.mkdtemp(prefix="streamload-fault-")).resolve()
    attempt = Attempt(number, variant, place, short, sources.borrow)
    try:
        function(attempt)
    except Exception:
        attempt.check("L", False, f"the attempt itself failed: {traceback.format_exc()[-900:]}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    gc.collect()
    left = [f"descriptor → {target}" for target in _open_files() if target.startswith(str(place))]
    left += [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("streamload-fill")]
    attempt.check("L", not left, f"left: {left[:5]}")
    return attempt


def _open_files() -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(descriptor))
        except OSError:
            continue  # the listing's own
    return found
