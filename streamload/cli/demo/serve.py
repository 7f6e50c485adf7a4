"""The demo's server in a process of its own, so that it doesn't take the training's turns in Python."""

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path


@contextmanager
def serving(shards: Path, bytes_per_second: int) -> Iterator[str]:
    """Serve a directory over HTTP at a limited speed; gives the URL that stands for it.

    The server ends with the block, and also when this process dies: it waits for nothing but the other end.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(shards, bytes_per_second, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _serve(shards: Path, bytes_per_second: int, other_end: Connection) -> None:
    from streamload.testing.server import ShardServer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's to answer
    with ShardServer(shards, bytes_per_second=bytes_per_second) as server:
        other_end.send(server.url)
        try:
            other_end.recv()
        except EOFError:
            return
