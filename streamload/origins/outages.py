"""Whether a shard fails, or all of the endpoint where it lives: a server, a bucket (step F).

What fails alone is given up, and the others go on. When an endpoint is away, that would cost a shard for each
transfer that runs out of patience. So it is asked then for a byte of a shard that it gave before, which tells
the two apart. It is known by this process, and by those that it forks, which shard that is. An outage is the
endpoint's, not a shard's: all transfers that wait for it have one deadline, and after it none waits again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from streamload.errors import (
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginTimeout,
    OriginUnavailable,
)
from streamload.origins.protocol import Origin, Session
from streamload.urls import endpoint

Reopen = Callable[[Session], Origin]
"""Makes the origin of a shard anew, for another session."""

MENDABLE = (OriginTimeout, OriginCut, OriginUnavailable)
"""Errors after which another attempt may help."""
_FIRST_CONTACT_SECONDS = 5.0
"""For so long an address is tried where nobody is, and from which nothing has ever come: by all transfers."""
_FORGOTTEN_SECONDS = 180.0
"""An outage that no transfer has met for so long is over, as far as anybody knows."""
_logger = logging.getLogger("streamload")
_gave: dict[str, tuple[Endpoint, ...]] = {}  # by name: the last two shards that it gave


class Outage(NamedTuple):
    """An endpoint that is away; times are of the monotonic clock.

    Attributes:
        cause: the error that it gave, or that no answer is.
        since: when a transfer met it first.
        seen: when one met it last.
        until: when it is waited for no longer.
    """

    cause: str
    since: float
    seen: float
    until: float


_away: dict[str, Outage] = {}  # by the name of the endpoint
_failing: dict[str, float] = {}  # by name: since when it has been said that it is unreachable
_listeners: list[tuple[int, Callable[[], None]]] = []  # each with its process: a fork isn't it


def outages() -> dict[str, Outage]:
    """The outages that transfers of this process wait for, by the name of the endpoint."""
    return dict(_away)


def listen(listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` when an outage begins or ends, from any thread; returns what ends that."""
    entry = (os.getpid(), listener)
    _listeners.append(entry)

    def end() -> None:
        if entry in _listeners:
            _listeners.remove(entry)

    return end


class Endpoint:
    """The server or bucket of a shard, or the program of its command.

    Args:
        url: of the shard, without secrets.
        reopen: makes its origin.
    """

    def __init__(self, url: str, reopen: Reopen) -> None:
        self._url, self._name = url, endpoint(url)
        self._reopen = reopen

    def __repr__(self) -> str:
        return f"Endpoint({self._name!r})"

    def gave(self) -> None:
        """Take note that bytes of this shard have come."""
        _failing.pop(self._name, None)
        if self._name:
            _gave[self._name] = (*self._others()[-1:], self)
        if _away and _away.pop(self._name, None) is not None:
            _logger.warning("%s is back", self._name)
            _tell()

    @property
    def outage(self) -> Outage | None:
        """The outage that is under way, if there is one."""
        return _away.get(self._name)

    def fails(self, error: OriginError) -> None:
        """Take note that one attempt after the other fails; said once where it can't even be connected to."""
        if self._name and self._name not in _failing and getattr(error, "is_unreachable", None) is not None:
            _failing[self._name] = time.monotonic()
            _logger.warning("%s can't be reached (%s): it is tried again", self._name, error)

    def is_nowhere(self, error: OriginError) -> bool:
        """Whether it looks like a wrong address: nobody is there, and nothing has come from it for long."""
        if self._name in _gave or not getattr(error, "is_unreachable", None):
            return False
        return time.monotonic() - _failing.get(self._name, math.inf) >= _FIRST_CONTACT_SECONDS

    def is_away(self, error: OriginError, session: Session) -> bool:
        """Ask for a shard that it gave before: whether that fails as well. False if it never gave one.

        Another one is asked for than this, if there is one.

        Args:
            error: for which it is asked. One that denies all, or has nothing of what it had, is away.
            session: in which it is asked.

        Raises:
            OriginStopped: the loader wants to stop.
        """
        known = self._others() or _gave.get(self._name)
        alike = MENDABLE if isinstance(error, MENDABLE) else type(error)
        if not known or not isinstance(error, (*MENDABLE, OriginDenied, OriginNotFound)):
            return False
        try:
            with contextlib.closing(known[-1]._reopen(session)) as origin:
                origin.read(0, 1, origin.version())
        except alike as exc:
            self._say(exc, session.options.outage_seconds)
            return True
        except Exception:  # it answers, if only that this shard has gone
            session.check(self._name)
        return False

    def _others(self) -> tuple[Endpoint, ...]:
        return tuple(other for other in _gave.get(self._name, ()) if other._url != self._url)

    def _say(self, exc: Exception, seconds: float) -> None:
        now, before = time.monotonic(), self.outage
        if before is not None and now - before.seen < _FORGOTTEN_SECONDS:
            _away[self._name] = before._replace(seen=now)
            return
        _away[self._name] = Outage(str(exc), now, now, now + seconds)
        _logger.warning(
            "%s is away (%s): its shards are waited for, %g s at most (STREAMLOAD_ORIGIN_WAIT)",
            *(self._name, exc, seconds),
        )
        _tell()


def _tell() -> None:
    for pid, listener in tuple(_listeners):
        if pid == os.getpid():
            listener()
