"""Agreement and failure reports among the ranks of a run, where torch.distributed joins them.

`gathered` is a collective: all ranks have to call it. The others use the store of torch.distributed, where no
rank has to wait long for another: `first_told` compares values, `agreed` decides. `Ranks` reaches a rank that
sits in a collective of the training itself: a rank whose data doesn't come writes down what it waits for, one
that has failed writes why, and a thread of each rank reads that while its training stands still.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from streamload.errors import RankFailed
from streamload.ipc import ControlBlock

T = TypeVar("T")
logger = logging.getLogger("streamload")

_LOOK_SECONDS = 5.0
_STILL_SECONDS = 10.0
"""After so long without a step a training counts as standing still, and the store is read."""
_WAIT_SECONDS = 30.0
_AWAY_SECONDS = 5.0
"""A rank reports a wait for data after the first; after the second where a server is known to be away."""
_KEY = "streamload/told"
_compared: Counter[str] = Counter()
"""How often this process has compared a value of each name."""

_ANSWERS_SECONDS = 30.0


def gathered(value: T, world_size: int) -> list[T]:
    """The values of all ranks, by rank; only this rank's where no process group joins them.

    Args:
        value: picklable.
        world_size: of how many ranks the run is; a process group of another size isn't the run's.
    """
    if not _are_joined(world_size):
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def first_told(name: str, value: str, world_size: int) -> str:
    """The value that the first rank gave under a name; this rank's if it is the first, or nothing joins them.

    It waits for no rank: only ranks that have called it are compared.
    """
    store = _store_of(world_size)
    if store is None:
        return value
    _compared[name] += 1
    told: bytes = store.compare_set(f"streamload/{name}/{_compared[name]}", "", value)
    return told.decode()


def agreed(name: str, value: T, decide: Callable[[list[T]], T], world_size: int) -> T:
    """One decision for all ranks, by the values that they give within half a minute.

    A rank that comes later keeps nobody waiting, and gets the decision of the others.

    Args:
        name: what is decided.
        value: what this rank says; JSON-able.
        decide: the decision by what was said.
        world_size: of how many ranks the run is; ranks that can't compare decide each for itself.
    """
    store = _store_of(world_size)
    if store is None:
        return decide([value])
    _compared[name] += 1
    name = f"streamload/{name}/{_compared[name]}"
    said = [f"{name}/{rank}" for rank in range(world_size)]
    store.set(said[torch.distributed.get_rank()], json.dumps(value))
    with contextlib.suppress(RuntimeError):  # torch's errors of a store: it was too long
        store.wait(said, timedelta(seconds=_ANSWERS_SECONDS))
    decision = decide([json.loads(store.get(one)) for one in said if store.check([one])])
    return json.loads(store.compare_set(name, "", json.dumps(decision)))  # type: ignore[no-any-return]


def can_compare(world_size: int) -> bool:
    """Whether `first_told` compares the ranks of a run, and `agreed` joins them."""
    return _store_of(world_size) is not None


class Ranks:
    """A log in the store of torch.distributed, which each rank appends to and reads. Thread-safe.

    Attributes:
        failed: of the ranks that have failed, and haven't gone on since: why.
        has_failed: whether this rank has.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.failed: dict[int, str] = {}
        self.has_failed = False
        self._store = store
        self._waiting: set[int] = set()
        self._read = 0
        self._lock = threading.Lock()

    def tell(self, what: str, why: str = "") -> int:
        """Append that this rank "waits", has "failed", or "goes on"; returns the entry's number."""
        self.has_failed = what == "failed"
        number: int = self._store.add(_KEY, 1)
        self._store.set(f"{_KEY}/{number}", json.dumps([self.rank, what, why]))
        return number

    def look(self) -> None:
        """Read and log the entries since the last call."""
        waits: dict[int, str] = {}
        with self._lock:
            while self._read < self._store.add(_KEY, 0):
                key = f"{_KEY}/{self._read + 1}"
                if not self._store.check([key]):  # it is being written
                    break
                rank, what, why = json.loads(self._store.get(key))
                self._read += 1
                waits.pop(rank, None)
                if what == "waits":
                    waits[rank] = why
                    self.failed.pop(rank, None)
                elif what == "failed":
                    self._fail(rank, why)
                elif rank in self._waiting or rank in self.failed:
                    self._waiting.discard(rank)
                    self.failed.pop(rank, None)
                    logger.warning("%s goes on", self.name_of(rank))
            self._waiting |= waits.keys()
        if waits:
            rank, why = min(waits.items())
            others = f" ({len(waits) - 1} more likewise)" if len(waits) > 1 else ""
            logger.warning("%s has waited %s%s", self.name_of(rank), why, others)

    def name_of(self, rank: int) -> str:
        """A rank as messages name it."""
        return f"rank {rank} of {self.world_size}"

    def is_seen(self, number: int) -> bool:
        """Whether all other ranks have read an entry by which this rank has failed."""
        seen: int = self._store.add(f"{_KEY}/{number}/seen", 0)
        return seen >= self.world_size - 1

    def _fail(self, rank: int, why: str) -> None:
        self._waiting.discard(rank)
        if rank == self.rank:
            return
        self.failed[rank] = why
        self._store.add(f"{_KEY}/{self._read}/seen", 1)
        logger.error("%s has failed, and all of the run with it: %s", self.name_of(rank), why)


class Watch:
    """A thread, for one epoch: it tells the others what this one waits for, and logs what they tell.

    Args:
        ranks: the ranks of the run.
        control: of the loader.
    """

    def __init__(self, ranks: Ranks, control: ControlBlock) -> None:
        self._ranks, self._control = ranks, control
        self._told_wait_seconds = 0.0  # of the wait that is under way; 0: it hasn't been told
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streamload-ranks", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Before each batch: this rank goes on, and so must the others.

        Raises:
            RankFailed: another rank has failed, and hasn't gone on since.
        """
        ranks = self._ranks
        if ranks.has_failed:  # in another epoch
            with contextlib.suppress(RuntimeError):
                ranks.tell("goes on")
        if not ranks.failed:
            return
        with contextlib.suppress(RuntimeError):
            ranks.look()
        for rank, why in sorted(ranks.failed.items()):
            raise RankFailed(f"{ranks.name_of(rank)} has failed: {why}")

    def fail(self, error: Exception) -> None:
        """Tell the others that this rank ends by an error, and put the rank's name in front of it.

        Where they wait for this rank they have some seconds to see it: the store may end with its process.
        """
        if isinstance(error, RankFailed):
            return
        self.close()
        first = str(error).partition("\n")[0]
        said = str(error).strip().rpartition("\n")[2] if first.startswith("Caught ") else first
        name = type(error).__name__
        why = f"{name}: {said.removeprefix(f'streamload.errors.{name}: ')}"
        with contextlib.suppress(RuntimeError):
            number = self._ranks.tell("failed", why[:2000])
            deadline = time.monotonic() + 2 * _LOOK_SECONDS
            while self._told_wait_seconds and time.monotonic() < deadline and not self._ranks.is_seen(number):
                time.sleep(0.05)
        if error.args and isinstance(error.args[0], str):
            error.args = (f"{self._ranks.name_of(self._ranks.rank)}: {error.args[0]}", *error.args[1:])

    def close(self) -> None:
        """End the thread; once is enough."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(
                1.0
            )  # at the end of a process it is not to be in the middle of a call of the store

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the run
            while not self._end.wait(_LOOK_SECONDS):
                self._tell_wait()
                if self._control.still_seconds() > _STILL_SECONDS:
                    self._ranks.look()

    def _tell_wait(self) -> None:
        """Tell of a wait: when it has become long, and after each half minute again; and that it is over."""
        waited = self._control.wanted_seconds()
        if waited < self._told_wait_seconds:
            self._told_wait_seconds = 0.0
            self._ranks.tell("goes on")
        blocked = self._control.blocked() if waited >= _AWAY_SECONDS else []
        away = {name: (cause, until) for one in blocked for name, cause, until in one["away"]}
        due = (
            _AWAY_SECONDS if away and not self._told_wait_seconds else self._told_wait_seconds + _WAIT_SECONDS
        )
        if waited < due:
            return
        self._told_wait_seconds = waited
        shards = sorted({one["shard"] for one in blocked if one["shard"]})
        why = f"{waited:.0f} s for {', '.join(shards[:2]) or 'its next batch'}"
        for name, (cause, until) in away.items():
            at = time.strftime("%H:%M:%S", time.localtime(time.time() + until - time.monotonic()))
            why += f"; {name} is away ({cause}), and is waited for until {at} (STREAMLOAD_ORIGIN_WAIT)"
        self._ranks.tell("waits", why)


_ranks: Ranks | None = None
"""Of this process: what it has read, and whether it has failed, outlives its loaders."""


def ranks_of(world_size: int) -> Ranks | None:
    """The ranks of a run; None where nothing joins them."""
    global _ranks
    store = _store_of(world_size)
    if store is None:
        return None
    if _ranks is None or _ranks._store is not store:
        _ranks = Ranks(store, torch.distributed.get_rank(), world_size)
    return _ranks


def _store_of(world_size: int) -> Any:
    """The store of torch.distributed; None where it joins no ranks of the run."""
    if not _are_joined(world_size):
        return None
    # It isn't public; without it ranks are told nothing.
    find: Callable[[], Any] | None = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def _are_joined(world_size: int) -> bool:
    if world_size == 1 or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return torch.distributed.get_world_size() == world_size
