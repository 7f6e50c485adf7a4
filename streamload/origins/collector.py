"""Python's garbage collector, paused while much is made that stays: it would look through all of it again."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

_is_paused = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect nothing during the block; where it is off already, leave it so."""
    global _is_paused
    if not gc.isenabled():
        yield
        return
    _is_paused = True
    gc.disable()
    try:
        yield
    finally:
        _resume()


def _resume() -> None:
    """End a pause; also in a process that is forked meanwhile, which hasn't the thread that would end it."""
    global _is_paused
    if _is_paused:
        _is_paused = False
        gc.enable()


os.register_at_fork(after_in_child=_resume)
