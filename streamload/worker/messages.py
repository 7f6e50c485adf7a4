"""The messages between a rank and its workers: configuration once, a start per epoch, and the batches."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from streamload.batches.assembly import BatchAssembly
from streamload.batches.padding import RowWidths
from streamload.batches.sample_weights import SampleWeight
from streamload.cache.checkpoint import CheckpointShard
from streamload.cache.selection import Selection
from streamload.cache.shard import ShardList
from streamload.cache.shared.sharing import SharedOptions
from streamload.derived.feature_rows import FeatureStart
from streamload.errors import OptionError
from streamload.options import Eviction, FreeDisk, Revalidate
from streamload.order.buckets import Blocks
from streamload.order.cursor import Cursor
from streamload.order.mixing import Change
from streamload.order.plan import OrderOptions, Pieces
from streamload.order.seq_lens import SeqLens
from streamload.order.split import Split
from streamload.order.steps import Resize, Steps, StepTable
from streamload.origins.origin import OriginOptions
from streamload.transforms.patch_grid import most_patches
from streamload.worker.in_flight import InFlight


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


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the processes of a rank read, and how; the same for all of them."""

    shards: ShardList
    origin: OriginOptions
    tier_root: Path
    tier_limit_bytes: int
    """The limit of a new tier; an existing one keeps its own."""
    free_disk: FreeDisk
    """Space that the tier leaves free on its disk."""
    eviction: Eviction
    revalidate: Revalidate
    shared: SharedOptions | None
    """The shared cache, read before the origins."""
    run: str
    """The name of the run on this node, unique among runs."""
    fills: int
    """Shards that each process fills at once."""
    ahead_bytes: int
    sources: tuple[SourceOrder, ...]
    """In the order of their shards in `shards`."""
    split: Split
    rank: int
    first_group: int
    """The number of the first group of `split`."""
    one_pass: bool
    """An epoch is a pass: it ends where the shards end."""
    train: bool
    skip: bool
    replacements: int | None
    """The most replacements tried for a sample that can't be used; None: some of every shard."""
    selection: Selection
    """The samples that are used, decided from the index alone."""
    assembly: BatchAssembly
    seq_lens: SeqLens | None
    """How many patches the images of a step have at most; None: images aren't made into patches."""
    step_table: StepTable | None
    """The steps of an epoch, if they differ in size."""
    with_keys: bool
    """Whether a batch carries the keys and URLs of its samples."""
    bucketing: Bucketing | None = None
    """How steps are planned by block; None: samples come in the order of the sequence."""
    multiple: int = 1
    """Of the rows that a step takes of each source."""
    sample_weight: SampleWeight | None = None
    """How rows are weighed in the loss; None: they aren't."""
    prepares: bool = False
    """Whether fills prepare shards themselves, where there is room."""
    in_flight: InFlight | None = None
    """The limits of batches that are made and not yet taken."""


@dataclass(frozen=True, slots=True)
class Bucketing:
    """How blocks of steps are planned (order/buckets.py).

    Attributes:
        steps: of a block.
        text: the name of the fact that says how long a sample's text is; None: texts don't count.
        text_most: tokens of the longest text, and of those of which nothing is known.
        text_multiple: of the tokens of a place in a batch.
        are_agreed: whether several groups agree on bounds, so that texts are cut by the rank.
        patches_most: of an image, and of those of which nothing is known; 0: images have no patches.
        patch_size: of each patch.
        max_ratio: by which factor images are enlarged at most; None: all have the most patches.
    """

    steps: int
    text: str | None
    text_most: int
    text_multiple: int
    are_agreed: bool = False
    patches_most: int = 0
    patch_size: tuple[int, int] = (1, 1)
    max_ratio: float | None = None

    def blocks(self, batch: int, epoch: int, origin: int) -> Blocks:
        """The blocks of a sequence, by the epoch in which it began."""
        return Blocks.of_sequence(batch, self.steps, epoch, origin)

    @property
    def facts(self) -> list[str]:
        """The names of the facts that costs follow from."""
        sizes = [] if self.max_ratio is None else ["width", "height"]
        return sizes if self.text is None else [self.text, *sizes]

    def costs(self, facts: Mapping[str, npt.NDArray[np.float64]], count: int) -> npt.NDArray[np.float64]:
        """float64[count, 2]: the length of the text and the size of the image, in tokens, by facts."""
        costs = np.zeros((count, 2))
        if self.text is not None:
            costs[:, 0] = np.fmin(facts[self.text], self.text_most)
        costs[:, 1] = self.patches_most
        if self.max_ratio is not None:
            most = most_patches(facts["height"], facts["width"], self.patch_size, self.max_ratio)
            costs[:, 1] = np.fmin(most, self.patches_most)
        return costs

    def any_row(self, count: int) -> npt.NDArray[np.int32]:
        """The room for rows of any length: int32[count, 2]."""
        return np.full((count, 2), (self.text_most, self.patches_most), np.int32)

    def rounded(self, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
        """The room for rows that cost at most this: int32[N, 2]."""
        room = costs.astype(np.int32)
        room[:, 0] = np.minimum(-(-room[:, 0] // self.text_multiple) * self.text_multiple, self.text_most)
        return room


SEAT = np.dtype("<i4")
"""The source of a row, as batches carry it."""


class Visit(NamedTuple):
    """One use of one sample.

    Attributes:
        source: its source.
        pass_: the pass of that source; with another number for each further use of the sample in it.
        shard: the index of its shard among those of the run.
        number: its number in the shard.
        most: the most tokens of text and image that its place in the batch has room for; None: any.
    """

    source: int
    pass_: int
    shard: int
    number: int
    most: tuple[int, int] | None = None


class SourceState(NamedTuple):
    """The state of a group in one source."""

    cursor: Cursor
    begun: dict[int, CheckpointShard]
    """The open shards as a checkpoint records them, by their index in the source."""


class GroupState(NamedTuple):
    """The state of a group: all that resuming it needs."""

    owed: tuple[int, ...]
    """What each source is owed (the credits of order.mixing.Portion)."""
    sources: tuple[SourceState, ...]

    def to_json(self) -> dict[str, Any]:
        """The state as JSON-able values."""
        return {
            "owed": list(self.owed),
            "sources": [
                {
                    "cursor": state.cursor.to_json(),
                    "begun": {str(shard): list(begun) for shard, begun in state.begun.items()},
                }
                for state in self.sources
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> GroupState:
        """The state that `to_json` wrote.

        Raises:
            OptionError: the value is something else.
        """
        try:
            owed = tuple(int(credit) for credit in value["owed"])
            sources = tuple(
                SourceState(
                    Cursor.from_json(state["cursor"]),
                    {int(shard): CheckpointShard.from_json(begun) for shard, begun in state["begun"].items()},
                )
                for state in value["sources"]
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise OptionError(f"not the state of a group: {type(exc).__name__}") from exc
        if len(owed) != len(sources) or sum(owed) != 0:
            raise OptionError("not the state of a group: what its sources are owed doesn't add up to 0")
        return cls(owed, sources)


class SealedStates(Mapping[int, GroupState]):
    """States of groups by group number, unpickled only on access.

    Every batch carries its states, and a rank needs only those of its last batch, for a checkpoint. Pickled
    as plain tuples they cost a fraction of the transfer.
    """

    def __init__(self, states: Mapping[int, GroupState]):
        plain = {
            number: (state.owed, [(tuple(cursor), _plain(begun)) for cursor, begun in state.sources])
            for number, state in states.items()
        }
        self._sealed = pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)

    def __getitem__(self, number: int) -> GroupState:
        return self._open()[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())

    def _open(self) -> dict[int, GroupState]:
        return {
            number: GroupState(owed, tuple(_source_state(*source) for source in sources))
            for number, (owed, sources) in pickle.loads(self._sealed).items()
        }


def _plain(begun: Mapping[int, CheckpointShard]) -> dict[int, tuple[Any, ...]]:
    return {shard: tuple(seen) for shard, seen in begun.items()}


def _source_state(cursor: tuple[Any, ...], begun: Mapping[int, tuple[Any, ...]]) -> SourceState:
    return SourceState(Cursor(*cursor), {shard: CheckpointShard(*seen) for shard, seen in begun.items()})


class EpochStart(NamedTuple):
    """Where the workers start and end; the rank writes it into the control block before each epoch."""

    epoch: int
    """Of the sequence; an epoch that resumes another keeps its number."""
    position: int
    """Global samples of the sequence before the first step."""
    steps: int | None
    """How many steps; None: to the end of the pass."""
    changes: list[Change]
    """Changes of the sources' shares, from the position on."""
    groups: dict[int, GroupState]
    """Of each group, by its number among all; none at the beginning of a sequence."""
    changes_generation: int
    """The generation of the control block's changes that are among these."""
    features: dict[str, FeatureStart]
    """What is known of each feature, by its name."""
    resizes: Sequence[Resize] = ()
    """Other sizes of steps than that of the configuration, from the position on."""
    blocks_from: int = 0
    """The position at which the blocks of bucketing begin."""
    table_from: tuple[int, int] = (0, 0)
    """With a table of steps: the epoch in the training loop, and its samples before the first step."""
    decisions: tuple[int, int, int] = (0, 0, 0)
    """Steps of the run before the first; weights are decided at each step that the second divides (0: never),
    and count so many steps later."""
    generation: int = 0
    """The generation of this start in the control block."""

    def decision_before(self, number: int) -> int:
        """The step of the run at which the last decision was made that a step may depend on; 0: none.

        Args:
            number: of the step, from 0 at this start.
        """
        steps, every, delay = self.decisions
        return max(0, steps + number - delay) // every * every if every else 0

    def steps_of(self, config: WorkerConfig) -> Steps:
        """The steps from the first one on."""
        table = config.step_table
        remaining = None if table is None else table.remaining(*self.table_from, config.split.ranks)
        blocks = None
        if config.bucketing is not None:
            blocks = config.bucketing.blocks(config.split.batch, self.epoch, self.blocks_from)
        return Steps(config.split, self.position, remaining, blocks, self.resizes)

    def to_json(self) -> dict[str, Any]:
        """The start as JSON-able values, without its generation."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "steps": self.steps,
            "changes": self.changes,
            "groups": {str(number): state.to_json() for number, state in self.groups.items()},
            "changes_generation": self.changes_generation,
            "features": self.features,
            "resizes": self.resizes,
            "blocks_from": self.blocks_from,
            "table_from": self.table_from,
            "decisions": self.decisions,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EpochStart:
        """The start that `to_json` wrote, with the control block's generation."""
        groups = {int(number): GroupState.from_json(state) for number, state in value["groups"].items()}
        features = {name: FeatureStart(*start) for name, start in value["features"].items()}
        changes, resizes = changes_from(value["changes"]), resizes_from(value["resizes"])
        parsed: dict[str, Any] = {"changes": changes, "resizes": resizes, "features": features}
        return cls(**{**value, **parsed, "groups": groups})


class Changed(NamedTuple):
    """What has changed since an epoch's start."""

    changes: list[Change]
    """Of the sources' shares."""
    resizes: list[Resize]
    """Of the steps' sizes, from a position on that no worker has passed when it reads this."""
    steps: int | None
    """How many steps the epoch has since its start."""
    generation: int = 0
    """The generation of these values in the control block."""

    def to_json(self) -> dict[str, Any]:
        """The changes as JSON-able values, without their generation."""
        return {name: value for name, value in self._asdict().items() if name != "generation"}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Changed:
        """The changes that `to_json` wrote, with the control block's generation."""
        parsed = {"changes": changes_from(value["changes"]), "resizes": resizes_from(value["resizes"])}
        return cls(**{**value, **parsed})


def changes_from(value: list[Any]) -> list[Change]:
    """Changes of shares from their JSON form."""
    return [Change(position, tuple(shares)) for position, shares in value]


def resizes_from(value: list[Any]) -> list[Resize]:
    """Sizes of steps from their JSON form."""
    return [Resize(*each) for each in value]


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


def bytes_by_modality(values: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of a batch's tensors: of images, of texts, and of all else, by the counter of each."""
    found = {"ready_image_bytes": 0, "ready_text_bytes": 0, "ready_other_bytes": 0}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            kind = "image" if name.startswith(_IMAGES) else "text" if name.startswith(_TEXTS) else "other"
            found[f"ready_{kind}_bytes"] += value.nbytes
    return found


class BlockBounds(NamedTuple):
    """How wide the rows of a block's steps are, where the groups of a run have to agree on that.

    Attributes:
        begin, end: the global positions of the block.
        rows: int32[steps, N, 2]: the most tokens of text and image of each row of a rank in each step.
    """

    begin: int
    end: int
    rows: npt.NDArray[np.int32]

    def at(self, position: int) -> npt.NDArray[np.int32] | None:
        """Those of the step at a global position; None outside of the block."""
        if not self.begin <= position < self.end:
            return None
        number = (position - self.begin) * len(self.rows) // (self.end - self.begin)
        found: npt.NDArray[np.int32] = self.rows[number]
        return found


class Batch(NamedTuple):
    """A batch from a worker: its values, and the state of the order after it."""

    values: dict[str, Any]
    """With the lists `__key__` and `__url__` if `with_keys`."""
    position: int
    """The position of its step: the global samples of the sequence before it."""
    stop: int
    """The position after its step."""
    groups: SealedStates
    """The state after this step of each group that contributed, by group number."""
    skipped: list[SkippedSample]
    """The samples that could not be used."""
    digests: dict[str, Span]
    """Hashes of all references before and after this step, by group and source."""
    samples: int
    """Its number of samples."""
    source_samples: list[int]
    """Its samples by source."""
    generation: int
    """The generation of the EpochStart that it was made for."""
    blocked: tuple[tuple[int, int], ...] = ()
    """The shards that the training loop waited for, and for how many nanoseconds."""
    widths: RowWidths | None = None
    """The columns that each row needs; None: all of them."""
    seats: bytes = b""
    """SEAT[samples]: the source of each row; empty: there is one source."""
    weighed: bytes = b""
    """VALUE[samples]: what each row is weighed by; empty: rows aren't weighed."""
    block: BlockBounds | None = None
    """With the first step of a block, and of an epoch: the bounds to agree on; None: nothing is left to."""
    passes: tuple[int, ...] = ()
    """The latest pass of each source that its rows are of; empty: there is one source."""
