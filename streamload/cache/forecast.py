"""How far a tier will go for a run: what has to be open at once, which widths fit, a warm epoch's hits.

The arithmetic is pure; `forecast` joins it with what the tier holds of the run's shards by now.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamload.cache.directory import bytes_below
from streamload.cache.shard import LOOKED_THROUGH, Shard, spread
from streamload.cache.tier import Tier
from streamload.errors import CacheCorrupt
from streamload.metrics import format_bytes
from streamload.shards.index import IndexReader

_SHARDS_LOOKED_INTO = 64
_SHARDS_MEASURED = 1000
LARGE_SHARD_BYTES, LARGE_SAMPLE_BYTES = 4 << 30, 1 << 20
"""As large as shards and their samples are taken to be before one is looked at."""
_KNOWN_AHEAD = 256
KNOWN_PART = 8
"""A worker knows 256 references ahead (order/group.py), or those of so large a part of the tier if these are
fewer: the shards of these are open, too."""
_STEPS_AHEAD = 8
"""So far apart are a rank's first and last worker when all wait, by the default number of workers. The run's
own number has no say, as batches are the same for every number."""
_CUTS, _CUTS_OF_HALF = 256, 8
_WINDOW_DIGITS = 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run may expect of its tier.

    Attributes:
        limit_bytes: the most that the tier may hold.
        used_bytes: what it holds.
        shards: how many the run reads on this node.
        data_bytes: what all of them would take; None where none has been seen.
        live_bytes: what has to be open at once; None where that isn't known either.
    """

    limit_bytes: int
    used_bytes: int
    shards: int
    data_bytes: int | None = None
    live_bytes: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """The share of shards that a warm epoch finds in the tier: (limit − live) / data, at most 1."""
        if self.data_bytes is None or self.live_bytes is None:
            return None
        if self.data_bytes <= self.limit_bytes:
            return 1.0
        return max(0.0, (self.limit_bytes - self.live_bytes) / self.data_bytes)

    def __str__(self) -> str:
        used = f"{format_bytes(self.used_bytes)} of at most {format_bytes(self.limit_bytes)} used"
        if self.data_bytes is None or self.live_bytes is None or self.hit_rate is None:
            return f"{used}; {self.shards:,} shards, none of them seen yet"
        return (
            f"{used}; {self.shards:,} shards of about {format_bytes(self.data_bytes)}, of them "
            f"{format_bytes(self.live_bytes)} open at once: a warm epoch finds {self.hit_rate:.0%} here"
        )


@dataclass(frozen=True, slots=True)
class Width:
    """How widely one source is read.

    Attributes:
        lanes, window: of its order.
        shards: how many of them a group has; more are never open at once.
        shard_bytes: what one of them takes in the tier; 0: nothing, or that isn't known.
        sample_bytes: of one sample.
    """

    lanes: int
    window: int
    shards: int
    shard_bytes: int = 0
    sample_bytes: float = 1.0

    @property
    def open_bytes(self) -> int:
        """What has to be in the tier at once."""
        most = self.shards * self.shard_bytes
        live = live_shards(self.lanes, self.window, self.shard_bytes / self.sample_bytes)
        return min(most, int(live * self.shard_bytes))

    def scaled(self, share: float, lanes: bool, window: bool) -> Width:
        """The same with a share of the lanes, or of the window, or of both; at least one of each.

        A source of which nothing is kept stays as it is.
        """
        if not self.shard_bytes:
            return self
        samples = self.shards * self.shard_bytes / self.sample_bytes  # a wider window changes nothing
        cut = int(min(self.window, samples) * share)
        unit = 10 ** max(0, len(str(cut)) - _WINDOW_DIGITS)  # a limit that is a little less changes nothing
        return replace(
            self,
            lanes=max(1, math.ceil(self.lanes * share)) if lanes else self.lanes,
            window=max(1, cut // unit * unit) if window else self.window,
        )


def fitting(
    widths: Sequence[Width], limit_bytes: int, step: int, *, lanes: bool, window: bool
) -> list[Width] | None:
    """The widest that a tier has room for, by one share for all sources; None where none would fit.

    One lane with a window of one sample is taken to fit wherever two shards do: one of them ends.

    Args:
        widths: as the sources are to be read.
        limit_bytes: of the tier, for each of the groups that are read through it.
        step: how many samples of a group the training takes at a time.
        lanes, window: whether these may be cut.
    """
    cut = [*widths]
    for number in range(1, _CUTS + 1):
        if fits(cut, limit_bytes, step):
            return cut
        cut = [width.scaled(0.5 ** (number / _CUTS_OF_HALF), lanes, window) for width in widths]
    is_least = lanes and window and 2 * sum(width.shard_bytes for width in widths) <= limit_bytes
    return cut if is_least else None


def fits(widths: Sequence[Width], limit_bytes: int, step: int) -> bool:
    """Whether a tier has room for what has to be open at once, of all sources; see `fitting`."""
    if sum(width.shards * width.shard_bytes for width in widths) <= limit_bytes:
        return True
    sample_bytes = max(width.sample_bytes for width in widths)
    ahead_bytes = min(_KNOWN_AHEAD * sample_bytes, limit_bytes / KNOWN_PART)
    ahead_bytes += _STEPS_AHEAD * step * sample_bytes
    return sum(width.open_bytes for width in widths) + ahead_bytes <= limit_bytes


def live_shards(lanes: int, window: int, samples_per_shard: float) -> float:
    """How many shards have to be open at once: those in lanes, those of a window, and some more."""
    return 1.2 * (lanes + window / max(1.0, samples_per_shard)) + 1


def forecast(tier: Tier, shards: Sequence[Shard], lanes: int, window: int, nodes: int = 1) -> Forecast:
    """What a run may expect, by the mean of those of its shards that the tier holds.

    Of a long list only some are looked for in the tier, and none in an empty one; shards that are listed more
    than once are counted once only in a short one.

    Args:
        tier: it is looked into, and stays as it is.
        shards: all that the run reads.
        lanes, window: of its order.
        nodes: among which the shards are dealt.
    """
    is_long = len(shards) > LOOKED_THROUGH
    used_bytes, allowed_bytes = tier.budget.used_bytes, tier.budget.allowed_bytes
    has_any = next(tier.own("shards"), None) is not None
    looked_at = {shard.digest: shard for shard in spread(shards)} if has_any or not is_long else {}
    count = -(-(len(shards) if is_long else len(looked_at)) // nodes)
    held = tier.published_of(
        dict.fromkeys(digest for shard in looked_at.values() for digest in shard.digests)
    )
    samples: list[int] = []
    for path in held[:_SHARDS_LOOKED_INTO]:
        with contextlib.suppress(OSError, CacheCorrupt), IndexReader(path) as index:
            samples.append(index.count)
    if not samples:
        return Forecast(allowed_bytes, used_bytes, count)
    measured = held[:: -(-len(held) // _SHARDS_MEASURED)]
    mean_bytes = sum(map(bytes_below, measured)) / len(measured)
    live = min(float(count), live_shards(lanes, window, sum(samples) / len(samples)))
    return Forecast(allowed_bytes, used_bytes, count, int(mean_bytes * count), int(mean_bytes * live))
