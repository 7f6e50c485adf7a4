"""Microbatches: a step's batch in parts of consecutive rows, each cut to its own longest row.

Parts are views. Which rows a step trains on never changes, and parts have equal rows on all ranks.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from streamload.batches.collate import Cells, Views
from streamload.batching.part_size import Agree, PartSizer
from streamload.batching.retry import AnotherRanOut, RanOut, StepRetry
from streamload.derived.calls.features import FeatureRows
from streamload.device import DeviceMemory, memory_of
from streamload.errors import OptionError, RankFailed, StreamloadError, add_note
from streamload.extension import RowWidths, Yielded

if TYPE_CHECKING:
    from streamload.extension import BatchInfo

logger = logging.getLogger("streamload")

_PATCHES = ("patches", "patch_coord", "patch_valid")
_MOST_WIDTHS = 16
"""Widths of parts where captions or images vary; where both do, a quarter and a half of it: 32 shapes."""
_KEYS_SHOWN = 4
_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class DictPart(dict[str, Any]):
    """A part of a batch with named values.

    Attributes:
        fraction: its share of the batch's rows.
        rows: its rows in the batch.
        is_last: whether it is the batch's last part.
    """

    fraction: float
    rows: slice
    is_last: bool


class TuplePart(tuple[Any, ...]):
    """A part of a batch that is a tuple; the attributes are those of DictPart."""

    fraction: float
    rows: slice
    is_last: bool


class Cut(NamedTuple):
    """The shape of a part.

    Attributes:
        rows: of the batch.
        tokens, patches: columns; 0: there are none, or they aren't cut.
    """

    rows: slice
    tokens: int
    patches: int

    @property
    def padded(self) -> int:
        """Its tokens and patches with padding."""
        rows: int = self.rows.stop - self.rows.start
        return rows * (self.tokens + self.patches)


def cut_of(yielded: Yielded, first: int, stop: int) -> Cut:
    """The shape of some rows: their most tokens and patches, rounded up so that shapes are few."""
    rows, widths = slice(first, stop), yielded.widths
    if widths is None or stop <= first:
        return Cut(rows, 0, 0)
    most = widths.bounds[rows].max(0).tolist()
    shares = (4, 2) if all(widths.varies) else (1, 1)
    return Cut(rows, *map(_rounded, most, widths.full, shares))


def _describe(yielded: Yielded, cut: Cut) -> str:
    """Name the step, the shape and the keys of the dearest rows of a part."""
    rows, shape = cut.rows, f"rows {cut.rows.start}–{cut.rows.stop - 1} of {yielded.samples}"
    shape += "".join(
        f", {count} {name}" for name, count in zip(cut._fields[1:], cut[1:], strict=True) if count
    )
    order: npt.NDArray[np.intp] | range = range(rows.stop - rows.start)
    if yielded.widths is not None:
        order = np.argsort(-yielded.widths.bounds[rows].sum(1), kind="stable")
    keys = [repr(yielded.keys[rows.start + int(place)]) for place in order[:_KEYS_SHOWN]]
    return f"in step {yielded.step}, a microbatch of {shape}; its largest samples: {', '.join(keys)}"


class Microbatches:
    """The parts of a batch: iterate it once, to its end, or once in each of its `attempts`.

    As a context manager it adds to an out-of-memory error what was being computed, and in the first of two
    attempts it ends there.

    Args:
        batch: as the training loop got it.
        yielded: what is known of it.
        rows: of each part, the last of which may have fewer; a sizer decides on each; None: all.
        longest: the most patches of an image of any step; 0: images aren't patches.
        max_tokens: of a part, padding and patches included; None: any.
        retry: how ranks agree to begin again; None: there is one attempt.
    """

    def __init__(
        self,
        batch: Any,
        yielded: Yielded,
        rows: int | PartSizer | None,
        longest: int = 0,
        max_tokens: int | None = None,
        retry: StepRetry | None = None,
    ):
        self._batch, self._yielded, self._longest = batch, yielded, longest
        self._max_tokens = max_tokens
        self._rows = rows if rows is not None else max(1, yielded.samples)
        self._planned = list(yielded.cells or ())
        self._used: Cut | None = None  # the part that the training loop is using
        self._retry = retry
        self._is_entered, self._can_begin_again = False, False
        self._ran_out: RanOut | None = None

    def attempts(self, zero_grad: Callable[[], object]) -> Iterator[Microbatches]:
        """Compute a step by its parts, and once more, in smaller ones, if memory runs out on any rank.

            for parts in loader.microbatches(batch).attempts(optimizer.zero_grad):
                with parts:
                    for part in parts:
                        compute(part)
            optimizer.step()

        With `microbatch="auto"`; otherwise there is one attempt. See docs/reference/batches.md for what ranks
        mustn't do within a part.

        Args:
            zero_grad: removes all gradients; called before each attempt, so that none of an attempt that
                failed, in forward or backward, counts.

        Yields:
            This object, for one `with` and, in it, one `for` loop.

        Raises:
            OptionError: ranks of a training that nothing joins.
        """
        sizer, retry = self._rows, self._retry
        if retry is not None:
            retry.begin_step()
        self._can_begin_again = retry is not None
        zero_grad()
        yield self
        self._can_begin_again = False
        if self._ran_out is not None and isinstance(sizer, PartSizer):
            zero_grad()
            sizer.begin_again(self._ran_out.rows)
            logger.warning(
                "step %d begins again, in microbatches of at most %d rows",
                *(self._yielded.step, self._ran_out.rows),
            )
            yield self

    def __iter__(self) -> Iterator[Any]:
        if self._batch is None:
            raise OptionError(
                "these parts were iterated before: call loader.microbatches(batch) for each loop over them"
            )
        samples, sizer = self._yielded.samples, self._rows
        batch_bytes = sum(tensor.nbytes for tensor in _tensors(self._batch))
        first = 0
        while first < samples:
            rows = self._planned.pop(0) if self._planned else sizer
            if not isinstance(rows, int):
                rows = rows.begin_part(samples - first, batch_bytes)
            self._used = cut = self._cut(first, min(first + rows, samples))
            if self._can_begin_again and not self._is_entered:
                raise OptionError(
                    "an attempt is a context manager: `with parts:` around `for part in parts:`"
                )
            yield _part(self._batch, self._yielded, cut)
            if self._can_begin_again and self._retry is not None:
                self._ran_out = self._retry.agree(None)
                if self._ran_out is not None:
                    raise AnotherRanOut
            if not isinstance(sizer, int):
                sizer.end_part(cut.rows.stop - first, self._width_of(cut))
            first = cut.rows.stop
        if not isinstance(sizer, int):
            sizer.end_step()
        self._used = self._batch = None  # the batch's memory is used again

    def _cut(self, first: int, stop: int) -> Cut:
        """The shape of the part that begins at a row, with fewer rows where it would have too many tokens."""
        cut, least = cut_of(self._yielded, first, stop), first + 1
        if self._max_tokens is None or cut.padded <= self._max_tokens:
            return cut
        while stop - least > 1:
            middle = (least + stop) // 2
            fits = cut_of(self._yielded, first, middle).padded <= self._max_tokens
            least, stop = (middle, stop) if fits else (least, middle)
        return cut_of(self._yielded, first, least)

    def _width_of(self, cut: Cut) -> float:
        """The width of a part ÷ that of the widest one."""
        widths = self._yielded.widths
        if widths is None:
            return 1.0
        longest = widths.full[0], self._longest
        return min(have / most if have and most else 1.0 for have, most in zip(cut[1:], longest, strict=True))

    def __enter__(self) -> Microbatches:
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        cut, self._is_entered = self._used, False
        self.explain(error)
        if isinstance(error, AnotherRanOut):
            return True
        if not (self._can_begin_again and cut is not None and isinstance(error, Exception)):
            return False
        return has_device_no_memory(error) and self._begins_again(error, cut)

    def _begins_again(self, error: Exception, cut: Cut) -> bool:
        """Agree on another attempt after a part ran out of memory; False: there is none, and a note why."""
        assert self._retry is not None
        assert isinstance(self._rows, PartSizer)
        logger.warning("memory ran out %s", _describe(self._yielded, cut))
        rows = (cut.rows.stop - cut.rows.start) // 2
        try:
            self._ran_out = self._retry.agree(RanOut(rows, self._rows.memory.limit_bytes()))
        except RankFailed as exc:
            add_note(error, f"The step doesn't begin again: {exc}")
        return self._ran_out is not None

    def explain(self, error: BaseException | None) -> None:
        """Add to an out-of-memory error which part was in use. Once."""
        if self._used is not None and isinstance(error, Exception) and is_out_of_memory(error):
            add_note(error, _describe(self._yielded, self._used))
            self._used = None


class Microbatching:
    """Microbatches of a loader's batches.

    Args:
        rows: of each part; None: all; "auto": as many as the device has room for.
        least: returns the least of the ranks' values; all of them have to call it.
        longest: the most patches of an image of any step; 0: images aren't patches.
        max_tokens: of a part, padding and patches included; None: any.
        names: those of values in a batch that has them under others.
        decoding_bytes: of the device's memory, that decoding images takes.
        retry: how ranks agree to begin a step again; "auto" needs it.
    """

    def __init__(
        self,
        rows: int | Literal["auto"] | None,
        least: Agree,
        longest: int,
        max_tokens: int | None,
        names: Mapping[str, str],
        decoding_bytes: int = 0,
        retry: StepRetry | None = None,
    ):
        self._retry = retry
        self._rows, self._least, self._longest = rows, least, longest
        self._decoding_bytes = decoding_bytes
        self._max_tokens, self._names = max_tokens, names
        self._sizer: PartSizer | None = None
        self._parts: Microbatches | None = None  # of the last step

    def prepare(self, device: torch.device | None) -> None:
        """Go by the memory of a device, where that is asked for.

        Raises:
            OptionError: its memory can't be read.
        """
        if self._rows == "auto" and self._sizer is None:
            assert self._retry is not None
            memory, most_rows = _device_memory(device), self._retry.most_rows
            self._sizer = PartSizer(memory, self._least, self._decoding_bytes, most_rows)

    def parts(self, batch: Any, info: BatchInfo) -> Microbatches:
        """The parts of a batch.

        Raises:
            OptionError: the batch has tensors that haven't a row for each sample, or `prepare` has failed.
        """
        yielded, widths = info.yielded, info.yielded.widths
        if isinstance(widths, RowWidths) and self._names:
            names = tuple(self._names.get(name, name) for name in widths.texts)
            yielded = replace(yielded, widths=widths._replace(texts=names))
        self.prepare(info.device)
        rows = self._sizer if self._rows == "auto" else self._rows
        self._parts = Microbatches(batch, yielded, rows, self._longest, self._max_tokens, self._retry)
        return self._parts

    def explain(self, error: BaseException | None) -> None:
        """Add to an out-of-memory error which part was in use."""
        if self._parts is not None:
            self._parts.explain(error)


def _device_memory(device: torch.device | None) -> DeviceMemory:
    """Reader of the memory of the device.

    Raises:
        OptionError: nothing does.
    """
    memory = memory_of(device)
    if memory is None:
        raise OptionError(
            f"microbatch='auto' needs a device of which torch tells the memory, as of CUDA's, and "
            f"device={device}: give device='cuda', or a number of rows"
        )
    return memory


def is_out_of_memory(error: Exception) -> bool:
    """True if memory ran out, of a device or of this machine."""
    if has_device_no_memory(error) or isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def has_device_no_memory(error: Exception) -> bool:
    """True if the memory of a device ran out: of torch's allocator, or of a library beside it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_foreign = isinstance(error, RuntimeError) and not isinstance(
        error, StreamloadError
    )  # RankFailed quotes
    return is_foreign and any(text in str(error) for text in _NO_MEMORY)


def _part(batch: Any, yielded: Yielded, cut: Cut) -> DictPart | TuplePart:
    part: DictPart | TuplePart
    if yielded.cells is not None and isinstance(batch, list):  # collated by the cell
        cell = batch[_cell_at(yielded.cells, cut.rows.start)]
        part = DictPart(cell) if isinstance(cell, Mapping) else TuplePart(cell)
    elif isinstance(batch, Mapping):
        part = DictPart(_values(batch, yielded, cut))
    else:
        names = [*yielded.names, *[""] * (len(batch) - len(yielded.names))]
        part = TuplePart(_value(name, value, yielded, cut) for name, value in zip(names, batch, strict=True))
    part.fraction = (cut.rows.stop - cut.rows.start) / yielded.samples
    part.rows, part.is_last = cut.rows, cut.rows.stop == yielded.samples
    return part


def _cell_at(cells: Sequence[int], row: int) -> int:
    """The number of the cell that begins at a row."""
    return list(itertools.accumulate(cells, initial=0)).index(row)


def _values(values: Mapping[str, Any], yielded: Yielded, cut: Cut) -> dict[str, Any]:
    """The values of a part; features are left out, as their modules take the whole batch."""
    return {
        name: _value(name, value, yielded, cut)
        for name, value in values.items()
        if not isinstance(value, FeatureRows)
    }


def _value(name: str, value: Any, yielded: Yielded, cut: Cut) -> Any:
    if isinstance(value, Mapping):
        part = _values(value, yielded, cut)
        return (
            part | {"seq_len": part["patches"].shape[1]} if "patches" in part and "seq_len" in part else part
        )
    if isinstance(value, Views):
        return Views(_value(name, view, yielded, cut) for view in value)
    if isinstance(value, Cells):
        return value[cut.rows.start // len(value[0])]
    if isinstance(value, list):
        return value[cut.rows]
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    if len(value) != yielded.samples:
        raise OptionError(
            f"microbatches() cuts a batch by rows: {name or 'a value'} {list(value.shape)} hasn't "
            f"{yielded.samples}"
        )
    widths = yielded.widths
    if widths is not None and name in _PATCHES:
        return value[cut.rows, : cut.patches]
    if widths is not None and name in widths.texts:
        start = max(0, value.shape[1] - cut.tokens) if widths.pads_left else 0
        return value[cut.rows, start : start + cut.tokens]
    return value[cut.rows]


def _rounded(most: int, full: int, share: int) -> int:
    """A width rounded up to one of at most _MOST_WIDTHS ÷ share, of 8 columns at least; 0 stays 0."""
    step = -(-full * share // _MOST_WIDTHS)
    step = -(-step // 8) * 8
    return min(full, max(1, -(-most // step)) * step) if full else 0


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    values = batch.values() if isinstance(batch, Mapping) else batch
    for value in values if isinstance(values, tuple | list) else list(values):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping | tuple | list) and not isinstance(value, str):
            yield from _tensors(value)
