"""Times of a worker's stages: reading, decoding, resizing, tokenizing, collating, hand-over (steps H to J).

Time stamps are per batch and per row of reads, not per image; how the time with images divides into decoding
and resizing follows from one image of 16 (batches/images.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING

import torch

from streamload.ipc import ControlBlock, spent_ns
from streamload.metrics import Counters
from streamload.worker.messages import SpanSink, bytes_by_modality

if TYPE_CHECKING:
    from streamload.batches.in_progress import MakingCosts


def nothing_ready(counts: Counters) -> None:
    """Begin an epoch: none of its batches is made yet."""
    for name in ("ready_batches", *bytes_by_modality({})):
        counts.set(name, 0)


class Spans:
    """Notes what a process does, for a trace of the run.

    Args:
        control: of the loader; says whether there was a trace.
        process: the name of this process in a trace.
        open_sink: opens what takes spans, at the first trace; None: there are no traces.
    """

    def __init__(
        self, control: ControlBlock, process: str, open_sink: Callable[[ControlBlock, str], SpanSink] | None
    ):
        self._control, self._process, self._open_sink = control, process, open_sink
        self._sink: SpanSink | None = None

    @property
    def is_on(self) -> bool:
        """True if a trace runs."""
        if self._sink is None:
            if self._open_sink is None or not self._control.tracing.generation:
                return False
            self._sink = self._open_sink(self._control, self._process)
        return self._sink.is_on

    def add(self, name: str, began_ns: int, ended_ns: int, **about: object) -> None:
        """Note a span of this thread, if a trace runs.

        Args:
            name: what was done.
            began_ns, ended_ns: since the epoch, as of `time.time_ns()`.
            about: JSON-able details.
        """
        if self.is_on and self._sink is not None:
            self._sink.add(name, began_ns, ended_ns, **about)

    @contextmanager
    def of(self, name: str, **about: object) -> Iterator[None]:
        """Note a span for the block, also if it raises."""
        began_ns = time_ns()
        try:
            yield
        finally:
            self.add(name, began_ns, time_ns(), **about)


class Stages:
    """The stages of one process's batches. Not thread-safe.

    Args:
        counts: of this process.
    """

    def __init__(self, counts: Counters):
        self._counts = counts
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
        start_ns, waited = monotonic_ns(), self._waited_ns()
        try:
            yield
        finally:
            taken_ns = monotonic_ns() - start_ns
            self._counts.add("transform_ns", taken_ns)
            waited_ns = self._waited_ns() - waited
            self._samples_ns += max(0, taken_ns - self._read_ns - waited_ns)
            self._counts.add("read_ns", self._read_ns)

    def begin_read(self) -> None:
        """Start the clock of reading."""
        self._read_began, self._waited_before = monotonic_ns(), self._waited_ns()

    def end_read(self) -> None:
        """Stop the clock of reading."""
        waited_ns = self._waited_ns() - self._waited_before
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
        add, timed_ns = self._counts.add, measured.decode_ns + measured.resize_ns
        if timed_ns:
            self._resize_share = measured.resize_ns / timed_ns
        resize_ns = int(self._samples_ns * self._resize_share)
        add("resize_ns", resize_ns)
        add("decode_ns", self._samples_ns - resize_ns)
        add("tokenize_ns", measured.tokenize_ns)
        add("collate_ns", max(0, self._finish_ns - measured.tokenize_ns))
        self._samples_ns = self._finish_ns = 0
        add("text_tokens_real", measured.text_real)
        add("text_tokens_padding", measured.text_padding)
        add("samples_unprepared", measured.unprepared)
        if patch_valid is not None:
            real = int(patch_valid.sum())
            add("image_tokens_real", real)
            add("image_tokens_padding", patch_valid.numel() - real)

    def ready(self, sizes: Mapping[str, int]) -> None:
        """A batch is about to be sent.

        Args:
            sizes: its bytes (messages.bytes_by_modality).
        """
        self._counts.add("ready_batches")
        for name, size in sizes.items():
            self._counts.add(name, size)

    def handed_over(self) -> None:
        """The last batch was sent."""
        before, self._spent_before = self._spent_before, spent_ns()
        self._counts.add("hand_over_ns", self._spent_before - before)

    def _waited_ns(self) -> int:
        return self._counts.value("bytes_wait_ns") + self._counts.value("shuffle_wait_ns")
