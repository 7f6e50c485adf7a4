"""Notices that this machine will be taken away: SIGTERM, and what AWS, GCP and Azure say beforehand.

A notice makes an end tidy, never right: SIGKILL at any moment loses nothing but time. A cloud is asked at its
metadata service, by a thread of its own, and never through a proxy or a redirect.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import json
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import urllib3

logger = logging.getLogger("streamload")

Cloud = Literal["auto", "aws", "gcp", "azure", "none"]

METADATA = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
USUAL_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""The notice that each cloud gives, where its answer doesn't say until when."""
GRACE_SECONDS = 30.0
"""What is left after a SIGTERM, unless told otherwise: Kubernetes' default, and Slurm's."""
POLL_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_TIMEOUT_SECONDS = 2.0
_TOKEN_SECONDS = 6 * 3600


class Notice:
    """Whether, by whom and until when this process was told to end. Thread-safe; the first word counts.

    No lock is held at any time, so that a signal handler may give it.

    Args:
        clock: monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._word: dict[str, tuple[str, float]] = {}

    def give(self, by: str, seconds: float) -> None:
        """Say that the process has to be gone in so many seconds."""
        self._word.setdefault("first", (by, self._clock() + max(0.0, seconds)))

    @property
    def is_given(self) -> bool:
        """Whether it was given."""
        return bool(self._word)

    @property
    def by(self) -> str:
        """Who gave it; "" if nobody has."""
        return self._word["first"][0] if self._word else ""

    def seconds_left(self) -> float:
        """How long this process may go on; endless without a notice."""
        return max(0.0, self._word["first"][1] - self._clock()) if self._word else float("inf")

    def wait(self, seconds: float) -> bool:
        """Wait for it; whether it was given."""
        until = time.monotonic() + seconds
        while not self._word and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return bool(self._word)


@contextlib.contextmanager
def on_signals(notice: Notice, grace_seconds: float = GRACE_SECONDS) -> Iterator[None]:
    """Take SIGTERM and SIGINT as notices within the block; a second one ends the grace. Main thread only.

    A first one after a cloud's notice ends nothing: that is how the cloud goes on.
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


class Metadata(Protocol):
    """A cloud's metadata service. For one thread; every call ends in seconds."""

    name: str

    def is_here(self) -> bool:
        """Whether this machine is of that cloud."""
        ...

    def notice_seconds(self) -> float | None:
        """How long this machine has left; None as long as nobody says so.

        Raises:
            OSError: the service gives no answer, or one that can't be understood.
        """
        ...


@dataclass(slots=True)
class _Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]

    def seconds_until(self, when: datetime.datetime) -> float:
        """How long it is until a time of the service's, by the service's own clock."""
        date = self.headers.get("Date")
        now = (
            email.utils.parsedate_to_datetime(date) if date else datetime.datetime.now(datetime.timezone.utc)
        )
        return (when - now).total_seconds()


class _Service:
    """Requests to one metadata service."""

    name = ""

    def __init__(self, base: str):
        self._base = base.rstrip("/")
        self._pool = urllib3.PoolManager(retries=False)

    def close(self) -> None:
        """Close its connections."""
        self._pool.clear()

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> _Answer:
        url = self._base + path
        try:
            answer = self._pool.request(
                method, url, headers=dict(headers), timeout=_TIMEOUT_SECONDS, redirect=False
            )
        except urllib3.exceptions.HTTPError as exc:
            raise OSError(f"{self.name}'s metadata service at {self._base}: {exc}") from exc
        return _Answer(answer.status, answer.data[:65536], answer.headers)

    def _fail(self, answer: _Answer) -> OSError:
        return OSError(
            f"{self.name}'s metadata service gives an answer that isn't understood: "
            f"{answer.status}, {answer.body[:100]!r}"
        )


class Aws(_Service):
    """EC2's instance metadata, version 2: spot/instance-action."""

    name = "aws"
    _token = ""

    def is_here(self) -> bool:
        """Whether it gives a token, as only EC2 does."""
        with contextlib.suppress(OSError):
            return self._renew()
        return False

    def notice_seconds(self) -> float | None:
        """See Metadata."""
        if not self._token and not self._renew():
            raise OSError("aws's metadata service gives no token")
        headers = {"X-aws-ec2-metadata-token": self._token}
        answer = self._ask("GET", "/latest/meta-data/spot/instance-action", headers)
        if answer.status == 401:  # the token has expired
            self._token = ""
            return None
        if answer.status == 404:
            return None
        try:
            if answer.status != 200:
                raise ValueError
            value = json.loads(answer.body)
            if value["action"] not in {"terminate", "stop", "hibernate"}:
                return None
            seconds = answer.seconds_until(
                datetime.datetime.fromisoformat(value["time"].replace("Z", "+00:00"))
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise self._fail(answer) from exc
        return min(max(seconds, 0.0), USUAL_SECONDS["aws"])

    def _renew(self) -> bool:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        answer = self._ask("PUT", "/latest/api/token", headers)
        if answer.status == 200 and answer.body.isascii() and 0 < len(answer.body) < 1024:
            self._token = answer.body.decode().strip()
        return bool(self._token) and self._token.isprintable()


class Gcp(_Service):
    """Compute Engine's metadata: instance/preempted."""

    name = "gcp"
    _HEADERS: Mapping[str, str] = {"Metadata-Flavor": "Google"}

    def is_here(self) -> bool:
        """Whether it answers as Google's does."""
        with contextlib.suppress(OSError):
            return self._is_google(self._ask("GET", "/computeMetadata/v1/instance/preempted", self._HEADERS))
        return False

    def notice_seconds(self) -> float | None:
        """See Metadata."""
        answer = self._ask("GET", "/computeMetadata/v1/instance/preempted", self._HEADERS)
        if not self._is_google(answer) or answer.body.strip() not in {b"TRUE", b"FALSE"}:
            raise self._fail(answer)
        return USUAL_SECONDS["gcp"] if answer.body.strip() == b"TRUE" else None

    @staticmethod
    def _is_google(answer: _Answer) -> bool:
        return answer.status == 200 and answer.headers.get("Metadata-Flavor") == "Google"


class Azure(_Service):
    """Azure's Scheduled Events: a Preempt of this machine.

    All machines of a scale set or an availability set are given the events of each of them; `Resources` says
    whom one is for (learn.microsoft.com/azure/virtual-machines/linux/scheduled-events). The first request for
    events may take two minutes, so Azure is known by the name that it has for this machine.
    """

    name = "azure"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _HEADERS: Mapping[str, str] = {"Metadata": "true"}
    _machine = ""

    def is_here(self) -> bool:
        """Whether it has a name for this machine."""
        with contextlib.suppress(OSError):
            return bool(self._own_name())
        return False

    def notice_seconds(self) -> float | None:
        """See Metadata."""
        answer = self._ask("GET", self._EVENTS, self._HEADERS)
        try:
            if answer.status != 200:
                raise ValueError
            events = json.loads(answer.body)["Events"]
            preempting = [event for event in events if event["EventType"] in {"Preempt", "Terminate"}]
            own = [event for event in preempting if self._own_name() in map(str.lower, event["Resources"])]
            seconds = [self._left(answer, event) for event in own]
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise self._fail(answer) from exc
        return min(seconds, default=None)

    def _own_name(self) -> str:
        """This machine's name, in small letters.

        Raises:
            OSError: none is given.
        """
        if not self._machine:
            answer = self._ask("GET", self._NAME, self._HEADERS)
            self._machine = answer.body.decode("utf-8", "replace").strip().lower()
            if answer.status != 200 or not re.fullmatch(r"[\w.-]{1,256}", self._machine):
                self._machine = ""
                raise self._fail(answer)
        return self._machine

    @staticmethod
    def _left(answer: _Answer, event: Mapping[str, Any]) -> float:
        """An event that has started says no time any more."""
        when = event.get("NotBefore")
        if not when:
            return USUAL_SECONDS["azure"]
        return max(0.0, answer.seconds_until(email.utils.parsedate_to_datetime(when)))


_CLOUDS: Mapping[str, type[Aws] | type[Gcp] | type[Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class Watch(threading.Thread):
    """Asks a cloud again and again, in a thread, and passes its word on.

    Args:
        notice: where it is given.
        cloud: which one; "auto" tries all, and is content with none.
        bases: the services' addresses.
        poll_seconds: how often.
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
            kind(bases[name]) for name, kind in _CLOUDS.items() if cloud == name or cloud == "auto"
        ]
        self.start()

    def close(self) -> None:
        """Ask no more; once is enough. Waits for the answer that is due."""
        self._ended.set()
        self.join()
        for service in self._services:
            service.close()

    def run(self) -> None:
        """What the thread does."""
        service = self._found()
        has_told = False
        while service is not None and not self._ended.is_set():
            try:
                seconds = service.notice_seconds()
            except OSError as exc:
                seconds = None
                if not has_told:
                    has_told = True
                    logger.warning("whether this machine is taken away can't be asked now: %s", exc)
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
                logger.info("this machine is of %s: its notices are heeded", service.name)
                return service
        return None
