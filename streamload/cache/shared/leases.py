"""Leases: which process works on which task, among processes that share nothing but a tier.

    leases/<task>.json      the holder, and a counter that it increments as a heartbeat

A lease only saves work: what two holders do twice is still right. So none of this has to be safe on stores
that ignore conditions, or when a stopped holder resumes. Clocks of different machines are never compared: a
lease has expired if it hasn't changed for a while by the observer's clock, or, on the holder's own node, once
its process is dead or stopped. Daemons share their work by leases, and so do nodes that want the same shard
at the same moment (single_flight.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from streamload import limits
from streamload.cache.shared.objects import Objects
from streamload.errors import SharedTierError

logger = logging.getLogger("streamload")

LEASE_SECONDS = 60.0
"""A lease without a heartbeat for so long has expired."""
_BEATS = 4
"""Heartbeats of a holder in that time."""
_PROC = Path("/proc")
_STOPPED_STATES = frozenset("TtZXx")
"""Stopped, traced, or dead and not yet reaped."""
_LIMIT_BYTES = 4096
_TASK = re.compile(r"[A-Za-z0-9._=+-]{1,200}")
_WORD = re.compile(r"[A-Za-z0-9.]{1,200}")
_NAME = re.compile(r"leases/([A-Za-z0-9._=+-]{1,200})\.json")


@dataclass(slots=True)
class _Seen:
    """The lease of another process: its content, and since when it hasn't changed."""

    content: bytes
    since: float


class Leases:
    """The leases of one process. Thread-safe; a thread sends heartbeats from the first lease on.

    Args:
        objects: of the shared tier.
        lease_seconds: an unchanged lease of another process expires after so long.
        address: identifies this process to others on its node (see `own_address`); "": unknown.
        has_gone: whether the holder at an address is known to be dead; then nobody waits.
        settle_seconds: after taking over a lease, wait so long and check it again: of several processes that
            saw it expire at the same moment the last one has it.
        clock: monotonic.

    Attributes:
        holder: the name by which this process holds its leases.
        taken_over: the number of expired leases that were taken over.
        lost: the number of own leases that another process took over.
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
        """Take the lease of a task, unless a live process has it.

        Raises:
            SharedTierError: the tier can't be read or written.
        """
        if not _TASK.fullmatch(task):
            raise ValueError(f"{task!r:.80} is not a valid name of a task")
        with self._change:
            if task in self._mine:
                return True
        name, content = _name(task), self._content()
        found = self._objects.read(name, _LIMIT_BYTES)
        is_foreign = found is not None and holder_of(found) != self.holder
        if found is None:
            self._objects.write_new(name, content)
        elif is_foreign and self._has_expired(task, found):
            self._objects.write(name, content)
            self._stop.wait(self._settle_seconds)
        elif is_foreign:
            return False
        # If several wrote at once, usually the last one has it: nobody waits for a store to be consistent. It
        # is also this process's if only the response to its first request was lost.
        if not self._is_mine(task):
            return False
        with self._change:
            self._mine.add(task)
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
        """Whether another process has the lease of a task, and is live as far as can be seen.

        Raises:
            SharedTierError: the tier can't be read.
        """
        found = self._objects.read(_name(task), _LIMIT_BYTES)
        if found is None:
            with self._change:
                self._seen.pop(task, None)
            return False
        return holder_of(found) != self.holder and not self._has_expired(task, found)

    def release(self, task: str) -> None:
        """Release a lease, if it is still this process's. Never raises: otherwise it expires later."""
        with self._change:
            if task not in self._mine:
                return
            self._mine.discard(task)
        with contextlib.suppress(SharedTierError):
            if self._is_mine(task):
                self._objects.delete(_name(task))

    def busy(self) -> set[str]:
        """The tasks that other processes have leases of, expired ones included.

        Raises:
            SharedTierError: they can't be listed.
        """
        busy = set(leased(self._objects.names("leases"))) - self.held()
        with self._change:
            self._seen = {task: seen for task, seen in self._seen.items() if task in busy}
        return busy

    def tidy(self, tasks: Iterable[str]) -> None:
        """Remove expired leases of tasks that are done.

        Raises:
            SharedTierError: they can't be read or removed.
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
        """Release all leases. Idempotent.

        Args:
            seconds: a timeout; what isn't released by then will expire.
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

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(self._lease_seconds / _BEATS):
            for task in self.held():
                try:
                    self._renew(task)
                except SharedTierError as exc:
                    logger.debug("a lease can't be renewed: %s", exc)
        for task in self.held():
            self.release(task)

    def _renew(self, task: str) -> None:
        """Send a heartbeat, unless the lease was taken over (this process may have been stopped)."""
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
            is_released = task not in self._mine
        if is_released:  # while it was written
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
    """The tasks of leases, from the names of their objects."""
    return [match[1] for name in names if (match := _NAME.fullmatch(name))]


def holder_of(content: bytes) -> str:
    """The holder of a lease, from its content; "" if it is malformed."""
    return _said(content, "holder")


def _said(content: bytes, name: str) -> str:
    """A plain word of a lease; "" if there is none: anybody may have written it."""
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        word = json.loads(content).get(name)
        if isinstance(word, str) and _WORD.fullmatch(word):
            return word
    return ""


def _name(task: str) -> str:
    return f"leases/{task}.json"


def own_address() -> str:
    """The address of this process: others on the same machine can tell from it whether the process is dead.

    It is valid only in the same boot of the same kernel and the same PID namespace; "" if the system has
    none.
    """
    with contextlib.suppress(OSError, IndexError):
        _, began = _process_state(os.getpid())
        return f"{_machine()}.{os.getpid()}.{began}"
    return ""


def is_dead_or_stopped(address: str) -> bool:
    """Whether the process at an address is dead or stopped; False if that isn't known here."""
    place, _, rest = address.partition(".")
    number, _, began = rest.partition(".")
    if not number.isdecimal() or not began.isdecimal() or not address.isascii():
        return False
    try:
        if place != _machine():
            return False
        state, found = _process_state(int(number))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, IndexError):
        return False
    return state in _STOPPED_STATES or found != began


@functools.lru_cache(maxsize=1)
def _machine() -> str:
    """This boot of this machine, and the PID namespace."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text()
    seen = (_PROC / "self/ns/pid").readlink()
    return hashlib.blake2b(repr([boot, str(seen)]).encode(), digest_size=16).hexdigest()


def _process_state(number: int) -> tuple[str, str]:
    """The state of a process and its start time, in ticks since the boot (proc(5))."""
    fields = (_PROC / str(number) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
