"""The server behind a limited link, and what its log says in the machine's monotonic time."""

import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamload.testing.server import ShardServer

_MARK = "what-time-is-it"
_MARKS = 5
_TRIES = 3
LEAST_SHARE = 0.95


@dataclass(frozen=True)
class Link:
    """A server in a process of its own; all its connections share the bandwidth."""

    server: Any
    url: str
    offset: float
    """From the server's clock to the machine's."""

    def requests(self, start: float, stop: float) -> list[tuple[float, int]]:
        """The requests for shards that came within a time: when, and the bytes sent in answer."""
        seen = [(r.seconds + self.offset, r.sent) for r in self.server.log if r.path != _MARK and r.sent]
        return [(at, sent) for at, sent in seen if start <= at < stop]

    def first_request(self) -> float | None:
        """When a shard was first asked for, by any method."""
        asked = [r.seconds + self.offset for r in self.server.log if r.path != _MARK]
        return min(asked, default=None)

    def busy(self) -> tuple[float, float, int]:
        """When a shard was first asked for, when the last answer was over, and the bytes of all answers."""
        answers = [request for request in self.server.log if request.path != _MARK]
        first, last = min(r.seconds for r in answers), max(r.ended for r in answers)
        return first + self.offset, last + self.offset, sum(r.sent for r in answers)

    def fetched_bytes(self, start: float, stop: float) -> int:
        return sum(sent for _, sent in self.requests(start, stop))


@contextmanager
def serving(
    shards: Path,
    bytes_per_second: float,
    tls: tuple[str, str] | None = None,
    latency_seconds: float = 0.0,
    connection_rate: float = 0.0,
) -> Iterator[Link]:
    """Serve a directory, by https with files of a certificate and its key; each answer after a latency.

    Args:
        connection_rate: bytes a second of each connection; 0: no limit of its own.
    """
    options = {
        "bytes_per_second": bytes_per_second,
        "latency_seconds": latency_seconds,
        "bytes_per_second_per_connection": connection_rate or None,
    }
    with ShardServer.spawn(shards, tls=tls, **options) as server:
        trust = ssl.create_default_context(cafile=tls[0]) if tls is not None else None
        answered = [_mark(server.url, trust) for _ in range(_MARKS)]
        asked = [request.seconds for request in server.log]
        # What an answer was late by only adds: the least is the nearest.
        yield Link(server, server.url, min(now - then for now, then in zip(answered, asked, strict=True)))


def _mark(url: str, trust: ssl.SSLContext | None) -> float:
    """Leave a mark in the server's log; the time of the answer."""
    try:
        urllib.request.urlopen(f"{url}/{_MARK}", context=trust).close()
    except urllib.error.HTTPError as answer:
        now = time.monotonic()
        answer.close()
        return now
    raise AssertionError(f"{url}/{_MARK} is there")


def measured_bytes_per_second(url: str, rate: float, *, least_share: float) -> float:
    """What one plain client gets.

    Args:
        url: a file to read.
        rate: of the link.
        least_share: of the rate that it has to get.

    Raises:
        RuntimeError: too little, three times: whoever reads over one connection would be at a disadvantage.
    """
    for _ in range(_TRIES):
        measured = _plain_client(url)
        if measured >= least_share * rate:
            return measured
    raise RuntimeError(f"one connection gets {measured / 1e6:.1f} MB/s of a link of {rate / 1e6:.0f} MB/s")


def _plain_client(url: str) -> float:
    began, total = time.monotonic(), 0
    with urllib.request.urlopen(url) as answer:
        while piece := answer.read(1 << 20):
            total += len(piece)
    return total / (time.monotonic() - began)
