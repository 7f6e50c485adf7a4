"""A trainer publishes what it will read and its progress: one small file per group, off the hot path.

It is advice for daemons: if the shared tier can't be written, the training logs that once and goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from streamload import limits
from streamload.cache.shared.objects import Objects, TooLarge
from streamload.daemon.plan_file import PLAN_LIMIT_BYTES, PlanProgress, RunPlan
from streamload.errors import SharedTierError, StreamloadError

logger = logging.getLogger("streamload")

EVERY_SECONDS = 10.0
_MOST_PAUSE_SECONDS = 600.0


class PlanPublisher:
    """Publishes a run's plan, then the progress of its groups, in a thread.

    Args:
        objects: of the shared tier.
        make_plan: called in the thread, as it may go over all shards.
    """

    def __init__(self, objects: Objects, make_plan: Callable[[], tuple[RunPlan, str]]):
        self._stop = threading.Event()
        self._objects = objects.until(self._stop)
        self._make_plan = make_plan
        self._every_seconds = EVERY_SECONDS
        self._change = threading.Condition()
        # Guarded by _change:
        self._news: dict[int, PlanProgress] = {}
        self._paces: dict[int, _OpeningRate] = {}
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name="streamload-publish", daemon=True)
        limits.start(self._thread)

    def tell(self, progress: PlanProgress) -> None:
        """Set the progress of a group, to be published next; takes microseconds."""
        with self._change:
            pace = self._paces.get(progress.group)
            if pace is None or pace.began_with.epoch != progress.epoch:
                pace = self._paces[progress.group] = _OpeningRate(progress, time.monotonic())
            self._news[progress.group] = replace(
                progress, shards_per_second=pace.at(progress, time.monotonic()), told=pace.told
            )
            pace.told += 1
            self._change.notify_all()

    def close(self) -> None:
        """Stop publishing; the last files stay. Idempotent."""
        self._stop.set()
        with self._change:
            self._change.notify_all()
        self._thread.join()

    def _work(self) -> None:
        run, pause = "", 0.0
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._news) or self._stop.is_set())
            if self._stop.is_set():
                return
            try:
                run = run or self._publish_plan()
                self._publish_progress(run)
                pause = self._every_seconds
            except StreamloadError as exc:
                self._log_once(exc)
                pause = min(max(2 * pause, self._every_seconds), _MOST_PAUSE_SECONDS)
            self._stop.wait(pause)

    def _publish_plan(self) -> str:
        plan, why = self._make_plan()
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

    def _log_once(self, error: StreamloadError) -> None:
        if self._stop.is_set() or self._has_failed:
            return
        self._has_failed = True
        logger.info("the plan of this run can't be published, so daemons can't follow it: %s", error)


class _OpeningRate:
    """The rate at which a group opens shards, since its first progress of an epoch."""

    def __init__(self, began_with: PlanProgress, now_seconds: float):
        self.began_with = began_with
        self.told = 0
        self._began = now_seconds
        self._opened = 0
        self._last = began_with.fronts

    def at(self, progress: PlanProgress, now_seconds: float) -> float:
        """Shards per second until now; 0 if it isn't known yet."""
        for (pass_, place), (last_pass, last_place) in zip(progress.fronts, self._last, strict=True):
            self._opened += max(0, place - last_place) if pass_ == last_pass else place
        self._last = progress.fronts
        return self._opened / (now_seconds - self._began) if now_seconds > self._began else 0.0
