"""What ranks report to the store of torch.distributed, summed up once for all that read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from streamload.ranks import reports
from streamload.ranks.monitor import Ranks
from streamload.ranks.reports import RankReports, RankSummary
from tests.support.kills import Child, Stage

RANKS = 40
REASON = "30 s for https://host/0001.tar"


class Counted:
    """A store that counts its requests, and those by which entries are read."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        self.counts[name] += 1
        return getattr(self.store, name)


def test_an_outage_that_all_ranks_report_costs_each_a_few_requests_and_is_summed_once() -> None:
    store = HashStore()
    counted = [Counted(store) for _ in range(RANKS)]
    ranks = [RankReports(each, rank) for rank, each in enumerate(counted)]
    for each in ranks:
        each.report("waits", REASON, f"host-{each._entry.rank // 8}")
    assert max(each.requests for each in counted) == 3
    summaries = [each.read() for each in ranks]
    assert summaries == [summaries[0]] * RANKS
    assert summaries[0] is not None
    assert summaries[0].waiting == frozenset(range(RANKS))
    assert summaries[0].wait == REASON
    assert max(each.requests for each in counted[1:]) == 5
    assert sum("multi_get" in each.counts or "get" in each.counts for each in counted) == 1
    assert [each.read() for each in ranks] == [None] * RANKS


def test_a_summary_made_since_the_last_look_does_where_older_ones_may_be_read() -> None:
    store = HashStore()
    first, second, third = (RankReports(store, rank) for rank in range(3))
    first.report("waits", REASON, "host")
    assert second.read() == first.read()
    second.report("waits", REASON, "host")
    assert (latest := first.read(accepts_older=True)) is not None
    assert latest.waiting == {0, 1}
    third.report("waits", REASON, "host")
    assert (older := second.read(accepts_older=True)) is not None
    assert older.waiting == {0, 1}
    assert (latest := second.read(accepts_older=True)) is not None
    assert latest.waiting == {0, 1, 2}


def test_the_first_failures_keep_their_order_and_the_others_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = HashStore()
    ranks = [Ranks(store, rank, RANKS) for rank in range(RANKS)]
    order = [7, 30, 2, *range(10, 25)]
    for rank in order:
        ranks[rank].report("failed", f"error {rank}")
        ranks[1].read_reports()
    assert [*ranks[1].failed] == [7, 30, 2, *range(10, 15)]
    assert len(caplog.messages) == reports._LISTED
    caplog.clear()
    ranks[0].read_reports()
    assert caplog.messages[0] == "rank 7 of 40 has failed, and with it the run: error 7"
    assert caplog.messages[-1].endswith("error 14 (and 10 more)")
    ranks[7].report("goes on")
    ranks[0].read_reports()
    assert caplog.messages[-1] == "rank 7 of 40 continues"
    assert 7 not in ranks[0].failed


def test_a_failure_is_read_when_all_others_have_or_when_an_earlier_one_is_known() -> None:
    store = HashStore()
    ranks = [Ranks(store, rank, 3) for rank in range(3)]
    number = ranks[1].report("failed", "disk")
    assert not ranks[1].is_read(number)
    ranks[0].read_reports()
    assert not ranks[1].is_read(number)
    later = ranks[2].report("failed", "disk, too")
    assert ranks[2].is_read(later)
    ranks[2].read_reports()
    assert ranks[1].is_read(number)


def test_the_summary_of_a_rank_that_died_while_making_it_is_made_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "_LOOK_SECONDS", 0.01)
    store = HashStore()
    first, second = RankReports(store, 0), RankReports(store, 1)
    first.report("waits", REASON, "host")
    store.add(f"{reports._KEY}/maker/1", 1)
    assert (summary := second.read()) is not None
    assert summary.waiting == {0}


def test_a_rank_that_dies_before_its_first_entry_is_written_hides_no_other() -> None:
    store = HashStore()
    store.add(reports._SLOTS, 1)
    RankReports(store, 1).report("waits", REASON, "host")
    assert (summary := RankReports(store, 2).read()) is not None
    assert summary.waiting == {1}


def test_processes_that_report_and_read_at_once_all_come_to_the_last_summary() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rounds, ranks = 5, 4

    def as_rank(rank: int) -> Callable[[Stage], Any]:
        def reports_and_reads(stage: Stage) -> Any:
            store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
            mine, summary = RankReports(store, rank), RankSummary()
            for _ in range(rounds):
                mine.report("waits", f"for {rank}", f"host-{rank}")
                summary = mine.read() or summary
            while summary.wait_reports < rounds * ranks:
                summary = mine.read() or summary
            return [sorted(summary.waiting), summary.wait, summary.hosts[0]]

        return reports_and_reads

    with ExitStack() as stack:
        children = [stack.enter_context(Child(as_rank(rank))) for rank in range(ranks)]
        assert [child.finish(60) for child in children] == [[[0, 1, 2, 3], "for 0", "host-0"]] * ranks
