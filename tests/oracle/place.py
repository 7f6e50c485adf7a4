"""Where cases run: each in a process and a directory of its own, with the same sets under the same names."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from streamload.testing.server import ShardServer
from tests.oracle.data import write_sets
from tests.oracle.functions import clip_processor, of_transformers

RECORDED_AT = "/tmp/streamload-oracle"
"""The root when states were recorded: states know local shards by their paths."""

RunAll = Callable[[Callable[[Any], Any], Iterable[tuple[str, Any]]], Iterator[Any]]

_root: Path


def root() -> Path:
    """The directory of the places of all cases."""
    return _root


@contextlib.contextmanager
def running(jobs: int, at: str | None = None) -> Iterator[RunAll]:
    """Give a `map` over (name, argument): each call in a place of this name.

    Args:
        jobs: how many run at a time.
        at: the root, which is made; None: a temporary directory.
    """
    with contextlib.ExitStack() as stack:
        if at is None:
            at = stack.enter_context(tempfile.TemporaryDirectory(prefix="streamload-oracle-"))
        else:
            Path(at).mkdir()
            stack.callback(shutil.rmtree, at)
        write_sets(Path(at, "sets"))
        server = stack.enter_context(ShardServer.spawn(Path(at, "sets")))
        for load in (of_transformers, clip_processor):  # seconds of imports, once for all processes
            load()
        context = multiprocessing.get_context("fork")
        pool = stack.enter_context(
            ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare, initargs=(at, server.url))
        )
        yield lambda function, items: pool.map(_InPlace(function), items)


def _prepare(at: str, proxy: str) -> None:
    """In each process: the proxy answers for every host, so URLs are the same wherever it listens."""
    global _root
    _root = Path(at)
    for name in [
        name for name in os.environ if name.startswith("STREAMLOAD_") or name.lower().endswith("_proxy")
    ]:
        del os.environ[name]
    os.environ["http_proxy"] = proxy
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    logging.getLogger("streamload").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)


class _InPlace:
    """A function that is called in a process and a place of its own."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function

    def __call__(self, item: tuple[str, Any]) -> Any:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=self._send, args=(item, sender))
        process.start()
        sender.close()
        result = receiver.recv()
        process.join()
        return result

    def _send(self, item: tuple[str, Any], sender: Connection) -> None:
        sender.send(self._result(*item))

    def _result(self, name: str, argument: Any) -> Any:
        place = root() / name
        place.mkdir()
        for entry in (root() / "sets").iterdir():
            (place / entry.name).symlink_to(entry)
        os.environ["XDG_CACHE_HOME"] = str(place / "home")
        os.chdir(place)
        try:
            return self._function(argument)
        finally:
            os.chdir(root())
            shutil.rmtree(place, ignore_errors=True)
