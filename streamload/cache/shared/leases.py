"""Leases: which process works on which task, among processes that share nothing but a tier.

    leases/<task>.json      the holder, its progress, and a counter that it increments as a heartbeat

A lease only saves work: what two holders do twice is still right. So none of this has to be safe on stores
that ignore conditions, or when a stopped holder resumes. Clocks of different machines are never compared: a
lease has expired if it hasn't changed for a while by the observer's clock, or, on the holder's own node, once
its process is dead or stopped, or once a later attempt of the holder's run asks: a run that was started again
has ended before. Within a run, and of a daemon, it is enough that a heartbeat is missing and the next one
nearly due. For how long it hadn't changed before the observer came, the times of the store tell: of the lease
and of an object written now, where both are by the store's own clock. Daemons share their work by leases, and
so do nodes that want the same shard at the same moment (single_flight.py).
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
from typing import Any, NamedTuple

from streamload import limits
from streamload.cache.shared.objects import Objects
from streamload.errors import SharedTierError
from streamload.node import host_name
from streamload.topology import RunAttempt

logger = logging.getLogger("streamload")

LEASE_SECONDS = 60.0
"""A lease expires after this long without a heartbeat."""
_BEATS = 4
"""Heartbeats of a holder in that time."""
_LATE_TIMES, _LATE_SECONDS = 1.5, 0.5
"""A heartbeat is late after this multiple of its interval plus these seconds for the requests."""
_SILENT_TIMES, _SILENT_SECONDS, _LEAST_SILENT_SECONDS = 1.75, 1.0, 10.0
"""A daemon, or a holder in this process's own run, counts as dead after this multiple of its heartbeat
interval plus these seconds, but not before the least: its peers can do its work. The least time suffices to
renew dozens of leases one after the other over a slow link."""
_RENEWAL_SECONDS = 0.2
"""Heartbeats are sent one after the other: a process that holds many leases renews each less often."""
DAEMONS = RunAttempt("0" * 16, 1)
"""The attempt of all daemons, which belong to no run."""
_STORE_SHARE, _STORE_SECONDS = 0.5, 3.0
"""Tolerance for the store's timestamps, as a share of the lease time plus seconds: some have whole seconds,
and the clocks of a store's servers differ a little."""
_LIMIT_BYTES = 4096
_TASK = re.compile(r"[A-Za-z0-9._=+-]{1,200}")
_WORD = re.compile(r"[A-Za-z0-9.]{1,200}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST = 1 << 60
_NAME = re.compile(r"leases/([A-Za-z0-9._=+-]{1,200})\.json")


class Holder(NamedTuple):
    """The holder of a lease, as another process sees it.

    Attributes:
        host: its name; "": unknown.
        address: see `own_address`; "": unknown.
        seconds: for how long it has held the lease: by its own clock until its last heartbeat, and by the
            observer's since then.
        arrived, size: its progress by its last heartbeat, in bytes; size 0: unknown.
        progress_seconds: the time for that progress: until its last heartbeat, or until now if the next one
            should have come; 0: it doesn't tell of its progress.
    """

    host: str
    address: str
    seconds: float
    arrived: int
    size: int
    progress_seconds: float


@dataclass(slots=True)
class _Seen:
    """The lease of another process: its content, since when it hasn't changed, whether to ask the store."""

    content: bytes
    since: float
    asks_store: bool


@dataclass(slots=True)
class _Held:
    """A lease of this process: since when, its progress in bytes, and its next heartbeat.

    The intervals of heartbeats double up to the usual one: what is slow is seen to be slow soon.
    """

    since: float
    interval: float
    due: float
    arrived: int = 0
    size: int = 0


class Leases:
    """The leases of one process. Thread-safe; a thread sends heartbeats from the first lease on.

    Methods that ask the tier raise SharedTierError if it can't be read or written.

    Args:
        lease_seconds: an unchanged lease of another process expires after so long.
        address: identifies this process to others on its node (see `own_address`); "": unknown.
        has_gone: whether the holder at an address is known to be dead; then nobody waits.
        attempt: of the run that this process belongs to; None: of none.
        first_beat_seconds: until the first heartbeat of a lease, at most; None: as between the others.
        beat_seconds: between two heartbeats, at most; None: a quarter of `lease_seconds`.
        tells_progress: whether heartbeats have the progress of a task, so that the holder may be overtaken.
        settle_seconds: after taking over a lease, wait so long and check it again: of several processes that
            saw it expire at the same moment the last one has it.

    Attributes:
        holder: the name by which this process holds its leases.
        taken_over: the number of expired leases that were taken over.
        lost: the number of own leases that another process took over.
        overtaken_at: when, by the clock, the last heartbeat saw that a faster process does this one's task as
            well (`second`); None: never.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        lease_seconds: float = LEASE_SECONDS,
        address: str = "",
        has_gone: Callable[[str], bool] = lambda address: False,
        attempt: RunAttempt | None = None,
        first_beat_seconds: float | None = None,
        beat_seconds: float | None = None,
        tells_progress: bool = False,
        settle_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.holder = secrets.token_hex(8)
        self.taken_over = self.lost = 0
        self.overtaken_at: float | None = None
        self._objects = objects
        self._lease_seconds = lease_seconds
        self._address = address
        self._has_gone = has_gone
        self._attempt = attempt
        self._beat_seconds = lease_seconds / _BEATS if beat_seconds is None else beat_seconds
        self._tells_progress = tells_progress
        self._first_beat_seconds = min(self._beat_seconds, first_beat_seconds or self._beat_seconds)
        self._host = host_name()
        self._settle_seconds = settle_seconds
        self._clock = clock
        self._stop = threading.Event()
        self._sending = threading.Lock()
        """Held while a heartbeat is sent or a lease released: between a heartbeat's look at the lease and its
        write another process must not take it."""
        self._change = threading.Lock()
        # Guarded by _change:
        self._mine: dict[str, _Held] = {}
        self._seen: dict[str, _Seen] = {}
        self._beat = 0
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        with self._change:
            return f"<Leases of {self.holder}: {sorted(self._mine)}>"

    def take(self, task: str) -> bool:
        """Take the lease of a task, unless a live process has it."""
        if not _TASK.fullmatch(task):
            raise ValueError(f"{task!r:.80} is not a valid name of a task")
        with self._change:
            if task in self._mine:
                return True
        tried_at = self._clock()
        held = _Held(tried_at, self._first_beat_seconds, tried_at + self._first_beat_seconds)
        name, content = _name(task), self._content(held)
        lease = self._objects.read(name, _LIMIT_BYTES)
        is_foreign = lease is not None and holder_of(lease) != self.holder
        if lease is None:
            self._objects.write_new(name, content)
        elif is_foreign and self._has_expired(task, lease, writes=True):
            self._log_loss(task, lease)
            self._objects.write(name, content)
            self._stop.wait(self._settle_seconds)
        elif is_foreign:
            return False
        # If several wrote at once, usually the last one has it: nobody waits for a store to be consistent. It
        # is also this process's if only the response to its first request was lost.
        if not self._is_mine(task):
            return False
        with self._change:
            self._mine[task] = held
            self._seen.pop(task, None)
            self.taken_over += is_foreign
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(
                    target=self._send_heartbeats, name="streamload-leases", daemon=True
                )
                limits.start(self._thread)
        if self._stop.is_set():  # closed meanwhile
            self.release(task)
            return False
        return True

    def is_held(self, task: str) -> bool:
        """True if another process has the lease of a task, and is live as far as can be seen."""
        return self.holder_at(task) is not None

    def holder_at(self, task: str) -> Holder | None:
        """The other process that has the lease of a task, and is live as far as can be seen; None: none."""
        content = self._objects.read(_name(task), _LIMIT_BYTES)
        if content is None:
            with self._change:
                self._seen.pop(task, None)
            return None
        if holder_of(content) == self.holder or self._has_expired(task, content):
            return None
        with self._change:
            sighting = self._seen.get(task)
        unchanged = 0.0 if sighting is None else self._clock() - sighting.since
        values = _parsed(content)
        seconds, tells_progress = _number(values, "seconds"), "bytes" in values and _number(values, "due") > 0
        return Holder(
            _word(values, "host", _HOST),
            _word(values, "address"),
            seconds + unchanged,
            int(_number(values, "bytes")),
            int(_number(values, "size")),
            seconds + unchanged * _is_late(values, unchanged) if tells_progress else 0.0,
        )

    def progress(self, task: str, arrived: int, size: int | None) -> None:
        """Note the progress of a task that this process has the lease of, for its next heartbeat."""
        with self._change:
            held = self._mine.get(task)
            if held is not None:
                held.arrived, held.size = arrived, size or 0

    def release(self, task: str) -> None:
        """Release a lease, if it is still this process's. Never raises: otherwise it expires later."""
        with self._change:
            if task not in self._mine:
                return
            del self._mine[task]
        with self._sending, contextlib.suppress(SharedTierError):
            if self._is_mine(task):
                self._objects.delete(_name(task))

    def busy(self) -> set[str]:
        """The tasks that other processes have leases of, expired ones included."""
        busy = set(leased(self._objects.names("leases"))) - self.held()
        with self._change:
            self._seen = {task: sighting for task, sighting in self._seen.items() if task in busy}
        return busy

    def tidy(self, tasks: Iterable[str]) -> None:
        """Remove expired leases of tasks that are done."""
        for task in tasks:
            lease = self._objects.read(_name(task), _LIMIT_BYTES)
            if lease is not None and self._has_expired(task, lease):
                self._objects.delete(_name(task))

    def held(self) -> set[str]:
        """The tasks that this process has a lease of."""
        with self._change:
            return set(self._mine)

    def close(self, seconds: float | None = None) -> None:
        """Release all leases. Idempotent.

        Args:
            seconds: a timeout; what isn't released by then will expire.
        """
        self._stop.set()
        with self._change:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _has_expired(self, task: str, content: bytes, *, writes: bool = False) -> bool:
        """True if another process's lease has expired.

        Args:
            content: of the lease, as it is now.
            writes: whether this process may write a temporary object, to learn the store's time.
        """
        values = _parsed(content)
        if (address := _word(values, "address")) and self._has_gone(address):
            return True
        attempt = _attempt_in(values)
        if self._attempt is not None and self._attempt.is_after(attempt):
            return True
        looked_at = self._clock()
        with self._change:
            sighting = self._seen.get(task)
            if sighting is None:
                sighting = self._seen[task] = _Seen(content, looked_at, asks_store=writes)
            elif sighting.content != content:  # its holder lives
                sighting = self._seen[task] = _Seen(content, looked_at, asks_store=False)
            is_own_run = (
                self._attempt is not None and attempt is not None and attempt.run == self._attempt.run
            )
            asks = sighting.asks_store and (not is_own_run or _is_late(values, looked_at - sighting.since))
            sighting.asks_store = sighting.asks_store and not asks
        if asks:
            sighting.since = min(sighting.since, self._clock() - self._silent_seconds(task))
        unchanged = self._clock() - sighting.since
        is_watched = is_own_run or (attempt is not None and attempt.run == DAEMONS.run)
        return unchanged >= self._lease_seconds or (is_watched and _is_silent(values, unchanged))

    def _log_loss(self, task: str, content: bytes) -> None:
        """Log which node of this run has fallen silent, if the lease of another machine is taken over."""
        values, own_machine = _parsed(content), self._address.partition(".")[0]
        machine, attempt = _word(values, "address").partition(".")[0], _attempt_in(values)
        if attempt is not None and attempt == self._attempt and machine not in ("", own_machine):
            logger.warning(
                "a process of this run on the node %s has died, or is stopped or cut off: it sends no "
                "heartbeats, so its fill of %s is taken over",
                *(_word(values, "host", _HOST) or "?", task),
            )

    def _silent_seconds(self, task: str) -> float:
        """Least time since a lease changed, by the store's own times; 0: unknown."""
        try:
            age = self._objects.age(_name(task))
        except SharedTierError as exc:
            logger.debug("the age of a lease isn't known: %s", exc)
            return 0.0
        return 0.0 if age is None else age - max(_STORE_SECONDS, _STORE_SHARE * self._lease_seconds)

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(self._until_due()):
            for task in self._due():
                try:
                    with self._sending:
                        self._renew(task)
                except SharedTierError as exc:
                    logger.debug("a lease can't be renewed: %s", exc)
        for task in self.held():
            self.release(task)

    def _until_due(self) -> float:
        """Seconds until the next heartbeat; leases that are taken meanwhile are looked at in time."""
        looked_at = self._clock()
        with self._change:
            dues = [held.due for held in self._mine.values()]
        return max(0.0, min([looked_at + self._first_beat_seconds, *dues]) - looked_at)

    def _due(self) -> list[str]:
        """The tasks whose leases need a heartbeat now."""
        looked_at = self._clock()
        with self._change:
            due = [task for task, held in self._mine.items() if held.due <= looked_at]
            slowest_seconds = min(_RENEWAL_SECONDS * len(self._mine), self._lease_seconds / 2)
            most_seconds = max(self._beat_seconds, slowest_seconds)
            for task in due:
                held = self._mine[task]
                held.interval = min(most_seconds, 2 * held.interval)
                held.due = looked_at + held.interval
        return due

    def _renew(self, task: str) -> None:
        """Send a heartbeat, unless the lease was taken over (this process may have been stopped)."""
        is_mine = self._is_mine(task)
        with self._change:
            held = self._mine.get(task)
            if held is None:
                return
            if not is_mine:
                del self._mine[task]
                self.lost += 1
                return
        self._objects.write(_name(task), self._content(held))
        if self._tells_progress and self._objects.read(_name(second(task)), _LIMIT_BYTES) is not None:
            self.overtaken_at = self._clock()

    def _is_mine(self, task: str) -> bool:
        lease = self._objects.read(_name(task), _LIMIT_BYTES)
        return lease is not None and holder_of(lease) == self.holder

    def _content(self, held: _Held) -> bytes:
        with self._change:
            self._beat += 1
            value: dict[str, Any] = {
                "format": 1,
                "holder": self.holder,
                "beat": self._beat,
                "address": self._address,
                "host": self._host,
                "seconds": round(self._clock() - held.since, 1),
                "due": held.interval,
            }
            if self._tells_progress:
                value |= {"bytes": held.arrived, "size": held.size}
        if self._attempt is not None:
            value |= self._attempt._asdict()
        return json.dumps(value).encode()


def second(task: str) -> str:
    """The task of the process that overtakes the holder of a task's lease."""
    return f"{task}.second"


def leased(names: Iterable[str]) -> list[str]:
    """The tasks of leases, from the names of their objects."""
    return [match[1] for name in names if (match := _NAME.fullmatch(name))]


def holder_of(content: bytes) -> str:
    """The holder of a lease, from its content; "" if it is malformed."""
    return _word(_parsed(content), "holder")


def _parsed(content: bytes) -> dict[str, Any]:
    """The values of a lease; none if it is malformed: anybody may have written it."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(content)
        if isinstance(values, dict):
            return values
    return {}


def _word(values: dict[str, Any], name: str, allowed: re.Pattern[str] = _WORD) -> str:
    """A plain word of a lease; "" if there is none."""
    word = values.get(name)
    return word if isinstance(word, str) and allowed.fullmatch(word) else ""


def _number(values: dict[str, Any], name: str) -> float:
    """A number of a lease, from 0; 0 if there is none."""
    number = values.get(name)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return 0.0
    return float(number) if 0 <= number < _MOST else 0.0


def _is_late(values: dict[str, Any], unchanged_seconds: float) -> bool:
    """True if the next heartbeat of a lease should have come."""
    return unchanged_seconds > _LATE_TIMES * _number(values, "due") + _LATE_SECONDS


def _is_silent(values: dict[str, Any], unchanged_seconds: float) -> bool:
    """True if a lease says when its next heartbeat is due, and that has been missing for almost as long."""
    due = _number(values, "due")
    silent_seconds = max(_LEAST_SILENT_SECONDS, _SILENT_TIMES * due + _SILENT_SECONDS)
    return due > 0 and unchanged_seconds >= silent_seconds


def _attempt_in(values: dict[str, Any]) -> RunAttempt | None:
    """The attempt of the run whose process holds a lease; None if it says none."""
    with contextlib.suppress(ValueError):
        return RunAttempt.parse(values.get("run"), values.get("attempt"))
    return None


def _name(task: str) -> str:
    return f"leases/{task}.json"
