"""Processes that a test stops or kills in the middle of their work."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import multiprocessing.synchronize
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def waiting(
    work: Callable[..., None], *given: Any, seconds: float = 60.0
) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that has come to where it waits; killed at the end, whatever came of the test.

    Args:
        work: called in the process with what is given and an event, which it sets when it is there.
        seconds: how long that may take.
    """
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=work, args=(*given, ready))
    process.start()
    try:
        assert ready.wait(seconds), "it didn't come to where it waits"
        yield process
    finally:
        process.kill()
        process.join()
