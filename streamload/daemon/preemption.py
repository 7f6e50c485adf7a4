"""Preemption notices: SIGTERM and SIGINT, and the clouds' own (metadata.py), polled by a thread.

A notice allows a tidy exit; correctness doesn't depend on it: SIGKILL at any moment loses nothing but time.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from streamload import limits
from streamload.daemon.metadata import CLOUDS, METADATA, Cloud, Metadata

logger = logging.getLogger("streamload")

GRACE_SECONDS = 30.0
"""The default time after a SIGTERM, as of Kubernetes and Slurm."""
POLL_SECONDS = 5.0


class Notice:
    """Notice that told this process to exit, by whom and until when. Thread-safe; the first one counts.

    Lock-free, so that a signal handler may give it.

    Args:
        clock: monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._word: dict[str, tuple[str, float]] = {}

    def give(self, by: str, seconds: float) -> None:
        """Tell the process to exit within so many seconds."""
        self._word.setdefault("first", (by, self._clock() + max(0.0, seconds)))

    @property
    def is_given(self) -> bool:
        """True if a notice was given."""
        return bool(self._word)

    @property
    def by(self) -> str:
        """Source of the notice: a signal or a cloud; "" if there was none."""
        return self._word["first"][0] if self._word else ""

    def seconds_left(self) -> float:
        """Time that this process has left; infinite without a notice."""
        return max(0.0, self._word["first"][1] - self._clock()) if self._word else float("inf")


@contextlib.contextmanager
def on_signals(notice: Notice, grace_seconds: float = GRACE_SECONDS) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into notices within the block; a second signal interrupts. Main thread only.

    The first signal after a cloud's notice changes nothing: it is the cloud's own next step.
    """

    heard: list[int] = []

    def heed(number: int, frame: object) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)
        notice.give(signal.Signals(number).name, grace_seconds)

    before = {number: signal.signal(number, heed) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class NoticeWatch(threading.Thread):
    """Polls a cloud's metadata service in a thread, and gives its notice.

    Args:
        notice: what to give.
        cloud: "auto" tries all, and none may be there.
        bases: the addresses of the services.
        poll_seconds: the polling interval.
    """

    def __init__(
        self,
        notice: Notice,
        cloud: Cloud = "auto",
        *,
        bases: Mapping[str, str] = METADATA,
        poll_seconds: float = POLL_SECONDS,
    ):
        super().__init__(name="streamload-notice", daemon=True)
        self._notice = notice
        self._cloud = cloud
        self._poll_seconds = poll_seconds
        self._ended = threading.Event()
        self._services = [
            kind(bases[name]) for name, kind in CLOUDS.items() if cloud == name or cloud == "auto"
        ]
        limits.start(self)

    def close(self) -> None:
        """Stop polling, after the running request. Idempotent."""
        self._ended.set()
        self.join()
        for service in self._services:
            service.close()

    def run(self) -> None:
        """Poll until a notice or `close`."""
        service = self._found()
        has_logged = False
        while service is not None and not self._ended.is_set():
            try:
                seconds = service.notice_seconds()
            except OSError as exc:
                seconds = None
                if not has_logged:
                    has_logged = True
                    logger.warning("can't poll for preemption notices now: %s", exc)
            if seconds is not None:
                logger.warning("%s takes this machine away in %.0f s", service.name, seconds)
                self._notice.give(service.name, seconds)
                return
            self._ended.wait(self._poll_seconds)

    def _found(self) -> Metadata | None:
        if self._cloud != "auto":
            return self._services[0] if self._services else None
        for service in self._services:
            if not self._ended.is_set() and service.is_here():
                logger.info("this machine is of %s: polling for its preemption notices", service.name)
                return service
        return None
