"""File of the spans of one process of a loader, written while the training traces.

`Loader.trace` turns it on and merges the files into a trace of torch.profiler. Off, a look at the control
block per batch is all that it costs.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from streamload.ipc import ControlBlock

_MOST_SPANS = 200_000
"""Of a process; about 40 MB."""


class SpanFile:
    """Appends spans of this process while a trace runs. Thread-safe.

    A full disk ends the trace of this process, never its work.

    Args:
        control: says whether a trace runs, and in which folder.
        process: the name of this process in the trace.
    """

    def __init__(self, control: ControlBlock, process: str):
        self._tracing = control.tracing
        self._process = process
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._generation = 0
        self._path: Path | None = None
        self._left = 0

    @property
    def is_on(self) -> bool:
        """True if a trace runs."""
        if self._tracing.generation != self._generation:
            with self._lock:
                self._follow()
        return self._path is not None

    def add(self, name: str, began_ns: int, ended_ns: int, **about: object) -> None:
        """Append a span of this thread, if a trace runs; see `worker.stages.Spans`."""
        if not self.is_on:
            return
        with self._lock:
            if not self._left:
                return
            self._left -= 1
            span = [name, began_ns, ended_ns, threading.get_native_id(), about]
            self._write([*span, threading.current_thread().name])

    def _follow(self) -> None:
        """Begin a file for a trace that has begun; end it with the trace."""
        tracing = self._tracing.read()
        self._path, self._left = None, 0
        if tracing["folder"]:
            self._path, self._left = Path(tracing["folder"]) / f"{os.getpid()}.jsonl", _MOST_SPANS
            self._write({"pid": os.getpid(), "process": self._process})
        self._generation = tracing["generation"]

    def _write(self, value: object) -> None:
        assert self._path is not None
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(value) + "\n")
        except OSError:
            self._path, self._left = None, 0
