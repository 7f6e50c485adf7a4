"""Reports of the training on rows, summed by source on the device where it lies; read at decisions only.

A report costs one copy into a buffer of its device. When that is full, and when the sums are read, all that
it holds is summed at once. Nothing but `read` waits for the device.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from streamload.errors import OptionError
from streamload.extension import RankPart
from streamload.steering import Signal
from streamload.steering.summary import PARTS

if TYPE_CHECKING:
    from streamload.extension import BatchInfo

Rows = slice | Sequence[int] | npt.NDArray[Any] | torch.Tensor
"""Some rows of a batch: a slice, their numbers, or bool[N]."""
_BUFFER_VALUES = {"cpu": 1 << 13}
"""Values that are summed at once: what a processor's cache holds. On other devices, so many that their calls
take no time."""
_DEVICE_VALUES = 1 << 16
_EVERY = 200
"""So many steps apart ReportedMeans reads its sums, for which their device is waited for."""
_TOTAL_GRID, _SQUARES_GRID = 2.0**26, 2.0**20
"""Values and their squares are rounded to one part in this, so that sums are exact and don't depend on their
order, as long as they are below 2^27 and 2^33."""
_COUNT, _TOTAL, _SQUARES, _BAD = range(4)
LOSS, ALIGNMENT, TOKENS = 0, PARTS, PARTS + 1
"""The first lines of the sums: of losses one for each part of an interval, of the others one."""
_LINES = PARTS + 2

Sums = npt.NDArray[np.float64]
"""float64[PARTS + 2, sources, 4]: the number of finite values, their sum, that of their squares; how many
values were not finite."""


class Reports:
    """Reports on this rank since the last decision.

    Args:
        sources: their number.

    Attributes:
        evaluations: by the sources' indexes, what was reported last.
    """

    def __init__(self, sources: int):
        self.evaluations: dict[int, float | torch.Tensor] = {}
        self._sources = sources
        self._sums = empty_sums(sources)
        self._buffers: dict[torch.device, _Buffer] = {}

    def add(self, line: int, values: Any, info: BatchInfo, rows: Rows | None) -> None:
        """Add values of rows of a batch.

        Args:
            line: of the sums: LOSS + the part of the interval, ALIGNMENT or TOKENS.
            values: of each of these rows, on any device; or a single one, of all of them.
            info: of the batch.
            rows: of it; None: all.

        Raises:
            OptionError: they aren't as many numbers as rows.
        """
        if not isinstance(values, torch.Tensor):
            values = torch.as_tensor(values, dtype=torch.float32)
        seats, count = (info.seat_bytes, info.rows) if rows is None else _seats(info, rows, values)
        shape = values.shape
        if len(shape) > 1 and values.numel() == count:
            values, shape = values.reshape(-1), (count,)
        if len(shape) > 1 or (shape and shape[0] != count) or values.is_complex():
            raise OptionError(
                f"report() takes one number for each of the {count} rows, or one for all of them, not "
                f"{values.dtype} {list(shape)}: give rows= if these are of some rows of the batch only"
            )
        buffer = self._buffers.get(values.device)
        if buffer is None:
            buffer = self._buffers[values.device] = _Buffer(values.device, _LINES * self._sources)
        buffer.add(values.detach(), count, line * self._sources, seats)

    def read(self) -> Sums:
        """The sums so far. Waits for the devices on which something was reported since the last time."""
        for buffer in self._buffers.values():
            self._sums += buffer.read().reshape(self._sums.shape)
        return self._sums

    def read_evaluations(self) -> dict[str, float]:
        """Reports of each source, by its index; values that aren't finite are left out."""
        by_source = {str(source): float(value) for source, value in self.evaluations.items()}
        return {source: value for source, value in by_source.items() if np.isfinite(value)}

    def clear(self) -> None:
        """Begin anew; what was reported is in sums that were read."""
        self.evaluations.clear()
        self._sums = empty_sums(self._sources)


class _Buffer:
    """The reports on one device that aren't summed yet, and the sums of those that are.

    Args:
        device: where.
        lines: of the sums.
    """

    def __init__(self, device: torch.device, lines: int):
        self._device, self._used = device, 0
        self._seats: list[bytes] = []  # of each pending report, as in BatchInfo.seat_bytes
        self._firsts: list[int] = []  # the line of its first source
        self._counts: list[int] = []  # its values
        self._on_device: list[tuple[int, torch.Tensor]] = []  # where lines follow that are on the device
        self._is_summed = False
        # MPS has no float64: there, sums are not exact.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._allocate(_BUFFER_VALUES.get(device.type, _DEVICE_VALUES))
        with torch.inference_mode(False):
            self._sums = torch.zeros((4, lines), dtype=self._dtype, device=device)

    def _allocate(self, size: int) -> None:
        self._size = size
        with torch.inference_mode(False):  # a tensor of inference mode can't be written outside of it
            self._values = torch.empty(size, dtype=torch.float32, device=self._device)
            self._columns = torch.empty((4, size), dtype=self._dtype, device=self._device)

    def add(self, values: torch.Tensor, count: int, first: int, seats: bytes | torch.Tensor) -> None:
        if self._used + count > self._size:
            self._sum_up()
            if count > self._size:
                self._allocate(count)
        start, self._used = self._used, self._used + count
        self._values[start : self._used].copy_(values)
        if isinstance(seats, torch.Tensor):
            self._on_device.append((start, seats + first))
            seats = b""
        self._seats.append(seats or bytes(4 * count))
        self._firsts.append(first)
        self._counts.append(count)

    def read(self) -> Sums:
        """The sums since the last time."""
        self._sum_up()
        if not self._is_summed:
            return np.zeros(tuple(self._sums.T.shape))
        sums: Sums = self._sums.cpu().numpy().T.astype(np.float64)
        self._sums.zero_()
        self._is_summed = False
        sums[:, _TOTAL] /= _TOTAL_GRID
        sums[:, _SQUARES] /= _SQUARES_GRID
        return sums

    def _sum_up(self) -> None:
        """Add the pending reports to the sums; starts work on the device without waiting for it."""
        if not self._used:
            return
        # int64: torch adds by int32 at a fraction of the speed.
        lines = np.repeat(np.array(self._firsts, np.int64), self._counts)
        lines += np.frombuffer(b"".join(self._seats), np.int32)
        with torch.no_grad():
            places = _to(torch.from_numpy(lines), self._device)
            for start, values in self._on_device:
                places[start : start + values.shape[0]] = values
            columns = self._columns[:, : self._used]
            count, total, squares, bad = columns
            total.copy_(self._values[: self._used])
            torch.eq(torch.sub(total, total, out=bad), 0, out=count)
            total.nan_to_num_(0.0, 0.0, 0.0)
            torch.mul(total, total, out=squares).mul_(_SQUARES_GRID).round_()
            total.mul_(_TOTAL_GRID).round_()
            bad.fill_(1).sub_(count)
            self._sums.index_add_(1, places, columns)
        self._used, self._is_summed = 0, True
        for pending in (self._seats, self._firsts, self._counts, self._on_device):
            pending.clear()


@dataclass(frozen=True, slots=True)
class Reported:
    """Reports of one rank, as they travel to rank 0, and as they stand in a state.

    Attributes:
        sums: of the values by source.
        evaluations: by the sources' indexes.
        sizes: of the sources, by their indexes, as far as their passes tell: at most so many samples.
    """

    sums: Sums
    evaluations: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values; the sums to the bit."""
        return {
            "sums": base64.b64encode(self.sums.astype("<f8").tobytes()).decode() if self.sums.any() else "",
            "evaluations": dict(sorted(self.evaluations.items())),
            "sizes": dict(sorted(self.sizes.items())),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], sources: int) -> Reported:
        """Read the result of `to_json`.

        Raises:
            ValueError: it is of another number of sources, or something else.
        """
        shape = empty_sums(sources).shape
        sums = np.frombuffer(base64.b64decode(value["sums"], validate=True), "<f8")
        if not value["sums"]:
            sums = np.zeros(int(np.prod(shape)))
        if sums.size != np.prod(shape) or not np.isfinite(sums).all():
            raise ValueError(f"not the sums of {sources} sources")
        numbers = [numbers_of(value[name], sources) for name in ("evaluations", "sizes")]
        return cls(sums.reshape(shape).astype(np.float64), *numbers)


class ReportedMeans(RankPart):
    """The means of what was reported of each source over the last steps, on this rank.

    Args:
        names: of the sources.
    """

    def __init__(self, names: Sequence[str]):
        self.takes_reports = True
        self.reported: list[dict[str, Any]] = []
        self._names = names
        self._forget()

    def _forget(self) -> None:
        self._reports = Reports(len(self._names))
        self._steps, self._is_empty = 1, True

    def report(self, values: Mapping[str, Any], info: BatchInfo, rows: Rows | None) -> None:
        """Take a report; see Loader.report."""
        for line, name in ((LOSS, "loss"), (ALIGNMENT, "alignment")):
            if values[name] is not None:
                self._reports.add(line, values[name], info, rows)
                self._is_empty = False

    def load(self, state: Mapping[str, Any]) -> None:
        """Forget what was reported in another run."""
        self._forget()

    def before_batch(self) -> None:
        """Every 200 steps read the loss and alignment of each source since the last time."""
        self._steps += 1
        if self._steps % _EVERY or self._is_empty:
            return
        sums = self._reports.read()
        self.reported = [
            {
                "name": name,
                "loss": signal_of(sums, LOSS, place).mean,
                "alignment": signal_of(sums, ALIGNMENT, place).mean,
            }
            for place, name in enumerate(self._names)
        ]
        self._reports.clear()
        self._is_empty = True


def merged(reported: Sequence[Reported], sources: int) -> Reported:
    """The sums of several ranks; of their evaluations the mean, of sizes the least."""
    sums = empty_sums(sources)
    evaluations: dict[str, list[float]] = {}
    sizes: dict[str, float] = {}
    for part in reported:
        sums = sums + part.sums
        for source, value in part.evaluations.items():
            evaluations.setdefault(source, []).append(value)
        for source, size in part.sizes.items():
            sizes[source] = min(size, sizes.get(source, size))
    means = {source: sum(values) / len(values) for source, values in sorted(evaluations.items())}
    return Reported(sums, means, dict(sorted(sizes.items())))


def numbers_of(value: Mapping[str, Any], sources: int) -> dict[str, float]:
    """Finite numbers by the sources' indexes.

    Raises:
        ValueError: something else.
    """
    numbers = {str(int(source)): float(number) for source, number in value.items()}
    if (
        any(not 0 <= int(source) < sources for source in numbers)
        or not np.isfinite(list(numbers.values())).all()
    ):
        raise ValueError(f"numbers of other sources than {sources}")
    return numbers


def empty_sums(sources: int) -> Sums:
    """The sums of nothing."""
    return np.zeros((_LINES, sources, 4))


def signal_of(sums: Sums, line: int, source: int) -> Signal:
    """Reports of a source in one line of the sums."""
    return Signal(*sums[line, source, :_BAD].tolist())


def bad_of(sums: Sums, source: int) -> int:
    """Number of values of a source that were not finite."""
    return int(sums[:, source, _BAD].sum())


def _seats(info: BatchInfo, rows: Rows, values: torch.Tensor) -> tuple[bytes | torch.Tensor, int]:
    """The sources of some rows, on the device if that has the rows' numbers, which aren't read; how many."""
    if isinstance(rows, torch.Tensor) and rows.device.type != "cpu":
        if rows.dtype == torch.bool:  # as many as there are values, in their order
            rows = (~rows).to(torch.uint8).argsort(stable=True)[: max(1, values.numel())]
        seats = info.source.to(rows.device, non_blocking=True)[rows]
        return seats, seats.shape[0]
    if not isinstance(rows, slice):
        rows = np.asarray(rows)
    try:
        found: npt.NDArray[np.int32] = info.seats[rows]
    except IndexError as exc:
        raise OptionError(f"report(rows=…) of a batch of {info.rows} rows: {exc}") from None
    return found.tobytes(), len(found)


def _to(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, for which the processor doesn't wait."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
