"""Who acts in the simulation: groups of trainers that read, and spot nodes with daemons that bring.

A daemon decides as Daemon and Followed do, with counters in place of lists; tests compare the two.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.spot_parts import Transfer
from streamload.cache.shared import leases
from streamload.daemon import daemon, followed, options, targets

if TYPE_CHECKING:
    from benchmarks.spot_world import World

PAGE_NAMES = 1_000  # of one answer to a listing
PATIENCE_SECONDS = 15.0  # of a request to the shared cache
OPTIONS = options.DaemonOptions()


class Group:
    """A node of trainers: reads its shards in order, and fetches some of them ahead."""

    def __init__(self, world: World, number: int, shards: list[int]):
        self.world, self.number, self.shards = world, number, shards
        self.front = 0  # the shard that is opened next
        self.fetched = 0  # so many from the first are fetched, or on their way
        self.here: set[int] = set()
        self.waits_since: float | None = None
        self.waited = 0.0
        self.is_reading = False
        self.held_ahead = 0  # shards behind those, in the shared cache

    def begin(self) -> None:
        self.waits_since = self.world.events.now
        self.go_on()

    def go_on(self) -> None:
        """Fetch what is near, and open the next shard if it is here and the one before is read."""
        while self.fetched < min(self.front + self.world.setup.ahead, len(self.shards)):
            self.fetched += 1
            self.world.fetch(self, self.fetched - 1)
        if not self.is_reading and self.front in self.here:
            now = self.world.events.now
            if self.waits_since is not None:
                self.waited += now - self.waits_since
                self.waits_since = None
            self.here.discard(self.front)
            self.is_reading = True
            self.world.opened(self)
            self.go_on()
            self.world.events.after(self.world.setup.shard_seconds, self.read)

    def read(self) -> None:
        self.is_reading = False
        if self.front == len(self.shards):
            self.world.ended += 1
        else:
            self.waits_since = self.world.events.now
            self.go_on()

    def waited_until(self, now: float) -> float:
        return self.waited + (now - self.waits_since if self.waits_since is not None else 0.0)


@dataclass
class Lease:
    """A task that a node has: shard `place` of a group."""

    group: Group
    place: int
    transfer: Transfer | None = None


class Node:
    """A spot node with a daemon, from its start until it is taken away."""

    def __init__(self, world: World, slot: int):
        setup = world.setup
        self.world, self.slot = world, slot
        self.rng = random.Random(f"{setup.seed} node {slot} {world.nodes_begun}")
        everyone = len(world.groups)
        count = everyone if setup.follows is None else min(setup.follows, everyone)
        first = 0 if count == everyone else slot * count
        self.follows = np.arange(first, first + count) % everyone
        self.tasks: dict[int, Lease] = {}
        self.seen: dict[int, float] = {}  # orphaned leases, since when
        self.view = world.published
        self.lives, self.takes, self.looks = True, True, False
        self.held_before = 0
        world.events.after(world.rng.random() * OPTIONS.look_seconds, self.look)
        self._show_life()

    def look(self) -> None:
        """Read how far the groups are, and ask for what isn't known to be held; then choose."""
        if not self.takes:
            return
        world, setup = self.world, self.world.setup
        self.looks, began = True, world.events.now
        groups = len(self.follows)
        missing, held = world.count(self.follows)
        fresh = max(0, held - self.held_before)
        self.held_before = held
        asked = (missing if setup.asks is None else min(missing, setup.asks)) + fresh
        asked += held * OPTIONS.look_seconds / targets._SEEN_SECONDS
        pages = 1 + groups // PAGE_NAMES
        served = world.ask("progress", gets=groups + pages)
        served = max(served, world.ask("what is held", gets=asked))
        failed = served == math.inf
        own = pages + groups / followed._READERS + asked / targets._ASKED_AT_ONCE
        self.view = world.published

        def end() -> None:
            self.looks = False
            if not failed:
                self.assign()
            pause = began + OPTIONS.look_seconds - world.events.now
            world.events.after(pause, self.look)

        world.events.after(PATIENCE_SECONDS if failed else max(served, own * setup.request_seconds), end)

    def assign(self) -> None:
        """Take tasks, as far as hands reach: Daemon._leased."""
        executor = OPTIONS.concurrency - len(self.tasks)
        if not self.takes or self.looks or executor <= 0:
            return
        world = self.world
        free = world.free(self, daemon._CROWD * OPTIONS.concurrency)
        expired = self._expired()
        if not free and not expired:
            return
        if world.leased:
            self.rng.shuffle(free)
        chosen = (expired + free)[:executor]
        watched = min(OPTIONS.concurrency, len(world.leased))
        pages = 1 + len(world.leased) // PAGE_NAMES
        served = world.ask("leases", gets=pages + watched + 3 * len(chosen), puts=len(chosen))
        if served == math.inf:
            return
        pause = max(served, (pages + watched + 4 * len(chosen)) * world.setup.request_seconds)
        for group, place in chosen:
            lease = world.lease(self, group, place)
            world.events.after(pause, functools.partial(self._fill, group.shards[place], lease))

    def _expired(self) -> list[tuple[Group, int]]:
        """Of what others have, so much as there are hands is watched, in order of need: who shows no life."""
        world = self.world
        orphans = [shard for shard in world.orphans if world.wants(self, world.leased[shard])]
        if not orphans:
            self.seen = {}
            return []
        busy = (
            (lease.place - int(self.view[lease.group.number]), lease.group.number, shard)
            for shard, lease in world.leased.items()
            if shard not in self.tasks and world.wants(self, lease)
        )
        watched = {shard for *_, shard in heapq.nsmallest(OPTIONS.concurrency, busy)}
        now = world.events.now
        self.seen = {shard: self.seen.get(shard, now) for shard in orphans if shard in watched}
        found = [shard for shard, since in self.seen.items() if now - since >= leases.LEASE_SECONDS]
        return [(world.leased[shard].group, world.leased[shard].place) for shard in found]

    def _fill(self, shard: int, lease: Lease) -> None:
        if self.tasks.get(shard) is lease:
            size = self.world.setup.shard_bytes
            lease.transfer = self.world.link.start("daemons", size, lambda: self._arrived(shard, lease))

    def _arrived(self, shard: int, lease: Lease) -> None:
        self.world.came(shard)
        pause = self.world.store()
        is_stored = pause < math.inf

        def end() -> None:
            if self.tasks.get(shard) is lease:
                if is_stored:
                    self.world.hold(shard)
                self.give_back(shard)
                self.assign()

        self.world.events.after(pause if is_stored else OPTIONS.retry_seconds, end)

    def give_back(self, shard: int) -> None:
        lease = self.tasks.pop(shard)
        self.world.break_off(lease)
        self.world.ask("leases", gets=1, puts=1)
        self.world.release(shard)

    def notified(self, seconds: float) -> None:
        """Take nothing more, and hand back what isn't done a little before the end: Daemon._wind_down."""
        self.takes = False
        margin = min(daemon._MOST_MARGIN_SECONDS, daemon._MARGIN_SHARE * seconds)

        def wind_down() -> None:
            for shard in list(self.tasks):
                self.give_back(shard)

        if seconds:
            self.world.events.after(seconds - margin, wind_down)
        self.world.events.after(seconds, self.die)

    def die(self) -> None:
        if not self.lives:
            return
        self.lives = self.takes = False
        for shard, lease in self.tasks.items():
            self.world.orphans.add(shard)
            self.world.break_off(lease)
        self.tasks = {}
        self.world.died(self)

    def _show_life(self) -> None:
        if self.lives:
            self.world.ask("leases", gets=len(self.tasks), puts=len(self.tasks))
            self.world.events.after(leases.LEASE_SECONDS / leases._BEATS, self._show_life)
