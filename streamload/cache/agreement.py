"""One answer for all processes of a node that have the same to decide: where a tier is to be.

What fits into memory now may not fit in a second, when the next rank asks: so whoever comes first writes the
answer into a file and holds a shared lock on it, as do all who go by it; the last of them takes it away, and
the next run decides anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash

from streamload.cache.locks import FileLock

_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02


class Answer(NamedTuple):
    """Where the tier is to be, and why, in words."""

    where: Literal["disk", "memory"]
    why: str


class Agreement:
    """One answer of all who ask the same, as long as one of them lives.

    Args:
        beside: the answer is kept in a file beside this.
        names: what is asked, in a fixed order.
    """

    def __init__(self, beside: Path, names: Iterable[str]):
        self._beside = beside
        name = f"{beside.name}.{xxhash.xxh3_64_hexdigest(os.fsencode(chr(10).join(names)))}"
        self._path = beside.with_name(name)
        self._lock: FileLock | None = None

    def join(self, decide: Callable[[], Answer]) -> Answer:
        """The answer that stands; if none does, the one that is decided now.

        Where none can be written down, or who decides doesn't go on, it is this process's own.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline and not self._is_anothers():
            try:
                self._decide_if_first(decide)
                self._lock = FileLock.acquire(self._path, shared=True)
                if self._lock is not None and self._lock.is_of(self._path):
                    return Answer(**json.loads(self._path.read_text()))
            except (OSError, ValueError, TypeError):
                break
            self._let_go()
            time.sleep(_POLL_SECONDS)
        self._let_go()
        return decide()

    def close(self) -> None:
        """Stand by the answer no more, and take it away if nobody else does; once is enough."""
        if self._lock is not None:
            self._let_go()
            _remove_if_unheld(self._path)

    def _decide_if_first(self, decide: Callable[[], Answer]) -> None:
        for other in self._beside.parent.glob(f"{self._beside.name}.{'[0-9a-f]' * 16}"):
            if other != self._path:
                _remove_if_unheld(other)  # of a run that was killed
        first = FileLock.acquire(self._path, create=True)
        if first is not None:
            with contextlib.closing(first):
                if first.is_of(self._path):
                    self._path.write_text(json.dumps(decide()._asdict()))

    def _is_anothers(self) -> bool:
        """Whether another user has put something where the answer would be: anybody may write there."""
        with contextlib.suppress(OSError):
            return self._path.lstat().st_uid != os.geteuid()
        return False

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _remove_if_unheld(path: Path) -> None:
    with contextlib.suppress(OSError):
        last = FileLock.acquire(path)
        if last is not None:
            with contextlib.closing(last):
                if last.is_of(path):
                    path.unlink()
