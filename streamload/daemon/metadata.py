"""The metadata services of AWS, GCP and Azure: whether this machine will be taken away.

They are asked directly, never through a proxy or a redirect.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import email.utils
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import urllib3

Cloud = Literal["auto", "aws", "gcp", "azure", "none"]

METADATA = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
USUAL_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""The notice period of each cloud, where its answer has no deadline."""
_TIMEOUT_SECONDS = 2.0
_TOKEN_SECONDS = 6 * 3600


@dataclass(slots=True)
class _MetadataAnswer:
    status: int
    body: bytes
    headers: Mapping[str, str]

    def seconds_until(self, when: datetime.datetime) -> float:
        """The seconds until a time, by the service's own clock."""
        date = self.headers.get("Date")
        current_time = (
            email.utils.parsedate_to_datetime(date) if date else datetime.datetime.now(datetime.timezone.utc)
        )
        return (when - current_time).total_seconds()


class Metadata(abc.ABC):
    """A cloud's metadata service. For one thread; every call returns within seconds."""

    name = ""

    def __init__(self, base: str):
        self._base = base.rstrip("/")
        self._pool = urllib3.PoolManager(retries=False)

    @abc.abstractmethod
    def is_here(self) -> bool:
        """True if this machine belongs to the cloud."""

    @abc.abstractmethod
    def notice_seconds(self) -> float | None:
        """Time that this machine has left; None without a notice.

        Raises:
            OSError: the service doesn't answer, or its answer can't be parsed.
        """

    def close(self) -> None:
        """Close its connections."""
        self._pool.clear()

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> _MetadataAnswer:
        url = self._base + path
        try:
            answer = self._pool.request(
                method, url, headers=dict(headers), timeout=_TIMEOUT_SECONDS, redirect=False
            )
        except urllib3.exceptions.HTTPError as exc:
            raise OSError(f"{self.name}'s metadata service at {self._base}: {exc}") from exc
        return _MetadataAnswer(answer.status, answer.data[:65536], answer.headers)

    def _fail(self, answer: _MetadataAnswer) -> OSError:
        return OSError(
            f"{self.name}'s metadata service answered with something unexpected: "
            f"{answer.status}, {answer.body[:100]!r}"
        )


class Aws(Metadata):
    """EC2's instance metadata, version 2: spot/instance-action."""

    name = "aws"
    _token = ""

    def is_here(self) -> bool:
        """True if it issues a token, as only EC2 does."""
        with contextlib.suppress(OSError):
            return self._renew()
        return False

    def notice_seconds(self) -> float | None:
        """Time that this machine has left; None without a notice."""
        if not self._token and not self._renew():
            raise OSError("aws's metadata service issues no token")
        headers = {"X-aws-ec2-metadata-token": self._token}
        answer = self._ask("GET", "/latest/meta-data/spot/instance-action", headers)
        if answer.status == 401:  # expired
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


class Gcp(Metadata):
    """Compute Engine's metadata: instance/preempted."""

    name = "gcp"
    _HEADERS: Mapping[str, str] = {"Metadata-Flavor": "Google"}

    def is_here(self) -> bool:
        """True if it answers as Google's service does."""
        with contextlib.suppress(OSError):
            return self._is_google(self._ask("GET", "/computeMetadata/v1/instance/preempted", self._HEADERS))
        return False

    def notice_seconds(self) -> float | None:
        """Time that this machine has left; None without a notice."""
        answer = self._ask("GET", "/computeMetadata/v1/instance/preempted", self._HEADERS)
        if not self._is_google(answer) or answer.body.strip() not in {b"TRUE", b"FALSE"}:
            raise self._fail(answer)
        return USUAL_SECONDS["gcp"] if answer.body.strip() == b"TRUE" else None

    @staticmethod
    def _is_google(answer: _MetadataAnswer) -> bool:
        return answer.status == 200 and answer.headers.get("Metadata-Flavor") == "Google"


class Azure(Metadata):
    """Azure's Scheduled Events: a Preempt of this machine.

    All machines of a scale set or availability set get each other's events; `Resources` names the machines an
    event is for (learn.microsoft.com/azure/virtual-machines/linux/scheduled-events). The first request for
    events may take two minutes, so Azure is detected by its name for this machine.
    """

    name = "azure"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _HEADERS: Mapping[str, str] = {"Metadata": "true"}
    _machine = ""

    def is_here(self) -> bool:
        """True if the service has a name for this machine."""
        with contextlib.suppress(OSError):
            return bool(self._own_name())
        return False

    def notice_seconds(self) -> float | None:
        """Time that this machine has left; None without a notice."""
        answer = self._ask("GET", self._EVENTS, self._HEADERS)
        try:
            if answer.status != 200:
                raise ValueError
            events = json.loads(answer.body)["Events"]
            preempting = [event for event in events if event["EventType"] in {"Preempt", "Terminate"}]
            own_events = [
                event for event in preempting if self._own_name() in map(str.lower, event["Resources"])
            ]
            seconds = [self._left(answer, event) for event in own_events]
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise self._fail(answer) from exc
        return min(seconds, default=None)

    def _own_name(self) -> str:
        """This machine's name, in lower case.

        Raises:
            OSError: the service has none.
        """
        if not self._machine:
            answer = self._ask("GET", self._NAME, self._HEADERS)
            self._machine = answer.body.decode("utf-8", "replace").strip().lower()
            if answer.status != 200 or not re.fullmatch(r"[\w.-]{1,256}", self._machine):
                self._machine = ""
                raise self._fail(answer)
        return self._machine

    @staticmethod
    def _left(answer: _MetadataAnswer, event: Mapping[str, Any]) -> float:
        """The seconds until an event; one that has started has no time."""
        when = event.get("NotBefore")
        if not when:
            return USUAL_SECONDS["azure"]
        return max(0.0, answer.seconds_until(email.utils.parsedate_to_datetime(when)))


CLOUDS: Mapping[str, type[Metadata]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
