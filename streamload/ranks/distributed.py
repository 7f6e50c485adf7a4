"""Agreement among the ranks of a run that torch.distributed joins.

`gather` is a collective: all ranks have to call it. The rest uses torch.distributed's store, where no rank
waits long for another: `first_value` compares values, `agree` decides. Ranks that nothing joins, and a single
one, have only their own values.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed

from streamload.errors import RankFailed
from streamload.ranks.store import values_of, wait_for_keys

if TYPE_CHECKING:
    from streamload.ranks.monitor import Ranks

T = TypeVar("T")
logger = logging.getLogger("streamload")

_AGREE_SECONDS = 30.0
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 1.0, 5.0
"""A rank that waits for a decision looks after this long, then so often, whether another has failed."""
_TURN_SECONDS = 0.05
"""How much longer than the rank below it each rank waits before it decides itself."""

_uses: Counter[str] = Counter()
"""Count of comparisons of values by this process under each name."""


def gather(value: T, world_size: int) -> list[T]:
    """The values of all ranks, by rank; only this rank's if no process group joins them.

    Args:
        value: picklable.
        world_size: of the run; a process group of another size isn't the run's.
    """
    if not _are_joined(world_size):
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def first_value(name: str, value: str, world_size: int) -> str:
    """The value of the first rank to call this with a name; this rank's if nothing joins the ranks.

    It doesn't wait for other ranks.
    """
    store = store_of(world_size)
    if store is None:
        return value
    first: bytes = store.compare_set(unique(name), "", value)
    return first.decode()


def first_with_details(
    name: str, value: str, details: Callable[[], str], world_size: int
) -> tuple[str, Callable[[], str]]:
    """As `first_value`, with details that are too many for each rank to compare.

    Args:
        name: as for `first_value`.
        value: of this rank; no other rank has the same.
        details: makes this rank's details; called only where they are used.
        world_size: of the run.

    Returns:
        The value of the first rank, and a function that returns its details.
    """
    store = store_of(world_size)
    if store is None:
        return value, details
    key = unique(name)
    first: str = store.compare_set(key, "", value).decode()
    if first == value:
        store.set(f"{key}/details", details())
        return value, details

    def fetch() -> str:
        """Wait for the first rank, which writes them right after its value.

        Raises:
            RankFailed: it has ended in between.
        """
        cause: RuntimeError | None = None
        try:
            has_details = wait_for_keys(store, [f"{key}/details"], _AGREE_SECONDS)
        except RuntimeError as exc:
            has_details, cause = False, exc
        if not has_details:
            raise RankFailed(f"the rank that was first has ended: {first}") from cause
        text: bytes = store.get(f"{key}/details")
        return text.decode()

    return first, fetch


def agree(
    name: str, value: T, decide: Callable[[list[T]], T], world_size: int, *, needs_all: bool = False
) -> T:
    """One decision for all ranks, from the values that arrive within half a minute.

    Rank 0 reads the values and decides, so the store has a few requests of each rank. Where rank 0 takes no
    part, the lowest rank that waits decides. Nobody waits for a later rank, which gets the decision.

    Args:
        name: of the decision.
        value: this rank's; JSON-able.
        decide: the values → the decision.
        world_size: of the run; ranks that aren't joined decide alone.
        needs_all: a rank that has failed ends the others, rather than being left out.

    Raises:
        RankFailed: another rank has failed.
        RuntimeError: torch.distributed's store is gone.
    """
    store = store_of(world_size)
    if store is None:
        return decide([value])
    name, rank = unique(name), torch.distributed.get_rank()
    keys = [f"{name}/{rank}" for rank in range(world_size)]
    store.set(keys[rank], json.dumps(value))
    awaited = [name] if rank else keys
    began = time.monotonic()
    deadline = began + _AGREE_SECONDS + _TURN_SECONDS * rank
    seconds = _FIRST_LOOK_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if wait_for_keys(store, awaited, min(seconds, left)):  # raises if the store is gone, and rank 0
            break
        if needs_all and (ranks := ranks_of(world_size)):
            ranks.read_reports()
            ranks.raise_if_failed()
        seconds = _LOOK_SECONDS
    if rank and store.check([name]):
        return json.loads(store.get(name))  # type: ignore[no-any-return]
    arrived = keys if store.check(keys) else [key for key in keys if store.check([key])]
    if missing := [number for number, key in enumerate(keys) if key not in arrived]:
        logger.warning(
            "rank %d goes on without the values of ranks %s in %r, after %.0f s: they aren't as far yet, or "
            "read shards of other paths",
            rank, missing, name, time.monotonic() - began,
        )  # fmt: skip
    decision = decide([json.loads(text) for text in values_of(store, arrived)])
    return json.loads(store.compare_set(name, "", json.dumps(decision)))  # type: ignore[no-any-return]


def can_compare(world_size: int) -> bool:
    """True if `first_value` and `agree` reach the other ranks of a run."""
    return store_of(world_size) is not None


_ranks: Ranks | None = None
"""The ranks as this process knows them: what it has read and whether it has failed outlive its loaders."""


def ranks_of(world_size: int) -> Ranks | None:
    """The ranks of a run; None if nothing joins them."""
    global _ranks
    store = store_of(world_size)
    if store is None:
        return None
    if _ranks is None or _ranks.store is not store:
        from streamload.ranks.monitor import Ranks

        _ranks = Ranks(store, torch.distributed.get_rank(), world_size)
    return _ranks


def unique(name: str) -> str:
    """A key for the next use of a name: the same on all ranks if they use it equally often."""
    _uses[name] += 1
    return f"streamload/{name}/{_uses[name]}"


def store_of(world_size: int) -> Any:
    """torch.distributed's store; None where it joins no ranks of the run."""
    if not _are_joined(world_size):
        return None
    # Not public; a torch without it leaves the ranks unconnected.
    find: Callable[[], Any] | None = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def _are_joined(world_size: int) -> bool:
    if world_size == 1 or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return torch.distributed.get_world_size() == world_size
