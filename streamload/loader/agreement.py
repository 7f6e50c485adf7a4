"""One rank decides for all: what each rank has goes to rank 0, and its answer to all of them.

Over a process group of its own on gloo, whatever the training uses: it needs no device, waits in no other
collective, and notices at once when a process ends. A rank that fails or ends meanwhile is RankFailed on the
others, never a wait without end.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed

from streamload.errors import OptionError, RankFailed
from streamload.loader.distributed import Ranks, ranks_of

_LONGEST_WAIT = timedelta(hours=2)
"""For a rank that is alive, and does something else: saves a checkpoint, evaluates."""
_LOOK_SECONDS = 1.0
"""Between two looks at what the other ranks reported."""


class Agreement:
    """Decisions of rank 0. All ranks have to make and ask it at the same steps.

    Args:
        world_size: of the run.

    Raises:
        OptionError: nothing joins the ranks of a run of several.
    """

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._group: Any = None
        self._ranks: Ranks | None = None
        if world_size == 1:
            return
        self._ranks = ranks_of(world_size)
        if self._ranks is None:
            raise OptionError(
                f"mixing= and batch_policy= decide from what all ranks report, and nothing joins the "
                f"{world_size} ranks of this run: initialise torch.distributed before the loader is "
                f"iterated, or leave them out (set_weights, set_batch_size and Replay don't need it)"
            )
        self._group = torch.distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)

    def decide(self, what: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Rank 0's decision from the values of all ranks.

        Args:
            what: is decided, for messages.
            value: this rank's; JSON-able.
            decide: the values by rank → the decision, JSON-able; called on rank 0. It raises nothing.

        Raises:
            RankFailed: a rank failed or ended.
        """
        if self._ranks is None:
            return decide([value])
        own = self._ranks.rank
        values = self._exchange(what, value)
        decision = decide(values) if own == 0 else None
        return self._exchange(f"{what}, as rank 0 decided", decision)[0]

    def _exchange(self, what: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        try:
            lengths = self._gathered(torch.tensor([len(text)]))
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(text)] = text
            texts = self._gathered(padded)
        except RuntimeError as exc:  # gloo's: a connection broke, or the longest wait is over
            raise self._failed(what, _told(exc)) from exc
        return [
            json.loads(bytes(text[: int(length)].tolist()))
            for text, length in zip(texts, lengths, strict=True)
        ]

    def _gathered(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks. Meanwhile this looks at what they report.

        Raises:
            RankFailed: a rank reported that it has failed.
        """
        found = [torch.empty_like(value) for _ in range(self._world_size)]
        work = torch.distributed.all_gather(found, value, group=self._group, async_op=True)
        look = time.monotonic() + _LOOK_SECONDS
        while not work.is_completed():
            if time.monotonic() >= look:
                self._raise_if_failed()
                look = time.monotonic() + _LOOK_SECONDS
            time.sleep(0.0002)
        work.wait()
        return found

    def _raise_if_failed(self) -> None:
        """Raise if a rank has reported that it failed.

        Raises:
            RankFailed: with its reason.
        """
        ranks = self._ranks
        assert ranks is not None
        with contextlib.suppress(RuntimeError):  # the store is gone with its rank
            ranks.read_reports()
        for rank, reason in sorted(ranks.failed.items()):
            raise RankFailed(f"{ranks.name_of(rank)} has failed: {reason}")

    def _failed(self, what: str, error: str) -> RankFailed:
        """The error for a rank that ended; the other ranks are told, as they may not wait for this one."""
        try:
            self._raise_if_failed()
        except RankFailed as failed:
            return failed
        ranks = self._ranks
        assert ranks is not None
        message = f"one of {self._world_size} ranks ended while all agreed on {what}: {error}"
        with contextlib.suppress(RuntimeError):
            ranks.report("failed", f"RankFailed: {message}")
        return RankFailed(message)


def _told(error: RuntimeError) -> str:
    """What gloo says, without where in its source it does, and advice."""
    return re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
