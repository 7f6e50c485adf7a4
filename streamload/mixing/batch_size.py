"""The batch size that follows the throughput: waits are measured, the policy is asked at decision steps (K).

Rank 0 asks, with what the slowest rank measured; all ranks take its answer. What is decided goes the way of
Loader.set_batch_size. The policies are in steering/batch_size.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamload.errors import OptionError, PolicyError, StateMismatch
from streamload.extension import Event, Extension, RankPart
from streamload.steering.batch_size import BatchPolicy, Measured, SizeDecided, ThroughputBalanced
from streamload.steering.policy import kept_memory
from streamload.steering.replay import Replay

if TYPE_CHECKING:
    from streamload.extension import Batch, LoaderOptions, Run

logger = logging.getLogger("streamload")

STATE, STEP_TIMES = "batch_policy", "step_times"
"""The keys of a state, which only runs with a policy have: what all ranks have alike, and the measurements of
each since the last decision, by rank."""


@dataclass(frozen=True, slots=True)
class BatchSizes(Extension):
    """The extension of a loader whose batch size follows the throughput, `Batches(batch_policy=…)`."""

    name = "batch_sizes"

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse sizes of an evaluation, of a replay, and of steps that are listed.

        Raises:
            OptionError: it says why.
        """
        if not options.train:
            raise OptionError("batch_policy= is for training: an evaluation yields each sample once")
        if isinstance(options.mixing, Replay):
            raise OptionError(f"leave out batch_policy=: {options.mixing!r} has all decisions")
        if options.listed_steps is not None:
            raise OptionError("batch_policy= is for steps of one size: Patches(steps=…) says each step's")

    def in_rank(self, run: Run) -> BatchSizing:
        """Decide by the policy of the loader."""
        return BatchSizing(run)


class BatchSizing(RankPart):
    """Decides on the batch size of one loader.

    Args:
        run: of the loader, which has a policy.
        clock: seconds.
    """

    by_rank = (STEP_TIMES,)

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic):
        self._policy: BatchPolicy = run.options.batches.batch_policy
        self._run, self._clock = run, clock
        self._steps = self._decided = 0  # of the run
        self._memory: Any = None
        self._are_sizes_checked = False
        self._cause: Exception | None = None
        self._forget()

    def _forget(self) -> None:
        """Measure anew."""
        self._rows = self._counted = self._waited_ns = 0
        self._seconds = 0.0
        self._wait_before_ns = 0  # all data wait up to the last step
        self._last: float | None = None  # when a step of this epoch was taken

    def start_epoch(self, start: int) -> Sequence[Event]:
        """Start an epoch: what is between two epochs isn't measured.

        Raises:
            OptionError: the policy's sizes can't be, or nothing joins the ranks.
        """
        self._last = None
        self._run.join()
        if isinstance(self._policy, ThroughputBalanced) and not self._are_sizes_checked:
            for size in (self._policy.most, self._policy.least, self._policy.multiple):
                self._run.refuse_batch_size(size)
            self._are_sizes_checked = True
        return ()

    def taken(self, batch: Batch) -> None:
        """Measure a step."""
        self._steps += 1
        rows, now_seconds = batch.step.stop - batch.step.position, self._clock()
        total_wait_ns = self._run.counts.value("data_wait_ns")
        if rows != self._rows:
            self._forget()
            self._rows = rows
        elif self._last is not None:
            self._seconds += now_seconds - self._last
            self._waited_ns += total_wait_ns - self._wait_before_ns
            self._counted += 1
        self._last, self._wait_before_ns = now_seconds, total_wait_ns

    def before_batch(self) -> None:
        """Ask the policy, if this step is a decision step.

        Raises:
            PolicyError: the policy raised an error, or its answer can't be used; on all ranks.
            RankFailed: another rank failed or ended.
            OptionError: steps can't have the size that it gave.
        """
        policy = self._policy
        if self._steps % policy.every or self._steps <= self._decided:
            return
        self._decided = self._steps
        if self._counted < policy.every // 2 or self._rows != self._run.rows * self._run.world_size:
            return  # most of them had another size, or this run has just begun: it is not over yet
        share = self._waited_ns / 1e9 / self._seconds if self._seconds > 0 else 0.0
        measured, size = [min(1.0, share), self._seconds / self._counted], self._run.rows
        self._seconds, self._waited_ns, self._counted = 0.0, 0, 0
        subject = f"the batch size at step {self._steps} of the run"
        answer = self._run.agree(subject, measured, lambda by_rank: self._answer(policy, size, by_rank))
        if "error" in answer:
            raise PolicyError(answer["error"]) from self._cause
        self._memory, reason = answer["memory"], answer["told"]
        if answer["size"] is None or answer["size"] == size:
            return
        step = self._run.set_batch_size(answer["size"], reason)
        if self._run.rank == 0:
            logger.info(
                "batch size: %d samples a rank, from step %d of the epoch on, not %d: %s",
                *(answer["size"], step, size, reason["reason"]),
            )

    def _answer(self, policy: BatchPolicy, size: int, by_rank: list[list[float]]) -> dict[str, Any]:
        """On rank 0, the policy's answer as JSON-able values, or why there is none.

        Args:
            policy: to ask.
            size: of a rank's batch now.
            by_rank: of each rank, the share of waiting, and the seconds of a step.
        """
        share, seconds = (max(values) for values in zip(*by_rank, strict=True))
        measured = Measured(self._steps, size, share, seconds)
        try:
            decided = policy.decide(measured, self._memory)
            if not isinstance(decided, SizeDecided):
                raise OptionError(f"decide() returned a {type(decided).__name__}; expected a SizeDecided")
            rows = decided.size
            if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
                raise OptionError(f"it returned {rows!r}; expected a whole number of at least 1, or None")
            reasons = {"reason": " ".join(str(decided.reason).split())[:500], **measured._asdict()}
            return {"size": rows, "memory": kept_memory(decided.memory), "told": reasons}
        except Exception as exc:
            self._cause = exc
            problem = str(exc) if isinstance(exc, OptionError) else f"{type(exc).__name__}: {exc}"
            return {"error": f"batch_policy={policy!r:.100}, at step {measured.step} of the run: {problem}"}

    def state(self, position: int) -> dict[str, Any]:
        """Its part of a state."""
        measured = [self._rows, self._counted, self._waited_ns, self._seconds]
        return {
            STATE: {"steps": self._steps, "decided": self._decided, "memory": self._memory},
            STEP_TIMES: {str(self._run.rank): measured},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue after a state, or begin anew where it has no such part.

        A rank whose own measurements aren't there continues with those of another one.

        Raises:
            StateMismatch: it is damaged.
        """
        part = state.get(STATE, {"steps": 0, "decided": 0, "memory": None})
        try:
            steps, decided, memory = part["steps"], part["decided"], part["memory"]
        except (KeyError, TypeError) as exc:
            raise StateMismatch(f"not a valid state of a loader: {exc!r:.100} as {STATE}") from None
        if not (type(steps) is type(decided) is int and 0 <= decided <= steps):
            raise StateMismatch(f"not a valid state of a loader: steps {steps!r:.50} as {STATE}")
        self._steps, self._decided, self._memory = steps, decided, memory
        self._forget()
        by_rank = state.get(STEP_TIMES, {})
        measured = by_rank.get(str(self._run.rank), next(iter(by_rank.values()), None))
        if measured is not None:
            self._rows, self._counted, self._waited_ns, self._seconds = _measured(measured)

    def gathered(self, state: Mapping[str, Any], position: int) -> dict[str, Any]:
        """Its part of the state of all ranks, with the measurements of each."""
        return {key: state[key] for key in (STATE, STEP_TIMES)}


def _measured(values: Any) -> tuple[int, int, int, float]:
    """Measurements of a rank: rows of all ranks, steps, nanoseconds of data wait, and seconds.

    Raises:
        StateMismatch: these aren't such values.
    """
    try:
        rows, steps, waited_ns, seconds = values
        numbers = int(rows), int(steps), int(waited_ns), float(seconds)
    except (TypeError, ValueError) as exc:
        raise StateMismatch(f"not a valid state of a loader: {exc!r:.100} as {STEP_TIMES}") from None
    if min(numbers) < 0 or not math.isfinite(numbers[3]):
        raise StateMismatch(f"not a valid state of a loader: {values!r:.50} as {STEP_TIMES}")
    return numbers
