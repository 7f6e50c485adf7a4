"""Keys of torch.distributed's store: a wait that opens no connection, and the values of many at once."""

from __future__ import annotations

import time
from typing import Any

_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.005, 0.5


def wait_for_keys(store: Any, keys: list[str], seconds: float) -> bool:
    """Wait until keys are in the store; False if they aren't after so many seconds.

    The store is asked again with a backoff: torch prints a warning for each wait in the store that times out.

    Raises:
        RuntimeError: the store is gone.
    """
    deadline, pause = time.monotonic() + seconds, _LEAST_PAUSE_SECONDS
    while not store.check(keys):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, _MOST_PAUSE_SECONDS)
    return True


def values_of(store: Any, keys: list[str]) -> list[bytes]:
    """The values of keys that are there, by one request if the store takes it."""
    if len(keys) > 1 and store.has_extended_api():
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]
