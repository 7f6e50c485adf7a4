"""Endpoints, which are servers and buckets: what they can do, and whether they are down (step F).

Known to a process and its forks, for all shards of an endpoint, as long as the process fills shards. The
latest answer about an ability holds: backends of one server may differ.

A shard that fails alone is given up. If the whole endpoint is down, that would cost one shard for each
transfer that runs out of retries. So the endpoint is probed for a byte of a shard that it served before. An
outage belongs to the endpoint: all transfers that wait for it share one deadline, and after it none waits
again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from streamload.errors import (
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginTimeout,
    OriginUnavailable,
)
from streamload.origins.protocol import Origin, Session, Version
from streamload.urls import endpoint, folder_of, redact, scrubbed_errors

Reopen = Callable[[Session], Origin]
"""Creates the origin of a shard again, for another session."""

RETRYABLE = (OriginTimeout, OriginCut, OriginUnavailable)
"""Errors after which a retry may succeed."""
_FIRST_CONTACT_SECONDS = 5.0
"""Time for which all transfers together retry an unreachable address that has never served a byte."""
_FORGOTTEN_SECONDS = 180.0
"""An outage that no transfer has seen for this long counts as over."""
_logger = logging.getLogger("streamload")
_abilities: dict[str, Abilities] = {}  # by name
_served: dict[str, tuple[Endpoint, ...]] = {}  # by name: the last two shards that were served


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities of a server; None: no answer has shown it yet.

    Attributes:
        ranges: it answers a request for a range with that range (206), so that a sample can be read alone.
        sizes: it states the size of a shard.
        versions: what tells two versions of a shard apart: "ETag", "date", or "" for nothing.
        refusals: number of shards that came whole after a request for a range was refused.
    """

    ranges: bool | None = None
    sizes: bool | None = None
    versions: str | None = None
    refusals: int = 0

    @property
    def refuses_ranges(self) -> bool:
        """True if shards should be asked for without a range. One refusal may be a busy backend's."""
        return self.refusals > 1

    def __str__(self) -> str:
        """Describe the server for a person."""
        ranges = {None: "byte ranges not tried", True: "byte ranges", False: "no byte ranges"}[self.ranges]
        sizes = {None: "sizes not seen", True: "sizes", False: "no sizes"}[self.sizes]
        versions = {None: "versions not seen", "": "nothing tells versions apart"}
        return f"{ranges}, {sizes}, {versions.get(self.versions, f'versions by {self.versions}')}"


class Outage(NamedTuple):
    """An endpoint that is down; times are of the monotonic clock.

    Attributes:
        cause: the error that it gave.
        since: when a transfer saw it first.
        seen_at: when one saw it last.
        until: the deadline for its return.
    """

    cause: str
    since: float
    seen_at: float
    until: float


_away: dict[str, Outage] = {}  # by the name of the endpoint
_back: dict[str, float] = {}  # by name: when its last outage ended
_failing: dict[str, float] = {}  # by name: when "can't be reached" was logged
_listeners: list[tuple[int, Callable[[], None]]] = []  # with the process ID, as forks inherit the list
_remembering: list[int] = []  # process IDs, for the same reason
at_end: list[Callable[[], None]] = []
"""Called when a process fills no more shards, and forgets all that it knows of endpoints."""


def abilities(url: str) -> Abilities:
    """Return what is known of the server of a shard."""
    return _abilities.get(_server(url), Abilities())


def learn_ranges(url: str, has_ranges: bool) -> None:
    """Note how a request for a range was answered."""
    before = abilities(url)
    refusals = 0 if has_ranges else before.refusals
    _abilities[_server(url)] = replace(before, ranges=has_ranges, refusals=refusals)


def learn_refusal(url: str) -> None:
    """Note that a shard has come whole whose range was refused."""
    _abilities[_server(url)] = replace(abilities(url), ranges=False, refusals=abilities(url).refusals + 1)


def learn_version(url: str, version: Version) -> None:
    """Note what an answer says about a shard's version."""
    validator = "ETag" if version.etag else "date" if version.last_modified else ""
    has_size = version.size is not None
    _abilities[_server(url)] = replace(abilities(url), sizes=has_size, versions=validator)


def outages() -> dict[str, Outage]:
    """Return the outages that transfers of this process wait for, by the name of the endpoint."""
    return dict(_away)


def listen(listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` from any thread when an outage begins or ends. Return a function that stops it."""
    entry = (os.getpid(), listener)
    _listeners.append(entry)

    def end() -> None:
        if entry in _listeners:
            _listeners.remove(entry)

    return end


def remember() -> Callable[[], None]:
    """Keep what is learnt of endpoints; return a function that ends this.

    When the last one of this process has ended, all is forgotten: shards that were served long ago, to
    another run, may have been removed on purpose since.
    """
    pid = os.getpid()
    _remembering.append(pid)

    def end() -> None:
        nonlocal pid
        if pid != os.getpid():  # ended before, or a fork of the process that began it
            return
        pid = 0
        _remembering.remove(os.getpid())
        if os.getpid() not in _remembering:
            for by_name in (_abilities, _served, _away, _back, _failing):
                by_name.clear()
            for release in at_end:
                release()

    return end


def is_remembering() -> bool:
    """Return whether this process fills shards."""
    return os.getpid() in _remembering


class Endpoint:
    """The server or bucket of a shard, the program of its command, or the mount of its file.

    Args:
        url: of the shard, without secrets.
        mounts: folders of files that fail together.
    """

    def __init__(self, url: str, reopen: Reopen, mounts: Sequence[str] = ()) -> None:
        self._url, self._name = url, endpoint(url) or folder_of(url, mounts) or ""
        self._reopen = reopen

    def __repr__(self) -> str:
        return f"Endpoint({self._name!r})"

    def served(self) -> None:
        """Note that bytes of this shard have come."""
        _failing.pop(self._name, None)
        if self._name:
            _served[self._name] = (*self._others()[-1:], self)
        if _away and _away.pop(self._name, None) is not None:
            _back[self._name] = time.monotonic()
            _logger.warning("%s is back", self._name)
            _notify()

    @property
    def outage(self) -> Outage | None:
        """The current outage, if any."""
        return _away.get(self._name)

    def was_away_since(self, since: float) -> bool:
        """Return whether an outage was seen, or has ended, since a moment of the monotonic clock."""
        outage = self.outage
        return (outage is not None and outage.seen_at >= since) or _back.get(self._name, -math.inf) >= since

    @property
    def has_served(self) -> bool:
        """True if a shard of it has been read."""
        return self._name in _served

    def fails(self, error: OriginError) -> None:
        """Note repeated failures; log once if the endpoint can't be reached at all."""
        if self._name and self._name not in _failing and error.is_unreachable is not None:
            _failing[self._name] = time.monotonic()
            _logger.warning("%s can't be reached (%s): retrying", self._name, error)

    def is_nowhere(self, error: OriginError) -> bool:
        """Return whether this looks like a wrong address: unreachable for long, and never served anything."""
        if self._name in _served or not error.is_unreachable:
            return False
        return time.monotonic() - _failing.get(self._name, math.inf) >= _FIRST_CONTACT_SECONDS

    def is_away(self, error: OriginError, session: Session) -> bool:
        """Probe a shard that was served before, preferably another one. Return whether that fails as well.

        False if none was ever served.

        Args:
            error: of this shard. An endpoint that denies or lacks everything it served before is down, too.
            session: for the probe.

        Raises:
            OriginStopped: the loader is stopping.
        """
        endpoints = self._others() or _served.get(self._name)
        alike: tuple[type[Exception], ...] = RETRYABLE if isinstance(error, RETRYABLE) else (type(error),)
        if error.may_be_renewed:
            alike = (*RETRYABLE, OriginDenied)
        if not endpoints or not isinstance(error, (*RETRYABLE, OriginDenied, OriginNotFound)):
            return False
        try:
            with (
                scrubbed_errors(lambda: session.secrets),  # their text is logged
                contextlib.closing(endpoints[-1]._reopen(session)) as origin,
            ):
                origin.read(0, 1, origin.version())
        except alike as exc:
            self._record(exc, session.options.outage_seconds)
            return True
        except Exception as exc:  # it answers, even if only that this shard is gone
            session.check(self._name)
            if isinstance(exc, OriginError) and exc.may_be_renewed:
                self._record(exc, session.options.outage_seconds)
                return True
        return False

    def _others(self) -> tuple[Endpoint, ...]:
        return tuple(other for other in _served.get(self._name, ()) if other._url != self._url)

    def _record(self, exc: Exception, seconds: float) -> None:
        now_seconds, before = time.monotonic(), self.outage
        if before is not None and now_seconds - before.seen_at < _FORGOTTEN_SECONDS:
            _away[self._name] = before._replace(seen_at=now_seconds)
            return
        _away[self._name] = Outage(str(exc), now_seconds, now_seconds, now_seconds + seconds)
        _logger.warning(
            "%s is down (%s): waiting for it, %g s at most (STREAMLOAD_ORIGIN_WAIT)",
            *(self._name, exc, seconds),
        )
        _notify()


@functools.lru_cache(maxsize=256)
def _server(url: str) -> str:
    return endpoint(redact(url))


def _notify() -> None:
    for pid, listener in tuple(_listeners):
        if pid == os.getpid():
            listener()
