"""The metadata services of AWS, GCP and Azure as far as they tell that a machine is taken away; on loopback.

Each answers only who asks as the real one wants to be asked: AWS with a token, the others with a header.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.server
import json
import threading
import time
from collections.abc import Iterable
from typing import Any, Literal

Answer = tuple[int, bytes]
CLOUDS = ("aws", "gcp", "azure")


class MetadataServer:
    """A metadata service; a context manager.

    Args:
        cloud: whose.
        skew_seconds: by how much its clock is ahead of this machine's.
        first: answers, status and body, that come before the right ones.
        enabling_seconds: how long Azure's first answer about events takes, which enables them.

    Attributes:
        bases: of each cloud the address of its service: this one.
        asked: the paths that were asked for.
    """

    def __init__(
        self,
        cloud: Literal["aws", "gcp", "azure", "none"],
        *,
        skew_seconds: float = 0.0,
        first: Iterable[Answer] = (),
        enabling_seconds: float = 0.0,
    ):
        self.cloud = cloud
        self.skew_seconds = skew_seconds
        self.first = list(first)
        self.enabling_seconds = enabling_seconds
        self.asked: list[str] = []
        self.tokens = 0
        self.left_seconds: float | None = None

        class Handler(_Handler):
            owner = self

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="metadata")
        self._thread.start()
        self.bases = dict.fromkeys(CLOUDS, f"http://127.0.0.1:{self._server.server_address[1]}")

    def __enter__(self) -> MetadataServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Answer no more; once is enough."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take_away(self, seconds: float) -> None:
        """From now on say that the machine goes in so many seconds (GCP doesn't say in how many)."""
        self.left_seconds = seconds

    def forget_tokens(self) -> None:
        """Tokens that were given don't count any more."""
        self.tokens += 1


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: MetadataServer

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The time of the service's clock."""
        return email.utils.formatdate(time.time() + self.owner.skew_seconds, usegmt=True)

    def do_PUT(self) -> None:
        """Give a token, as AWS does."""
        if self.owner.cloud != "aws" or self.path != "/latest/api/token":
            self._say(404)
        elif not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdecimal():
            self._say(400)
        else:
            self.owner.tokens += 1
            self._say(200, f"token-{self.owner.tokens}".encode())

    def do_GET(self) -> None:
        """Say whether the machine goes."""
        self.owner.asked.append(self.path)
        if self.owner.first:
            self._say(*self.owner.first.pop(0))
        elif self.owner.cloud == "none":
            self._say(404)
        else:
            {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}[self.owner.cloud]()

    def _aws(self) -> None:
        if self.path != "/latest/meta-data/spot/instance-action":
            self._say(404)
        elif self.headers.get("X-aws-ec2-metadata-token") != f"token-{self.owner.tokens}":
            self._say(401)
        elif self.owner.left_seconds is None:
            self._say(404)
        else:
            when = self._goes_at().strftime("%Y-%m-%dT%H:%M:%SZ")
            self._say(200, json.dumps({"action": "terminate", "time": when}).encode())

    def _gcp(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._say(403)
        elif not self.path.startswith("/computeMetadata/v1/instance/preempted"):
            self._say(404)
        else:
            goes = self.owner.left_seconds is not None
            self._say(200, b"TRUE" if goes else b"FALSE", {"Metadata-Flavor": "Google"})

    def _azure(self) -> None:
        if self.headers.get("Metadata") != "true" or "api-version=" not in self.path:
            self._say(400)
        elif self.path.startswith("/metadata/instance/compute/name?"):
            self._say(200, b"spot_7")
        elif self.path.startswith("/metadata/scheduledevents?"):
            pause, self.owner.enabling_seconds = self.owner.enabling_seconds, 0.0
            time.sleep(pause)
            self._say(200, json.dumps({"DocumentIncarnation": 1, "Events": self._events()}).encode())
        else:
            self._say(404)

    def _events(self) -> list[dict[str, Any]]:
        """Those of another machine of the same set are among them."""
        events: list[dict[str, Any]] = [
            {"EventType": "Reboot", "NotBefore": "", "EventStatus": "Started", "Resources": ["SPOT_7"]},
            {"EventType": "Preempt", "NotBefore": "", "EventStatus": "Started", "Resources": ["SPOT_8"]},
        ]
        if self.owner.left_seconds is not None:
            when = email.utils.format_datetime(self._goes_at(), usegmt=True)
            own = {"EventType": "Preempt", "NotBefore": when, "EventStatus": "Scheduled"}
            events.append({**own, "Resources": ["SPOT_9", "SPOT_7"]})
        return events

    def _goes_at(self) -> datetime.datetime:
        now = datetime.datetime.now(datetime.timezone.utc)
        return now + datetime.timedelta(seconds=(self.owner.left_seconds or 0.0) + self.owner.skew_seconds)

    def _say(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(ConnectionError):  # who asked may be gone by then
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (http.server's name)
        """Say nothing: `asked` has it."""
