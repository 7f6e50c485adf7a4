"""The state of a group after a step, all that resuming needs: it travels with a batch, and in checkpoints."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from streamload.cache.checkpoint import CheckpointShard
from streamload.errors import OptionError
from streamload.order.cursor import Cursor


class SourceState(NamedTuple):
    """The state of a group in one source."""

    cursor: Cursor
    begun: dict[int, CheckpointShard]
    """The open shards as a checkpoint records them, by their index in the source."""


class GroupState(NamedTuple):
    """The state of a group: all that resuming it needs."""

    owed: tuple[int, ...]
    """Credits of each source (of order.portions.Portion)."""
    sources: tuple[SourceState, ...]

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
                    {
                        int(shard): CheckpointShard.from_json(checkpoint)
                        for shard, checkpoint in state["begun"].items()
                    },
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
            number: (
                state.owed,
                [(tuple(cursor), _plain(open_shards)) for cursor, open_shards in state.sources],
            )
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


def _plain(open_shards: Mapping[int, CheckpointShard]) -> dict[int, tuple[Any, ...]]:
    return {shard: tuple(checkpoint) for shard, checkpoint in open_shards.items()}


def _source_state(cursor: tuple[Any, ...], open_shards: Mapping[int, tuple[Any, ...]]) -> SourceState:
    return SourceState(
        Cursor(*cursor), {shard: CheckpointShard(*checkpoint) for shard, checkpoint in open_shards.items()}
    )
