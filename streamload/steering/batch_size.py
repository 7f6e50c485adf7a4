"""Batch sizes that follow the throughput: pure decisions from measured waits, and what a policy of them is.

The loader measures, asks on rank 0, agrees and applies (mixing/batch_size.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from streamload.errors import OptionError
from streamload.options.values import at_least

FUNCTION_EVERY = 200
"""The steps between two decisions of a plain function."""
_FIRST_IGNORED = 2
"""Intervals at the start of a run, in which caches fill and kernels are tuned."""
_PATIENCE = 3
"""Intervals of a size before the next one is tried; so many in a row have to be late for data to be late."""
_SHORTEST_TRIAL, _LONGEST_TRIAL = 3, 8
"""Intervals by which a new size is judged: so many as it takes to be sure, by their own noise."""
_DEVIATIONS, _LEAST_NOISE = 2.5, 0.01
_FEW = 2.2
"""Student's t: of n degrees of freedom, 2.5 (1 + 2.2 / n) deviations are as sure as 2.5 of the true ones."""
_FACTOR, _FARTHEST = 1.5, 4.0
"""A size grows by the first where nothing is known of larger ones, and by the second at most."""
_HIGH = 0.10
"""The share of waiting above which data is late."""
_GAIN = 0.03
"""A larger size has to be faster by this share."""
_ROWS_TO_FIXED = (_FACTOR - 1 - _GAIN) / (_FACTOR * _GAIN)
"""Rows take this many times as long as what a step costs whatever its size, where _FACTOR gains _GAIN."""
_FIRST_REST, _LONGEST_REST = 8, 128
"""Intervals without a change after a size that was taken back; doubled each time."""


class Measured(NamedTuple):
    """Measurements since the last decision, of steps of one size.

    Attributes:
        step: of the run: steps taken so far.
        size: samples of a rank in a step.
        wait_share: of the time, how much was spent waiting for data; of the rank that waited most.
        step_seconds: how long a step took, waiting included; of the slowest rank.
    """

    step: int
    size: int
    wait_share: float
    step_seconds: float

    @property
    def rows_per_second(self) -> float:
        """Samples of a rank in a second."""
        return self.size / self.step_seconds if self.step_seconds > 0 else 0.0


class SizeDecided(NamedTuple):
    """The answer of a policy.

    Attributes:
        size: samples of a rank in a step, from now on; None: no change.
        memory: handed in again at the next decision. JSON-able, and small: it is part of the state.
        reason: one line for the log.
    """

    size: int | None
    memory: Any = None
    reason: str = ""


@runtime_checkable
class BatchPolicy(Protocol):
    """Decides on the batch size. The same measurements and memory give the same answer.

    Attributes:
        every: a decision is made at each step of the run that this number divides.
    """

    @property
    def every(self) -> int:
        """The steps from one decision to the next."""
        ...

    def decide(self, measured: Measured, memory: Any) -> SizeDecided:
        """Return the size from now on, and what to remember; `memory` is None at the first decision."""
        ...


PlainFunction = Callable[[Measured], "int | None"]


@dataclass(frozen=True, slots=True)
class FunctionBatchPolicy:
    """A plain function of what was measured as a policy without memory."""

    function: PlainFunction
    every: int = FUNCTION_EVERY

    def decide(self, measured: Measured, memory: Any) -> SizeDecided:
        """Return what the function returns."""
        return SizeDecided(self.function(measured), None, getattr(self.function, "__name__", "function"))


def as_batch_policy(policy: BatchPolicy | PlainFunction) -> BatchPolicy:
    """Return a policy as it is, and a plain function as a policy that is asked every 200 steps.

    Raises:
        OptionError: it is neither, or its `every` isn't a positive whole number.
    """
    if isinstance(policy, type):
        raise OptionError(f"batch_policy={policy.__name__} is a class; give an object: {policy.__name__}(…)")
    if isinstance(policy, BatchPolicy):
        at_least(1, every=policy.every)
        return policy
    if callable(policy):
        return FunctionBatchPolicy(policy)
    raise OptionError(
        f"batch_policy={policy!r:.100}; expected ThroughputBalanced(least=…, most=…), a function of what was "
        f"measured that returns a size or None, or an object with `every` and `decide`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputBalanced:
    """Larger steps as long as samples a second grow by them.

    Ranks wait for each other, and for late batches, once in a step: larger steps even that out. Where data is
    on time, they share what a step costs whatever its size. So it tries a size half as large again after
    three decisions, and takes it back where it isn't at least 3 % faster in samples a second; then it rests,
    each time for longer. Where it is faster and data is on time (less than 10 % of the time is waiting), the
    seconds of both sizes say how far steps are worth growing: it tries that size next, up to four times as
    large, and a smaller one if data is late then. A loader that is evenly too slow isn't helped by any size:
    then it stays as it is. It never goes below a size that it kept, nor below the one that the run began
    with.

    Args:
        least, most: samples of a rank in a step; the batch size that the run begins with may be any.
        every: steps between two decisions.
        multiple: sizes are multiples of it, but for `least` and `most`; the rows of a microbatch, say.

    Raises:
        OptionError: a value that can't be used.
    """

    least: int
    most: int
    every: int = 200
    multiple: int = 8

    def __post_init__(self) -> None:
        at_least(1, least=self.least, every=self.every, multiple=self.multiple)
        at_least(self.least, most=self.most)

    def decide(self, measured: Measured, memory: Any) -> SizeDecided:
        """Return the size from now on; see BatchPolicy."""
        current = _Memory(**memory) if memory is not None else _Memory()
        current = current._replace(seen=current.seen + 1)
        if current.seen <= _FIRST_IGNORED:
            return SizeDecided(None, current._asdict(), "the first intervals don't count")
        late = min(current.late + 1, _PATIENCE) if measured.wait_share > _HIGH else 0
        is_as_before = bool(late) == bool(current.late) or current.tried_from
        rates = [*(current.rates if is_as_before else ()), measured.rows_per_second][-_LONGEST_TRIAL:]
        current = current._replace(rates=rates, late=late)
        if current.tried_from:
            return self._judged(measured.size, current)
        if current.rest:
            return SizeDecided(None, current._replace(rest=current.rest - 1)._asdict(), "rests")
        if len(rates) < _PATIENCE:
            return SizeDecided(None, current._asdict(), "no change")
        size = self._next(measured.size)
        if size <= measured.size:
            return SizeDecided(None, current._asdict(), "no size beyond this one is allowed")
        limit = "waiting for data" if late == _PATIENCE else "the device"
        share = f"{measured.wait_share:.0%} of the time is waiting"
        return _tried(size, measured.size, current, f"{limit} is the limit: {share}")

    def _judged(self, size: int, current: _Memory) -> SizeDecided:
        """Keep the size that is tried, try another one, or take it back."""
        gain, error = _gain(current.before, current.rates)
        is_sure = len(current.rates) >= _SHORTEST_TRIAL and abs(gain - _GAIN) >= _DEVIATIONS * error
        if not is_sure and len(current.rates) < _LONGEST_TRIAL:
            return SizeDecided(None, current._asdict(), "tries this size")
        start, reason = current.tried_from, f"{gain:+.1%} samples a second"
        is_far, is_late = size > self._next(start), current.late == _PATIENCE
        if gain >= max(_GAIN, _DEVIATIONS * error) and not (is_far and is_late):
            worthwhile = min(_worthwhile_size(start, size, current), _FARTHEST * size)
            farther = min(self.most, self._rounded(worthwhile))
            kept = current._replace(before=[], tried_from=0, next_rest=_FIRST_REST)
            if farther > self._next(size) and not (is_late or current.was_too_far):
                return _tried(farther, size, kept, f"keeps {size}: {reason}, and more by larger steps")
            return SizeDecided(None, kept._asdict(), f"keeps this size: {reason}")
        if is_far:
            smaller = max(self._next(start), self._rounded(math.sqrt(start * size)))
            smaller_memory = current._replace(rates=[], late=0, was_too_far=True)._asdict()
            return SizeDecided(smaller, smaller_memory, f"too far: {reason}{', data is late' * is_late}")
        steps = current.next_rest
        kept = current._replace(rates=[], before=[], tried_from=0, rest=steps, was_too_far=False)
        kept = kept._replace(next_rest=min(2 * steps, _LONGEST_REST))
        return SizeDecided(start, kept._asdict(), f"back: {reason}")

    def _next(self, size: int) -> int:
        """The next larger size; one that isn't larger if there is none."""
        next_multiple = (size // self.multiple + 1) * self.multiple
        return min(self.most, max(self.least, self._rounded(size * _FACTOR), next_multiple))

    def _rounded(self, size: float) -> int:
        return max(1, round(size / self.multiple)) * self.multiple


class _Memory(NamedTuple):
    """Memory of ThroughputBalanced.

    Attributes:
        seen: intervals so far.
        rates: samples a second of the last intervals of this size, since data became late or on time.
        late: how many of the last intervals in a row had much waiting, up to _PATIENCE.
        tried_from: the size before the one that is tried; 0: none is.
        before: `rates` at that size.
        was_too_far: of the sizes since the last rest, one was more than a step away and not worth it.
        rest: intervals until sizes are tried again.
        next_rest: after a size is taken back.
    """

    seen: int = 0
    rates: list[float] = []  # noqa: RUF012  # never changed in place
    late: int = 0
    tried_from: int = 0
    before: list[float] = []  # noqa: RUF012
    was_too_far: bool = False
    rest: int = 0
    next_rest: int = _FIRST_REST


def _tried(size: int, start: int, current: _Memory, reason: str) -> SizeDecided:
    """Try a size beside the one that was measured."""
    kept = current._replace(rates=[], before=current.rates, late=0, tried_from=start)
    return SizeDecided(size, kept._asdict(), reason)


def _worthwhile_size(start: int, size: int, current: _Memory) -> float:
    """The size from which on _FACTOR gains less than _GAIN, by the seconds of a step of two sizes.

    These are taken to be a fixed part and one for each row.
    """
    first, second = start / statistics.fmean(current.before), size / statistics.fmean(current.rates)
    row_seconds = (second - first) / (size - start)
    if row_seconds <= 0:
        return math.inf
    return _ROWS_TO_FIXED * (first / row_seconds - start)


def _gain(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """By which share rates have grown, and the standard error of that; larger where few say what it is."""
    first, second = statistics.fmean(before), statistics.fmean(after)
    if first <= 0:
        return 0.0, 0.0
    squares = sum((rate - first) ** 2 for rate in before) + sum((rate - second) ** 2 for rate in after)
    freedom = max(1, len(before) + len(after) - 2)
    noise = max(_LEAST_NOISE, math.sqrt(squares / freedom) / first) * (1 + _FEW / freedom)
    return second / first - 1, noise * math.sqrt(1 / len(before) + 1 / len(after))
