"""Heartbeats of the ranks in torch.distributed's store: which process has died, which node has fallen silent.

A rank sees at once that a process of its own machine has died. Of other machines it sees only that their
counters in the store stop, by its own clock: clocks of nodes are never compared. Each rank writes one key
every ten seconds. Rank 0 reads all of them in one request, the others that of rank 0 while they wait for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from streamload.node import is_dead, machine, own_address
from streamload.ranks.store import values_of

SILENT_SECONDS = 30.0
"""Ranks are named after this long without a heartbeat."""
GONE_SECONDS = 120.0
"""No decision waits for a rank after this long: a live one may hold Python's lock for a minute."""
_KEY = "streamload/beat"


class Heartbeats:
    """The heartbeats of one rank, and what it sees of the others'.

    Args:
        store: of torch.distributed.
        rank, world_size: this rank's.
        clock: monotonic.

    Attributes:
        silent: since when, by this process's clock, for each rank that has fallen silent. Ranks other than 0
            look only at rank 0, in `gone`.
        hosts: of the ranks, by the heartbeats that were read.
        neighbours: addresses of the ranks on this machine, as of the last call of `gone`.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.silent: dict[int, float] = {}
        self.hosts: dict[int, str] = {}
        self.neighbours: dict[int, str] = {}
        self._store, self._rank, self._clock = store, rank, clock
        self._keys = [f"{_KEY}/{number}" for number in range(world_size)]
        self._count = 0
        self._seen: dict[int, tuple[bytes, float]] = {}  # the last heartbeat of each rank, and when it came
        self._are_all_known = False
        self._machine = _own_machine()
        self._is_registered = False

    def register(self) -> None:
        """Tell the ranks of this machine which process this is. Idempotent."""
        if self._is_registered:
            return
        self._is_registered = True
        self._store.set(self._keys[self._rank], "")
        if self._machine:
            number = self._store.add(f"{_KEY}/{self._machine}", 1)
            self._store.set(f"{_KEY}/{self._machine}/{number}", json.dumps([self._rank, own_address()]))

    def beat(self, host: str, is_running: bool = True) -> None:
        """Write a heartbeat.

        Args:
            host: of this rank.
            is_running: False: none will follow for now, which isn't silence.
        """
        self.register()
        self._count += 1
        self._store.set(self._keys[self._rank], f"{self._count} {host}" if is_running else "")

    def look(self) -> list[int]:
        """On rank 0: read all heartbeats; the ranks that have fallen silent since the last call."""
        self._are_all_known = self._are_all_known or self._store.check(self._keys)
        if not self._are_all_known:  # some have no loader yet
            return []
        contents = enumerate(values_of(self._store, self._keys))
        return [rank for rank, content in contents if self._falls_silent(rank, content)]

    def gone(self) -> dict[int, str]:
        """The ranks that are known to have died or are silent for long, and why; one request, or a few."""
        if self._rank and self._store.check(self._keys[:1]):
            self._falls_silent(0, self._store.get(self._keys[0]))
        if self._machine:
            self._read_neighbours()
        died = [rank for rank, address in self.neighbours.items() if is_dead(address)]
        seconds = {rank: self._clock() - since for rank, since in self.silent.copy().items()}
        return {
            rank: f"no heartbeat for {silent:.0f} s"
            for rank, silent in seconds.items()
            if silent >= GONE_SECONDS
        } | dict.fromkeys(died, "its process died")

    def _falls_silent(self, rank: int, content: bytes) -> bool:
        """Note the heartbeat of a rank; whether that has fallen silent since the last one was noted."""
        now_seconds = self._clock()
        before, since = self._seen.get(rank, (b"", now_seconds))
        self.hosts[rank] = content.decode().partition(" ")[2] or self.hosts.get(rank, "")
        if rank == self._rank or not content or content != before:
            self._seen[rank] = content, now_seconds
            self.silent.pop(rank, None)
        elif now_seconds - since >= SILENT_SECONDS and rank not in self.silent:
            self.silent[rank] = since
            return True
        return False

    def _read_neighbours(self) -> None:
        """Read which ranks are on this machine; those that come later are read by the next call."""
        prefix = f"{_KEY}/{self._machine}"
        for number in range(1, self._store.add(prefix, 0) + 1):
            key = f"{prefix}/{number}"
            if number > len(self.neighbours) and self._store.check([key]):
                rank, address = json.loads(self._store.get(key))
                self.neighbours[rank] = address


def spans_of(ranks: Iterable[int]) -> list[list[int]]:
    """Runs of adjacent ranks, each as its first and last one."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


def ranges_of(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 2–5, 8"."""
    spans = spans_of(ranks)
    words = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)
    return f"rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {words}"


def _own_machine() -> str:
    try:
        return machine()
    except OSError:
        return ""
