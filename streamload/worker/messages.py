"""The messages between a rank and its workers: configuration once, a start per epoch, and the batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from streamload.order.events import Event, from_json
from streamload.order.plan import OrderOptions, Pieces
from streamload.order.steps import MIXED, SourceDraws, Split, StepOptions, StepStart
from streamload.torch_internals import ExceptionWrapper
from streamload.worker.states import GroupState, SealedStates

if TYPE_CHECKING:
    from streamload.batches.assembly import BatchAssembly
    from streamload.batches.in_progress import Room
    from streamload.cache.backing import Backing
    from streamload.cache.selection import Selection
    from streamload.cache.shard import ShardList
    from streamload.extension import Extension
    from streamload.options import FreeDisk, Revalidate
    from streamload.origins.origin import OriginOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceOrder:
    """One source: its shards among those of the run, and the order in which they are read."""

    name: str
    first: int
    """The index of its first shard among the run's."""
    count: int
    """Its number of shards."""
    order: OrderOptions
    pieces: Mapping[int, Pieces] = field(repr=False)
    """For each group that the rank reads; computed once, as that goes over all shards."""


class TierConfig(NamedTuple):
    """The node's tier, as each process opens it."""

    root: Path
    limit_bytes: int
    """The limit of a new tier; an existing one keeps its own."""
    free_disk: FreeDisk
    """Space that it leaves free on its disk."""
    revalidate: Revalidate


class AheadConfig(NamedTuple):
    """Work that a process does ahead of its batches."""

    fills: int
    """Shards that it fills at once."""
    bytes: int
    """The most bytes that it fetches ahead."""
    prepare_share: float = 0.0
    """Share of a processor for preparing, in idle time, shards that the cache has unprepared; fills prepare
    what arrives, where there is room. 0: neither."""
    by_range: bool = False
    """Keep only the indexes of shards that the cache lacks, and read their samples by range if possible."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Shards that the processes of a rank read, and how; the same for all of them."""

    shards: ShardList
    origin: OriginOptions
    tier: TierConfig
    shared: Backing | None
    """The shared cache, read before the origins."""
    run: str
    """The name of the run on this node, unique among runs."""
    ahead: AheadConfig
    sources: tuple[SourceOrder, ...]
    """In the order of their shards in `shards`."""
    steps: StepOptions
    rank: int
    first_group: int
    """The number of the first group of the steps' split."""
    one_pass: bool
    """An epoch is a pass: it ends where the shards end."""
    train: bool
    skip: bool
    replacements: int | None
    """The most replacements tried for a sample that can't be used; None: some of every shard."""
    selection: Selection
    """The samples that are used, decided from the index alone."""
    assembly: BatchAssembly
    with_keys: bool
    """True if a batch carries the keys and URLs of its samples."""
    draws: SourceDraws = MIXED
    """The rows that are drawn from one source at once."""
    extensions: tuple[Extension, ...] = ()
    """The extensions of the loader."""

    @property
    def split(self) -> Split:
        """The split of a step among ranks."""
        return self.steps.split

    @property
    def told_groups(self) -> tuple[int, ...]:
        """The groups, by their numbers among all, that this rank counts: it is the first that reads them."""
        return tuple(self.first_group + group for group in self.split.groups_told_by(self.rank))


SEAT = np.dtype("<i4")
"""The source of a row, as batches carry it."""


class Visit(NamedTuple):
    """One use of one sample.

    Attributes:
        source: its source.
        pass_: the pass of that source; with another number for each further use of the sample in it.
        shard: the index of its shard among those of the run.
        number: its number in the shard.
        most: the room of its place in the batch; None: any.
    """

    source: int
    pass_: int
    shard: int
    number: int
    most: Room | None = None


class EpochStart(NamedTuple):
    """Start and end of the workers' epoch; the rank writes it into the control block before each epoch."""

    start: StepStart
    """Start of the steps; an epoch that resumes another is of the same sequence."""
    steps: int | None
    """Number of steps; None: to the end of the pass."""
    events: Sequence[Event]
    """Events of the run that hold from the position on, and later ones."""
    groups: dict[int, GroupState]
    """State of each group by its number among all; none at the beginning of a sequence."""
    changes_generation: int
    """The generation of the control block's changes that are among the events."""
    generation: int = 0
    """The generation of this start in the control block."""

    @property
    def epoch(self) -> int:
        """The epoch of the sequence."""
        return self.start.sequence

    @property
    def position(self) -> int:
        """Global samples of the sequence before the first step."""
        return self.start.position

    def to_json(self) -> dict[str, Any]:
        """The start as JSON-able values, without its generation."""
        return {
            "start": self.start,
            "steps": self.steps,
            "events": self.events,
            "groups": {str(number): state.to_json() for number, state in self.groups.items()},
            "changes_generation": self.changes_generation,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EpochStart:
        """The start that `to_json` wrote, with the control block's generation."""
        groups = {int(number): GroupState.from_json(state) for number, state in value["groups"].items()}
        start, events = StepStart(*value["start"]), from_json(value["events"])
        return cls(**{**value, "start": start, "events": events, "groups": groups})


class EpochChange(NamedTuple):
    """Events since an epoch's start."""

    events: Sequence[Event]
    """Without events that set weights or sizes and were over when this was written."""
    steps: int | None
    """Number of steps of the epoch since its start."""
    generation: int = 0
    """The generation of these values in the control block."""

    def to_json(self) -> dict[str, Any]:
        """The change as JSON-able values, without its generation."""
        return {"events": self.events, "steps": self.steps}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EpochChange:
        """The change that `to_json` wrote, with the control block's generation."""
        return cls(**{**value, "events": from_json(value["events"])})


class SkippedSample(NamedTuple):
    """A sample that could not be used."""

    cause: str
    """One of metrics.CAUSES."""
    url: str
    key: str
    message: str


class Span(NamedTuple):
    """Hashes of a sequence's references before a step and after it."""

    begin: int
    before: int
    end: int
    after: int


_IMAGES = ("image", "pixel_values", "patch")
_TEXTS = ("text", "input_ids", "attention_mask", "token_type_ids")


def ready_counts(values: Mapping[str, Any]) -> dict[str, int]:
    """A batch's part of what is ready, by counter: one batch, and the bytes of its tensors by modality."""
    counts = {"ready_batches": 1, "ready_image_bytes": 0, "ready_text_bytes": 0, "ready_other_bytes": 0}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            kind = "image" if name.startswith(_IMAGES) else "text" if name.startswith(_TEXTS) else "other"
            counts[f"ready_{kind}_bytes"] += value.nbytes
    return counts


class OrderStep(NamedTuple):
    """A step of the order, and the order after it."""

    position: int
    """The global samples of the sequence before it."""
    stop: int
    """The position after it."""
    groups: SealedStates
    """The state after it of each group that contributed, by group number."""
    digests: dict[str, Span]
    """Hashes of all references before and after it, by group and source."""
    rows: int | None = None
    """The rows of this rank, where positions count cells; None: they follow from the positions."""


class RowSources(NamedTuple):
    """The rows of a batch, and their sources."""

    samples: int
    """The number of rows."""
    by_source: list[int]
    """Rows that the step takes of each source; in an evaluation some may be left out."""
    seats: bytes = b""
    """SEAT[rows]: the source of each; empty: there is one source."""
    passes: tuple[int, ...] = ()
    """The latest pass of each source that rows are of; empty: there is one source."""


class Batch(NamedTuple):
    """A batch from a worker: its values, and the order after it."""

    values: dict[str, Any]
    """With the lists `__key__` and `__url__` if `with_keys`."""
    number: int
    """Number of batches of the order before it."""
    generation: int
    """The generation of the EpochStart that it was made for."""
    step: OrderStep
    """Its step."""
    rows: RowSources
    """Its rows."""
    skipped: list[SkippedSample]
    """The samples that could not be used."""
    blocked: tuple[tuple[int, int], ...] = ()
    """The shards that the training loop waited for, and for how many nanoseconds."""
    extras: Mapping[str, bytes] = {}
    """Messages of extensions to their part in the rank, by name."""


class Failed(NamedTuple):
    """In place of a batch: what kept a worker from making it, to be raised in its turn."""

    number: int
    error: ExceptionWrapper


class Ended(NamedTuple):
    """In place of a batch: a worker found that the epoch ends before this number. Nothing else ends it."""

    number: int
    position: int = 0
    """Position at which the step would begin."""
    step: int = 0
    """Samples that it would take over all ranks."""
    due: int | None = None
    """References in a pass of this rank's groups, by their shards' indexes; None: the steps are planned."""
    left_out: Mapping[int, Mapping[str, int]] = {}
    """The samples left out of each of this rank's groups in the sequence, by what left them out."""


Message = Batch | Failed | Ended
"""A message of a worker to its rank."""


def whole_batch(message: T) -> T:
    """The collate_fn of workers, which yield whole batches. Here, so that unpickling it imports no loader."""
    return message
