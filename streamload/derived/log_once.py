"""A warning that would come with every batch is logged once in a process."""

import functools
import logging

logger = logging.getLogger("streamload")


@functools.cache
def log_once(message: str) -> None:
    """Log a warning, unless it was logged before."""
    logger.warning("%s", message)
