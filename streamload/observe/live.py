"""Figures of live ranks: rates and shares over the last seconds, from the pages that they publish. Pure.

`streamload top` shows it, loops look.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from streamload.metrics.counters import Snapshot
from streamload.observe.page import RunPage, distinct

_WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LiveSource:
    """A source of a rank now.

    Attributes:
        samples_per_second, share: as the training loop took them.
        weight, loss, alignment, passes: as the rank says; None: it doesn't.
        wait: seconds per second for which workers wait for its bytes.
    """

    name: str
    samples_per_second: float
    share: float
    wait: float
    weight: float | None = None
    loss: float | None = None
    alignment: float | None = None
    passes: float | None = None


@dataclass(frozen=True, slots=True)
class LiveRank:
    """A rank now; its rates are those of the last ten seconds, or since it was seen first.

    Attributes:
        wait: the share of the time in which the training loop waited for data.
        stages: seconds per second by stage, summed over workers.
        hits: of the shards whose reading started, those that were complete in the cache; None: none started.
        tiers: bytes in use and the limit, by tier.
        still_seconds: how long the training loop has neither asked for a batch nor got one.
        age_seconds: of its numbers.
    """

    run: str
    rank: int
    world_size: int
    host: str
    pid: int
    workers: int
    run_seconds: float
    epoch: int | None
    samples: int
    samples_per_second: float
    batches_per_second: float
    wait: float
    ready_batches: int
    stages: dict[str, float]
    origin_bytes_per_second: float
    retries_per_second: float
    hits: float | None
    tiers: dict[str, tuple[float, float]]
    device_memory: float | None
    still_seconds: float
    age_seconds: float
    verdict: str
    alerts: dict[str, str] = field(default_factory=dict)
    sources: tuple[LiveSource, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def flat(self) -> dict[str, float]:
        """The numbers as one flat dict, for trackers; names are such that each of them takes them."""
        workers = max(1, self.workers)
        values_shown: dict[str, float | None] = {
            "samples_per_second": self.samples_per_second,
            "data_wait": self.wait,
            "ready_batches": self.ready_batches,
            "origin_bytes_per_second": self.origin_bytes_per_second,
            "origin_retries_per_second": self.retries_per_second,
            "cache_hits": self.hits,
            "device_memory": self.device_memory,
            "epoch": self.epoch,
        }
        for stage, seconds in self.stages.items():
            is_own = stage in ("training", "device")
            values_shown[f"stage/{stage}"] = seconds / (1 if is_own else workers)
        for tier, (used, limit) in self.tiers.items():
            values_shown[f"cache_fill/{tier}"] = used / limit if limit else None
        for name, source in zip(_plain(source.name for source in self.sources), self.sources, strict=True):
            values = asdict(source)
            values.pop("name")
            values_shown |= {f"source/{name}/{metric}": value for metric, value in values.items()}
        return {f"loader/{name}": float(value) for name, value in values_shown.items() if value is not None}


class RunWatch:
    """Follows live ranks from look to look."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, int, int], deque[RunPage]] = {}

    def look(self, pages: Iterable[RunPage]) -> list[LiveRank]:
        """The ranks of these pages, in their order; ranks that have no page any more are forgotten.

        A rank that is seen for the first time has its rates since it began.
        """
        by_process = {(page.run, page.rank, page.pid): page for page in pages}
        self._pages = {key: self._pages.get(key, deque()) for key in by_process}
        return [self._follow(self._pages[key], page) for key, page in by_process.items()]

    def _follow(self, earlier: deque[RunPage], page: RunPage) -> LiveRank:
        if not earlier or earlier[-1].written != page.written:
            earlier.append(page)
        while len(earlier) > 2 and page.written.seconds_since(earlier[1].written) >= _WINDOW_SECONDS:
            earlier.popleft()
        first = earlier[0] if len(earlier) > 1 else None
        return live_rank(page, first)


def live_rank(page: RunPage, before: RunPage | None) -> LiveRank:
    """A rank by its page, and an earlier one; None: its rates are those since it began."""
    latest = page.snapshot()
    done = latest if before is None else latest.since(before.snapshot())
    seconds = page.run_seconds if before is None else page.written.seconds_since(before.written)
    seconds = max(seconds, 1e-3)
    started = done.tier_hits + done.tier_misses
    epoch = page.gauge("epoch")
    return LiveRank(
        run=page.run,
        rank=page.rank,
        world_size=page.world_size,
        host=page.host,
        pid=page.pid,
        workers=page.workers,
        run_seconds=page.run_seconds,
        epoch=None if epoch is None else int(epoch),
        samples=latest.samples_yielded,
        samples_per_second=done.samples_yielded / seconds,
        batches_per_second=done.batches_yielded / seconds,
        wait=min(1.0, max(0.0, done.data_wait_seconds / seconds)),
        ready_batches=latest.ready_batches,
        stages={stage: max(0.0, spent) / seconds for stage, spent in done.stages.items()},
        origin_bytes_per_second=done.origin_bytes / seconds,
        retries_per_second=done.origin_retries / seconds,
        hits=done.tier_hits / started if started else None,
        tiers=_tiers(page),
        device_memory=page.gauge("device_memory_ratio"),
        still_seconds=page.still_seconds,
        age_seconds=page.age_seconds,
        verdict=page.verdict,
        alerts=dict(page.alerts),
        sources=tuple(_sources(page, done, seconds)),
    )


def _plain(names: Iterable[str]) -> tuple[str, ...]:
    """Names of sources as trackers take them (MLflow has the strictest rules), all different."""
    return distinct((re.sub(r"[^A-Za-z0-9_ -]", "_", name).strip() or "_" for name in names), "{}_{}".format)


def _tiers(page: RunPage) -> dict[str, tuple[float, float]]:
    limits = page.gauges.get("tier_limit_bytes", {})
    used = page.gauges.get("tier_bytes", {})
    return {labels[0]: (used[labels], limit) for labels, limit in limits.items() if labels in used}


def _sources(page: RunPage, done: Snapshot, seconds: float) -> Iterable[LiveSource]:
    whole = sum(done.source_samples.values()) or 1
    for name, samples in done.source_samples.items():
        yield LiveSource(
            name,
            samples / seconds,
            samples / whole,
            done.source_wait_seconds.get(name, 0.0) / seconds,
            *(page.gauge(f"source_{metric}", name) for metric in ("weight", "loss", "alignment", "passes")),
        )
