"""The worker loop: the journey of a batch from references to tensors, one step per line.

It is the one module that knows all rooms. Steps A (the list of shards) and K (the rank) are in loader/,
L (the device) in device/.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (every worker needs it and numpy.random: imported here, forked workers share them)
import gc
import multiprocessing.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.random
import torch
from torch.utils.data import IterableDataset, get_worker_info

from streamload.batches.in_progress import BatchFactory, BatchInProgress
from streamload.cache.shard_copy import ReadMemory
from streamload.errors import (
    BlankCaption,
    CaptionError,
    DataError,
    ImageTooLarge,
    LabelError,
    SampleError,
    TooManyBadSamples,
    add_note,
    as_failure,
)
from streamload.ipc import ControlBlock, Numbers, own_empty, shared_empty
from streamload.limits import allow_many_files
from streamload.metrics import Counters
from streamload.order.hashing import sample_seed
from streamload.shards.samples import Sample
from streamload.torch_internals import ExceptionWrapper
from streamload.worker import process
from streamload.worker.blocked import Superseded
from streamload.worker.extensions import BatchRows, StepsAhead, WorkerParts, WorkerProcess
from streamload.worker.messages import (
    SEAT,
    Batch,
    Ended,
    EpochChange,
    EpochStart,
    Failed,
    Message,
    OrderStep,
    RowSources,
    SkippedSample,
    Visit,
    WorkerConfig,
    ready_counts,
)
from streamload.worker.reader import Reader
from streamload.worker.sampler import RankStep, Sampler
from streamload.worker.stages import Spans, Stages
from streamload.worker.states import SealedStates

if TYPE_CHECKING:
    from streamload.ipc.buffers import BufferPool
    from streamload.worker.replacements import Replacements

_POLL_SECONDS = 0.002
"""Between two looks at whether a decision was made, or a batch taken."""
_READ_AHEAD_BYTES = 16 << 20
"""About the most bytes of a batch's samples that are read in advance."""
_READ_AHEAD_WITHOUT_DECODING_BYTES = 1 << 19
"""The same where adding a sample decodes nothing: its bytes are still in the processor's caches then."""


class _Visited(NamedTuple):
    """A sample before its pixels are decoded.

    Attributes:
        seed: uint64, of its random choices.
        seen: what `look_at` returned; or why the sample can't be used, to be reported or raised.
    """

    visit: Visit
    sample: Sample
    seed: int
    seen: Any | SkippedSample | SampleError


@dataclass(slots=True)
class _Epoch:
    """The epoch that a process makes batches of.

    Attributes:
        start: of the epoch.
        sampler: has its steps.
        begin: makes an empty batch.
        numbers: of the steps that this process makes.
        steps: number of steps; None: to the end of the pass.
        changes_generation: of the events since its start that are known here.
    """

    start: EpochStart
    sampler: Sampler
    begin: BatchFactory
    numbers: Numbers
    steps: int | None
    changes_generation: int

    def is_over(self, number: int) -> bool:
        """True if the planned steps end before this one."""
        return self.steps is not None and number >= self.steps


class StreamDataset(IterableDataset[Message]):
    """The samples of a run as batches; a DataLoader iterates it in its workers, or in the rank itself.

    Args:
        config: what is read.
        control: shared with the rank.
        buffers: of each worker.
        ahead: how many batches all workers may begin beyond those that the training loop has taken.
    """

    def __init__(
        self, config: WorkerConfig, control: ControlBlock, buffers: Sequence[BufferPool], ahead: int
    ):
        self._config = config
        self._control = control
        self._ahead = ahead
        self._slots = buffers
        self._loop: WorkerLoop | None = None
        self._environ: dict[str, str] | None = None  # the rank's, for workers that aren't forked

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_environ": dict(os.environ)}

    def __iter__(self) -> Iterator[Message]:
        info = get_worker_info()
        if self._loop is None or self._loop.pid != os.getpid():
            worker, workers = (info.id, info.num_workers) if info else (0, 0)
            if workers:
                process.leave_signals_to_rank()
                if self._environ is not None:
                    process.put_environment(self._environ)
                gc.freeze()  # else a collection would copy every page that is shared with the rank
                allow_many_files()
            buffers = self._slots[worker] if self._slots else None
            try:
                self._loop = WorkerLoop(self._config, self._control, worker, workers, buffers, self._ahead)
            except StopIteration as exc:  # of an extension
                raise as_failure(exc) from exc
            if workers:
                multiprocessing.util.Finalize(self, self._loop.close, exitpriority=10)
                process.end_with_rank(self._loop.close)
        return self._loop.batches(EpochStart.from_json(self._control.order.read()))

    def close(self) -> None:
        """Stop the fills and close the tier. Idempotent."""
        if self._loop is not None and self._loop.pid == os.getpid():
            self._loop.close()
        self._loop = None


class WorkerLoop:
    """The loop of one process, with its reader. It lasts from epoch to epoch."""

    def __init__(
        self,
        config: WorkerConfig,
        control: ControlBlock,
        worker: int,
        workers: int,
        buffers: BufferPool | None,
        ahead: int,
    ):
        self.pid = os.getpid()
        self._config = config
        self._control = control
        self._worker, self._workers, self._ahead = worker, workers, ahead
        self._counts = Counters(control.counters[worker + 1 if workers else 0])
        name = f"worker {worker}" if workers else "training"
        self._spans = Spans(control, name)
        self._stages = Stages(self._counts)
        self._reader = Reader(config, control, self._counts, self._spans, self._stages, worker, workers)
        self._slots = buffers
        self._numbers: Numbers | None = None
        self._replacements: Replacements | None = None  # made for the first bad sample
        self._parts: WorkerParts | None = None
        self._excluding: Sequence[Callable[[Sample], bool]] = ()
        if config.extensions:
            self._parts = WorkerParts(
                config.extensions, WorkerProcess(worker, workers, self._reader, control)
            )
            self._excluding = self._parts.excluding
        self._placed: list[tuple[int, int]] = []  # shard and number of the sample of each row
        self._visits: list[Visit] = []  # of each row, whose sample may have been replaced
        self._memory = ReadMemory(_READ_AHEAD_BYTES)
        self._fresh = shared_empty if workers else own_empty

    def batches(self, start: EpochStart) -> Iterator[Message]:
        """The batches of an epoch that this process makes: each is claimed when the one before is made."""
        epoch, number = self._begin(start), 0
        try:
            for number in epoch.numbers:
                if not self._reaches(epoch, number):
                    return
                if epoch.is_over(number):
                    yield Ended(number)
                    return
                step = epoch.sampler.at(self._enter(epoch, number))  # E
                with self._spans.of(f"batch {number}"):  # B, C, D while F, G go on; H, I
                    made = self._make(epoch, step)
                if made is None:
                    yield self._end(epoch, number, step.position)
                    return
                yield self._batch(epoch, number, step, *made)  # J
                self._stages.handed_over()
        except Superseded:
            return
        except Exception as exc:
            if not self._workers:
                raise
            where, error = f"in DataLoader worker process {self._worker}", as_failure(exc)
            info = type(error), error, error.__traceback__
            yield Failed(number, ExceptionWrapper(info, where))  # type: ignore[no-untyped-call]

    def _begin(self, start: EpochStart) -> _Epoch:
        """Begin an epoch: its steps, and the numbers of those that this process makes."""
        self._reader.begin(start)
        self._stages.begin()
        if self._slots is not None:
            self._slots.take_back()
        parts, columns = self._parts, None
        sampler = None if parts is None else parts.sampler(start)
        self._sampler = sampler = sampler or Sampler(self._config, self._reader, start)
        if parts is not None:
            rank, generation = self._config.rank, start.generation
            ahead = StepsAhead(sampler.steps, rank, generation, self._reader, self._control)
            parts.start_epoch(start.events, start.position, ahead)
            columns = parts.columns
        claims = self._control.claims if self._workers else None
        self._numbers = Numbers(claims, start.generation, self._ahead + 2, self._numbers)
        begin = self._config.assembly.batch_factory(columns)
        changes = start.changes_generation
        return _Epoch(start, sampler, begin, self._numbers, start.steps, changes)

    def _reaches(self, epoch: _Epoch, number: int) -> bool:
        """Wait until a step may begin, with all events for it; False if the epoch was superseded."""
        while self._workers and number >= self._control.taken + self._ahead:
            self._wait()
        if self._control.order.generation != epoch.start.generation:
            return False
        if self._parts is not None and not epoch.is_over(number):
            while not self._parts.may_begin(number):
                self._wait()
        if epoch.changes_generation != self._control.changes.generation:
            latest = EpochChange.from_json(self._control.changes.read())
            epoch.steps, epoch.changes_generation = latest.steps, latest.generation
            epoch.sampler.receive(latest.events)
            if self._parts is not None:
                self._parts.receive(latest.events)
        return True

    def _enter(self, epoch: _Epoch, number: int) -> int:
        """Enter a step, by its number: return its position, and request what later ones need."""
        sampler, parts = epoch.sampler, self._parts
        if parts is not None:
            parts.before_step(number)
        position = sampler.steps.begin(number)
        if self._reader.fills.reads_ranges and (coming := epoch.numbers.coming()) is not None:
            self._reader.want_ranges(sampler.coming(sampler.steps.begin(coming)))
        if parts is not None:
            parts.begin(position)
        return position

    def _end(self, epoch: _Epoch, number: int, position: int) -> Ended:
        """The message that the data ends before a step."""
        if self._workers:
            self._control.end(self._worker + 1, epoch.start.generation, number)
        self._check_end(number, epoch.start)
        return epoch.sampler.ended(number, position)

    def _batch(
        self,
        epoch: _Epoch,
        number: int,
        step: RankStep,
        values: dict[str, Any],
        skipped: list[SkippedSample],
    ) -> Batch:
        """The message with a batch's values, and the order after it."""
        keys, urls = values.pop("__key__"), values.pop("__url__")
        states, spans, extras = step.states(), step.spans(), dict[str, bytes]()
        if self._parts is not None:
            extras = self._parts.finish(
                values, BatchRows(step, self._placed, self._visits, self._reader, states)
            )
        self._reader.end_batch()
        ready = ready_counts(values)
        if self._slots is not None:
            with self._counts.timed("hand_over_ns"):
                values = self._slots.hand_over(values, self._counts)
        if self._config.with_keys:
            values |= {"__key__": keys, "__url__": urls}
        stop, rows = epoch.sampler.steps.begin(number + 1), len(keys)
        planned = None if step.parts is None else sum(step.parts)
        order = OrderStep(step.position, stop, SealedStates(states), spans, planned)
        self._counts.add_all(ready)
        generation, blocked = epoch.start.generation, self._reader.blocked()
        return Batch(values, number, generation, order, self._rows_of(step, rows), skipped, blocked, extras)

    def _rows_of(self, step: RankStep, rows: int) -> RowSources:
        """The sources of a batch's rows; an evaluation ends with fewer rows than its seats."""
        sources = len(self._config.sources)
        if sources == 1:
            return RowSources(rows, [rows])
        seats = step.seats
        by_source = np.bincount(seats, minlength=sources).tolist()
        passes = tuple(step.passes.get(source, 0) for source in range(sources))
        return RowSources(rows, by_source, seats.astype(SEAT).tobytes(), passes)

    def close(self) -> None:
        """Stop the fills and close the tier. Idempotent."""
        if self._parts is not None:
            self._parts.close()
        self._reader.close()

    def _wait(self) -> None:
        """Wait a moment for the training loop.

        Raises:
            Superseded: the rank has started another epoch, or has died.
        """
        self._reader.stop_if_superseded()
        time.sleep(_POLL_SECONDS)

    def _check_end(self, number: int, start: EpochStart) -> None:
        """Raise if the sequence should not have ended before this step.

        Raises:
            NoValidSamples: it had no usable sample.
            DataError: in training, it has too few samples for one step, or a whole pass without any.
        """
        if self._config.train and not self._config.one_pass:
            self._reader.raise_if_unusable()
            raise DataError(
                "a whole pass over the shards gave no usable sample, so this epoch can't go on: see whether "
                "they can still be read"
            )
        if start.position:
            return  # the rest of an epoch may be empty
        is_share = not self._config.train and self._config.sources[0].order.groups > 1
        if not is_share:  # a rank's share of an evaluation may be empty
            self._reader.raise_if_unusable()
        if self._config.train and number == 0:
            raise DataError(
                f"the data has fewer usable samples than one step takes ({self._config.split.batch}): lower "
                f"batch_size, or give num_batches to go round and round"
            )

    def _make(self, epoch: _Epoch, step: RankStep) -> tuple[dict[str, Any], list[SkippedSample]] | None:
        """Turn samples into the tensors of a batch, each as soon as it is known; None: no batch."""
        self._reader.begin_batch()
        batch = epoch.begin(step.size, self._empty, epoch.sampler.steps.seq_len(step.position))
        self._placed.clear()
        self._visits.clear()
        skipped: list[SkippedSample] = []
        rows = 0
        with contextlib.closing(batch), _one_thread():
            for part in step.visits():
                if part is None:
                    return None
                rows += len(part)
                with self._stages.samples():
                    for visited in chain.from_iterable(self._read(batch, epoch.start.epoch, part)):
                        one_skipped = self._place(batch, visited)
                        if one_skipped is not None:
                            skipped.append(one_skipped)
            if not rows:
                return None
            with self._stages.finish():
                values = batch.finish(step.bounds, step.parts)
            self._stages.made(batch.measured(), values.get("patch_valid"))
        return values, skipped

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor of a batch: in a shared buffer if one is free."""
        tensor = self._slots.empty(shape, dtype) if self._slots is not None else None
        return self._fresh(shape, dtype) if tensor is None else tensor

    def _read(self, batch: BatchInProgress, epoch: int, visits: list[Visit]) -> Iterator[list[_Visited]]:
        """Look samples up, read them (H), and do everything that comes before their pixels.

        Decoding an image evicts all other code and data from the processor's caches: interleaved with it,
        this takes up to five times as long. So entries are looked up for all samples at once, and the rest is
        done for as many in a row as there is memory for, or for a few where nothing is decoded.
        """
        most_bytes = _READ_AHEAD_BYTES if batch.decodes else _READ_AHEAD_WITHOUT_DECODING_BYTES
        self._stages.begin_read()
        entries = self._reader.find([visit.shard for visit in visits], [visit.number for visit in visits])
        row: list[tuple[Visit, Sample]] = []
        self._memory.reset(most_bytes)
        for visit, entry in zip(visits, entries, strict=True):
            row.append((visit, self._reader.sample(visit.shard, visit.number, self._memory, entry)))
            if self._memory.is_full:
                self._stages.end_read()
                yield [self._look_at(batch, epoch, *pair) for pair in row]
                row.clear()
                self._memory.reset(most_bytes)
                self._stages.begin_read()
        self._stages.end_read()
        yield [self._look_at(batch, epoch, *pair) for pair in row]

    def _look_at(self, batch: BatchInProgress, epoch: int, visit: Visit, sample: Sample) -> _Visited:
        source = self._config.sources[visit.source]
        seed = sample_seed(source.order.seed, epoch, visit.pass_, visit.shard - source.first, visit.number)
        if self._excluding and self._is_excluded(sample):
            left_out = SkippedSample("left_out", sample.url, sample.key, "it is left out")
            return _Visited(visit, sample, seed, left_out)
        try:
            return _Visited(visit, sample, seed, batch.parse(sample, seed, visit.most))
        except SampleError as exc:  # handled in its turn: its replacement may wait for bytes
            passed = self._config.skip or isinstance(exc, BlankCaption)
            return _Visited(visit, sample, seed, _skipped(sample, exc) if passed else exc)
        except Exception as exc:
            add_note(exc, _place_of(sample))
            raise

    def _is_excluded(self, sample: Sample) -> bool:
        return any(excludes(sample) for excludes in self._excluding)

    def _place(self, batch: BatchInProgress, visited: _Visited) -> SkippedSample | None:
        """Add one sample to a batch; in training, a replacement if it can't be used."""
        visit, sample, seed, parsed = visited
        if isinstance(parsed, SampleError):
            raise _located(sample, parsed) from parsed
        if isinstance(parsed, SkippedSample):
            skipped = parsed
        else:
            try:
                batch.add(parsed)
                self._placed.append((visit.shard, visit.number))
                self._visits.append(visit)
                return None
            except SampleError as exc:
                if not self._config.skip:
                    raise _located(sample, exc) from exc
                skipped = _skipped(sample, exc)
            except Exception as exc:
                add_note(exc, _place_of(sample))
                raise
        if not self._config.train or self._sampler.leaves_out(visit):
            return skipped
        tried = 0
        if self._replacements is None:
            from streamload.worker.replacements import Replacements

            self._replacements = Replacements(self._config, self._reader)
        for shard, number in self._replacements.of(visit, seed, self._sampler.fits):
            tried += 1
            with contextlib.suppress(SampleError):
                another = self._reader.sample(shard, number)
                if self._excluding and self._is_excluded(another):
                    continue
                batch.add(batch.parse(another, seed, visit.most))
                self._placed.append((shard, number))
                self._visits.append(visit)
                return skipped
        raise TooManyBadSamples(
            f"{sample.key} in {sample.url} can't be used, nor can any of {tried} samples near it: "
            f"{skipped.message}"
        )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from using several threads for one image, which costs more than it gains."""
    threads = torch.get_num_threads()
    if threads == 1:  # as in every DataLoader worker
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _place_of(sample: Sample) -> str:
    return f"in sample {sample.key!r} of {sample.url}"


def _located(sample: Sample, error: SampleError) -> SampleError:
    """The same error with the sample's key and shard in its message."""
    return type(error)(f"{error}, {_place_of(sample)}")


def _skipped(sample: Sample, error: SampleError) -> SkippedSample:
    """The report of an error, without its traceback, which would keep the sample alive."""
    causes = {
        BlankCaption: "missing",
        CaptionError: "caption",
        LabelError: "label",
        ImageTooLarge: "too_large",
    }
    return SkippedSample(causes.get(type(error), "decode"), sample.url, sample.key, str(error))
