"""Number of rows of a step that go through the device at once, for `Batches(microbatch="auto")`.

Parts grow while it is seen what they take; which rows a step trains on never changes, and no row is computed
twice. All ranks have parts of one size: the least of what each has room for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from streamload.device import DeviceMemory

_SPARE = 0.06
"""Of the device's memory: for fragmentation, and for what differs between parts of one shape."""
_PROBED_STEPS = 3
"""Steps in which sizes are looked for: in the first, gradients appear, and behind it an optimizer's state."""
_DIVISORS = (1, 2, 4)
"""Of the largest size: which sizes are timed, each for one step."""
_AS_FAST = 0.97
_DECISION_STEPS = 32
_HIGH, _LOW, _LOW_TIMES = 1 - _SPARE / 2, 0.70, 3
"""Above the first share of the memory parts get smaller; below the second, so many times in a row, larger."""


Agree = Callable[[float], float]
"""Returns the least of the ranks' values; all of them have to call it."""


class PartSizer:
    """The number of rows of each part.

    A part of n rows counts as n × (its width ÷ widest)² of the widest rows: attention is quadratic in width,
    all else grows more slowly. If it took so many bytes, m of the widest rows take at most bytes × max(1, m ÷
    that number): a part that is smaller has the same fixed cost (weights cast by autocast, workspaces), and
    in one that is larger the fixed cost counts as its rows'. So each part gives a bound, and the least of all
    holds.

    Args:
        memory: of the device.
        agree: among the ranks.
        decoding_bytes: that decoding the next step's images may take at any time.
        most_rows: returns the most rows of a part on a device of a memory, once one ran out of it.

    Attributes:
        memory: the same.
        rows: of a part, from now on.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        agree: Agree,
        decoding_bytes: int = 0,
        most_rows: Callable[[int], float] = lambda limit_bytes: math.inf,
    ):
        self.rows, self._most_rows = 1, most_rows
        self.memory, self._agree, self._decoding_bytes = memory, agree, decoding_bytes
        self._seen: dict[int, tuple[float, int]] = {}  # by size, parts: widest rows, and bytes taken
        self._growth_bytes = 0  # of what stays, in the first part of a step: gradients
        self._ahead_bytes = 0
        self._step, self._part = 0, 0
        self._begun_bytes, self._began = 0, 0.0
        self._work = 0.0  # of the step so far: rows × width
        self._largest, self._rates = 0, [0.0] * len(_DIVISORS)
        self._peak_share, self._low = 0.0, 0

    def begin_part(self, left: int, ahead_bytes: int = 0) -> int:
        """Number of rows of the next part.

        Args:
            left: rows of the step.
            ahead_bytes: of the step's batch: as much may arrive for the next step at any time.
        """
        memory, self._ahead_bytes = self.memory, ahead_bytes
        if self._step < _PROBED_STEPS:
            self.rows = int(self._agree(float(self._probed(left))))
        if self._is_timed and self._part == 0:
            self._began = memory.seconds()
        self._begun_bytes = memory.allocated_bytes()
        memory.reset_peak()
        return min(self.rows, left)

    def end_part(self, rows: int, width: float) -> None:
        """The part was computed.

        Args:
            rows: of it.
            width: its width ÷ the widest, from above 0 to 1.
        """
        memory = self.memory
        stays, peak = memory.allocated_bytes(), memory.peak_bytes()
        # What was let go of meanwhile, or came to stay, counts as taken: both make the bound larger. Only a
        # step's first part is left out, in which gradients appear and the last batch goes.
        part_bytes = max(peak - min(stays, self._begun_bytes), 1)
        if self._part > 0 or not self._seen:
            self._add_seen(rows * width**2, part_bytes)
        if self._part == 0:
            self._growth_bytes = max(self._growth_bytes, stays - self._begun_bytes)
        self._peak_share = max(self._peak_share, peak / memory.limit_bytes())
        self._part += 1
        self._work += rows * width

    def begin_again(self, rows: int) -> None:
        """The step begins again in parts of at most so many rows, on all ranks: a part ran out of memory."""
        self.rows, self._largest = min(self.rows, rows), min(self._largest, rows)
        self._part, self._work = 0, 0.0
        self.memory.free_unused()

    def end_step(self) -> None:
        """The step's parts were computed."""
        work, self._work = self._work, 0.0
        self._part = 0
        self._step += 1
        if self._step == _PROBED_STEPS:
            self._largest = self.rows
        timed = self._step - _PROBED_STEPS
        if 1 <= timed <= len(_DIVISORS):
            self._rates[timed - 1] = work / max(self.memory.seconds() - self._began, 1e-9)
        if timed == len(_DIVISORS):
            self.rows = self._fastest()
        elif self._is_timed:
            self.rows = max(1, self._largest // _DIVISORS[timed])
        elif self._step % _DECISION_STEPS == 0:
            self._decide()

    @property
    def _is_timed(self) -> bool:
        return _PROBED_STEPS <= self._step < _PROBED_STEPS + len(_DIVISORS)

    def _probed(self, left: int) -> int:
        """The size that is tried next: twice the last one, if there is room for it."""
        doubled = 2 * self.rows if self._seen else 1
        most = left if self._part == 0 else doubled  # the rest of a step may be small: that is no size
        return max(1, min(doubled, self._fitting(), most))

    def _add_seen(self, widest_rows: float, part_bytes: int) -> None:
        """Keep what a part took: of parts of about one size (× 2^¼) the one that gives larger parts least."""
        size = math.floor(4 * math.log2(widest_rows))
        rows, most_bytes = self._seen.get(size, (0.0, 1))
        if part_bytes * rows <= most_bytes * widest_rows:
            self._seen[size] = widest_rows, part_bytes

    def _fitting(self) -> int:
        """Number of rows of the widest shape for which there is room now."""
        limit_bytes = self.memory.limit_bytes()
        room = (1 - _SPARE) * limit_bytes - self.memory.allocated_bytes()
        room -= self._ahead_bytes + self._decoding_bytes
        if self._part == 0:
            room -= self._growth_bytes
        fitting = (rows * room / part_bytes for rows, part_bytes in self._seen.values() if part_bytes <= room)
        return max(1, int(min(max(fitting, default=1), self._most_rows(limit_bytes))))

    def _fastest(self) -> int:
        """The smallest of the timed sizes that is about as fast as the fastest."""
        rates = [self._agree(rate) for rate in self._rates]
        fast = [place for place, rate in enumerate(rates) if rate >= _AS_FAST * max(rates)]
        self._largest = max(1, self._largest // _DIVISORS[max(fast)])
        return self._largest

    def _decide(self) -> None:
        """One size down where memory is short, up again where there was room for long."""
        share = -self._agree(-self._peak_share)
        self._peak_share = 0.0
        self._low = self._low + 1 if share < _LOW else 0
        if share > _HIGH:
            self.rows = max(1, self.rows * 3 // 4)
        elif self._low >= _LOW_TIMES:
            larger = min(self._largest, self.rows + max(1, self.rows // 4))
            self.rows = max(self.rows, min(larger, int(self._agree(float(self._fitting())))))
            self._low = 0
