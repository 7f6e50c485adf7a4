"""The memory of a batch's images (step J), all of one size, and the place of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from streamload.batches.collate import Allocate
from streamload.transforms.plan import ImagePlan
from streamload.transforms.resize import Place


class Places:
    """Where a batch's images lie in its memory; computed once for each pooled buffer."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Sequence[Place]]] = {}

    def of(
        self, memory: torch.Tensor, split: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    ) -> Sequence[Place]:
        """The places of a tensor's images; `split` (always the same) divides it into images."""
        number = id(memory)  # forgotten when the tensor dies
        if number not in self._known:
            forget = weakref.ref(memory, lambda _: self._known.pop(number, None))
            # Views keep their base alive: the detached tensor, not the one that is to be forgotten.
            self._known[number] = forget, [Place.of(part) for part in split(memory.detach())]
        return self._known[number][1]


def _channels_first(levels: torch.Tensor) -> Sequence[torch.Tensor]:
    """[N, H, W, 3] → N views [1, 3, H, W]."""
    return torch.split(levels.permute(0, 3, 1, 2), 1)


class ImageMemory:
    """The images of a batch, all of one size.

    Args:
        plan: that makes them.
        as_bytes: whether they are left as uint8.
        known: the places in memory that was used before.
        size: its capacity, in images.
        allocate: makes its tensor.

    Attributes:
        batch: uint8 or float32[N, 3, H, W].
        places: of the images.
    """

    def __init__(self, plan: ImagePlan, as_bytes: bool, known: Places, size: int, allocate: Allocate):
        if as_bytes or plan.statistics is None:
            memory = allocate((size, *plan.size, 3), torch.uint8)
            self.batch = memory.permute(0, 3, 1, 2)
            self.places = known.of(memory, _channels_first)
        else:
            self.batch = allocate((size, 3, *plan.size), torch.float32)
            self.places = known.of(self.batch, torch.unbind)

    def values(self, count: int) -> dict[str, Any]:
        """The values of the first `count` images."""
        return {"image": self.batch[:count]}
