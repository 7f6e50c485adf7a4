"""The number of workers for `num_workers="auto"`. Loaded only for it."""

from __future__ import annotations

import logging
import multiprocessing

from streamload.limits import own_processors

logger = logging.getLogger("streamload")

_MOST_WORKERS = 16
"""Each worker takes memory, for its batches too, and so many decode more than one device usually takes."""


def auto_workers(local_rank: int, ranks: int) -> int:
    """The workers of a rank: one for each of its processors, but one, which the training has.

    With a single processor there is still one worker: it makes batches while the device computes, and waits
    for bytes, where `next` would do both. In a daemonic process, which can't have any, it is 0.

    Args:
        local_rank: of this rank; the first one of a node logs the number.
        ranks: of the node.
    """
    processors = own_processors(ranks)
    workers = max(1, min(processors - 1, _MOST_WORKERS))
    if multiprocessing.current_process().daemon:
        workers = 0
    if local_rank == 0:
        logger.info(
            'num_workers="auto": %d, as each of the %d ranks of this node may use %d processors',
            *(workers, ranks, processors),
        )
    return workers
