"""Checks of stored rows in the process that has their module: the choice of rows, and the verdicts.

The first row that another process stored is computed again before it is used, later at most one in a hundred
(rounding.py compares). Without a built module nothing is computed: there, the fingerprint covers the files
and variables that computing reads (reads.py). Verdicts are notes beside the rows, and are deleted with them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from xxhash import xxh3_64_hexdigest

from streamload.derived.proof.fingerprint import Fingerprint
from streamload.derived.proof.rounding import JudgedRows
from streamload.derived.store.row_store import RowPlace, RowStore
from streamload.derived.store.sealed import Row
from streamload.errors import FeatureNotCacheable
from streamload.torch_internals import DropoutBase, InstanceNormBase, NormBase

_REFUSED, _CHECKED = b"refused", b"checked"
"""Prefixes of the keys of verdicts: with a fingerprint, that its rows are wrong, or when they were right."""
_MOST_CHECKED = 64
"""Checks of a fingerprint's rows per process: enough to meet one wrong row in 20."""
HITS_BETWEEN = (100, 300)
_MOST_OWN = 100_000


class RowChecks:
    """Choice of the stored rows of a fingerprint that are checked: the first, then at most one in a hundred.

    Each process draws its own choice. Rows that this process stored itself aren't checked.

    Args:
        hits_between: least and most hits from a check to the next.
        is_first: whether the first hit is checked.

    Attributes:
        samples: rows of whole numbers that are judged together with later ones.
        count: checks so far.
        own: names of the rows that this process stored.
    """

    def __init__(self, hits_between: tuple[int, int] = HITS_BETWEEN, *, is_first: bool = True) -> None:
        self.samples: list[JudgedRows] = []
        self.count = 0
        self._hits_between = hits_between
        self.own: set[bytes] = set()
        self._hits, self._next_hit = 0, 1
        if not is_first:
            self.postpone()

    @property
    def is_first(self) -> bool:
        """True if no row has been checked."""
        return not self.count

    @property
    def is_done(self) -> bool:
        """True if enough rows have been checked."""
        return self.count >= _MOST_CHECKED

    def is_due(self, hits: int) -> bool:
        """True if one of these hits has to be checked."""
        self._hits += hits
        return not self.is_done and self._hits >= self._next_hit

    def passes(self, name: bytes) -> bool:
        """True if a row may be returned without a check."""
        if name in self.own or self.is_done:
            return True
        if self._hits + 1 >= self._next_hit:
            return False
        self._hits += 1
        return True

    def checked(self) -> None:
        """Count a check and draw when the next is due."""
        self.count += 1
        self.postpone()

    def postpone(self) -> None:
        """Draw when the next check is due."""
        self._next_hit = self._hits + _drawn.randint(*self._hits_between)

    def add_own(self, names: Sequence[bytes]) -> None:
        """Note rows that this process stores."""
        if len(self.own) < _MOST_OWN:
            self.own.update(names)

    def foreign(self, names: Sequence[bytes], places: Sequence[int]) -> list[int]:
        """The places of rows that another process or an earlier run stored."""
        return [place for place in places if names[place] not in self.own] if self.own else list(places)


_drawn = random.Random()
"""Draws rows to check: no seed of the user's is touched."""
os.register_at_fork(after_in_child=_drawn.seed)


def row_digests(rows: Mapping[bytes, Row]) -> dict[str, str]:
    """Digests of the bytes of rows, by their names as hexadecimal digits."""
    return {name.hex(): xxh3_64_hexdigest(row.body) for name, row in rows.items()}


def note_refused(store: RowStore, fingerprint: Fingerprint, rows: Mapping[bytes, Row], label: str) -> None:
    """Store that rows are wrong: their fingerprint is refused as long as one of them is stored."""
    store.write_note(_REFUSED + fingerprint.digest, json.dumps(row_digests(rows)).encode(), label)


def is_refused(store: RowStore, fingerprint: Fingerprint) -> bool:
    """True if rows of a fingerprint were found to be wrong and are still stored."""
    note = store.read_note(_REFUSED + fingerprint.digest)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return note is not None and (not (rows := json.loads(note)) or any(_are_stored(store, rows)))
    return True


def note_checked(
    store: RowStore, fingerprint: Fingerprint, rows: Mapping[bytes, Row], label: str, seconds: float
) -> None:
    """Store that rows were found to be right at a `time.time()`."""
    verdict = json.dumps({"at": seconds, "rows": row_digests(rows)}).encode()
    store.write_note(_CHECKED + fingerprint.digest, verdict, label)


def was_checked(store: RowStore, fingerprint: Fingerprint) -> float:
    """The `time.time()` of the last check of rows that are still stored; 0: never."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        verdict = json.loads(store.read_note(_CHECKED + fingerprint.digest) or b"{}")
        if verdict and verdict["rows"] and all(_are_stored(store, verdict["rows"])):
            return float(verdict["at"])
    return 0.0


def _are_stored(store: RowStore, rows: Mapping[str, str]) -> Iterator[bool]:
    """For each named row, True if it is stored with this digest."""
    digests = row_digests(store.read([bytes.fromhex(name) for name in rows], "checked rows"))
    return (digests.get(name) == digest for name, digest in rows.items())


def checks_of(store: RowStore, fingerprint: Fingerprint) -> RowChecks:
    """The checks of a fingerprint's rows in this process, shared by all module objects that read them."""
    key = store.place, fingerprint.digest
    return _checks.get(key) or _checks.setdefault(key, RowChecks())


_checks: dict[tuple[RowPlace, bytes], RowChecks] = {}


def checks_made() -> int:
    """Number of checks in this process that found rows to be right."""
    return sum(checks.count for checks in _checks.values())


def run_began() -> float:
    """The `time.time()` at which this process, or the parent of a worker, started."""
    parent = multiprocessing.parent_process()
    process = os.getpid() if parent is None else parent.pid
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _imported_at
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


_imported_at = time.time()


def refuse_module(module: torch.nn.Module) -> None:
    """Refuse a built module whose results depend on more than the input.

    Raises:
        FeatureNotCacheable: it is sharded, or in train mode with dropout or batch norm.
    """
    name = type(module).__name__
    for prefix, child in module.named_modules():
        where = f"{name}.{prefix}" if prefix else name
        for tensor in child._parameters.values():
            if tensor is not None and (hasattr(tensor, "device_mesh") or tensor.device.type == "meta"):
                raise FeatureNotCacheable(
                    f"the weights of {where} are sharded, or not loaded: the whole module has to be in this "
                    f"process; keep it out of FSDP (ignored_modules)"
                )
        if type(child).__name__ in ("FullyShardedDataParallel", "FlatParameter"):
            raise FeatureNotCacheable(f"{where} is sharded: keep it out of FSDP (ignored_modules)")
        if not child.training:
            continue
        is_random = isinstance(child, DropoutBase) and child.p > 0
        is_random = is_random or _share_of(child, "drop_prob") > 0 or _share_of(child, "dropout") > 0
        is_per_row = isinstance(child, InstanceNormBase) and not child.track_running_stats
        if is_random or (isinstance(child, NormBase) and not is_per_row):
            raise FeatureNotCacheable(
                f"{where} is a {type(child).__name__} in train mode: its results differ from call to call; "
                f"call .eval() on the module (a parent's .train() undoes it)"
            )


def _share_of(module: torch.nn.Module, name: str) -> float:
    value = vars(module).get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0
