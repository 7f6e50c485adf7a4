"""Reports of the ranks in torch.distributed's store: which wait for data, which have failed, and why.

Each rank has one entry, which it replaces. Of the ranks that read, one sums all entries up, and the others
read that summary: a few requests of each rank, however many ranks there are. What a rank does with a summary
is monitor.py's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from streamload.ranks.heartbeats import spans_of
from streamload.ranks.store import values_of, wait_for_keys

_KEY = "streamload/told"
_SUMMARY, _SLOTS = f"{_KEY}/summary", f"{_KEY}/slots"
_LOOKS, _LOOK_SECONDS = 10, 0.5
"""Interval and duration in which a rank looks for the summary of another one; then it makes one."""
_LISTED, _LISTED_NOTICES = 8, 4
"""Failures and notices of a summary; of further failures it has the ranks."""


class ReportedFailure(NamedTuple):
    """A rank that has failed, the number of its report, and why."""

    rank: int
    number: int
    reason: str


class RankSummary(NamedTuple):
    """The reports of all ranks.

    Attributes:
        version: the number of reports when it was made; it has all of these.
        waiting, failed: the ranks that wait for data, and those that have failed.
        wait: what the lowest of the waiting ranks waits for; "": none waits.
        wait_reports: how many reports of waiting there were: more than before, and something waits anew.
        failures: the first ones of those that have failed, the earliest first.
        notices: the last ones, each with the rank that reported it and its number there.
        hosts: of the ranks that are named, and of one on another host.
    """

    version: int = 0
    waiting: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    wait: str = ""
    wait_reports: int = 0
    failures: tuple[ReportedFailure, ...] = ()
    notices: tuple[tuple[int, int, str], ...] = ()
    hosts: dict[int, str] = {}  # noqa: RUF012  (of an immutable value; never changed)

    @classmethod
    def parse(cls, text: bytes) -> RankSummary:
        """The summary of a text; the empty one of none."""
        if not text:
            return cls()
        values = cls(**json.loads(text))
        return values._replace(
            waiting=_ranks_in(values.waiting),
            failed=_ranks_in(values.failed),
            failures=tuple(ReportedFailure(*failure) for failure in values.failures),
            notices=tuple((rank, number, notice) for rank, number, notice in values.notices),
            hosts={int(rank): host for rank, host in values.hosts.items()},
        )

    def text(self) -> str:
        """As `parse` reads it."""
        return json.dumps(
            self._asdict() | {"waiting": spans_of(self.waiting), "failed": spans_of(self.failed)}
        )


class _RankEntry(NamedTuple):
    """Last report of a rank: the `number`-th of its reports, of which `wait_reports` were waits."""

    rank: int
    number: int
    wait_reports: int
    status: str
    reason: str
    host: str
    notices: list[tuple[int, str]]


class RankReports:
    """The reports of one rank, and what it reads of the others'. Reports are thread-safe; read in one thread.

    Args:
        store: of torch.distributed.
        rank: this one.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._entry = _RankEntry(rank, 0, 0, "", "", "", [])
        self._notices = self._slot = 0
        # Of the reader:
        self._text, self._version = b"", 0

    def report(self, status: str, reason: str, host: str) -> int:
        """Replace this rank's entry; a "silent" one is a notice beside it.

        Returns:
            The number of the report among those of this rank.
        """
        with self._lock:
            entry = self._entry._replace(number=self._entry.number + 1, host=host)
            if status == "silent":
                self._notices += 1
                entry = entry._replace(
                    notices=[*entry.notices, (self._notices, reason)][-_LISTED_NOTICES:],
                )
            else:
                waits = entry.wait_reports + (status == "waits")
                entry = entry._replace(status=status, reason=reason, wait_reports=waits)
            self._entry = entry
            self._slot = self._slot or self._store.add(_SLOTS, 1)
            self._store.set(f"{_KEY}/{self._slot}", json.dumps(entry))
            version = self._store.add(_KEY, 1)
        if status == "failed" and not (latest := self._latest()).failures:  # so that nobody has to look twice
            self._summarise(version, latest)
        return entry.number

    def read(self, *, accepts_older: bool = False) -> RankSummary | None:
        """The summary of all reports; None: the one that was read last has them all.

        Args:
            accepts_older: one that was made since the last call will do, if there is one.
        """
        version = self._store.add(_KEY, 0)
        if version == self._version:
            return None
        text = self._stored()
        is_old = RankSummary.parse(text).version < version
        if is_old and not (accepts_older and text != self._text):
            text = self._summary_with(version)
        if text == self._text:
            return None
        summary = RankSummary.parse(text)
        self._text, self._version = text, summary.version
        return summary

    def acknowledge(self, failure: ReportedFailure) -> None:
        """Tell a rank that has failed that this one has read so."""
        self._store.add(_seen(failure.rank, failure.number), 1)

    def is_read(self, number: int, readers: int) -> bool:
        """True if so many ranks have read this rank's failure, or that of an earlier one.

        Args:
            number: of its report.
            readers: all other ranks.
        """
        failures = self._latest().failures
        if failures and failures[0].rank != self._entry.rank:
            return True
        count: int = self._store.add(_seen(self._entry.rank, number), 0)
        return count >= readers

    def _stored(self) -> bytes:
        text: bytes = self._store.compare_set(_SUMMARY, "", "")  # which is there from now on
        return text

    def _latest(self) -> RankSummary:
        return RankSummary.parse(self._stored())

    def _summary_with(self, version: int) -> bytes:
        """The summary of so many reports, made by this rank or by another that began before."""
        looks = _LOOKS if self._store.add(f"{_KEY}/maker/{version}", 1) > 1 else 0
        for _ in range(looks):
            wait_for_keys(self._store, [f"{_KEY}/made/{version}"], _LOOK_SECONDS)
            if RankSummary.parse(text := self._stored()).version >= version:
                return text
        return self._summarise(version, self._latest())

    def _summarise(self, version: int, before: RankSummary) -> bytes:
        """Make the summary of so many reports, or some more, and write it.

        Args:
            version: how many reports there are.
            before: the last summary; failures keep their order.
        """
        keys = [f"{_KEY}/{slot}" for slot in range(1, self._store.add(_SLOTS, 0) + 1)]
        if not self._store.check(keys):  # a rank is about to write its first
            keys = [key for key in keys if self._store.check([key])]
        entries = [_RankEntry(*json.loads(text)) for text in values_of(self._store, keys)]
        text = summary_of(entries, version, before).text()
        self._store.set(_SUMMARY, text)
        self._store.set(f"{_KEY}/made/{version}", "")
        for name in ("maker", "made"):
            self._store.delete_key(f"{_KEY}/{name}/{before.version}")
        return text.encode()


def summary_of(entries: Iterable[_RankEntry], version: int, before: RankSummary) -> RankSummary:
    """The summary of the entries of all ranks; pure."""
    by_rank = {entry.rank: entry for entry in sorted(entries)}
    waiting = [rank for rank, entry in by_rank.items() if entry.status == "waits"]
    failed = [rank for rank, entry in by_rank.items() if entry.status == "failed"]
    earlier = [failure.rank for failure in before.failures if failure.rank in failed]
    listed = [*earlier, *(rank for rank in failed if rank not in earlier)][:_LISTED]
    notices = [(entry.rank, *notice) for entry in by_rank.values() for notice in entry.notices]
    named = {*waiting[:1], *listed}
    hosts: dict[str, int] = {}
    for entry in by_rank.values():
        hosts.setdefault(entry.host, entry.rank)
    return RankSummary(
        version,
        frozenset(waiting),
        frozenset(failed),
        by_rank[waiting[0]].reason if waiting else "",
        sum(entry.wait_reports for entry in by_rank.values()),
        tuple(ReportedFailure(rank, by_rank[rank].number, by_rank[rank].reason) for rank in listed),
        tuple(notices[-_LISTED_NOTICES:]),
        {rank: by_rank[rank].host for rank in sorted({*named, *[*hosts.values()][:2]})},
    )


def _ranks_in(spans: Any) -> frozenset[int]:
    return frozenset(rank for first, last in spans for rank in range(first, last + 1))


def _seen(rank: int, number: int) -> str:
    return f"{_KEY}/seen/{rank}/{number}"
