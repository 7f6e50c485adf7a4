"""Times of a worker's stages: reading, decoding, resizing, tokenizing, collating, hand-over (steps H to J).

Time stamps are per batch and per row of reads, not per image; how the time with images divides into decoding
and resizing follows from one image of 16 (batches/images.py).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING

import torch

from streamload.ipc import ControlBlock, spent_ns
from streamload.metrics import Counters
from streamload.worker.messages import ready_counts

_MOST_SPANS = 200_000
"""Most spans of a process; about 40 MB."""

if TYPE_CHECKING:
    from streamload.batches.in_progress import MakingCosts


def nothing_ready(counts: Counters) -> None:
    """Begin an epoch: none of its batches is made yet."""
    for name in ready_counts({}):
        counts.set(name, 0)


class Spans:
    """Spans of one process, appended to a file while a trace of the run goes on. Thread-safe.

    `Loader.trace` turns it on and merges the files into a trace of torch.profiler. Off, a look at the control
    block is all that a span costs. A full disk ends the trace of this process, never its work.

    Args:
        control: of the loader; says whether a trace runs, and in which folder.
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
        """Append a span of this thread, if a trace runs.

        Args:
            name: what was done.
            began_ns, ended_ns: since the epoch, as of `time.time_ns()`.
            about: JSON-able details.
        """
        if not self.is_on:
            return
        with self._lock:
            if not self._left:
                return
            self._left -= 1
            span = [name, began_ns, ended_ns, threading.get_native_id(), about]
            self._write([*span, threading.current_thread().name])

    @contextmanager
    def of(self, name: str, **about: object) -> Iterator[None]:
        """Note a span for the block, also if it raises."""
        began_ns = time_ns()
        try:
            yield
        finally:
            self.add(name, began_ns, time_ns(), **about)

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


class Stages:
    """The stages of one process's batches. Not thread-safe.

    Args:
        counts: of this process.

    Attributes:
        waited_ns: for which the reader has waited for bytes so far; no stage runs then.
    """

    def __init__(self, counts: Counters):
        self._counts, self.waited_ns = counts, 0
        self._samples_ns = self._read_ns = self._finish_ns = 0  # of the current batch
        self._read_began = self._waited_before = 0
        self._resize_share = 0.0
        self._spent_before = spent_ns()

    def begin(self) -> None:
        """An epoch begins; none of its batches is made yet."""
        nothing_ready(self._counts)
        self._samples_ns = self._finish_ns = 0
        self._spent_before = spent_ns()

    @contextmanager
    def samples(self) -> Iterator[None]:
        """Time the reading and placing of samples."""
        self._read_ns = 0
        start_ns, waited_before = monotonic_ns(), self.waited_ns
        try:
            yield
        finally:
            taken_ns = monotonic_ns() - start_ns
            waited_ns = self.waited_ns - waited_before
            self._samples_ns += max(0, taken_ns - self._read_ns - waited_ns)
            self._counts.add_all({"transform_ns": taken_ns, "read_ns": self._read_ns})

    def begin_read(self) -> None:
        """Start the clock of reading."""
        self._read_began, self._waited_before = monotonic_ns(), self.waited_ns

    def end_read(self) -> None:
        """Stop the clock of reading."""
        waited_ns = self.waited_ns - self._waited_before
        self._read_ns += max(0, monotonic_ns() - self._read_began - waited_ns)

    @contextmanager
    def finish(self) -> Iterator[None]:
        """Time the rest of the making."""
        start_ns = monotonic_ns()
        try:
            yield
        finally:
            self._finish_ns = monotonic_ns() - start_ns
            self._counts.add("transform_ns", self._finish_ns)

    def made(self, measured: MakingCosts, patch_valid: torch.Tensor | None) -> None:
        """A batch was made.

        Args:
            measured: of it.
            patch_valid: bool[N, P]: which of its places are patches; None: it has no patches.
        """
        if timed_ns := measured.decode_ns + measured.resize_ns:
            self._resize_share = measured.resize_ns / timed_ns
        resize_ns = int(self._samples_ns * self._resize_share)
        counted = {
            "resize_ns": resize_ns,
            "decode_ns": self._samples_ns - resize_ns,
            "tokenize_ns": measured.tokenize_ns,
            "collate_ns": max(0, self._finish_ns - measured.tokenize_ns),
            "text_tokens_real": measured.text_real,
            "text_tokens_padding": measured.text_padding,
            "samples_unprepared": measured.unprepared,
        }
        if patch_valid is not None:
            real = int(patch_valid.sum())
            counted |= {"image_tokens_real": real, "image_tokens_padding": patch_valid.numel() - real}
        self._counts.add_all(counted)
        self._samples_ns = self._finish_ns = 0

    def handed_over(self) -> None:
        """The last batch was sent."""
        before, self._spent_before = self._spent_before, spent_ns()
        self._counts.add("hand_over_ns", self._spent_before - before)
