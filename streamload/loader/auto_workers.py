"""The number of workers for `num_workers="auto"`. Loaded only for it."""

from __future__ import annotations

import logging
import multiprocessing

from streamload.limits import own_processors
from streamload.loader.groups import Order
from streamload.topology import read_topology

logger = logging.getLogger("streamload")

_MOST_WORKERS = 16
"""Each worker takes memory, for its batches too, and so many decode more than one device usually takes."""


def auto_workers(order: Order) -> int:
    """The workers of a rank: one for each of its processors, but one, which the training has.

    With a single processor there is still one worker: it makes batches while the device computes, and waits
    for bytes, where `next` would do both. In a daemonic process, which can't have any, it is 0.

    Args:
        order: has the rank, if it was given; the first rank of a node logs the number.
    """
    here = read_topology(order.rank, order.world_size)
    processors = own_processors(here.local_world_size)
    workers = max(1, min(processors - 1, _MOST_WORKERS))
    if multiprocessing.current_process().daemon:
        workers = 0
    if here.local_rank == 0:
        logger.info(
            'num_workers="auto": %d, as each of the %d ranks of this node may use %d processors',
            *(workers, here.local_world_size, processors),
        )
    return workers
