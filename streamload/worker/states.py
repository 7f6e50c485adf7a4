"""The state of a group after a step, all that resuming needs: it travels with a batch, and in checkpoints.

An order continues exactly only over the same samples. So a state records of each shard with samples to come
how many were seen, where it was given up (if it was), its version, and a digest of the start of its index;
whoever resumes compares.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.errors import OptionError
from streamload.order.group import Cursor
from streamload.order.left_out import Tally


class CheckpointShard(NamedTuple):
    """A shard as it was when a state was saved.

    Attributes:
        samples: the number of usable samples seen.
        ended: whether there are no more.
        given_up: the number of entries after which it was given up; -1: it wasn't.
        version: a digest of its version; 0 if its origin has none.
        entries: the number of index entries that `contents` covers; 0: unknown, as the shard was damaged.
        contents: a digest of the first entries; independent of where the shard is.
    """

    samples: int
    ended: bool
    given_up: int
    version: int
    entries: int
    contents: int

    @classmethod
    def from_json(cls, value: Any) -> CheckpointShard:
        """Parse what `list(begun)` has become in JSON.

        Raises:
            OptionError: it is something else.
        """
        is_known = isinstance(value, list) and len(value) == len(cls._fields)
        if not is_known or not all(isinstance(part, int) for part in value):
            raise OptionError("not a shard of a state: six whole numbers")
        samples, ended, *digests = value
        return cls(samples, bool(ended), *digests)


class OpenShards(Mapping[int, CheckpointShard]):
    """The open shards as a checkpoint records them, by their index in the source.

    Each batch carries them, and hundreds of small shards may be open: they are rows of one array, which is
    copied in microseconds, and become records only where they are looked at.

    Args:
        rows: int64[N, 7]: the index of a shard and the fields of its record.
    """

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self.rows = rows

    @classmethod
    def of(cls, records: Mapping[int, CheckpointShard]) -> OpenShards:
        """Build them from records.

        Raises:
            OverflowError: a number has more than 63 bits.
        """
        rows = [(shard, *record) for shard, record in records.items()]
        return cls(np.array(rows, np.int64).reshape(-1, COLUMNS))

    def __getitem__(self, shard: int) -> CheckpointShard:
        return self._records[shard]

    def __iter__(self) -> Iterator[int]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[type[OpenShards], tuple[npt.NDArray[np.int64]]]:
        return OpenShards, (self.rows,)

    @cached_property
    def _records(self) -> dict[int, CheckpointShard]:
        return {
            shard: CheckpointShard(samples, bool(ended), *rest)
            for shard, samples, ended, *rest in self.rows.tolist()
        }


COLUMNS = 1 + len(CheckpointShard._fields)
ENDED = 1 + CheckpointShard._fields.index("ended")


class SourceState(NamedTuple):
    """The state of a group in one source."""

    cursor: Cursor
    begun: OpenShards


class GroupState(NamedTuple):
    """The state of a group: all that resuming it needs."""

    owed: tuple[int, ...]
    """Credits of each source (of order.steps.Portion)."""
    sources: tuple[SourceState, ...]
    past: tuple[tuple[int, ...], ...] = ()
    """Blocks of other steps that began here, and were left before their end, as an extension has them."""

    @property
    def left_out(self) -> Tally:
        """The samples left out of the sequence so far, by what left them out."""
        of_sources = (source.cursor.left_out for source in self.sources)
        return sum((left_out.total for left_out in of_sources if left_out is not None), Counter())

    def to_json(self) -> dict[str, Any]:
        """The state as JSON-able values."""
        return {
            "owed": list(self.owed),
            "sources": [
                {
                    "cursor": state.cursor.to_json(),
                    "begun": {str(shard): list(checkpoint) for shard, checkpoint in state.begun.items()},
                }
                for state in self.sources
            ],
            **({"past": [list(block) for block in self.past]} if self.past else {}),
        }

    @classmethod
    def from_json(cls, value: Any) -> GroupState:
        """The state that `to_json` wrote.

        Raises:
            OptionError: the value is something else.
        """
        try:
            owed = tuple(int(credit) for credit in value["owed"])
            past = tuple(tuple(int(number) for number in block) for block in value.get("past", ()))
            sources = tuple(
                SourceState(
                    Cursor.from_json(state["cursor"]),
                    OpenShards.of(
                        {
                            int(shard): CheckpointShard.from_json(checkpoint)
                            for shard, checkpoint in state["begun"].items()
                        }
                    ),
                )
                for state in value["sources"]
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise OptionError(f"not the state of a group: {type(exc).__name__}") from exc
        if len(owed) != len(sources) or sum(owed) != 0:
            raise OptionError("not the state of a group: what its sources are owed doesn't add up to 0")
        return cls(owed, sources, past)


class SealedStates(Mapping[int, GroupState]):
    """States of groups by group number, unpickled only on access.

    Every batch carries its states, and a rank needs only those of its last batch, for a checkpoint.
    """

    def __init__(self, states: Mapping[int, GroupState]):
        self._sealed = pickle.dumps(dict(states), pickle.HIGHEST_PROTOCOL)

    def __getitem__(self, number: int) -> GroupState:
        return self._open()[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())

    def _open(self) -> dict[int, GroupState]:
        states: dict[int, GroupState] = pickle.loads(self._sealed)
        return states
