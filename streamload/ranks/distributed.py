"""Agreement and failure reports among the ranks of a run that torch.distributed joins.

`gather` is a collective: all ranks have to call it. The rest uses torch.distributed's store, where no rank
waits long for another: `first_value` compares values, `agree` decides. `Ranks` also reaches a rank that hangs
in a collective of the training itself: each rank reports what it waits for and why it failed to the store
(reports.py), where a thread of every rank reads that while its training stands still.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed

from streamload import limits
from streamload.errors import RankFailed
from streamload.ipc import ControlBlock
from streamload.node import SlowestRank, host_name
from streamload.ranks.heartbeats import SILENT_SECONDS, Heartbeats, ranges_of, values_of, wait_for_keys
from streamload.ranks.loaders import Comparison, RankLoaders
from streamload.ranks.reports import RankReports, RankSummary

T = TypeVar("T")
logger = logging.getLogger("streamload")

_POLL_SECONDS = 5.0
_STILL_SECONDS = 10.0
"""A training without a step for this long stands still: from then on its rank reads the log."""
_WAIT_SECONDS = 30.0
_OUTAGE_SECONDS = 5.0
"""A rank reports a wait for data after the first; after the second if a server is known to be down."""
_SLOWEST = "streamload/slowest"
_LOADERS_SECONDS, _LOADERS_POLLS = 1.0, 12
"""Interval in which a rank looks for one with another loader, and the polls after which a poll is enough."""
_COMPARED_EVERY, _LOOKS = 2, 3
"""Waits are compared every so many polls; an entry that hasn't changed for so many looks is old."""
_AGREE_SECONDS = 30.0
_FIRST_LOOK_SECONDS = 1.0
"""A rank that waits for a decision looks after this long, then with each poll, whether another has failed."""
_TURN_SECONDS = 0.05
"""After the ranks below it each rank waits so much longer before it decides itself."""
_EXCHANGE_SECONDS = 1800.0

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
    store = _store_of(world_size)
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
    store = _store_of(world_size)
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
    store = _store_of(world_size)
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
        seconds = _POLL_SECONDS
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
    store = _store_of(world_size)
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
    store = _store_of(world_size)
    if store is not None:
        store.delete_key(f"streamload/{name}")


def _wait_for(store: Any, key: str, world_size: int) -> bytes:
    """Wait for a key in the store, as long as no rank is known to have failed."""
    deadline = time.monotonic() + _EXCHANGE_SECONDS
    try:
        while not wait_for_keys(store, [key], _POLL_SECONDS):
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


def can_compare(world_size: int) -> bool:
    """True if `first_value` and `agree` reach the other ranks of a run."""
    return _store_of(world_size) is not None


class Ranks:
    """The ranks of a run, by what each reports to torch.distributed's store. Thread-safe.

    Attributes:
        store: of torch.distributed.
        heartbeats: of this rank and the others.
        loaders: of this rank, compared with the others'.
        host: of this rank, with its node in a run on several.
        failed: why, for the first of the ranks that have failed and haven't continued since.
        has_failed: whether this rank has.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.store = rank, world_size, store
        self.heartbeats = Heartbeats(store, rank, world_size)
        self.loaders = RankLoaders(store, rank, world_size)
        self.host = host_name()
        self.failed: dict[int, str] = {}
        self.has_failed = False
        self._reports = RankReports(store, rank)
        self._is_on_nodes = False
        self._slowest, self._seen = "", 0  # the entry of the rank that waits most, and looks since it changed
        self._lock = threading.Lock()
        # As of the last summary; guarded by _lock:
        self._summary = RankSummary()
        self._noticed: dict[int, int] = {}  # by rank: its last notice

    def be_on(self, node: int) -> None:
        """Name this rank's host with its node from now on: the run is on several."""
        self.host = f"{host_name()} (node {node})".lstrip()
        self._is_on_nodes = True

    def report(self, status: str, reason: str = "") -> int:
        """Report that this rank "waits", has "failed", or "goes on", or that others are "silent".

        Returns:
            The report's number.
        """
        if status != "silent":
            self.has_failed = status == "failed"
        return self._reports.report(status, reason, self.host)

    def read_reports(self, *, accepts_older: bool = False) -> None:
        """Read what the ranks have reported since the last call, and log it.

        Args:
            accepts_older: the last reports may be missing, if the next call comes soon.
        """
        with self._lock:
            summary = self._reports.read(accepts_older=accepts_older)
            if summary is None:
                return
            before, self._summary = self._summary, summary
            self._log_failures(before, summary)
            for rank, number, notice in summary.notices:
                if number > self._noticed.get(rank, 0):
                    self._noticed[rank] = number
                    logger.warning("%s", notice)
            going_on = (before.waiting | before.failed) - summary.waiting - summary.failed
            if len(going_on) > 1:
                logger.warning("%s of %d continue", ranges_of(going_on), self.world_size)
            elif going_on:
                logger.warning("%s continues", self.name_of(*going_on))
            if summary.waiting and summary.wait_reports > before.wait_reports:
                rank, count = min(summary.waiting), len(summary.waiting)
                and_others = f" (and {count - 1} more)" if count > 1 else ""
                logger.warning("%s has waited %s%s", self.name_of(rank), summary.wait, and_others)

    def _log_failures(self, before: RankSummary, summary: RankSummary) -> None:
        """Log the failures of other ranks since an earlier summary, and remember them."""
        failures = [failure for failure in summary.failures if failure.rank != self.rank]
        self.failed = {failure.rank: failure.reason for failure in failures}
        unlisted = len(summary.failed) - len(summary.failures)
        for failure in failures:
            if failure in before.failures:
                continue
            if failure == summary.failures[0]:
                self._reports.acknowledge(failure)
            and_others = f" (and {unlisted} more)" if unlisted and failure == failures[-1] else ""
            name = self.name_of(failure.rank)
            logger.error("%s has failed, and with it the run: %s%s", name, failure.reason, and_others)

    def compare_waits(self, ratio: float) -> SlowestRank | None:
        """Compare how much the ranks wait for data; to be called every few seconds.

        One entry in the store is that of the rank that waits most; a rank that waits more replaces it, and so
        does any rank once it is old.

        Args:
            ratio: the share of the last minute in which this rank waited.

        Returns:
            The other rank that waits most; None: none waits more than this one.
        """
        text = self.store.get(_SLOWEST).decode() if self.store.check([_SLOWEST]) else ""
        self._seen = self._seen + 1 if text == self._slowest else 0
        self._slowest = text
        rank, most, number, host = json.loads(text) if text else (-1, 0.0, 0, "")
        if self._seen >= _LOOKS and rank != self.rank:
            rank, most = -1, 0.0
        if rank == self.rank or ratio > most:
            self.store.set(_SLOWEST, json.dumps([self.rank, ratio, number + 1, self.host]))
            return None
        return SlowestRank(rank, most, "" if host == self.host else host) if most else None

    def name_of(self, rank: int) -> str:
        """A rank as messages name it: with its host, in a run of several."""
        hosts = dict.fromkeys(self.heartbeats.neighbours, self.host)
        hosts |= {beating: host for beating, host in self.heartbeats.hosts.items() if host}
        hosts |= {**self._summary.hosts, self.rank: self.host}
        is_on_several = self._is_on_nodes or len({*hosts.values()} - {""}) > 1
        host = hosts.get(rank, "") if is_on_several else ""
        return f"rank {rank} of {self.world_size}" + (f" on {host}" if host else "")

    def raise_if_failed(self) -> None:
        """Raise if another rank is known to have failed.

        Raises:
            RankFailed: with the rank, and its host in a run of several.
        """
        for rank, reason in sorted(self.failed.items()):
            raise RankFailed(f"{self.name_of(rank)} has failed: {reason}")

    def raise_if_ended(self, meanwhile: str) -> None:
        """Raise if another rank has failed, has died, or is silent.

        Args:
            meanwhile: what all ranks did, for the message: "agreed on …".

        Raises:
            RankFailed: with the rank, and its host in a run of several.
            RuntimeError: the store is gone.
        """
        self.read_reports()
        self.raise_if_failed()
        for rank, reason in sorted(self.heartbeats.gone().items()):
            raise self.ended(meanwhile, f"{self.name_of(rank)}: {reason}")

    def ended(self, meanwhile: str, reason: str) -> RankFailed:
        """The error of a rank that ended before its part was done."""
        return RankFailed(f"one of {self.world_size} ranks ended while all {meanwhile}: {reason}")

    def report_silence(self) -> None:
        """On rank 0: report the ranks whose heartbeats have stopped; all ranks log that."""
        if silent := self.heartbeats.look():
            hosts = sorted({self.heartbeats.hosts[rank] for rank in silent} - {""})
            where = f" on {', '.join(hosts)}" if hosts else ""
            self.report(
                "silent",
                f"{ranges_of(silent)} of {self.world_size}{where}: no heartbeat for {SILENT_SECONDS:.0f} s. "
                "The node is down or cut off, or its processes have ended or are stopped",
            )
            self.read_reports()

    def is_read(self, number: int) -> bool:
        """True if all other ranks have read that this one, or another one before, has failed.

        Args:
            number: of this rank's report.
        """
        return self._reports.is_read(number, self.world_size - 1)


class RankMonitor:
    """A thread, for one epoch, that reports this rank's waits to the other ranks and logs their reports.

    Args:
        ranks: of the run.
        control: of the loader.
        compare_waits: calls a function with this rank's share of waiting, which returns the rank that waits
            most of the others.
        tick: called while the training stands still.
        comparison: of the loader with those of the other ranks; None: its rank isn't torch.distributed's.
    """

    def __init__(
        self,
        ranks: Ranks,
        control: ControlBlock,
        compare_waits: Callable[[Callable[[float], SlowestRank | None]], object],
        tick: Callable[[], object],
        comparison: Comparison | None = None,
    ) -> None:
        self._ranks, self._control, self._comparison = ranks, control, comparison
        self._compare_waits, self._tick = compare_waits, tick
        self._reported_wait_seconds = 0.0  # of the current wait; 0: not reported yet
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streamload-ranks", daemon=True)
        limits.start(self._thread)

    def check(self) -> None:
        """To be called before each batch: this rank continues, and the others must not have failed.

        Raises:
            RankFailed: another rank has failed and hasn't continued since.
            OptionError: another rank has other shards, options or another state.
        """
        ranks = self._ranks
        if self._comparison is not None:
            self._comparison.check()
        if ranks.has_failed:  # in an earlier epoch
            with contextlib.suppress(RuntimeError):
                ranks.report("goes on")
        if not ranks.failed:
            return
        with contextlib.suppress(RuntimeError):
            ranks.read_reports()
        ranks.raise_if_failed()

    def fail(self, error: Exception) -> None:
        """Report the error that ends this rank to the others, and prefix it with the rank's name.

        If they wait for this rank, they get some seconds to read it: the store may end with this process.
        """
        if isinstance(error, RankFailed):
            return
        self.close()
        first = str(error).partition("\n")[0]
        message = str(error).strip().rpartition("\n")[2] if first.startswith("Caught ") else first
        name = type(error).__name__
        reason = f"{name}: {message.removeprefix(f'streamload.errors.{name}: ')}"
        with contextlib.suppress(RuntimeError):
            number, compared = self._ranks.report("failed", reason[:2000]), self._comparison
            if compared is not None and not compared.is_settled:
                compared.loaders.mark()
                self._ranks.read_reports()
            is_awaited = self._reported_wait_seconds or (compared is not None and compared.mismatch)
            deadline, pause = time.monotonic() + 2 * _POLL_SECONDS, 0.05
            while is_awaited and time.monotonic() < deadline:
                if self._ranks.is_read(number):
                    break
                time.sleep(pause)
                pause = min(0.5, 1.5 * pause)
        if error.args and isinstance(error.args[0], str):
            error.args = (f"{self._ranks.name_of(self._ranks.rank)}: {error.args[0]}", *error.args[1:])

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)  # at the process's exit it must not be in a call of the store

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the run
            for poll in itertools.count():
                if poll % _COMPARED_EVERY == 0:
                    self._ranks.heartbeats.beat(self._ranks.host)
                if self._is_over(_LOADERS_SECONDS if poll < _LOADERS_POLLS else _POLL_SECONDS):
                    self._ranks.heartbeats.beat(self._ranks.host, is_running=False)
                    return
                if self._ranks.rank == 0 and poll % _COMPARED_EVERY == 0:
                    self._ranks.report_silence()
                self._report_wait()
                if poll % _COMPARED_EVERY == 0:
                    self._compare_waits(self._ranks.compare_waits)
                if self._control.still_seconds() > _STILL_SECONDS:
                    self._ranks.read_reports(accepts_older=True)
                    self._tick()

    def _is_over(self, interval_seconds: float) -> bool:
        """Wait for the next poll; True if the epoch ends. Reads why a rank with another loader has failed."""
        compared, left = self._comparison, _POLL_SECONDS
        while compared is not None and not compared.is_settled and left > 0:
            if self._end.wait(min(interval_seconds, left)):
                return True
            left -= interval_seconds
            if compared.look():
                self._ranks.read_reports()
        return self._end.wait(max(0.0, left))

    def _report_wait(self) -> None:
        """Report a long wait for data, again every half minute, and its end."""
        waited = self._control.wanted_seconds()
        if waited < self._reported_wait_seconds:
            self._reported_wait_seconds = 0.0
            self._ranks.report("goes on")
        blocked = self._control.blocked() if waited >= _OUTAGE_SECONDS else []
        outages = {name: (cause, until) for worker in blocked for name, cause, until in worker["away"]}
        is_first = not self._reported_wait_seconds
        due = _OUTAGE_SECONDS if outages and is_first else self._reported_wait_seconds + _WAIT_SECONDS
        if waited < due:
            return
        self._reported_wait_seconds = waited
        shards = sorted({worker["shard"] for worker in blocked if worker["shard"]})
        reason = f"{waited:.0f} s for {', '.join(shards[:2]) or 'its next batch'}"
        for name, (cause, until) in outages.items():
            until_text = time.strftime("%H:%M:%S", time.localtime(time.time() + until - time.monotonic()))
            reason += f"; {name} is down ({cause}), retried until {until_text} (STREAMLOAD_ORIGIN_WAIT)"
        self._ranks.report("waits", reason)


_ranks: Ranks | None = None
"""Of this process: what it has read, and whether it has failed, outlives its loaders."""


def ranks_of(world_size: int) -> Ranks | None:
    """The ranks of a run; None if nothing joins them."""
    global _ranks
    store = _store_of(world_size)
    if store is None:
        return None
    if _ranks is None or _ranks.store is not store:
        _ranks = Ranks(store, torch.distributed.get_rank(), world_size)
    return _ranks


def unique(name: str) -> str:
    """A key for the next use of a name: the same on all ranks if they use it equally often."""
    _uses[name] += 1
    return f"streamload/{name}/{_uses[name]}"


def _store_of(world_size: int) -> Any:
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
