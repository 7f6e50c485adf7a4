"""Shared-memory control block between a loader and its workers: commands down, counters up."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from streamload.ipc.buffers import SharedArray
from streamload.ipc.claims import StepClaims
from streamload.metrics import WIDTH

_TEXT_BYTES = 64 << 20
"""Only written pages take memory."""
_HEAD_BYTES = 8
_BLOCKED_BYTES = 4096


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
