"""What every origin promises, and what all transfers of a loader share (step F).

An origin gives a shard's bytes in order, from any byte to the end, and never mixes two versions of it.
Those that give ranges of their own have a better `read` than the one here.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamload.errors import (
    DatasetChanged,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginStopped,
    OriginTimeout,
    OriginUnavailable,
    StreamloadError,
)
from streamload.origins.access import Named

_LEAST_READ_BYTES = 32 << 10
_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


@dataclass(frozen=True, slots=True)
class Version:
    """What tells two versions of a shard apart, as far as its origin says: a weak ETag counts as none."""

    size: int | None = None
    etag: str | None = None
    last_modified: str | None = None

    @property
    def is_traceable(self) -> bool:
        """Whether anything but its size tells this version from another."""
        return bool(self.etag or self.last_modified)

    def difference(self, other: Version) -> str | None:
        """Say in words why `other` is another version; None where nothing speaks against the same one."""
        facts = ["size", "etag"] if self.etag and other.etag else ["size", "last_modified"]
        for fact in facts:
            mine, theirs = getattr(self, fact), getattr(other, fact)
            if mine is not None and theirs is not None and mine != theirs:
                return f"its {fact.replace('_', ' ')} was {mine} and is {theirs}"
        return None

    def proves(self, other: Version) -> bool:
        """Whether a validator that both have says that they are the same version."""
        fact = "etag" if self.etag and other.etag else "last_modified"
        return bool(getattr(self, fact) and getattr(other, fact)) and self.difference(other) is None

    def without_etag(self) -> Version:
        """Return what is compared where bytes are, too: each backend of a balancer may have its own ETag."""
        return Version(self.size, None, self.last_modified)

    def completed(self, other: Version) -> Version:
        """Return this version with the facts that only `other` knows."""
        size = other.size if self.size is None else self.size
        return Version(size, self.etag or other.etag, self.last_modified or other.last_modified)


class Unproven(Exception):
    """Nothing proves that what would come next is of the version whose first bytes are there.

    The shard has to be read from its first byte, over one connection, and compared with what is there.
    """


class Stream(Protocol):
    """A shard's bytes from one byte to its end. For one thread; close() is idempotent and ends every wait."""

    version: Version

    def chunks(self) -> Iterator[bytes]:
        """Give the bytes in order, once; ends only where the origin vouches that the shard ends."""
        ...

    def close(self) -> None:
        """Give back connection, process and descriptors."""
        ...


class Origin(Protocol):
    """Where one shard lives. Not thread-safe, not picklable; made in the process that uses it.

    To be inherited from, for `read` and `close`.

    Attributes:
        url: as it may be shown, without secrets.
    """

    url: str

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Return the bytes from `start` to the end.

        Raises:
            OriginError: by its subclass: not found, denied, too slow, cut.
            DatasetChanged: the shard isn't the version `expected`.
            Unproven: from a byte other than the first; here, or by the stream's chunks().
        """
        ...

    def version(self) -> Version:
        """Ask which version the shard has now, for next to no bytes; empty where the origin knows none.

        Raises:
            OriginError: as for open().
        """
        ...

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Return the bytes from `start` up to `stop` of a shard of a known version.

        Another size or date is found out here, other bytes by whoever has their checksums.

        Raises:
            OriginError, DatasetChanged: as for open().
        """
        return self.streamed(start, start, stop, version)

    def streamed(self, begin: int, start: int, stop: int, version: Version) -> bytes:
        """Return the same out of a stream from `begin` on."""
        data, position = bytearray(), begin
        with contextlib.closing(self.open(begin)) as stream:
            same_version(self.url, version.without_etag(), stream.version)
            for chunk in stream.chunks():
                data += chunk[max(0, start - position) :]
                position += len(chunk)
                if position >= stop:
                    return bytes(data[: stop - start])
        raise OriginCut(f"{self.url}: ended at byte {position}, before {stop}")

    def close(self) -> None:
        """Give back what is kept from one read to the next; once is enough."""
        return


class Counts(Protocol):
    """Where transfers are counted."""

    def add(self, name: str, n: int = 1, /) -> None:
        """Add n to the counter `name`."""
        ...


@dataclass(frozen=True, slots=True)
class OriginOptions:
    """How patient transfers are.

    Args:
        connect_seconds: for a connection to be made, and for a TLS handshake.
        stall_seconds: without a byte of payload, or for a whole head, after which the transfer begins anew at
            the byte where it is.
        slow_seconds: waiting time over which at least `slow_bytes` have to arrive.
        slow_bytes: fewer than these in `slow_seconds` count as a stall.
        attempts: that may fail one after the other, with fewer than `slow_bytes` of progress between them.
        outage_seconds: for so long more are made while all of the shard's server or bucket is away.
        backoff_seconds: the first wait is between 0 and this, and doubles with each failure …
        backoff_limit_seconds: … up to this.
        retry_after_limit_seconds: the longest that a Retry-After is obeyed.
        chunk_bytes: the most bytes of one chunk from a connection or pipe.
        first_get_bytes: the range with which a shard on a web server begins. If it comes as quickly …
        quick_bytes_per_second: … as this, one connection goes on with all the rest, and else ranges.
        first_part_bytes: the first of ranges side by side (of object stores always); each next is twice as …
        part_limit_bytes: … large, up to this, as long as they arrive quickly.
        parts: ranges of a shard that are asked for at once; with 1, a web server is asked for all at once.
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


@dataclass(frozen=True, slots=True)
class Session:
    """What a loader gives to its origins.

    Attributes:
        options: how patient they are.
        counts: where they count.
        stop: ends their waits.
        named: see there.
        secrets: of the URL and its storage options: what no message may hold.
    """

    options: OriginOptions = field(default_factory=OriginOptions)
    counts: Counts | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    named: Named | None = None
    secrets: Sequence[str] = field(default=(), repr=False)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter, if there are any."""
        if self.counts is not None:
            self.counts.add(name, n)

    def check(self, url: str) -> None:
        """Raise OriginStopped once the loader wants to stop."""
        if self.stop.is_set():
            raise OriginStopped(f"{url}: reading was stopped from this side")


class ReadSize:
    """How much to ask a connection or pipe for at once.

    A read makes room for all that it asks for, and gives back what hasn't come: half a megabyte for each
    16 KB costs the kernel more than their transfer does.

    Attributes:
        bytes: to ask for now.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._least = self.bytes = min(_LEAST_READ_BYTES, most_bytes)

    def came(self, got: int) -> None:
        """Take note of what a read has brought."""
        if got == self.bytes:
            self.bytes = min(2 * got, self._most)
        elif 4 * got < self.bytes:
            self.bytes = max(self.bytes // 2, self._least)


def no_crawl(url: str, chunks: Iterator[bytes], options: OriginOptions) -> Iterator[bytes]:
    """Pass chunks on; raise OriginTimeout when too few bytes come in the time spent waiting for them."""
    waited, got = 0.0, 0
    while True:
        began = time.monotonic()
        chunk = next(chunks, None)
        if chunk is None:
            return
        waited += time.monotonic() - began
        got += len(chunk)
        yield chunk
        if waited >= options.slow_seconds:
            if got < options.slow_bytes:
                raise OriginTimeout(f"{url}: only {got} bytes in {waited:.0f} s")
            waited, got = 0.0, 0


def same_version(url: str, expected: Version | None, found: Version) -> None:
    """Raise DatasetChanged where `found` can't be the version `expected`."""
    difference = expected.difference(found) if expected is not None else None
    if difference is not None:
        raise DatasetChanged(
            f"{url} was replaced while it was in use: {difference}; "
            "read it anew from its first byte, or keep data sets under names that never change"
        )


def strong(etag: str | None) -> str | None:
    """Return an ETag that stands for exact bytes, or None."""
    return None if not etag or etag.startswith("W/") else etag


def http_error(message: str, status: int, retry_after: str | None = None) -> StreamloadError:
    """Return the error that an HTTP status stands for."""
    if status in {404, 410}:
        return OriginNotFound(message)
    if status in {401, 402, 403, 407}:
        return OriginDenied(message)
    if status == 408:
        return OriginTimeout(message)
    if status == 412:
        return DatasetChanged(f"{message}: it was replaced while it was in use")
    if status in {425, 429} or (status >= 500 and status not in {501, 505}):
        error = OriginUnavailable(message)
        error.retry_after_seconds = _retry_after_seconds(retry_after)
        return error
    return OriginError(message)


def is_unreachable(error: BaseException) -> bool:
    """Whether no host has the name, or nothing listens at the port; else a connection may do next time."""
    is_unknown = isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME
    return is_unknown or isinstance(error, ConnectionRefusedError)


def _retry_after_seconds(retry_after: str | None) -> float | None:
    """Retry-After is a number of seconds or a date."""
    if not retry_after:
        return None
    if re.fullmatch("[0-9]{1,18}", retry_after.strip()):
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
