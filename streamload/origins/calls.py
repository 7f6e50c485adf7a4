"""Calls of fsspec's file systems, which may never end: in their event loop, or in threads without one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from streamload.errors import OriginTimeout

_WAKE_SECONDS = 0.1

Future = concurrent.futures.Future[Any]
Pieces = queue.SimpleQueue["bytes | None"]
"""Bytes on their way from an event loop to a thread; None: the end, of whatever kind."""


def begin(files: Any, what: str, *given: Any, **more: Any) -> Future:
    """Call a file system's method of that name; `result` waits for what it returns or raises."""
    if files.async_impl:
        return asyncio.run_coroutine_threadsafe(getattr(files, f"_{what}")(*given, **more), files.loop)
    future: Future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(getattr(files, what)(*given, **more))
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=call, name="streamload-store", daemon=True).start()
    return future


def result(future: Future, files: Any, seconds: float, check: Callable[[], None]) -> Any:
    """Return what a call returns, or raise what it raises.

    A call that isn't waited for any longer is cancelled in an event loop. In a thread it goes on for as long
    as it likes, and keeps its file system: ask for one anew then, nobody is given that one any more.

    Args:
        check: called ten times a second; what it raises ends the wait.

    Raises:
        OriginTimeout: the call takes longer than these seconds.
    """
    deadline = time.monotonic() + seconds
    try:
        while not future.done():
            concurrent.futures.wait([future], timeout=_WAKE_SECONDS)
            check()
            if not future.done() and time.monotonic() >= deadline:
                raise OriginTimeout(f"no answer for {seconds:g} s")
        return future.result()
    finally:
        if not future.cancel() and not future.done():
            type(files).clear_instance_cache()


def pieces(future: Future, came: Pieces, seconds: float, check: Callable[[], None]) -> Iterator[bytes]:
    """Give what a coroutine puts into a queue until it ends; raise what it raises.

    Args:
        check: as for `result`.

    Raises:
        OriginTimeout: no piece comes for so many seconds.
    """
    future.add_done_callback(lambda _: came.put(None))
    try:
        while (piece := _next(came, seconds, check)) is not None:
            yield piece
        future.result()
    finally:
        future.cancel()


def _next(came: Pieces, seconds: float, check: Callable[[], None]) -> bytes | None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(queue.Empty):
            return came.get(timeout=_WAKE_SECONDS)
        check()
        if time.monotonic() >= deadline:
            raise OriginTimeout(f"no answer for {seconds:g} s")
