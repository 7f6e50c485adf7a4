"""A run on many nodes, an origin, a shared cache and daemons on spot nodes, simulated.

Which shards a group reads and in which order is computed by the loader's own order/; how often daemons look,
how a lease lives, how many tasks are chosen among, and how much of a notice is kept for the end are the
daemon's own constants. docs/results/spot-nodes.md says what is left out.
"""

import heapq
import math
import random
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from benchmarks.spot_actors import OPTIONS, PATIENCE_SECONDS, Group, Lease, Node
from benchmarks.spot_parts import Events, Limit, Link
from benchmarks.spot_setup import Setup
from streamload.daemon import publisher
from streamload.order.plan import OrderOptions, pass_order, pieces

SMALL = frozenset({"progress", "leases"})
"""What has to do with small objects, all in one partition of the shared cache."""


class World:
    """All of it, for one run of the clock `events`; `begin` sets it going."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.events = Events()
        self.rng = random.Random(f"{setup.seed} world")
        self.link = Link(
            self.events,
            setup.origin,
            {
                "trainers": (setup.stream, setup.uplink),
                "daemons": (min(setup.stream, setup.node / OPTIONS.concurrency), math.inf),
            },
        )
        self.small, self.large = (
            [Limit(self.events, rate * parts, PATIENCE_SECONDS) for rate in (setup.gets, setup.puts)]
            for parts in (1, setup.partitions)
        )
        self.asked: Counter[str] = Counter()
        self.held: set[int] = set()
        self.leased: dict[int, Lease] = {}
        self.orphans: set[int] = set()  # leased, by nodes that are dead
        self.taken_over = 0
        self.had: set[int] = set()  # shards that came from the origin
        self.wasted: Counter[str] = Counter()  # bytes
        self.groups: list[Group] = []
        for run in range(setup.runs):
            order = OrderOptions(setup.seed * 1_000 + run, setup.groups, 8, 10_000)
            for number in range(setup.groups):
                own = pieces(order, setup.shards, number).shards
                shards = pass_order(order, own, number, 0, 0).tolist()
                self.groups.append(Group(self, len(self.groups), shards))
        self._places = [
            {shard: (group, place) for group in self._of(run) for place, shard in enumerate(group.shards)}
            for run in range(setup.runs)
        ]
        self.first_free = np.zeros(len(self.groups), np.int64)
        self.lengths = np.array([len(group.shards) for group in self.groups])
        self.widths = self._widths()
        self.published = np.zeros(len(self.groups), np.int64)
        self.nodes: dict[int, Node] = {}
        self.nodes_begun = 0
        self.node_seconds = 0.0
        self._begun: dict[int, float] = {}
        self.is_begun = False
        self.ended = 0

    def _of(self, run: int) -> list[Group]:
        return self.groups[run * self.setup.groups : (run + 1) * self.setup.groups]

    def _widths(self) -> NDArray[np.int64]:
        """How many shards of each group lie in the window."""
        setup, groups = self.setup, len(self.groups)
        if setup.window_bytes is None:
            return np.full(groups, math.ceil(setup.window / setup.shard_seconds))
        total = max(1, int(setup.window_bytes / setup.shard_bytes))
        return total // groups + (np.arange(groups) < total % groups)

    # -- the trainers

    def begin(self) -> None:
        """Start the daemons, the trainers after their head start, and let nodes be lost."""
        setup = self.setup
        self.events.every(publisher.EVERY_SECONDS, self.publish)
        for slot in range(setup.nodes):
            self.start_node(slot)
        if setup.loss is not None:
            when, share = setup.loss
            self.events.after(when, lambda: self.take_many(share))
        self.events.after(setup.head_start, self._begin_trainers)

    @property
    def is_over(self) -> bool:
        """Whether all groups have read all of their shards."""
        return self.ended == len(self.groups)

    def _begin_trainers(self) -> None:
        self.is_begun = True
        for group in self.groups:
            # Not all of them at the same moment.
            self.events.after(self.rng.random() * self.setup.shard_seconds, group.begin)

    def opened(self, group: Group) -> None:
        """A group has opened its next shard."""
        left = group.front + self.setup.ahead  # this one comes out of the daemons' window
        group.front += 1
        if left < len(group.shards) and group.shards[left] in self.held:
            group.held_ahead -= 1
        self._move(group)

    def fetch(self, group: Group, place: int) -> None:
        """Bring a shard to a group: from the shared cache, else from the origin."""
        setup, shard = self.setup, group.shards[place]

        def arrived() -> None:
            group.here.add(place)
            group.go_on()

        def from_origin() -> None:
            self.link.start("trainers", setup.shard_bytes, fetched)

        def fetched() -> None:
            self.came(shard)
            arrived()
            if setup.write_back and shard not in self.held:
                self.events.after(self.store(), lambda: self.hold(shard))

        def answered() -> None:
            pieces_ = setup.shard_bytes / setup.get_bytes
            served = self.ask("reading shards", gets=pieces_) if shard in self.held else math.inf
            if served < math.inf:
                self.events.after(served + setup.shard_bytes / setup.shared, arrived)
            else:
                from_origin()

        served = self.ask("reading shards", gets=1)
        if served < math.inf:
            self.events.after(served + setup.request_seconds, answered)
        else:
            self.events.after(PATIENCE_SECONDS, from_origin)

    def came(self, shard: int) -> None:
        """A shard came from the origin."""
        if shard in self.had:
            self.wasted["fetched again"] += self.setup.shard_bytes
        self.had.add(shard)

    def break_off(self, lease: Lease) -> None:
        """A node's transfer ends before its time."""
        if lease.transfer is not None:
            self.wasted["broken off"] += self.link.stop(lease.transfer)

    # -- the shared cache

    def ask(self, what: str, gets: float = 0.0, puts: float = 0.0) -> float:
        """Requests to the shared cache; the seconds until they are served; endless if they aren't."""
        self.asked[what] += gets + puts
        limits = self.small if what in SMALL else self.large
        asked = [limit.seconds_for(count) for limit, count in zip(limits, (gets, puts), strict=True) if count]
        return max(asked, default=0.0)

    def store(self) -> float:
        """Write a shard; the seconds until it is there, without end if that is refused."""
        setup = self.setup
        served = self.ask("writing shards", gets=2, puts=setup.shard_bytes / setup.put_bytes + 3)
        return served + setup.shard_bytes / setup.shared

    def hold(self, shard: int) -> None:
        """The shared cache has a shard from now on."""
        if shard in self.held:
            return
        self.held.add(shard)
        for places in self._places:
            group, place = places[shard]
            if place >= group.front + self.setup.ahead:
                group.held_ahead += 1
            self._move(group)

    def publish(self) -> None:
        """Trainers tell how far they are."""
        self.published = np.array([group.front for group in self.groups])
        self.ask("progress", puts=len(self.groups) if self.is_begun else 0)

    # -- what daemons go by

    def count(self, groups: NDArray[np.int64]) -> tuple[int, int]:
        """Of the window of some groups so many shards are missing, and so many held."""
        missing = held = 0
        for number in groups.tolist():
            group = self.groups[number]
            width = min(int(self.widths[number]), len(group.shards) - group.front - self.setup.ahead)
            held += min(group.held_ahead, max(0, width))
            missing += max(0, width - group.held_ahead)
        return missing, held

    def free(self, node: Node, count: int) -> list[tuple[Group, int]]:
        """The first tasks that nobody has or works on, in the order of need of a node's groups (in_order)."""
        of = node.follows
        base = node.view[of] + self.setup.ahead
        ranks = np.maximum(self.first_free[of], base) - base
        open_ = np.flatnonzero((ranks < self.widths[of]) & (self.first_free[of] < self.lengths[of]))
        if not open_.size:
            return []
        keys = ranks[open_] * len(of) + open_
        if keys.size > count:
            keys = np.partition(keys, count)[:count]
        queue = keys.tolist()
        heapq.heapify(queue)
        found: dict[int, tuple[Group, int]] = {}  # runs may need the same shards
        while queue and len(found) < count:
            rank, index = divmod(heapq.heappop(queue), len(of))
            group = self.groups[of[index]]
            place = int(base[index]) + rank
            if self._is_free(group.shards[place]):
                found.setdefault(group.shards[place], (group, place))
            if rank + 1 < self.widths[of[index]] and place + 1 < len(group.shards):
                heapq.heappush(queue, (rank + 1) * len(of) + index)
        return list(found.values())

    def wants(self, node: Node, lease: Lease) -> bool:
        """Whether a leased task lies in a node's window, and isn't held."""
        number, groups = lease.group.number, len(self.groups)
        rank = lease.place - int(node.view[number]) - self.setup.ahead
        is_followed = (number - int(node.follows[0])) % groups < len(node.follows)
        is_missing = lease.group.shards[lease.place] not in self.held
        return is_followed and is_missing and 0 <= rank < self.widths[number]

    def lease(self, node: Node, group: Group, place: int) -> Lease:
        """A node has a task from now on; it may have been a dead one's."""
        shard = group.shards[place]
        assert shard not in self.leased or shard in self.orphans
        self.taken_over += shard in self.orphans
        self.orphans.discard(shard)
        lease = self.leased[shard] = node.tasks[shard] = Lease(group, place)
        self._moved(shard)
        return lease

    def release(self, shard: int) -> None:
        """Nobody works on a task any more."""
        del self.leased[shard]
        if shard not in self.held:
            for places in self._places:
                group, place = places[shard]
                self.first_free[group.number] = min(self.first_free[group.number], place)
                self._move(group)

    def _is_free(self, shard: int) -> bool:
        return shard not in self.held and shard not in self.leased

    def _moved(self, shard: int) -> None:
        for places in self._places:
            self._move(places[shard][0])

    def _move(self, group: Group) -> None:
        place = max(int(self.first_free[group.number]), group.front + self.setup.ahead)
        while place < len(group.shards) and not self._is_free(group.shards[place]):
            place += 1
        self.first_free[group.number] = place

    # -- the spot nodes

    def start_node(self, slot: int) -> None:
        self.nodes[slot] = node = Node(self, slot)
        self.nodes_begun += 1
        self._begun[slot] = self.events.now
        if self.setup.lost_per_hour:
            life = self.rng.expovariate(self.setup.lost_per_hour / 3600)
            self.events.after(life, lambda: self.take(node))

    def take(self, node: Node) -> None:
        """The cloud takes a node away, after its notice."""
        if node.takes:
            node.notified(self.setup.notice_seconds)

    def take_many(self, share: float) -> None:
        slots = sorted(slot for slot, node in self.nodes.items() if node.takes)
        for slot in self.rng.sample(slots, round(share * len(slots))):
            self.take(self.nodes[slot])

    def died(self, node: Node) -> None:
        self.node_seconds += self.events.now - self._begun.pop(node.slot)
        del self.nodes[node.slot]
        if self.setup.returns:
            pause = self.rng.expovariate(1 / self.setup.replace_seconds)
            self.events.after(pause, lambda: self.start_node(node.slot))

    def node_hours(self) -> float:
        under_way = sum(self.events.now - begun for begun in self._begun.values())
        return (self.node_seconds + under_way) / 3600
