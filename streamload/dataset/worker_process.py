"""What a process that works for a rank sees to beside its work: its environment, its threads, its end."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Mapping

import torch


def put_environment(environ: Mapping[str, str]) -> None:
    """Give this worker its rank's environment: a forkserver's is that of the moment when it was started."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


def end_with_rank(close: Callable[[], None]) -> None:
    """End this worker when its rank is killed, where torch doesn't see to it.

    torch looks whether the parent process is another one. A forkserver is the parent of its workers, and
    lives as long as any of them does.

    Args:
        close: stops what runs in this process, before it ends.
    """
    rank = multiprocessing.parent_process()
    if rank is None or rank.pid == os.getppid():
        return

    def watch() -> None:
        multiprocessing.connection.wait([rank.sentinel])
        try:
            close()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="streamload-rank", daemon=True).start()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from spreading an image over threads, which costs more than it gains."""
    threads = torch.get_num_threads()
    if threads == 1:  # as in every DataLoader worker
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
