"""Values that are computed once: shards with prepared images, in place of a shard; rows of modules."""

import functools
import logging

logger = logging.getLogger("streamload")


@functools.cache
def log_once(message: str) -> None:
    """Log a warning, unless it was logged before."""
    logger.warning("%s", message)
