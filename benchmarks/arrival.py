"""The share of the samples of a first pass that is trained when the last byte arrives, by the data's size.

Question: where training is faster than the link, how much of a first pass is done when its download is, and
how well are its batches mixed? From 500 samples to 1,000,000, by the order over remote shards and by the one
over local ones (the window is open from the beginning).

Command: python -m benchmarks.arrival

Computed, with no clock: the order is that of the modules that ship, and follows a model of the link. Samples
are equally large. As many shards are filled at once as there are lanes, at least four (worker_config.py), in
the order of need that the order itself tells (`blocked`, `open_shards`, `coming_shards`), and share the link
equally. A batch begins when all of its references are known and the one before is trained; training alone
takes half as long as the link. Numbers are medians over the rounds, each with a seed of its own.

- trained: share of the batches of the pass that are trained when the last byte arrives.
- total: until the last batch is trained, × the link's time.
- pairs: share of the pairs of samples in a batch that are of one shard (order_measures.py); beside it that
  of a later pass, and that of the lanes alone, a later pass without a window.
- shards: in a batch; the fewest in a batch while as many shards as lanes aren't used up.
- gap: between two samples of one shard that come one after the other, the median, and that of a later pass.

Targets: from 2,000 samples on at least 0.85 are trained. Rows of at least 6 of 8 lanes while as many shards
as lanes are unread. Pairs at most 2 × those of a later pass where there are at most twice as many shards as
lanes, or the pass is 10 windows long; elsewhere at most 1.2 × those of the lanes alone.

Result: results/arrival.json; docs/results/order.md has it as a table and a chart.

Explanation: while n references have been read, the window holds about n/16 of them, later n/8, at most half
of the window: that is what is left when the last byte arrives. In a short pass all lanes read at one speed:
shards arrive evenly, and with lanes of different speeds the bytes of the slow ones would wait.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import turns
from benchmarks.contenders.job import versions
from benchmarks.following import epoch_of
from benchmarks.order_measures import measures, shards_in_batches
from streamload.order.group import GroupOrder
from streamload.order.lanes import default_lanes
from streamload.order.plan import OrderOptions
from streamload.order.shuffle import default_window

REMOTE, LOCAL = "remote shards", "local shards"
ORDERS = (REMOTE, LOCAL)
TRAINING_SPEED = 2.0
"""Samples trained in the time in which the link brings one."""
SEED_STEP = 1000
TRAINED_LEAST, FROM_SAMPLES = 0.85, 2_000
LATER_MOST, LANES_MOST, LONG_WINDOWS, LANES_LEAST = 2.0, 1.2, 10, 6 / 8
_LEAST_FILLS = 4
_SHARDS_AHEAD = 64
_LOOKS = 2_000
"""The times of a pass at which the order sees what has arrived."""


@dataclass(frozen=True)
class Data:
    """Equal shards, and the samples of a step; `is_on_curve`: the layout that the chart has for its size."""

    shards: int
    shard_samples: int
    batch: int
    is_on_curve: bool = False

    @property
    def samples(self) -> int:
        return self.shards * self.shard_samples

    @property
    def name(self) -> str:
        return f"{self.shards:,} × {self.shard_samples:,}, batches of {self.batch:,}"

    def options(self, order: str, seed: int) -> OrderOptions:
        lanes, window = default_lanes(self.batch), default_window(self.batch)
        return OrderOptions(seed, 1, lanes, window, opens_slowly=order == REMOTE)


DATA = (
    Data(5, 100, 64, is_on_curve=True),
    Data(4, 500, 64),
    Data(20, 100, 64, is_on_curve=True),
    Data(10, 1_000, 64),
    Data(20, 500, 64, is_on_curve=True),
    Data(100, 100, 64),
    Data(16, 1_000, 64),
    Data(40, 1_000, 64),
    Data(80, 1_000, 256),
    Data(100, 1_000, 256, is_on_curve=True),
    Data(200, 1_000, 2_048),
    Data(1_000, 1_000, 256, is_on_curve=True),
    Data(1_000, 1_000, 2_048),
)
QUICK_DATA = (Data(20, 50, 32, is_on_curve=True), Data(16, 150, 32, is_on_curve=True))


class Link:
    """The `Arrivals` of equal shards over a link that its fills share equally; time in samples of the link.

    Args:
        order: whose needs are filled.
        data: the shards.
    """

    def __init__(self, order: GroupOrder, data: Data, lanes: int) -> None:
        self._order, self._size = order, data.shard_samples
        self._fills = max(lanes, _LEAST_FILLS)
        self._arrived = np.zeros(data.shards)
        self._entries = np.arange(data.shard_samples)
        self._filling: list[int] = []
        self.now = 0.0

    def arrived(self, shard: int) -> tuple[NDArray[np.int64], bool]:
        count = int(self._arrived[shard] + 1e-6)
        return self._entries[:count], count == self._size

    def bring(self, samples: float) -> bool:
        """Bring so many samples, or fewer until a fill ends; False: all have arrived."""
        self._filling = [shard for shard in self._filling if self._lacks(shard)]
        if len(self._filling) < self._fills:
            self._begin_fills()
        if not self._filling:
            return False
        each = min(samples / len(self._filling), self._size - self._arrived[self._filling].max())
        self._arrived[self._filling] += each
        self.now += each * len(self._filling)
        return True

    def _begin_fills(self) -> None:
        """Fill the most needed shards that aren't being filled."""
        order = self._order
        needed = [*order.blocked(self), *order.open_shards(), *order.coming_shards(_SHARDS_AHEAD).tolist()]
        free = [shard for shard in dict.fromkeys(needed) if self._lacks(shard) and shard not in self._filling]
        self._filling += free[: self._fills - len(self._filling)]

    def _lacks(self, shard: int) -> bool:
        return bool(self._arrived[shard] < self._size - 1e-6)


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=ORDERS)
    seeds = [round_ * SEED_STEP for round_ in range(given.rounds)]
    layouts = QUICK_DATA if given.quick else DATA
    rows = [row for seed in seeds for data in layouts for row in rows_of(data, given.contenders, seed)]
    result(given, layouts, rows, seeds)


def rows_of(data: Data, orders: list[str], seed: int) -> Iterator[dict[str, Any]]:
    """The measures of a layout, by each order of the first pass."""
    later = data.options(REMOTE, seed)
    alone = OrderOptions(seed, 1, later.lanes, 0)
    sizes = [data.shard_samples] * data.shards
    second, by_lanes = (epoch_of(options, sizes, 1, data.batch)[0] for options in (later, alone))
    of_later, of_lanes = (measures(second, epoch, sizes, 1) for epoch in (second, by_lanes))
    for name in orders:
        options = data.options(name, seed)
        first = epoch_of(options, sizes, 0, data.batch)[0]
        of_first = measures(second, first, sizes, 1)
        yield {
            "label": f"{data.name}: {name}",
            "contender": name,
            "data": data.name,
            "samples": data.samples,
            "is_on_curve": data.is_on_curve,
            "round": seed,
            "lanes": options.lanes,
            "window": options.window,
            **trained(options, data),
            **{key: of_first[key] for key in ("pairs", "worst_pairs", "shards_in_1", "gap")},
            "fewest_shards": fewest_shards(first.shards, data.shards, options.lanes),
            **{f"later_{key}": of_later[key] for key in ("pairs", "shards_in_1", "gap")},
            "lanes_pairs": of_lanes["pairs"],
        }


def trained(options: OrderOptions, data: Data) -> dict[str, float]:
    """The share of a first pass that is trained when the last byte arrives, and how long the pass takes."""
    order = GroupOrder(options, data.shards, 0, 0, passes=1)
    link = Link(order, data, options.lanes)
    known_at = np.zeros(data.samples)
    while link.bring(max(1.0, data.samples / _LOOKS)):
        before = order.position
        while order.advance(link).shards.size:
            pass
        known_at[before : order.position] = link.now
    ends, end = [], 0.0
    for begin in known_at[data.batch - 1 :: data.batch].tolist():
        end = max(end, begin) + data.batch / TRAINING_SPEED
        ends.append(end)
    return {
        "trained": round(float(np.mean(np.array(ends) <= link.now + 1e-6)), 4),
        "total": round(end / link.now, 4),
    }


def fewest_shards(shards: NDArray[np.int64], count: int, lanes: int) -> int | None:
    """The fewest shards in a batch while `lanes` shards or more aren't used up; None: no such batch."""
    is_in = shards_in_batches(shards, count) > 0
    last = np.where(is_in.any(axis=0), len(is_in) - 1 - is_in[::-1].argmax(axis=0), -1)
    unread = (last >= np.arange(len(is_in))[:, None]).sum(axis=1)
    in_batches = is_in.sum(axis=1)[unread >= lanes]
    return int(in_batches.min()) if in_batches.size else None


def result(given: Namespace, layouts: tuple[Data, ...], rows: list[dict[str, Any]], seeds: list[int]) -> None:
    medians = turns.medians(rows)
    turns.write(
        given,
        "arrival",
        {
            "settings": {"training_speed": TRAINING_SPEED, "data": [data.name for data in layouts]},
            "versions": {"streamload": versions("streamload", "numpy")},
            "seeds": seeds,
            "rounds": rows,
            "medians": medians,
            "targets": [target for data in layouts for target in targets(data, rows)],
        },
    )


def targets(data: Data, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the first pass over remote shards has to reach, by the worst of its rounds."""
    remote = [row for row in rows if row["label"] == f"{data.name}: {REMOTE}"]
    if not remote:
        return []
    reached = []
    if data.samples >= FROM_SAMPLES:
        least = min(row["trained"] for row in remote)
        reached.append(turns.target(f"{data.name}: trained", least, at_least=TRAINED_LEAST))
    lanes, window = remote[0]["lanes"], remote[0]["window"]
    is_beside_later = data.shards <= 2 * lanes or data.samples >= LONG_WINDOWS * window
    beside, most = ("later", LATER_MOST) if is_beside_later else ("lanes", LANES_MOST)
    pairs = max(row["pairs"] / row[f"{beside}_pairs"] for row in remote)
    words = {"later": "those of a later pass", "lanes": "those of the lanes alone"}[beside]
    reached.append(turns.target(f"{data.name}: pairs, × {words}", round(pairs, 3), at_most=most))
    fewest = [row["fewest_shards"] for row in remote if row["fewest_shards"] is not None]
    if fewest:
        claim = f"{data.name}: shards in a batch"
        reached.append(turns.target(claim, min(fewest), at_least=LANES_LEAST * lanes))
    return reached


if __name__ == "__main__":
    main()
