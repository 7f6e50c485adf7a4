"""The extension by which a training with a shared cache publishes its plan and progress, for daemons.

One small file per group, off the hot path. It is advice: if the shared tier can't be written, the training
logs that once and goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamload import limits
from streamload.cache.shared.objects import TooLarge
from streamload.cache.shared.sharing import SharedOptions
from streamload.daemon.plan_file import PLAN_LIMIT_BYTES, PlannedSource, PlanProgress, plan_of
from streamload.errors import SharedTierError, StreamloadError
from streamload.extension import Extension, WorkerPart
from streamload.urls import UrlList

if TYPE_CHECKING:
    from streamload.extension import BatchRows, WorkerProcess

logger = logging.getLogger("streamload")

EVERY_SECONDS = 10.0
_MOST_PAUSE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class PlanPublication(Extension):
    """Publishes a run's plan, and the progress of this rank's groups.

    Attributes:
        shared: the shared cache.
        sources: of the run.
        one_pass: an epoch is a pass.
        urls: of the shards.
        storage_options: of fsspec.
        groups: whose progress this rank publishes.
        prepare, prepared_by: the recipe of prepared images, and its full name; "": they aren't prepared.
    """

    shared: SharedOptions
    sources: Sequence[PlannedSource]
    one_pass: bool
    urls: UrlList
    storage_options: Mapping[str, Any] | None
    groups: Sequence[int]
    prepare: str
    prepared_by: str

    name = "plan"

    def in_worker(self, process: WorkerProcess) -> PublishingPart | None:
        """Its part in the first worker, which publishes; None in the others."""
        return None if process.number else PublishingPart(self, process)


class PublishingPart(WorkerPart):
    """The part of the worker that publishes the plan, then the progress of its groups, in a thread.

    Args:
        publication: what is published.
        process: has the progress.
    """

    def __init__(self, publication: PlanPublication, process: WorkerProcess):
        self._publication, self._process = publication, process
        self._stop = threading.Event()
        self._objects = publication.shared.open_objects().until(self._stop)
        self._change = threading.Condition()
        # Guarded by _change:
        self._news: dict[int, PlanProgress] = {}
        self._rates: dict[int, _OpeningRate] = {}
        self._thread = threading.Thread(target=self._work, name="streamload-publish", daemon=True)
        limits.start(self._thread)

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        """Set how far the groups are, to be published next; takes microseconds."""
        progress, prepared_by = self._process.progress(), self._publication.prepared_by
        for group in self._publication.groups:
            fronts = tuple(
                progress.fronts.get((group, source), (0, 0))
                for source in range(len(self._publication.sources))
            )
            news = PlanProgress(
                *(group, progress.epoch, fronts, progress.shards_ahead, progress.mean_bytes),
                prepared=prepared_by,
            )
            with self._change:
                rate = self._rates.get(group)
                if rate is None or rate.epoch != progress.epoch:
                    rate = self._rates[group] = _OpeningRate(news, time.monotonic())
                shards_per_second = rate.at(news, time.monotonic())
                self._news[group] = replace(news, shards_per_second=shards_per_second, told=rate.told)
                rate.told += 1
                self._change.notify_all()
        return b""

    def close(self) -> None:
        """Stop publishing; the last files stay. Idempotent."""
        self._stop.set()
        with self._change:
            self._change.notify_all()
        self._thread.join()

    def _work(self) -> None:
        run, pause, has_failed = "", 0.0, False
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._news) or self._stop.is_set())
            if self._stop.is_set():
                return
            try:
                run = run or self._publish_plan()
                self._publish_progress(run)
                pause = EVERY_SECONDS
            except StreamloadError as exc:
                if not (has_failed or self._stop.is_set()):
                    has_failed = True
                    logger.info(
                        "the plan of this run can't be published, so daemons can't follow it: %s", exc
                    )
                pause = min(max(2 * pause, EVERY_SECONDS), _MOST_PAUSE_SECONDS)
            self._stop.wait(pause)

    def _publish_plan(self) -> str:
        run = self._publication
        plan, why = plan_of(run.sources, run.one_pass, run.urls, run.storage_options, run.prepare)
        name, content = f"runs/{plan.run}/plan.json", plan.written()
        there: bytes | None = None
        with contextlib.suppress(TooLarge):
            there = self._objects.read(name, PLAN_LIMIT_BYTES)
        if there != content:
            self._objects.write(name, content)
        if why:
            logger.info("run %s is published without the URLs of its shards: %s", plan.run, why)
        else:
            logger.info("run %s is published at %s", plan.run, self._objects.url)
        return plan.run

    def _publish_progress(self, run: str) -> None:
        with self._change:
            news, self._news = self._news, {}
        for group, progress in news.items():
            try:
                self._objects.write(f"runs/{run}/{progress.name}", progress.written())
            except SharedTierError:
                with self._change:
                    self._news.setdefault(group, progress)
                raise


class _OpeningRate:
    """The rate at which a group opens shards, since its first progress of an epoch.

    Attributes:
        epoch: of the order.
        told: how often the progress was set.
    """

    def __init__(self, first: PlanProgress, now_seconds: float):
        self.epoch = first.epoch
        self.told = 0
        self._began = now_seconds
        self._opened = 0
        self._last = first.fronts

    def at(self, progress: PlanProgress, now_seconds: float) -> float:
        """Shards per second until now; 0 if it isn't known yet."""
        for (pass_, place), (last_pass, last_place) in zip(progress.fronts, self._last, strict=True):
            self._opened += max(0, place - last_place) if pass_ == last_pass else place
        self._last = progress.fronts
        return self._opened / (now_seconds - self._began) if now_seconds > self._began else 0.0
