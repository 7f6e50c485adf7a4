"""What the numbers were measured on."""

import os

from streamload.bench.machine import describe

__all__ = ["describe", "load"]


def load() -> float:
    """Processes that ran or wanted to, in the mean of the last minute."""
    return os.getloadavg()[0]
