"""A worker process: its environment, its signals, and its exit with its rank."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Mapping

from streamload import limits


def put_environment(environ: Mapping[str, str]) -> None:
    """Apply the rank's environment: a forkserver has the one of its own start."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


def leave_interrupts_to_rank() -> None:
    """Ignore SIGINT: terminals and notebooks send it to the whole process group, and the rank decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_with_rank(close: Callable[[], None]) -> None:
    """Exit when the rank is killed, where torch doesn't notice.

    torch checks whether the parent process has changed. A forkserver is the parent of its workers, and lives
    as long as any of them.

    Args:
        close: stops the work of this process before it exits.
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

    limits.start(threading.Thread(target=watch, name="streamload-rank", daemon=True))
