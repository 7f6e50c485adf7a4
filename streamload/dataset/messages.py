"""What a rank and its workers tell each other: the recipe once, a start for each epoch, and the batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from streamload.cache.selection import Selection
from streamload.cache.shard import ShardList
from streamload.order.deal import Deal
from streamload.order.plan import OrderOptions, Pieces
from streamload.origins.origin import OriginOptions
from streamload.settings import Eviction, FreeDisk, Revalidate
from streamload.transforms.examples import Examples


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run reads and what it makes of it: the same in all processes of a rank."""

    shards: ShardList
    storage_options: dict[str, Any] | None = field(repr=False)
    origin: OriginOptions
    tier_root: Path
    tier_limit_bytes: int
    """Of a tier that has to be made anew; else the limit that it has by then counts."""
    free_disk: FreeDisk
    """What the tier leaves free on its disk."""
    eviction: Eviction
    revalidate: Revalidate
    run: str
    """A name that all processes of the run on this node have, and none of another run."""
    fills: int
    """Shards that each process fills at once."""
    ahead_bytes: int
    order: OrderOptions
    pieces: Mapping[int, Pieces] = field(repr=False)
    """Of each group that the rank reads: computed once, because that goes over all shards."""
    deal: Deal
    rank: int
    first_group: int
    """The first of the groups that the deal speaks of."""
    one_pass: bool
    """An epoch is a pass: it ends where the shards end."""
    train: bool
    skip: bool
    selection: Selection
    """Which samples are used, from the index alone."""
    examples: Examples


class Start(NamedTuple):
    """From where to where the workers go on: what the rank writes on the board before each epoch."""

    epoch: int
    """Of the sequence: an epoch that goes on where another stopped keeps its number."""
    step: int
    """The first step, counted from the beginning of the sequence."""
    steps: int | None
    """How many steps; None: to the end of the pass."""
    cursors: dict[str, Any]
    """Of each group, by its number as text; empty at the beginning."""
    generation: int
    """Of the order on the board."""


class Trouble(NamedTuple):
    """A sample that could not be used."""

    cause: str
    """One of metrics.CAUSES."""
    url: str
    key: str
    message: str


class Span(NamedTuple):
    """Hashes of a group's references, up to where a step begins and up to where it ends."""

    before: int
    behind: int


class Batch(NamedTuple):
    """What a worker hands over: the values, and where the order stands behind them."""

    values: dict[str, Any]
    step: int
    cursors: dict[str, Any]
    troubles: list[Trouble]
    """The samples that could not be used."""
    digests: dict[str, Span]
    """Of each group: hashes of all references before this step and before the next."""

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return len(self.values["__key__"])
