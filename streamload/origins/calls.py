"""Calls of fsspec's file systems, which may never end: in their event loop, or in threads without one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any

from streamload.errors import OriginTimeout

_WAKE_SECONDS = 0.1

Future = concurrent.futures.Future[Any]


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
