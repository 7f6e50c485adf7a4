"""The order of samples told one sample at a time, in plain Python, from its rules: the oracle of the tests.

It shares no arithmetic with the package. `known[shard]` is a pair: the usable entries that have arrived, and
whether no more will come.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from streamload.order import plan
from streamload.order.group import Cursor, GroupOrder
from streamload.order.plan import OrderOptions

WORD = 1 << 64


def splitmix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def chained(*parts: int) -> int:
    value = 0
    for part in parts:
        value = splitmix(value ^ part % WORD)
    return value


def draw(key: int, index: int) -> int:
    return splitmix((key + index * 0x9E3779B97F4A7C15) % WORD)


def shuffled(key: int, things: list) -> list:
    return [things[i] for i in sorted(range(len(things)), key=lambda i: draw(key, i))]


@dataclass
class Case:
    """A data set and options, drawn at random."""

    seed: int
    entries: list[list[int]]
    groups: int
    lanes: int
    window: int
    epoch: int = 0
    shuffle: bool = True
    hints: list[int] | None = None
    opens_slowly: bool = False

    @classmethod
    def drawn(cls, number: int, largest: int = 60) -> Case:
        rng = random.Random(number)
        shards = rng.randint(1, 24)
        kind = rng.choice(["equal", "uneven", "some empty"])
        counts = [rng.randint(1, largest)] * shards if kind == "equal" else []
        counts = counts or [rng.randint(0 if kind == "some empty" else 1, largest) for _ in range(shards)]
        if kind == "some empty":
            counts = [rng.choice([0, count]) for count in counts]
        # Some entries are not usable: the raw numbers have holes.
        entries = [
            [i for i in range(2 * count) if rng.random() < 0.7][:count]
            if rng.random() < 0.3
            else list(range(count))
            for count in counts
        ]
        hints = rng.choice(
            [
                None,
                [len(own) for own in entries],
                [rng.randint(0, 3 * largest) for _ in entries],
                [112_000 * len(own) + rng.randint(0, 9) for own in entries],
                [2**40 * len(own) for own in entries],
                [0] * shards,
            ]
        )
        return cls(
            seed=rng.choice([0, -5, rng.getrandbits(70)]),
            entries=entries,
            groups=rng.randint(1, 8),
            lanes=rng.randint(1, 8),
            window=rng.choice([0, 1, rng.randint(0, 30), rng.randint(0, 300)]),
            epoch=rng.choice([0, 0, 3]),
            shuffle=rng.random() < 0.85,
            hints=hints,
            opens_slowly=rng.random() < 0.5,
        )

    @property
    def options(self) -> OrderOptions:
        hints = None if self.hints is None else np.array(self.hints, np.int64)
        return OrderOptions(
            self.seed, self.groups, self.lanes, self.window, self.shuffle, hints, self.opens_slowly
        )

    @property
    def everything(self) -> list[tuple[list[int], bool]]:
        return [(own, True) for own in self.entries]

    def order(self, group: int, start: Cursor | None = None, passes: int | None = None) -> GroupOrder:
        return GroupOrder(self.options, len(self.entries), group, self.epoch, start, passes)

    def arriving(self, rng: random.Random):
        """Arrivals that grow at random, shard by shard, until everything is there."""
        known = [([], False) for _ in self.entries]
        while any(not ended for _, ended in known):
            shard = rng.choice([shard for shard, (_, ended) in enumerate(known) if not ended])
            have = len(known[shard][0]) + rng.choice([0, 1, 1, 2, 10, 60])
            ended = have >= len(self.entries[shard]) and rng.random() < 0.7
            known[shard] = (self.entries[shard][:have], ended)
            yield list(known)


class Given:
    """The `Arrivals` of the package, from a list."""

    def __init__(self, known: list[tuple[list[int], bool]]) -> None:
        self.known = [(np.array(own, np.int64), ended) for own, ended in known]
        self.looks = 0

    def arrived(self, shard: int):
        self.looks += 1
        return self.known[shard]


def owners(case: Case, shard: int, start: int, size: int, total: int) -> list[int]:
    """Which group owns each entry of a shard that lies at `start` on the axis; periodic in `size`."""

    def owner(point: int) -> int:
        for group in range(case.groups):
            if group * total // case.groups <= point < (group + 1) * total // case.groups:
                return group
        return case.groups - 1

    step = max(1, round(size * 0.6180339887498949))
    while gcd(step, size) > 1:
        step += 1
    if size == 0:
        return [owner(start)]
    last = max([*case.entries[shard], 0])
    return [owner(start + i * step % size) for i in range(min(size, last + 1))]


def axis(case: Case) -> list[tuple[int, int, int]]:
    """(shard, start, size) along the axis that is cut into groups; and how long it is, as the last start."""
    shards = list(range(len(case.entries)))
    if case.shuffle and case.groups > 1:
        shards = shuffled(chained(case.seed, 1), shards)
    sizes = case.hints if case.hints is not None else [case.groups] * len(shards)
    while max(sizes) >= 2**31:
        sizes = [size // 2 for size in sizes]
    places, at = [], 0
    for shard in shards:
        places.append((shard, at, sizes[shard]))
        at += sizes[shard]
    return [*places, (-1, at, 0)]


def pieces(case: Case, group: int) -> list[tuple[int, set[int]]]:
    """The shards of a group with the entry numbers it owns; a shard is there when its stretch is touched."""
    if case.groups == 1:
        return [(shard, set(own)) for shard, own in enumerate(case.entries)]
    *places, (_, total, _) = axis(case)
    low, high = group * total // case.groups, (group + 1) * total // case.groups
    found = []
    for shard, start, size in places:
        if size == 0:
            touched = owners(case, shard, start, size, total) == [group]
        else:
            touched = max(start, low) < min(start + size, high)
        if not touched:
            continue
        if size == 0 or (low <= start and start + size <= high):
            found.append((shard, set(case.entries[shard])))
        else:
            owner = owners(case, shard, start, size, total)
            found.append((shard, {i for i in case.entries[shard] if owner[i % size] == group}))
    return found


def served(rounds: int, slow: int, lanes: int) -> int:
    return rounds if rounds <= 128 else 128 + (rounds - 128) * lanes // (lanes + slow)


@dataclass
class Walk:
    """What the lanes of a pass give, as far as it is certain."""

    references: list[tuple[int, int]] = field(default_factory=list)
    reading: list[int] = field(default_factory=list)
    blocked: int | None = None
    coming: list[int] = field(default_factory=list)
    passed: list[list[str]] = field(
        default_factory=list
    )  # of each reference, why samples before it are left out
    carried: list[str] = field(default_factory=list)  # of those that no reference of their lane follows


def walk(
    case: Case,
    group: int,
    pass_: int,
    known,
    everything: bool = False,
    left_out: list[dict[int, str]] | None = None,
) -> Walk:
    todo = (
        [(shard, set(own)) for shard, own in enumerate(case.entries)] if everything else pieces(case, group)
    )
    opens_slowly = case.opens_slowly and case.epoch == pass_ == 0
    is_even = opens_slowly and len(todo) <= 10 * case.lanes
    staggered = len(todo) > case.lanes and not is_even
    if case.shuffle:
        todo = shuffled(chained(case.seed, 3, case.epoch, group, pass_), todo)
    lanes: list[dict | None] = [None] * case.lanes
    carried: list[list[str]] = [[] for _ in lanes]
    result = Walk()

    def ended() -> Walk:
        result.reading = [lane["shard"] for lane in lanes if lane]
        result.coming = [shard for shard, _ in todo]
        result.carried = [name for of_lane in carried for name in of_lane]
        return result

    round_ = 0
    while todo or any(lanes):
        for slot in range(case.lanes):
            while True:
                lane = lanes[slot]
                if lane is None:
                    if not todo:
                        break
                    shard, owned = todo.pop(0)
                    slow = slot if round_ == 0 and staggered else 0
                    lanes[slot] = {"shard": shard, "owned": owned, "taken": 0, "slow": slow, "last": -1}
                    continue
                slow = lane["slow"]
                if served(round_ + 1, slow, case.lanes) == served(round_, slow, case.lanes):
                    break
                have, whole = known[lane["shard"]]
                out = {} if left_out is None else left_out[lane["shard"]]
                own = [i for i in have if i in lane["owned"] and i not in out]
                passed = [i for i in have if i in lane["owned"] and i in out and i > lane["last"]]
                if lane["taken"] < len(own):
                    lane["last"] = own[lane["taken"]]
                    result.references.append((lane["shard"], lane["last"]))
                    result.passed.append(carried[slot] + [out[i] for i in passed if i < lane["last"]])
                    carried[slot] = []
                    lane["taken"] += 1
                    break
                if not whole:
                    result.blocked = lane["shard"]
                    return ended()
                carried[slot] += [out[i] for i in passed]
                lanes[slot] = None
        round_ += 1
    return ended()


def due(case: Case, group: int, pass_: int, number: int, shards: int) -> int:
    width = case.window
    if case.opens_slowly and case.epoch == pass_ == 0:
        opened = number // 8 if number < 4096 else number // 4 - 512
        width = min(width, opened)
    u = draw(chained(case.seed, 4, case.epoch, group, pass_), number) >> 32
    return number * 65536 + u * width // 65536


def sequence(case: Case, group: int, passes: int, known=None):
    """What is certain as (pass, shard, sample); the last pass's walk; the shards waiting in its window."""
    known = case.everything if known is None else known
    handed_out, everything = [], False
    for pass_ in range(passes):
        walked = walk(case, group, pass_, known, everything)
        shards = len(case.entries) if everything else len(pieces(case, group))
        timed = sorted((due(case, group, pass_, n, shards), n) for n in range(len(walked.references)))
        horizon = float("inf") if walked.blocked is None else len(walked.references) * 65536
        certain = [n for time, n in timed if time < horizon]
        handed_out += [(pass_, *walked.references[n]) for n in certain]
        gave_nothing = not walked.references and walked.blocked is None
        if gave_nothing and not everything and case.groups > 1:
            everything = True
            continue
        everything = False
        if walked.blocked is not None or gave_nothing:
            waiting = {walked.references[n][0] for time, n in timed if time >= horizon}
            return handed_out, walked, waiting
    return handed_out, walked, set()


def left_out_before(
    case: Case, group: int, left_out: list[dict[int, str]], passes: int
) -> list[tuple[Counter, Counter]]:
    """At each position, the samples left out of earlier passes and of the pass; and in all, as the last."""
    before, in_pass, everything = Counter(), Counter(), False
    counts = [(before, in_pass)]
    for pass_ in range(passes):
        walked = walk(case, group, pass_, case.everything, everything, left_out)
        shards = len(case.entries) if everything else len(pieces(case, group))
        order = sorted(range(len(walked.references)), key=lambda n: (due(case, group, pass_, n, shards), n))
        for n in order:
            in_pass = in_pass + Counter(walked.passed[n])
            counts.append((before, in_pass))
        before, in_pass = before + in_pass + Counter(walked.carried), Counter()
        gave_nothing = not walked.references
        if gave_nothing and (everything or case.groups == 1):
            break
        everything = gave_nothing
    return [*counts, (before, in_pass)]


def drain(order: GroupOrder, arrivals: Given, most: int | None = None) -> list[tuple[int, int, int]]:
    """What an order gives out before it has to wait, or at least `most` references."""
    found = []
    while most is None or len(found) < most:
        references = order.advance(arrivals)
        if not references.shards.size:
            break
        found += zip(*(column.tolist() for column in references), strict=True)
    return found


def shard_order(options: OrderOptions, shards: int, group: int, epoch: int, pass_: int) -> np.ndarray:
    """The shards of a pass of a group, in the order in which it begins them, by the modules that ship."""
    return plan.pass_order(options, plan.pieces(options, shards, group).shards, group, epoch, pass_)
