"""What each rank of a run reports to torch.distributed's store: its waits, and why it failed.

This also reaches a rank that hangs in a collective of the training itself: a thread of every rank reads the
reports (reports.py) while its training stands still.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from streamload import limits
from streamload.errors import RankFailed
from streamload.ipc import ControlBlock
from streamload.metrics.findings import SlowestRank
from streamload.node import host_name
from streamload.ranks.heartbeats import SILENT_SECONDS, Heartbeats, ranges_of
from streamload.ranks.loaders import Comparison, RankLoaders
from streamload.ranks.reports import RankReports, RankSummary

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
"""Polls between two comparisons of waits; comparisons after which an unchanged entry is old."""


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

    def monitor(
        self,
        control: ControlBlock,
        compare_waits: Callable[[Callable[[float], SlowestRank | None]], object],
        tick: Callable[[], object],
        comparison: Comparison | None = None,
    ) -> RankMonitor:
        """Report this rank's waits and log the reports of the others, for one epoch; see RankMonitor."""
        return RankMonitor(self, control, compare_waits, tick, comparison)

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
