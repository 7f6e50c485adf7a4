"""Which batch a worker makes next: numbers in their order, each for the worker that asks first.

Dealt in turn, every n-th batch to each of n workers, all of them would go at the pace of the slowest one,
which shares its core with the training loop, or with another job.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.reduction import DupFd
from struct import Struct
from typing import Any

from streamload.ipc.buffers import shared_file

_DEALT = Struct("<qq")
"""The generation of the order, and how many of its numbers are dealt."""


class StepClaims:
    """A count that all workers of a rank advance; can be sent to any process.

    A record lock guards it, which ends with its process: a worker that is killed here stops no other one.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = shared_file()
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        os.pwrite(self._file, _DEALT.pack(0, 0), 0)

    def __getstate__(self) -> dict[str, Any]:
        return {"_file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._file = state["_file"].detach()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def next(self, generation: int) -> int | None:
        """Claim the next number of an order, from 0; None if a later order is being followed."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            latest, dealt = _DEALT.unpack(os.pread(self._file, _DEALT.size, 0))
            if latest > generation:
                return None
            number = dealt if latest == generation else 0
            os.pwrite(self._file, _DEALT.pack(generation, number + 1), 0)
            return int(number)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


class Numbers:
    """The numbers of the batches that one process makes, in ascending order.

    A worker that starts late follows the next order already when the rank drops the iteration before, and its
    batches with that. Numbers that it had claimed for those are its own again in the next iteration.

    Args:
        claims: those of the rank's workers; None: this process makes all batches.
        generation: of the order that it follows; its numbers end with it.
        most: how many numbers a process can claim before the rank takes any batch.
        before: those of the process's last iteration.
    """

    def __init__(
        self, claims: StepClaims | None, generation: int, most: int = 0, before: Numbers | None = None
    ):
        self._claims, self._generation, self._most = claims, generation, most
        self._again: list[int] = []
        if before is not None and before._generation == generation:
            self._again = [*before._first, *before._again]
        self._first: list[int] = []
        self._dealt = 0  # without claims
        self._coming: int | None = None  # was claimed in advance

    def __iter__(self) -> Iterator[int]:
        while (number := self.coming()) is not None:
            self._coming = None
            yield number

    def coming(self) -> int | None:
        """The next number, claimed in advance; None: there is none."""
        if self._coming is None:
            self._coming = self._next()
            if self._coming is not None and len(self._first) < self._most:
                self._first.append(self._coming)
        return self._coming

    def _next(self) -> int | None:
        if self._again:
            return self._again.pop(0)
        if self._claims is not None:
            return self._claims.next(self._generation)
        self._dealt += 1
        return self._dealt - 1
