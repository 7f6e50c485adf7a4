"""The page on which a loader and its workers tell each other what isn't in batches."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from streamload.handoff.memory import shared_empty
from streamload.metrics import WIDTH

_ORDER_BYTES = 1 << 18


class Board:
    """What a loader and its workers tell each other outside of batches; it can be sent to any process.

    Args:
        writers: how many processes count: the rank and its workers.
    """

    def __init__(self, writers: int):
        self._counters = shared_empty((writers, WIDTH), torch.int64)
        self._order = shared_empty((_ORDER_BYTES,), torch.uint8)
        self._generation = shared_empty((1,), torch.int64)
        self._wanted_since = shared_empty((1,), torch.float64)

    @property
    def counters(self) -> npt.NDArray[np.int64]:
        """int64[writers, counters]: each process writes its own row, anyone may read all."""
        counters: npt.NDArray[np.int64] = self._counters.numpy()
        return counters

    @property
    def generation(self) -> int:
        """The number of the newest order: a worker that follows an older one stops."""
        return int(self._generation[0])

    def give_order(self, order: dict[str, Any]) -> None:
        """Tell the workers what to produce from now on. Call it before they are asked for the first batch.

        Args:
            order: JSON-able; its `generation` is added by `read_order`.
        """
        text = json.dumps(order).encode()
        if len(text) > _ORDER_BYTES - 8:
            raise ValueError(f"an order of {len(text):,} bytes is too long for the board ({_ORDER_BYTES:,})")
        self._generation[0] += 1  # odd: being written
        page = self._order.numpy()
        page[8 : 8 + len(text)] = np.frombuffer(text, dtype=np.uint8)
        page[:8] = np.frombuffer(len(text).to_bytes(8, "little"), dtype=np.uint8)
        self._generation[0] += 1

    def want(self, now: bool) -> None:
        """Say whether the training loop is waiting for a batch."""
        self._wanted_since[0] = time.monotonic() if now else 0.0

    def wanted_seconds(self) -> float:
        """How long the training loop has been waiting for the batch that it wants; 0 if it isn't."""
        since = float(self._wanted_since[0])
        return time.monotonic() - since if since else 0.0

    def withdraw_order(self) -> None:
        """Make the workers stop what they are producing."""
        self._generation[0] += 2

    def read_order(self) -> dict[str, Any]:
        """What to produce, with its `generation`."""
        while True:
            generation = self.generation
            page = self._order.numpy().tobytes()
            if generation % 2 == 0 and generation == self.generation:
                text = page[8 : 8 + int.from_bytes(page[:8], "little")]
                return {**json.loads(text), "generation": generation}
            time.sleep(0.0005)
