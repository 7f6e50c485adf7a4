"""A step in which a part ran out of memory begins again, once, in smaller parts (K).

After each part the ranks agree on whether memory ran out on any of them, through torch.distributed's store: a
collective would meet one of the training's own, in which another rank may be. If one rank has begun fewer
collectives than another, as it left a part in the middle, they would never match again: then the step doesn't
begin again. What is learned is part of the state. The attempts are `Microbatches.attempts` (microbatches.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed

from streamload.errors import OptionError, RankFailed, StateMismatch
from streamload.extension import Extension, RankPart

if TYPE_CHECKING:
    from streamload.extension import Run

STATE = "microbatch"
"""The key of a state, which only runs have in which a part ran out of memory."""
_PATIENCE_SECONDS = 120.0
"""How long a rank that ran out of memory waits for the others to end the same part."""
_SAME_MEMORY = 1.1
"""A device with more than this × the memory isn't bound by what ran out of it."""


class RanOut(NamedTuple):
    """A bound that was learned as a part ran out of memory.

    Attributes:
        rows: of a part from then on; 0: the step can't begin again.
        limit_bytes: the memory of the device.
    """

    rows: int
    limit_bytes: int


class AnotherRanOut(Exception):
    """Another rank ran out of memory: it ends this rank's loop over the parts of the step."""


@dataclass(frozen=True, slots=True)
class RetriedSteps(Extension):
    """The extension of a loader with `Batches(microbatch="auto")`."""

    name = STATE

    def in_rank(self, run: Run) -> StepRetry:
        """Agree with the other ranks, and keep what was learned."""
        return StepRetry(run)


class StepRetry(RankPart):
    """What the ranks know of parts that ran out of memory.

    Args:
        run: of the loader.
    """

    def __init__(self, run: Run):
        self._run = run
        self._ran_out: RanOut | None = None
        self._collectives: int | None = None  # before the step

    def begin_step(self) -> None:
        """A step begins, on all ranks.

        Raises:
            OptionError: nothing joins them.
        """
        if self._run.options.train and not self._run.can_agree:
            raise OptionError(
                f"attempts() begins a step again on all ranks, and nothing joins the {self._run.world_size} "
                f"of this run: initialise torch.distributed first, or iterate loader.microbatches(batch)"
            )
        self._collectives = _begun_collectives()

    def agree(self, ran_out: RanOut | None) -> RanOut | None:
        """The bound for all ranks, if memory ran out in this part on any; None: it didn't.

        In training all ranks have to call it after each part of an attempt; in evaluation each is alone.

        Args:
            ran_out: of this rank; None: it computed the part.

        Raises:
            RankFailed: the step can't begin again; or a rank failed, or didn't come to the end of the part.
        """
        run, learned = self._run, ran_out
        if run.options.train and run.world_size > 1:
            patience = None if ran_out is None else _PATIENCE_SECONDS
            collectives, before = _begun_collectives(), self._collectives
            count = None if collectives is None or before is None else collectives - before
            answer = run.agree("whether memory ran out", (ran_out, count), _least, patience)
            learned = None if answer is None else RanOut(*answer)
        if learned is not None:
            if not learned.rows:
                raise RankFailed(
                    "a rank ran out of memory in a microbatch of one row, or before a collective of others"
                )
            self._ran_out = learned
        return learned

    def most_rows(self, limit_bytes: int) -> float:
        """The most rows of a part by what was learned.

        Args:
            limit_bytes: the memory of the device.
        """
        if self._ran_out is None or limit_bytes > _SAME_MEMORY * self._ran_out.limit_bytes:
            return math.inf
        return self._ran_out.rows

    def state(self, position: int) -> dict[str, object]:
        """Its part of a state, once a part ran out of memory."""
        return {} if self._ran_out is None else {STATE: self._ran_out._asdict()}

    def load(self, state: Mapping[str, object]) -> None:
        """Continue with what was learned, if the state has it.

        Raises:
            StateMismatch: it is damaged.
        """
        part = state.get(STATE)
        if part is None:
            return
        numbers = [part.get(name) for name in RanOut._fields] if isinstance(part, Mapping) else [None]
        if any(type(number) is not int or number < 1 for number in numbers):
            raise StateMismatch(f"not a valid state of a loader: {part!r:.50} as {STATE}")
        self._ran_out = RanOut(*numbers)


def _least(by_rank: list[tuple[RanOut | None, int | None]]) -> tuple[int, int] | None:
    """The least rows and the least memory of the ranks that ran out of it; None: none did.

    Args:
        by_rank: what each ran out of, and how many collectives of the step it has begun; None: unknown.
    """
    failed = [ran_out for ran_out, _ in by_rank if ran_out is not None]
    if not failed:
        return None
    rows, limit_bytes = map(min, zip(*failed, strict=True))
    counts = {count for _, count in by_rank}
    return (rows if len(counts) == 1 and None not in counts else 0), limit_bytes


def _begun_collectives() -> int | None:
    """The collectives that this process has begun, over all process groups; None: nothing says."""
    # Not public; with a torch without it, or a backend that doesn't count, a step begins again on no rank.
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    groups: Collection[Any] = getattr(world, "pg_map", {})
    try:
        return sum(int(group._get_sequence_number_for_group()) for group in groups) if groups else None
    except (AttributeError, RuntimeError):
        return None
