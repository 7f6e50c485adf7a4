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
"""So many intervals in a row have to say the same before the size changes."""
_SHORTEST_TRIAL, _LONGEST_TRIAL = 3, 8
"""Intervals by which a new size is judged: so many as it takes to be sure, by their own noise."""
_DEVIATIONS, _LEAST_NOISE = 2.5, 0.01
_FACTOR = 1.5
_HIGH, _LOW = 0.10, 0.02
"""Shares of waiting above which the loader is the limit, and below which the device is."""
_GAIN = 0.03
"""A larger size has to be faster by this share."""
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
    never late, they share what a step costs whatever its size. So it tries the next larger size when three
    decisions in a row say that more than 10 % of the time is waiting, or less than 2 %, and takes it back
    where it isn't at least 3 % faster in samples a second; then it rests, each time for longer. A loader that
    is evenly too slow isn't helped by any size: then it stays as it is. It never goes below a size that it
    kept, nor below the one that the run began with.

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
        rates = [*current.rates, measured.rows_per_second][-_LONGEST_TRIAL:]
        if current.tried_from:
            return _judged(current._replace(rates=rates))
        if current.rest:
            return SizeDecided(None, current._replace(rates=rates, rest=current.rest - 1)._asdict(), "rests")
        waits = current.waits + 1 if measured.wait_share > _HIGH else 0
        calm = current.calm + 1 if measured.wait_share < _LOW else 0
        larger = max(self.least, self._rounded(measured.size * _FACTOR), measured.size + self.multiple)
        size = min(self.most, larger)
        kept = current._replace(rates=rates, waits=min(waits, _PATIENCE), calm=min(calm, _PATIENCE))
        if waits < _PATIENCE and calm < _PATIENCE:
            return SizeDecided(None, kept._asdict(), "no change")
        if size <= measured.size:
            return SizeDecided(None, kept._asdict(), "no size beyond this one is allowed")
        kept = kept._replace(rates=[], before=rates, waits=0, calm=0, tried_from=measured.size)
        limit = "waiting for data" if waits else "the device"
        share = f"{measured.wait_share:.0%} of the time is waiting"
        return SizeDecided(size, kept._asdict(), f"{limit} is the limit: {share}")

    def _rounded(self, size: float) -> int:
        return max(1, round(size / self.multiple)) * self.multiple


class _Memory(NamedTuple):
    """Memory of ThroughputBalanced.

    Attributes:
        seen: intervals so far.
        rates: samples a second of the last intervals of this size.
        waits, calm: how many of the last intervals in a row had much waiting, or nearly none.
        tried_from: the size before the one that is tried; 0: none is.
        before: `rates` at that size.
        rest: intervals until sizes are tried again.
        next_rest: after a size is taken back.
    """

    seen: int = 0
    rates: list[float] = []  # noqa: RUF012  # never changed in place
    waits: int = 0
    calm: int = 0
    tried_from: int = 0
    before: list[float] = []  # noqa: RUF012
    rest: int = 0
    next_rest: int = _FIRST_REST


def _judged(current: _Memory) -> SizeDecided:
    """Keep the size that is tried, or take it back."""
    gain, error = _gain(current.before, current.rates)
    is_sure = len(current.rates) >= _SHORTEST_TRIAL and abs(gain - _GAIN) >= _DEVIATIONS * error
    if not is_sure and len(current.rates) < _LONGEST_TRIAL:
        return SizeDecided(None, current._asdict(), "tries this size")
    if gain >= _GAIN:
        kept = current._replace(before=[], tried_from=0, next_rest=_FIRST_REST)
        return SizeDecided(None, kept._asdict(), f"keeps this size: {gain:+.1%} samples a second")
    steps = current.next_rest
    kept = current._replace(rates=[], before=[], tried_from=0, rest=steps)
    kept = kept._replace(next_rest=min(2 * steps, _LONGEST_REST))
    return SizeDecided(current.tried_from, kept._asdict(), f"back: {gain:+.1%} samples a second")


def _gain(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """By which share rates have grown, and the standard error of that."""
    first, second = statistics.fmean(before), statistics.fmean(after)
    if first <= 0:
        return 0.0, 0.0
    squares = sum((rate - first) ** 2 for rate in before) + sum((rate - second) ** 2 for rate in after)
    noise = max(_LEAST_NOISE, math.sqrt(squares / max(1, len(before) + len(after) - 2)) / first)
    return second / first - 1, noise * math.sqrt(1 / len(before) + 1 / len(after))
