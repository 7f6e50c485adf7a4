"""Whether a shard fails, or all of the endpoint where it lives: a server, a bucket (step F).

What fails alone is given up, and the others go on. When an endpoint is away, that would cost a shard for each
transfer that runs out of patience. So it is asked then for a byte of a shard that it gave before, which tells
the two apart. It is known by this process, and by those that it forks, which shard that is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

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
_logger = logging.getLogger("streamload")
_gave: dict[str, tuple[Endpoint, ...]] = {}  # by name: the last two shards that it gave
_away: set[str] = set()  # names of those of which that was said


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
        if self._name:
            _gave[self._name] = (*self._others()[-1:], self)
        if self._name in _away:
            _away.discard(self._name)
            _logger.warning("%s is back", self._name)

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
        if self._name not in _away:
            _away.add(self._name)
            _logger.warning(
                "%s is away (%s): its shards are waited for, %g s at most (STREAMLOAD_ORIGIN_WAIT)",
                *(self._name, exc, seconds),
            )
