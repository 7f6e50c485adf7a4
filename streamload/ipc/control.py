"""Shared-memory control block between a loader and its workers: commands down, counters up, steps claimed.

Workers claim the numbers of batches in their order. Dealt in turn, every n-th batch to each of n workers, all
would go at the pace of the slowest one, which shares its core with the training loop, or with another job.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import DupFd
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from streamload.ipc.shared_memory import SharedArray, shared_file
from streamload.metrics import WIDTH

_TEXT_BYTES = 64 << 20
"""Only written pages take memory."""
_HEAD_BYTES = 8
_BLOCKED_BYTES = 4096
_DEALT = Struct("<qq")
"""The generation of the order, and how many of its numbers are dealt."""

_spent_ns = 0


def spend(sending_ns: int) -> None:
    """Count time in which this process has sent or received messages."""
    global _spent_ns
    _spent_ns += sending_ns


def spent_ns() -> int:
    """Time that this process has spent in sending and receiving messages, without waiting for them."""
    return _spent_ns


class SharedJson:
    """JSON-able values that one process writes and others read atomically."""

    def __init__(self) -> None:
        self._text = SharedArray((_TEXT_BYTES,), torch.uint8)
        self._generation = SharedArray((1,), torch.int64)
        self._generation.array[0] = 0

    @property
    def generation(self) -> int:
        """The number of the current values; changes with every write."""
        return int(self._generation.array[0])

    def write(self, values: dict[str, Any]) -> None:
        """Replace the values.

        Raises:
            ValueError: they are too long.
        """
        text = json.dumps(values).encode()
        if len(text) > _TEXT_BYTES - _HEAD_BYTES:
            raise ValueError(
                f"a text of {len(text):,} bytes is too long for the control block ({_TEXT_BYTES:,})"
            )
        page, generation = self._text.array, self._generation.array
        generation[0] += 1  # odd: being written
        page[_HEAD_BYTES : _HEAD_BYTES + len(text)] = np.frombuffer(text, dtype=np.uint8)
        page[:_HEAD_BYTES] = np.frombuffer(len(text).to_bytes(_HEAD_BYTES, "little"), dtype=np.uint8)
        generation[0] += 1

    def withdraw(self) -> None:
        """Change the generation without writing, so that its followers stop."""
        self._generation.array[0] += 2

    def read(self) -> dict[str, Any]:
        """Return the values, with their `generation`.

        Raises:
            EOFError: the process that started this one was killed, perhaps while writing.
        """
        page, parent = self._text.array, multiprocessing.parent_process()
        while True:
            generation = self.generation
            length = int.from_bytes(page[:_HEAD_BYTES].tobytes(), "little")
            text = page[_HEAD_BYTES : _HEAD_BYTES + length].tobytes()
            if generation % 2 == 0 and generation == self.generation:
                return {**json.loads(text), "generation": generation}
            if parent is not None and not parent.is_alive():
                raise EOFError("the process that writes this text was killed")
            time.sleep(0.0005)


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
            if self._again:
                self._coming = self._again.pop(0)
            elif self._claims is not None:
                self._coming = self._claims.next(self._generation)
            else:
                self._coming, self._dealt = self._dealt, self._dealt + 1
            if self._coming is not None and len(self._first) < self._most:
                self._first.append(self._coming)
        return self._coming


class ControlBlock:
    """The control block of a loader and its workers; can be sent to any process.

    Args:
        writers: the number of processes with counters: the rank and its workers.
        sources: the number of sources.

    Attributes:
        order: what to produce; a worker that follows an older generation stops.
        changes: of the sources' shares, since the order was written.
        claims: of the order's batches, by the workers.
        while_waiting: called about every 50 ms where a process waits for bytes; for a rank without workers.
        tracing: the `folder` for spans while a trace runs; "" when it has ended.
    """

    def __init__(self, writers: int, sources: int = 1):
        self.order = SharedJson()
        self.changes = SharedJson()
        self.claims = StepClaims()
        self.while_waiting: Callable[[], object] | None = None
        self.tracing = SharedJson()
        self._counters = SharedArray((writers, WIDTH), torch.int64)
        self._by_source = SharedArray((writers, sources, 2), torch.int64)
        self._wanted = SharedArray((1,), torch.float64)
        self._taken = SharedArray((1,), torch.int64)
        self._ends = SharedArray((writers, 2), torch.int64)
        self._decided = SharedArray((1,), torch.int64)
        self._blocked = SharedArray((writers, _BLOCKED_BYTES), torch.uint8)

    @property
    def counters(self) -> npt.NDArray[np.int64]:
        """int64[writers, counters]: each process writes its own row; any process may read all."""
        return self._counters.array

    @property
    def by_source(self) -> npt.NDArray[np.int64]:
        """int64[writers, sources, 2]: samples taken, and nanoseconds waited for bytes."""
        return self._by_source.array

    @property
    def taken(self) -> int:
        """Number of batches of the current order that the rank has received."""
        return int(self._taken.array[0])

    def take(self, count: int) -> None:
        """Set how many batches of the current order were received; 0 before it is written."""
        self._taken.array[0] = count

    def end(self, writer: int, generation: int, number: int) -> None:
        """Set the first step that a process found missing at the end of the order of a generation."""
        self._ends.array[writer] = 0, number
        self._ends.array[writer, 0] = generation

    def is_past_end(self, generation: int, number: int) -> bool:
        """Return whether a process found that this step, or an earlier one, isn't there."""
        ends = self._ends.array
        return bool(np.any((ends[:, 0] == generation) & (ends[:, 1] <= number)))

    @property
    def decided(self) -> int:
        """The step of the run up to which decisions were made; their changes were written before."""
        return int(self._decided.array[0])

    @decided.setter
    def decided(self, step: int) -> None:
        self._decided.array[0] = step

    def want(self, is_waiting: bool) -> None:
        """Set whether the training loop is waiting for a batch."""
        self._wanted.array[0] = time.monotonic() if is_waiting else -time.monotonic()

    def wanted_seconds(self) -> float:
        """Return how long the training loop has been waiting for a batch; 0 if it isn't."""
        since = float(self._wanted.array[0])
        return time.monotonic() - since if since > 0 else 0.0

    def still_seconds(self) -> float:
        """Return how long the training loop has neither requested nor received a batch."""
        since = abs(float(self._wanted.array[0]))
        return time.monotonic() - since if since else 0.0

    def block(self, writer: int, blocked: dict[str, Any] | None) -> None:
        """Set what a process waits for; None: nothing.

        Args:
            writer: the number of this process.
            blocked: JSON-able; left out if it is too long.
        """
        text = b"" if blocked is None else json.dumps(blocked).encode()
        page = self._blocked.array[writer]
        page[:_HEAD_BYTES] = 0  # a concurrent reader finds nothing, or invalid JSON
        if len(text) <= _BLOCKED_BYTES - _HEAD_BYTES:
            page[_HEAD_BYTES : _HEAD_BYTES + len(text)] = np.frombuffer(text, dtype=np.uint8)
            page[:_HEAD_BYTES] = np.frombuffer(len(text).to_bytes(_HEAD_BYTES, "little"), dtype=np.uint8)

    def blocked(self) -> list[dict[str, Any]]:
        """Return what the processes wait for; one element for each that waits."""
        blocked = []
        for page in self._blocked.array:
            length = int.from_bytes(page[:_HEAD_BYTES].tobytes(), "little")
            with contextlib.suppress(ValueError):
                blocked.append(json.loads(page[_HEAD_BYTES : _HEAD_BYTES + length].tobytes()))
        return blocked
