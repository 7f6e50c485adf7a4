"""Who works on what, among processes that share nothing but a tier: one small object for each task.

    leases/<task>.json      the holder, and a number that it counts up as long as it is at work

A lease only saves work: whatever two holders of the same one do is done twice, and right. So none of this
has to be safe where a store ignores conditions, or where a holder is stopped and goes on. No clock is
compared with another machine's: a lease has expired when it hasn't changed for a while by the clock of
whoever looks, or, on the holder's own node, when its process has gone. Daemons share their work by them, and
nodes that would fetch the same shard at the same moment (single_flight.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streamload.cache.shared.objects import Objects
from streamload.errors import SharedTierError

logger = logging.getLogger("streamload")

LEASE_SECONDS = 60.0
"""After so long without a sign of life a lease is anybody's."""
_BEATS = 4
"""How often a holder shows life in that time."""
_LIMIT_BYTES = 4096
_TASK = re.compile(r"[A-Za-z0-9._=+-]{1,200}")
_WORD = re.compile(r"[A-Za-z0-9.]{1,200}")
_NAME = re.compile(r"leases/([A-Za-z0-9._=+-]{1,200})\.json")


@dataclass(slots=True)
class _Seen:
    """A lease of another: its bytes, and since when they are the same."""

    content: bytes
    since: float


class Leases:
    """The leases of one process. Thread-safe; from the first that it takes on a thread shows life.

    Args:
        objects: of the shared tier.
        lease_seconds: how long another's lease may go without a change before it is taken over.
        address: by which others on this node can tell whether the holder lives; "": they can't.
        has_gone: whether the holder at an address is known to be dead; then nobody waits.
        settle_seconds: so long after it took over a lease it looks whether another did so, too: the last of
            those who saw it expire at the same moment has it.
        clock: this machine's, monotonic.

    Attributes:
        holder: the name by which this process holds its leases.
        taken_over: how many leases were found expired and taken.
        lost: how many of its own this process found in another's hands.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        lease_seconds: float = LEASE_SECONDS,
        address: str = "",
        has_gone: Callable[[str], bool] = lambda address: False,
        settle_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.holder = secrets.token_hex(8)
        self.taken_over = self.lost = 0
        self._objects = objects
        self._lease_seconds = lease_seconds
        self._address = address
        self._has_gone = has_gone
        self._settle_seconds = settle_seconds
        self._clock = clock
        self._stop = threading.Event()
        self._change = threading.Lock()
        # Guarded by _change:
        self._mine: set[str] = set()
        self._seen: dict[str, _Seen] = {}
        self._beat = 0
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        with self._change:
            return f"<Leases of {self.holder}: {sorted(self._mine)}>"

    def take(self, task: str) -> bool:
        """Take the lease of a task, unless somebody at work has it.

        Raises:
            SharedTierError: the tier can't be asked, or takes nothing.
        """
        if not _TASK.fullmatch(task):
            raise ValueError(f"{task!r:.80} can't be the name of a task")
        with self._change:
            if task in self._mine:
                return True
        name, content = _name(task), self._content()
        found = self._objects.read(name, _LIMIT_BYTES)
        is_anothers = found is not None and holder_of(found) != self.holder
        if found is None:
            self._objects.write_new(name, content)
        elif is_anothers and self._has_expired(task, found):
            self._objects.write(name, content)
            self._stop.wait(self._settle_seconds)
        elif is_anothers:
            return False
        # Of several who wrote at once the last one has it, as a rule: nobody waits for a store to agree. And
        # it is this process's, too, where only the answer to its first request was lost.
        if not self._is_mine(task):
            return False
        with self._change:
            self._mine.add(task)
            self._seen.pop(task, None)
            self.taken_over += is_anothers
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._show_life, name="streamload-leases", daemon=True)
                self._thread.start()
        if self._stop.is_set():  # closed meanwhile
            self.release(task)
            return False
        return True

    def is_held(self, task: str) -> bool:
        """Whether anybody else has the lease of a task and, by all that can be seen, is at work.

        Raises:
            SharedTierError: that can't be asked now.
        """
        found = self._objects.read(_name(task), _LIMIT_BYTES)
        if found is None:
            with self._change:
                self._seen.pop(task, None)
            return False
        return holder_of(found) != self.holder and not self._has_expired(task, found)

    def release(self, task: str) -> None:
        """Give a lease back, if it is still this process's. Never raises: it would only expire later."""
        with self._change:
            if task not in self._mine:
                return
            self._mine.discard(task)
        with contextlib.suppress(SharedTierError):
            if self._is_mine(task):
                self._objects.delete(_name(task))

    def busy(self) -> set[str]:
        """The tasks that anybody else has a lease of, whether he lives or not.

        Raises:
            SharedTierError: they can't be listed.
        """
        busy = set(leased(self._objects.names("leases"))) - self.held()
        with self._change:
            self._seen = {task: seen for task, seen in self._seen.items() if task in busy}
        return busy

    def tidy(self, tasks: Iterable[str]) -> None:
        """Remove those leases, of tasks on which nothing is left to do, whose holders have gone.

        Raises:
            SharedTierError: they can't be looked at, or removed.
        """
        for task in tasks:
            found = self._objects.read(_name(task), _LIMIT_BYTES)
            if found is not None and self._has_expired(task, found):
                self._objects.delete(_name(task))

    def held(self) -> set[str]:
        """The tasks that this process has a lease of."""
        with self._change:
            return set(self._mine)

    def close(self, seconds: float | None = None) -> None:
        """Give all leases back; once is enough.

        Args:
            seconds: how long that may take; what isn't given back by then will expire.
        """
        self._stop.set()
        with self._change:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _has_expired(self, task: str, content: bytes) -> bool:
        if (address := _said(content, "address")) and self._has_gone(address):
            return True
        now = self._clock()
        with self._change:
            seen = self._seen.get(task)
            if seen is None or seen.content != content:
                self._seen[task] = _Seen(content, now)
                return False
            return now - seen.since >= self._lease_seconds

    def _show_life(self) -> None:
        while not self._stop.wait(self._lease_seconds / _BEATS):
            for task in self.held():
                try:
                    self._renew(task)
                except SharedTierError as exc:
                    logger.debug("a lease can't be renewed: %s", exc)
        for task in self.held():
            self.release(task)

    def _renew(self, task: str) -> None:
        """Change a lease, so that others see life; it may be another's by now, after a stop, say."""
        is_mine = self._is_mine(task)
        with self._change:
            if task not in self._mine:
                return
            if not is_mine:
                self._mine.discard(task)
                self.lost += 1
                return
        self._objects.write(_name(task), self._content())
        with self._change:
            is_given_back = task not in self._mine
        if is_given_back:  # while it was written
            self._objects.delete(_name(task))

    def _is_mine(self, task: str) -> bool:
        found = self._objects.read(_name(task), _LIMIT_BYTES)
        return found is not None and holder_of(found) == self.holder

    def _content(self) -> bytes:
        with self._change:
            self._beat += 1
            value = {"format": 1, "holder": self.holder, "beat": self._beat, "address": self._address}
        return json.dumps(value).encode()


def leased(names: Iterable[str]) -> list[str]:
    """The tasks that leases are of, by the names of objects."""
    return [match[1] for name in names if (match := _NAME.fullmatch(name))]


def holder_of(content: bytes) -> str:
    """Who holds a lease, by its content; "" where that says nothing."""
    return _said(content, "holder")


def _said(content: bytes, name: str) -> str:
    """A plain word of a lease; "" where there is none: somebody else may have written it."""
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        word = json.loads(content).get(name)
        if isinstance(word, str) and _WORD.fullmatch(word):
            return word
    return ""


def _name(task: str) -> str:
    return f"leases/{task}.json"
