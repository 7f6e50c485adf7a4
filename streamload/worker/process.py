"""A worker process: its environment, its signals, and its exit with its rank."""

from __future__ import annotations

import functools
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


def leave_signals_to_rank() -> None:
    """Go on at SIGINT and SIGTERM: terminals and launchers signal the whole process group, the rank decides.

    Processes that user code starts here end at a SIGTERM: commands inherit no handler, but would inherit
    SIG_IGN; forked processes get the default back, before Python can take a signal and lose it.
    """
    block, unblock = (
        functools.partial(signal.pthread_sigmask, how, {signal.SIGTERM})
        for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
    )

    def end_at_sigterm() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    signal.set_wakeup_fd(-1)  # a forked worker has the rank's, whose event loop would see the signal twice
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    unblock()
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=end_at_sigterm)


def end_with_rank(close: Callable[[], None]) -> None:
    """Exit when the rank is gone, whatever this process is doing.

    torch checks between two batches whether the parent process has changed. A forkserver is the parent of its
    workers, and lives as long as any of them. Other children of the rank hold the sentinel's pipe open.

    Args:
        close: stops the work of this process before it exits.
    """
    rank = multiprocessing.parent_process()
    if rank is None:
        return
    ends = [rank.sentinel]
    try:
        ends.append(os.pidfd_open(rank.pid or 0))
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):
        pass  # not Linux, or a sandbox without this call

    def watch() -> None:
        multiprocessing.connection.wait(ends)
        try:
            close()
        finally:
            os._exit(1)

    limits.start(threading.Thread(target=watch, name="streamload-rank", daemon=True))
