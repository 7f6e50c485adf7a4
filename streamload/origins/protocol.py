"""The contract of every origin, and what the transfers of a loader share (step F).

An origin gives the bytes of a shard in order, from any byte to the end, and never mixes two versions.
Origins with range requests override `read`.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from streamload.errors import (
    DatasetChanged,
    OptionError,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginStopped,
    OriginTimeout,
    OriginUnavailable,
    StreamloadError,
)
from streamload.metrics import Counts
from streamload.urls import origin_of, redact
from streamload.urls.identity import DEFAULT_PORTS

ENDED = {
    "ExpiredToken": "the token has expired",
    "InvalidAccessKeyId": "the access key doesn't exist",
    "InvalidToken": "the token is invalid",
    "RequestExpired": "the request has expired",
    "TokenRefreshRequired": "the token must be refreshed",
}
"""Error codes of S3 and stores like it for credentials that have ended, and what they mean."""
_LEAST_READ_BYTES = 32 << 10
_LATER = frozenset((202, 409, 421, 425, 429))
"""Besides 5xx, statuses after which the same request may succeed: not ready, busy, the wrong connection."""
_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


@dataclass(frozen=True, slots=True)
class Version:
    """Version of a shard by its origin. A weak ETag counts as none."""

    size: int | None = None
    etag: str | None = None
    last_modified: str | None = None

    @property
    def is_traceable(self) -> bool:
        """True if anything other than the size identifies this version."""
        return bool(self.etag or self.last_modified)

    def difference(self, other: Version) -> str | None:
        """Return why `other` is another version; None if it may be the same."""
        facts = ["size", "etag"] if self.etag and other.etag else ["size", "last_modified"]
        for fact in facts:
            mine, theirs = getattr(self, fact), getattr(other, fact)
            if mine is not None and theirs is not None and mine != theirs:
                return f"its {fact.replace('_', ' ')} was {mine} and is {theirs}"
        return None

    def proves(self, other: Version) -> bool:
        """Return whether a validator that both have shows that they are the same version."""
        fact = "etag" if self.etag and other.etag else "last_modified"
        return bool(getattr(self, fact) and getattr(other, fact)) and self.difference(other) is None

    def only_size(self) -> Version:
        """Return the version to compare if bytes are compared too.

        Backends of a load balancer may have an ETag and a date each for the same bytes.
        """
        return Version(self.size)

    def completed(self, other: Version) -> Version:
        """Return this version, completed by facts that only `other` has."""
        size = other.size if self.size is None else self.size
        return Version(size, self.etag or other.etag, self.last_modified or other.last_modified)


class Unproven(Exception):
    """Nothing proves that the next bytes are of the same version as the bytes before them.

    The shard must be read from its first byte, over one connection, and compared with the bytes already read.
    """


class Stream(Protocol):
    """The bytes of a shard from one byte to its end. Not thread-safe; close() is idempotent."""

    version: Version

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order, once. Ends only if the origin confirms that the shard is complete."""
        ...

    def close(self) -> None:
        """Release connection, process and descriptors."""
        ...


class Origin(Protocol):
    """Origin of one shard. Not thread-safe, not picklable; created in the process that uses it.

    Subclasses inherit `read` and `close`.

    Attributes:
        url: without secrets, as it may be shown.
    """

    url: str

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Return the bytes from `start` to the end.

        Raises:
            OriginError: by subclass: not found, denied, too slow, cut.
            DatasetChanged: the shard isn't the version `expected`.
            Unproven: `start` isn't 0; here, or from the stream's chunks().
        """
        ...

    def version(self) -> Version:
        """Return the current version of the shard, for next to no bytes; empty if the origin knows none.

        Raises:
            OriginError: as for open().
        """
        ...

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Return the bytes from `start` up to `stop` of a shard of a known version.

        Detects another size, and another date if no other backend can have it; the caller detects other bytes
        by their checksums.

        Raises:
            OriginError, DatasetChanged: as for open().
        """
        return self.streamed(start, start, stop, version)

    def streamed(self, begin: int, start: int, stop: int, version: Version) -> bytes:
        """Do the same by a stream that starts at `begin`."""
        data, position = bytearray(), begin
        with contextlib.closing(self.open(begin)) as stream:
            same_version(self.url, version, stream.version)
            for chunk in stream.chunks():
                data += chunk[max(0, start - position) :]
                position += len(chunk)
                if position >= stop:
                    return bytes(data[: stop - start])
        raise OriginCut(f"{self.url}: ended at byte {position}, before {stop}")

    def close(self) -> None:
        """Release what is kept between reads; idempotent."""
        return


class Recipe(Protocol):
    """Makes a derived shard of each shard: prepared images, or rows of features.

    Thread-safe, deterministic, picklable.
    """

    @property
    def name(self) -> str:
        """A name for all that the result depends on beside the shard (`Shard.recipe`)."""
        ...

    def derive(self, origin: Origin) -> Origin:
        """The derived shard of an origin's shard, under that shard's version."""
        ...


@dataclass(frozen=True, slots=True)
class OriginOptions:
    """Timeouts, retries and request sizes of transfers.

    Args:
        connect_seconds: timeout for a connection, and for a TLS handshake.
        stall_seconds: timeout for the next byte of payload, or for a whole head; then the transfer is retried
            from its position.
        slow_seconds: waiting time in which at least `slow_bytes` must arrive.
        slow_bytes: fewer than these in `slow_seconds` count as a stall.
        attempts: give up after this many failures with fewer than `slow_bytes` of progress between them.
        outage_seconds: how long to go on retrying while the whole server or bucket is down.
        backoff_seconds: the first wait is between 0 and this. The limit doubles with each failure …
        backoff_limit_seconds: … up to this.
        retry_after_limit_seconds: the longest Retry-After that is obeyed.
        chunk_bytes: the largest chunk from a connection or pipe.
        first_get_bytes: the first range of a shard on a web server. If it arrives at least …
        quick_bytes_per_second: … this fast, the same connection reads the rest; otherwise parallel ranges do.
        first_part_bytes: the first parallel range (object stores always use them); each next is twice as …
        part_limit_bytes: … large, up to this, as long as they arrive quickly.
        parts: parallel ranges of a shard; with 1, a web server is asked for the whole shard at once.
        mounts: folders whose files are fetched, each the mount of a file system that may be away.
    """

    connect_seconds: float = 10.0
    stall_seconds: float = 15.0
    slow_seconds: float = 30.0
    slow_bytes: int = 30_000
    attempts: int = 10
    outage_seconds: float = 0.0
    backoff_seconds: float = 0.1
    backoff_limit_seconds: float = 15.0
    retry_after_limit_seconds: float = 60.0
    chunk_bytes: int = 512 * 1024
    first_get_bytes: int = 4 * 1024 * 1024
    quick_bytes_per_second: float = 8e6
    first_part_bytes: int = 256 * 1024
    part_limit_bytes: int = 8 * 1024 * 1024
    parts: int = 2
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Named:
    """The hosts, buckets and repositories that the user named, for shards that are listed by a plan.

    Only these get credentials and headers, and only these may have non-public addresses. None in place of a
    `Named` means that the user listed all shards.

    Args:
        origins: as returned by `origin_of`.
    """

    origins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Named:
        """Parse what the user wrote.

        Raises:
            OptionError: a text that isn't a web server, bucket or repository alone.
        """
        allowed = set()
        for text in texts:
            origin = origin_of(text)
            if not origin or re.search("[?#]", text) or text.rstrip("/").count("/") != origin.count("/"):
                raise OptionError(
                    f"origin={redact(text)!r}: expected a web server, bucket or repository alone, as "
                    "https://host, s3://bucket or hf://datasets/owner/name"
                )
            allowed.add(origin)
        return cls(frozenset(allowed))

    def has(self, url: str) -> bool:
        """Return whether the user named the origin of a URL."""
        return origin_of(url) in self.origins

    def has_host(self, host: str, port: int | None) -> bool:
        """Return whether the user named a host with this port."""
        mine = host.strip("[]").rstrip(".").lower()
        for parts in map(urlsplit, self.origins):
            usual = DEFAULT_PORTS.get(parts.scheme)
            if usual is not None and parts.hostname == mine and (parts.port or usual) == port:
                return True
        return False

    def and_also(self, url: str) -> Named:
        """Return these and the origin of another URL."""
        return Named(self.origins | {origin_of(url)})


class KeptConnections:
    """Connections that outlive a shard: each thread that fills has its own for the next one. Thread-safe."""

    def __init__(self) -> None:
        self.by_thread: dict[int, Any] = {}  # `Pools`, which import urllib3

    def close(self) -> None:
        """Close the connections, once no thread uses them. Idempotent."""
        while self.by_thread:
            self.by_thread.popitem()[1].close()


@dataclass(frozen=True, slots=True)
class Session:
    """Session of the origins of a loader.

    Attributes:
        options: timeouts, retries and request sizes.
        counts: their counters.
        stop: ends their waits.
        named: see `Named`.
        secrets: of the URL and its storage options, and credentials that were found; no message may contain
            them.
        kept: connections for further shards; None: each shard has its own.
    """

    options: OriginOptions = field(default_factory=OriginOptions)
    counts: Counts | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    named: Named | None = None
    secrets: list[str] = field(default_factory=list, repr=False)
    kept: KeptConnections | None = None

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter, if counters were given."""
        if self.counts is not None:
            self.counts.add(name, n)

    def hide(self, secrets: Iterable[str | None]) -> None:
        """Add secrets, the longest first: renewed credentials have their own."""
        added = set(filter(None, secrets))
        if not added <= set(self.secrets):
            self.secrets[:] = sorted({*self.secrets, *added}, key=lambda secret: (-len(secret), secret))

    def check(self, url: str) -> None:
        """Raise OriginStopped if the loader is stopping."""
        if self.stop.is_set():
            raise OriginStopped(f"{url}: reading was stopped from this side")


class ReadSize:
    """The adaptive size of reads from a connection or pipe.

    A read allocates all that it asks for and frees what hasn't come: half a megabyte for each 16 KB costs the
    kernel more than the transfer.

    Attributes:
        bytes: size of the next read.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._least = self.bytes = min(_LEAST_READ_BYTES, most_bytes)

    def came(self, got: int) -> None:
        """Adapt to the number of bytes that a read returned."""
        if got == self.bytes:
            self.bytes = min(2 * got, self._most)
        elif 4 * got < self.bytes:
            self.bytes = max(self.bytes // 2, self._least)


def no_crawl(url: str, chunks: Iterator[bytes], options: OriginOptions) -> Iterator[bytes]:
    """Pass chunks on; raise OriginTimeout if too few bytes arrive in the time spent waiting for them."""
    waited, got = 0.0, 0
    while True:
        start = time.monotonic()
        chunk = next(chunks, None)
        if chunk is None:
            return
        waited += time.monotonic() - start
        got += len(chunk)
        yield chunk
        if waited >= options.slow_seconds:
            if got < options.slow_bytes:
                raise OriginTimeout(f"{url}: only {got} bytes in {waited:.0f} s")
            waited, got = 0.0, 0


def same_version(url: str, expected: Version | None, current: Version) -> None:
    """Raise DatasetChanged if `current` can't be the version `expected`."""
    difference = expected.difference(current) if expected is not None else None
    if difference is not None:
        raise DatasetChanged(
            f"{url} was replaced while it was in use: {difference}; "
            "read it again from its first byte, or give each version of a data set its own name"
        )


def strong(etag: str | None) -> str | None:
    """Return an ETag unless it is weak."""
    return None if not etag or etag.startswith("W/") else etag


def clock_hint(code: str, date: str | None) -> str:
    """Return what to add to a refusal for a wrong clock; "" for another code.

    Args:
        date: the header of the answer.
    """
    if code != "RequestTimeTooSkewed":
        return ""
    return (
        f": the clock of this machine says {email.utils.formatdate(usegmt=True)} and the store's "
        f"{date or 'something else'}: set this one (timedatectl set-ntp true), a signature lives for minutes"
    )


def http_error(message: str, status: int, retry_after: str | None = None) -> StreamloadError:
    """Return the error for an HTTP status."""
    if status in {404, 410}:
        return OriginNotFound(message)
    if status in {401, 402, 403, 407}:
        return OriginDenied(message)
    if status == 408:
        return OriginTimeout(message)
    if status == 412:
        return DatasetChanged(f"{message}: it was replaced while it was in use")
    if status in _LATER or (status >= 500 and status not in {501, 505}):
        error = OriginUnavailable(message)
        error.retry_after_seconds = _retry_after_seconds(retry_after)
        return error
    return OriginError(message)


def is_unreachable(error: BaseException) -> bool:
    """Return whether no host has the name, or nothing listens at the port."""
    is_unknown = isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME
    return is_unknown or isinstance(error, ConnectionRefusedError)


def _retry_after_seconds(retry_after: str | None) -> float | None:
    """Parse a Retry-After header: a number of seconds or a date."""
    if not retry_after:
        return None
    if re.fullmatch("[0-9]{1,18}", retry_after.strip()):
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
