"""`Order(journal=folder)`: the extension that writes a rank's file.

Kinds of records, in the order in which a run adds them:

- segment: an attempt of the run begins in this process; its parent is the step of the segment whose state it
  has loaded.
- mark: the state before a step. At the start of each epoch, and every 512 steps; with cells every 64.
- ended: shards whose end the order has reached, with the group's samples in each and what a state records of
  them. So the order can be computed again without looking at any shard. Passes are those of the sequence that
  began, or was taken up, at the step `origin`.
- event: what was set in the run, and from which position on it holds.
- steps: of consecutive steps digests of this rank's samples and of their bytes; and their losses, with those
  of the worst rows.
- usual: the mean of the losses that were reported of each source since the last one.
"""

from __future__ import annotations

import os
import pickle
import secrets
import struct
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from streamload.errors import JournalError, OptionError, StateMismatch
from streamload.extension import BatchColumn, Event, Extension, RankPart, WorkerPart
from streamload.journal.content import CONTENT, UNKNOWN, Content, digest_of
from streamload.journal.files import Record, RecordWriter, path_of
from streamload.mixing.reports import LOSS, Reports, signal_of
from streamload.order.events import BATCH_SIZE, WEIGHTS

if TYPE_CHECKING:
    from streamload.extension import Batch, BatchInfo, BatchRows, LoaderOptions, Run, WorkerProcess
    from streamload.extension.kernel import Allocate

NAME = "journal"
MARK_STEPS = 512
"""Steps between marks; with cells an eighth of it, as all steps after a mark have to be made again."""
WORST = 8
"""Rows of a step whose losses are kept."""
_FLUSH_STEPS, _FLUSH_SECONDS = 64, 5.0
"""Steps are written once there are so many, or after so long."""
_ON_THE_WAY = 2
"""The latest steps, whose losses a device may not have computed yet, aren't written but at the end."""
_DIGESTS = struct.Struct("<QI")
_PASSES_KEPT = 4
_WIDEST_ROW = 1 << 16


@dataclass(frozen=True, slots=True)
class Journal(Extension):
    """The extension of a loader that keeps a journal.

    Attributes:
        folder: of its files.
    """

    folder: str

    name = NAME

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse it where there is no run to look back at."""
        if not options.train:
            raise OptionError(
                "journal= is for training: an evaluation has the samples in the order as listed"
            )

    def in_worker(self, process: WorkerProcess) -> StepWitness:
        """Tell of each step what it had."""
        return StepWitness(process.reader.config.assembly.preparation is not None)

    def in_rank(self, run: Run) -> Recorder:
        """Write the file of the rank."""
        return Recorder(run, self.folder)


class StepWitness(WorkerPart):
    """The journal in a worker: the digests of a step, and the shards that have ended.

    Args:
        prepares: whether shards are prepared. Other bytes are read then once they are, so they get no digest.
    """

    def __init__(self, prepares: bool):
        self._prepares = prepares

    def columns(self, size: int, allocate: Allocate) -> Sequence[BatchColumn]:
        """The bytes of the samples, as a digest."""
        return [] if self._prepares else [Content()]

    def finish(self, values: dict[str, object], rows: BatchRows) -> bytes:
        """Message with the digests, and the rows of `Reader.ended`."""
        digests = _DIGESTS.pack(digest_of(rows.samples), values.pop(CONTENT, UNKNOWN))
        return digests + rows.reader.ended().tobytes()


class Recorder(RankPart):
    """The journal in the rank.

    Args:
        run: of the loader.
        folder: of the files.
    """

    def __init__(self, run: Run, folder: str):
        self._run, self._folder = run, folder
        self._pending: _Unwritten | None = None  # of the current segment
        self._segment, self._parent = "", None  # type: str, list[Any] | None
        self._step = 0  # of the run: the next one
        self._is_due = self._is_new = False  # a mark is; the sequence has no mark
        self._is_marking = False
        self._known: list[Event] = []  # events that are written
        self._noted: Sequence[Event] = ()  # the run's events, as they were looked at last
        self._reasons: list[tuple[Event, Mapping[str, Any]]] = []  # of events that aren't written yet
        self._sources = [source.name for source in run.options.sources]

    def start_epoch(self, start: int) -> Sequence[Event]:
        """Begin a segment if this process has none, or has loaded a state.

        Raises:
            OptionError: the folder can't be written; on all ranks that are joined.
        """
        is_new = self._pending is None
        if is_new:
            self._begin()
        assert self._pending is not None
        if is_new or start == 0:
            self._pending.begin_sequence(self._step)
            self._is_new = True
        self._is_due = True
        return ()

    def _begin(self) -> None:
        run, writer, error = self._run, RecordWriter(path_of(self._folder, self._run.rank)), ""
        loader = {}
        try:
            writer.open()
            loader = _stored_options(run.options, Path(self._folder)) if run.rank == 0 else {}
        except (OSError, JournalError) as exc:
            error = f"journal={self._folder!r} can't be used: {exc}"
        if run.can_agree:
            token, error = run.agree(
                "the journal",
                [secrets.token_hex(4), error],
                lambda ranks: [ranks[0][0], next((error for _, error in ranks if error), "")],
            )
        else:  # ranks that were placed by Order(rank=…): what is the same on all of them
            inputs: list[Any] = [run.identity, self._parent, run.world_size]
            while (token := xxhash.xxh32_hexdigest(repr(inputs).encode())) in writer.segments:
                inputs.append(token)
        if error:
            raise OptionError(error)
        self._segment, self._known = token, []
        self._pending = _Unwritten(writer, self._sources)
        weakref.finalize(self, _finish, self._pending, os.getpid())
        values = {
            "segment": token,
            "parent": self._parent,
            "step": self._step,
            "rank": run.rank,
            "world_size": run.world_size,
            "rows": run.options.batch_size,
            "seconds": round(time.time()),
            "order": run.identity,
            **loader,
        }
        writer.add(Record("segment", values, {}))

    def before_batch(self) -> None:
        """Write what is due; the state is that of the last batch."""
        pending = self._pending
        if pending is None:
            return
        every = -(-MARK_STEPS // 8) if self._run.options.has_cells else MARK_STEPS
        if self._is_due or (self._step % every == 0 and pending.marked != self._step):
            position = self._run.position
            if self._is_new:  # its first mark has these; later ones of a recorded run it hasn't
                self._known = [event for event in position.events if event.position <= position.position]
                self._noted = ()
            self._note(position.events)
            self._is_due = self._is_new = False
            pending.marked = self._step
            if self._run.counts_groups:
                self._is_marking = True
                state = {"step": self._step, "origin": pending.origin, "state": self._run.state()}
                self._is_marking = False
                pending.writer.add(Record("mark", state, {}))
            pending.write_usual(self._step)
        pending.flush_if_due()

    def taken(self, batch: Batch) -> None:
        """Count the step, and note events that a mark doesn't have."""
        self._note(self._run.position.events)
        self._step += 1

    def event_set(self, event: Event, reason: Mapping[str, object]) -> None:
        """Keep the reason of an event until it is written; what an extension sets is in its state."""
        if event.kind in (WEIGHTS, BATCH_SIZE):
            self._reasons.append((event, reason))
        else:
            self._is_due = True

    def _note(self, events: Sequence[Event]) -> None:
        """Write events that aren't written."""
        if events == self._noted:
            return
        assert self._pending is not None
        self._noted = events
        for event in [event for event in events if event not in self._known]:
            self._known.append(event)
            reason = next((reason for other, reason in self._reasons if other == event), {})
            self._reasons = [pair for pair in self._reasons if pair[0] != event]
            values = {"step": self._step, "origin": self._pending.origin, "event": event, "reason": reason}
            self._pending.writer.add(Record("event", values, {}))

    def yielded(self, part: bytes, values: dict[str, object]) -> Mapping[str, object]:
        """Take the worker's message; the batch's info gets the step of the run."""
        step, pending = self._step - 1, self._pending
        assert pending is not None
        pending.add(step, *_DIGESTS.unpack_from(part))
        if len(part) > _DIGESTS.size:
            from streamload.worker.reader import ENDED_COLUMNS

            pending.add_ended(np.frombuffer(part[_DIGESTS.size :], np.int64).reshape(-1, ENDED_COLUMNS))
        return {"run_step": step}

    def report(self, values: Mapping[str, object], info: BatchInfo, rows: Any) -> None:
        """Keep the worst of the rows' losses, and their mean."""
        loss = values["loss"]
        if loss is None or info.run_step is None or self._pending is None:
            return
        self._pending.report(loss, info, rows)

    def end_epoch(self) -> None:
        """Write all steps but the last ones, whose losses may be reported now."""
        if self._pending is not None:
            self._pending.flush(_ON_THE_WAY)

    def close(self) -> None:
        """Write all there is."""
        if self._pending is not None:
            self._pending.end()

    def state(self, position: int) -> Mapping[str, object]:
        """The place in the journal, which has all steps before it: a killed run goes on from there."""
        if self._pending is not None and not self._is_marking:
            self._pending.flush()
        if not self._segment:
            return {} if self._parent is None else {NAME: {"segment": self._parent[0], "step": self._step}}
        return {NAME: {"segment": self._segment, "step": self._step}}

    def load(self, state: Mapping[str, object]) -> None:
        """Begin another segment with the next epoch, after the state's step.

        Raises:
            StateMismatch: its part of the state is damaged.
        """
        place: Any = state.get(NAME, {"segment": None, "step": 0})
        try:
            segment, step = place["segment"], range(place["step"] + 1)[-1]
        except (TypeError, KeyError, IndexError):
            raise StateMismatch(f"not a valid state of a loader: {place!r:.50} as {NAME}") from None
        self.close()
        self._pending, self._segment, self._step = None, "", step
        self._parent = None if segment is None else [segment, step]


class _Unwritten:
    """What isn't written yet of a segment.

    Args:
        writer: of the file.
        sources: their names.

    Attributes:
        writer: the same.
        marked: the step of the last mark.
        origin: the step at which the sequence began, or was taken up.
    """

    def __init__(self, writer: RecordWriter, sources: Sequence[str]):
        self._sources = sources
        self._reports: Reports | None = None  # of losses since the last mark
        self.writer, self.marked, self.origin = writer, -1, 0
        self._first, self._digests, self._contents = 0, list[int](), list[int]()
        self._losses: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._told: dict[tuple[int, int, int], set[int]] = {}  # shards by group, source and pass
        self._ended: list[npt.NDArray[np.int64]] = []
        self._flushed = time.monotonic()

    def begin_sequence(self, step: int) -> None:
        """Passes are counted from here on."""
        self.flush()
        self._told.clear()
        self.origin = step

    def add(self, step: int, digest: int, content: int) -> None:
        """Add a step, which follows the last one."""
        if not self._digests:
            self._first = step
        self._digests.append(digest)
        self._contents.append(content)

    def add_ended(self, rows: npt.NDArray[np.int64]) -> None:
        """Add shards that a worker found to have ended; others have found most of them, too."""
        fresh = []
        for place, (group, source, pass_, shard) in enumerate(rows[:, :4].tolist()):
            shards = self._told.get((group, source, pass_))
            if shards is None:
                shards = self._told[group, source, pass_] = set()
                self._told.pop((group, source, pass_ - _PASSES_KEPT), None)
            if shard not in shards:
                shards.add(shard)
                fresh.append(place)
        if fresh:
            self._ended.append(rows[fresh])

    def report(self, loss: Any, info: BatchInfo, rows: Any) -> None:
        """Take the losses of rows of a step. Nothing waits for their device."""
        if self._reports is None:
            self._reports = Reports(len(self._sources))
        self._reports.add(LOSS, loss, info, rows)  # checks them
        assert info.run_step is not None
        with torch.no_grad():
            losses = torch.as_tensor(loss).detach().float()
            is_by_row, losses = bool(losses.dim()), losses.reshape(-1)
            worst, places = losses[:0], torch.empty(0, dtype=torch.int64, device=losses.device)
            if is_by_row:
                worst, places = losses.topk(min(WORST, losses.numel()))
                places = _rows_at(places, rows, info.rows)
            many = losses.numel() if is_by_row else info.rows
            sums = torch.stack([losses.mean() * many, losses.new_tensor(float(many))])
        self._losses.setdefault(info.run_step, []).append((torch.cat([sums, worst]), places))

    def write_usual(self, step: int) -> None:
        """Write the means of what was reported of each source, for which its device is waited for."""
        if self._reports is None:
            return
        sums, self._reports = self._reports.read(), None
        signals = [signal_of(sums, LOSS, place) for place in range(len(self._sources))]
        usual = {
            name: [int(signal.count), signal.mean]
            for name, signal in zip(self._sources, signals, strict=True)
            if signal.count
        }
        self.writer.add(Record("usual", {"step": step, "sources": usual}, {}))

    def end(self) -> None:
        """Write all there is."""
        self.write_usual(self._first + len(self._digests))
        self.flush()

    def flush_if_due(self) -> None:
        """Write steps once there are enough, or after a while."""
        is_late = time.monotonic() - self._flushed > _FLUSH_SECONDS
        if len(self._digests) >= _FLUSH_STEPS + _ON_THE_WAY or (is_late and len(self._digests) > _ON_THE_WAY):
            self.flush(_ON_THE_WAY)

    def flush(self, kept: int = 0) -> None:
        """Write all steps but the latest."""
        self._flushed = time.monotonic()
        if self._ended:
            shards = {"shards": np.concatenate(self._ended)}
            self.writer.add(Record("ended", {"origin": self.origin}, shards))
            self._ended.clear()
        count = len(self._digests) - kept
        if count <= 0:
            return
        arrays: dict[str, npt.NDArray[Any]] = {"digest": np.array(self._digests[:count], np.uint64)}
        if any(self._contents[:count]):
            arrays["content"] = np.array(self._contents[:count], np.uint32)
        if any(step < self._first + count for step in self._losses):
            arrays |= self._losses_of(count)
        self.writer.add(Record("steps", {"step": self._first}, arrays))
        self._first += count
        del self._digests[:count], self._contents[:count]

    def _losses_of(self, count: int) -> dict[str, npt.NDArray[Any]]:
        """The mean loss of each step, and its worst rows with their losses; NaN where there is none."""
        means = np.full(count, np.nan, np.float32)
        rows, worst = np.zeros((count, WORST), np.uint32), np.full((count, WORST), np.nan, np.float32)
        has_loss = np.zeros(count, np.uint8)
        for step in [step for step in self._losses if step < self._first + count]:
            reports, place = self._losses.pop(step), step - self._first
            if place < 0:
                continue
            parts = [(values.cpu().numpy(), places.cpu().numpy()) for values, places in reports]
            sums = np.sum([values[:2] for values, _ in parts], axis=0)
            means[place] = sums[0] / sums[1]
            losses = np.concatenate([values[2:] for values, _ in parts])
            places = np.concatenate([places for _, places in parts])
            order = np.argsort(-np.nan_to_num(losses, nan=np.inf), kind="stable")[:WORST]
            has_loss[place] = len(order)
            worst[place, : len(order)], rows[place, : len(order)] = losses[order], places[order]
        narrow = rows.astype(np.uint16) if rows.max(initial=0) < _WIDEST_ROW else rows
        most = np.finfo(np.float16).max
        narrow_worst = np.where(np.isfinite(worst), worst.clip(-most, most), worst).astype(np.float16)
        return {"loss": means, "rows": narrow, "worst": narrow_worst, "count": has_loss}


def _rows_at(places: torch.Tensor, rows: Any, count: int) -> torch.Tensor:
    """The rows of a batch of `count` at places in a report on some of them."""
    if rows is None:
        return places
    if isinstance(rows, slice):
        start, _, step = rows.indices(count)
        return places * step + start
    index = torch.as_tensor(rows, device=places.device)
    if index.dtype == torch.bool:
        index = (~index).to(torch.uint8).argsort(stable=True)
        return index[places]
    return index[places] % count  # -1 is the last one


def _finish(pending: _Unwritten, pid: int) -> None:
    """Write what is left, as the loader goes or the process ends."""
    if os.getpid() == pid:
        pending.end()


def _stored_options(options: LoaderOptions, folder: Path) -> dict[str, Any]:
    """Keep the loader's options beside the journal, for `streamload replay`; return where they are.

    The file is only for its owner: options may have credentials.
    """
    if unpicklable := [name for name, _ in options.unpicklable()]:
        return {"unpicklable": unpicklable}
    text = zlib.compress(pickle.dumps(replace(options, extensions=())))
    path = folder / f"loader-{xxhash.xxh3_64_hexdigest(text)}.pickle"
    if not path.is_file():
        part = path.with_suffix(".part")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text)
        part.replace(path)
    return {"loader": path.name}
