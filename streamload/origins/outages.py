"""Whether a shard fails, or all of the place where it lives: a server, a bucket (step F).

What fails alone is given up, and the others go on. When a place is away, that would cost a shard for each
transfer that runs out of patience. So it is asked then for a byte of a shard that it gave before, which tells
the two apart. It is known by this process, and by those that it forks, which shard that is.
"""

from __future__ import annotations

import contextlib
import logging
import re
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

Reopen = Callable[[Session], Origin]
"""Makes the origin of a shard anew, for another session."""

MENDABLE = (OriginTimeout, OriginCut, OriginUnavailable)
"""Errors after which another attempt may help."""
_PLACE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s'\"?#]+")
_logger = logging.getLogger("streamload")
_gave: dict[str, tuple[Place, ...]] = {}  # by place: the last two shards that it gave
_away: set[str] = set()  # places of which that was said


class Place:
    """Where a shard lives.

    Args:
        url: of the shard, without secrets.
        reopen: makes its origin.
    """

    def __init__(self, url: str, reopen: Reopen) -> None:
        self._url, self._name = url, _name(url)
        self._reopen = reopen

    def __repr__(self) -> str:
        return f"Place({self._name!r})"

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
            error: for which it is asked. A place that denies all, or has nothing of what it had, is away.
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

    def _others(self) -> tuple[Place, ...]:
        return tuple(other for other in _gave.get(self._name, ()) if other._url != self._url)

    def _say(self, exc: Exception, seconds: float) -> None:
        if self._name not in _away:
            _away.add(self._name)
            _logger.warning(
                "%s is away (%s): its shards are waited for, for %g s (STREAMLOAD_ORIGIN_WAIT)",
                *(self._name, exc, seconds),
            )


def _name(url: str) -> str:
    """Scheme and host; of a command its program as well; "" of a file of this machine."""
    place = _PLACE.search(url)
    if url.startswith("pipe:"):
        return " ".join([*url.split(maxsplit=1)[:1], *([place[0]] if place else [])])
    return place[0] if place else ""
