"""What the ranks of a run settle among each other, where torch.distributed joins them; all have to call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed

from streamload.errors import OrderDiverged
from streamload.loader.place import BAD_SAMPLES, bad_samples_of, from_state, to_state

if TYPE_CHECKING:
    from streamload.loader.loader import Loader

T = TypeVar("T")


def gathered(value: T, world_size: int) -> list[T]:
    """What each rank gives, by rank; this one's alone where nothing joins them.

    Args:
        value: picklable.
        world_size: of how many ranks the run is; a process group of another size isn't the run's.
    """
    if world_size == 1 or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [value]
    if torch.distributed.get_world_size() != world_size:
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def gather_state(loader: Loader) -> dict[str, Any]:
    """One state of all ranks, to be called by all of them behind the same batch; each gets all of it.

    A rank by itself knows the place of its own node's sequence only. On one node `state_dict()` says as much.

    Raises:
        OrderDiverged: the ranks are not behind the same batch.
    """
    states = gathered(loader.state_dict(), loader.world_size)
    positions = [state["position"] for state in states]
    if len(set(positions)) > 1:
        raise OrderDiverged(
            f"the ranks are not behind the same batch: by rank, {positions[:16]} samples are taken. Call "
            f"gather_state() on all of them after the same step"
        )
    return {**to_state(*from_state(states)), BAD_SAMPLES: bad_samples_of(states)}
