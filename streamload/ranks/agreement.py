"""One rank decides for all: the values of each rank go to rank 0, and its answer to all of them.

Through torch.distributed's store, whatever backend the training uses: it needs no device and no connection of
its own, and waits in no other collective. A decision costs each rank a few requests. A rank that fails or
ends meanwhile is RankFailed on the others, never a wait without end.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamload.errors import OptionError, RankFailed
from streamload.ranks.distributed import ranks_of, store_of, unique
from streamload.ranks.store import values_of, wait_for_keys

if TYPE_CHECKING:
    from streamload.ranks.monitor import Ranks

_LONGEST_WAIT_SECONDS = 7200.0
"""For a rank that is alive, and does something else: saves a checkpoint, evaluates."""
_PROMPT_SECONDS = 1.0
"""While a rank waits, it looks at the others so often."""
_EXCHANGE_SECONDS, _LOOK_SECONDS = 1800.0, 5.0
"""The longest wait for the values of `largest`, and the interval in which a rank looks at the others."""


class Agreement:
    """Decisions of rank 0. All ranks have to make and ask it at the same steps.

    Args:
        world_size: of the run.

    Raises:
        OptionError: nothing joins the ranks of a run of several.
    """

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._ranks: Ranks | None = None
        self._decisions = 0
        if world_size == 1:
            return
        self._ranks = ranks_of(world_size)
        if self._ranks is None:
            raise OptionError(
                f"mixing= and batch_policy= decide from what all ranks report, and nothing joins the "
                f"{world_size} ranks of this run: initialise torch.distributed before the loader is "
                f"iterated, or leave them out (set_weights, set_batch_size and Replay don't need it)"
            )
        self._name = unique("decisions")
        self._ranks.heartbeats.register()

    def decide(
        self,
        what: str,
        value: Any,
        decide: Callable[[list[Any]], Any],
        patience_seconds: float | None = None,
    ) -> Any:
        """Rank 0's decision from the values of all ranks.

        Args:
            what: is decided, for messages.
            value: this rank's; JSON-able.
            decide: the values by rank → the decision, JSON-able; called on rank 0. It raises nothing.
            patience_seconds: the longest wait for a rank that is alive; None: two hours.

        Raises:
            RankFailed: a rank failed or ended.
        """
        ranks = self._ranks
        if ranks is None:
            return decide([value])
        store, number = ranks.store, self._decisions
        self._decisions += 1
        keys = [f"{self._name}/of/{rank}" for rank in range(self._world_size)]
        arrived, complete, decided = _keys(self._name, number)
        try:
            store.set(keys[ranks.rank], json.dumps(value))
            if store.add(arrived, 1) == self._world_size:
                store.set(complete, "1")
            if ranks.rank:
                self._wait_for(decided, f"{what}, as rank 0 decided", patience_seconds)
                return json.loads(store.get(decided))
            self._wait_for(complete, what, patience_seconds)
            text = json.dumps(decide([json.loads(text_of_rank) for text_of_rank in values_of(store, keys)]))
            store.set(decided, text)
            if number:  # all ranks have read it
                for key in _keys(self._name, number - 1):
                    store.delete_key(key)
        except RankFailed as exc:
            self._report(exc)
            raise
        except RuntimeError as exc:
            reason = "the store of torch.distributed is gone, and with it rank 0"
            raise ranks.ended(f"agreed on {what}", reason) from exc
        return json.loads(text)

    def _wait_for(self, key: str, what: str, patience_seconds: float | None) -> None:
        """Wait for a key of the store, as long as no rank has failed.

        Raises:
            RankFailed: a rank has failed or died, or it took too long.
            RuntimeError: the store is gone.
        """
        ranks, start = self._ranks, time.monotonic()
        patience_seconds = _LONGEST_WAIT_SECONDS if patience_seconds is None else patience_seconds
        assert ranks is not None
        while not wait_for_keys(ranks.store, [key], _PROMPT_SECONDS):
            try:
                ranks.raise_if_ended(f"agreed on {what}")
            except RankFailed:
                if ranks.store.check([key]):  # it ended after its part was done
                    return
                raise
            if time.monotonic() - start > patience_seconds:
                reason = f"not all answered in {patience_seconds / 60:.0f} minutes"
                raise ranks.ended(f"agreed on {what}", reason)

    def _report(self, error: RankFailed) -> None:
        """Tell the other ranks, as they may not see what this one has seen."""
        ranks = self._ranks
        assert ranks is not None
        if not ranks.failed:
            with contextlib.suppress(RuntimeError):
                ranks.report("failed", f"RankFailed: {error}")


def _keys(name: str, number: int) -> tuple[str, str, str]:
    """The keys of a decision: how many ranks have given their values, that all have, and the decision."""
    return f"{name}/{number}/arrived", f"{name}/{number}/complete", f"{name}/{number}/decided"


def largest(
    name: str, value: npt.NDArray[np.int32], rank: int, tellers: Collection[int], world_size: int
) -> npt.NDArray[np.int32]:
    """The largest of some ranks' values, element by element; a collective, but of the store: no device waits.

    Args:
        name: of the value: what it depends on, so that a name always has the same values.
        value: this rank's; of one shape on all of them.
        rank: this one; 0 decides.
        tellers: the ranks whose values count.
        world_size: of the run; ranks that aren't joined have only their own.

    Raises:
        RankFailed: another rank has failed, or didn't call this in half an hour.
    """
    store = store_of(world_size)
    if store is None:
        return value
    name = f"streamload/{name}"
    if rank == 0 and not store.check([name]):
        for teller in tellers:
            if teller:
                received = np.frombuffer(_wait_for(store, f"{name}/{teller}", world_size), np.int32)
                value = np.maximum(value, received.reshape(value.shape))
                store.delete_key(f"{name}/{teller}")
        store.set(name, value.tobytes())
    elif rank in tellers and rank:
        store.set(f"{name}/{rank}", value.tobytes())
    return np.frombuffer(_wait_for(store, name, world_size), np.int32).reshape(value.shape)


def forget(name: str, world_size: int) -> None:
    """Remove a decision of `largest` that every rank knows."""
    store = store_of(world_size)
    if store is not None:
        store.delete_key(f"streamload/{name}")


def _wait_for(store: Any, key: str, world_size: int) -> bytes:
    """Wait for a key in the store, as long as no rank is known to have failed."""
    deadline = time.monotonic() + _EXCHANGE_SECONDS
    try:
        while not wait_for_keys(store, [key], _LOOK_SECONDS):
            if ranks := ranks_of(world_size):
                ranks.raise_if_ended("agreed on how wide the rows of the next steps are")
            if time.monotonic() > deadline:
                raise RankFailed(
                    f"no rank has said within {_EXCHANGE_SECONDS / 60:.0f} minutes how wide the rows of the "
                    f"next steps are: do all ranks take equally many batches?"
                )
        value: bytes = store.get(key)
        return value
    except RankFailed:
        raise
    except RuntimeError as exc:
        raise RankFailed("the store of torch.distributed is gone, and with it rank 0") from exc
