"""Comparison of the ranks' loaders: with other shards, options or states, samples come twice or never.

Each distinct description of a loader has a slot in torch.distributed's store, filled by the first rank with
such a loader, and a count of the ranks that have it. Two ranks differ if each has a description that the
other one lacks. A rank compares when it asks for its second batch, and decides at the fourth: a rank that
reads a few batches of another loader first, to show some images, has come to this one by then, as the ranks
of a training step together. Nobody waits for a rank that isn't there. Each rank sends a few requests for each
loader, however many ranks there are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

from streamload.errors import OptionError

_KEY = "streamload/loaders"
_PATIENCE_SECONDS, _PAUSE_SECONDS = 5.0, 0.1
"""How long a rank that sees a difference looks again: the other rank may be about to start this loader."""
_MARK = 1 << 32
"""Added to a slot's count when a rank that has compared its loader fails: read the reports."""
_SHOWN = 3
_COMPARED_AT, _DECIDED_AT = 2, 4
"""Batches that are asked for."""


class RankLoaders:
    """Descriptions of the loaders of one rank, and those of the other ranks that it has read.

    Args:
        store: of torch.distributed.
        rank, world_size: this rank's.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self._prefix = ""
        self._slots: list[tuple[int, dict[str, Any]]] = []  # the first rank with a description, and this
        self._own: list[int] = []  # slots of this rank's loaders

    def add(self, description: Mapping[str, Any]) -> Comparison:
        """Add a loader of this rank.

        Args:
            description: JSON-able; its keys name what may differ.
        """
        if not self._prefix:  # process groups of one process may have one store after another
            self._prefix = f"{_KEY}/{self.store.add(f'{_KEY}/groups/{self.rank}', 1)}"
        slot = self._slot_of(json.loads(json.dumps(description)))
        if slot not in self._own:
            self._own.append(slot)
            if any(self._slots[own][0] == self.rank for own in self._own):
                self.store.set(f"{self._prefix}/of/{self.rank}", json.dumps(self._own))
            self.store.add(self.count_key(slot), 1)
        return Comparison(self, slot)

    def count_key(self, slot: int) -> str:
        """The key of the number of ranks that have a description."""
        return f"{self._prefix}/{slot}/ranks"

    def mark(self) -> None:
        """Make all ranks that compare their loaders read the reports."""
        for slot in range(len(self._slots)):
            self.store.add(self.count_key(slot), _MARK)

    def difference(self, slot: int) -> str:
        """Difference between a loader of this rank and one of another rank, in words; "": there is none."""
        self._read_slots()
        for other, (rank, description) in enumerate(self._slots):
            if other not in self._own and slot not in self._slots_of(rank):
                return self._in_words(rank, description, self._slots[slot][1])
        return ""

    def _slot_of(self, description: dict[str, Any]) -> int:
        text = json.dumps([self.rank, description])
        for slot in itertools.count():
            if slot == len(self._slots):
                rank, first = json.loads(self.store.compare_set(self._slot_key(slot), "", text))
                self._slots.append((rank, first))
            if self._slots[slot][1] == description:
                return slot
        raise AssertionError

    def _read_slots(self) -> None:
        while self.store.check([key := self._slot_key(len(self._slots))]):
            rank, description = json.loads(self.store.get(key))
            self._slots.append((rank, description))

    def _slots_of(self, rank: int) -> list[int]:
        """The slots of another rank's loaders; known of ranks that were the first in one."""
        key = f"{self._prefix}/of/{rank}"
        slots: list[int] = json.loads(self.store.get(key)) if self.store.check([key]) else []
        return slots

    def _slot_key(self, slot: int) -> str:
        return f"{self._prefix}/{slot}"

    def _in_words(self, rank: int, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
        differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        shown = [
            f"{name}={_shown(theirs.get(name))} on rank {rank} and {_shown(ours.get(name))} on rank "
            f"{self.rank}"
            for name in differ[:_SHOWN]
        ]
        more = f"; and also {', '.join(differ[_SHOWN:])}" if differ[_SHOWN:] else ""
        return f"{'; '.join(shown)}{more}"


class Comparison:
    """Comparison of one loader of this rank with those of the other ranks.

    Args:
        loaders: of this rank.
        slot: of the loader's description.

    Attributes:
        is_settled: all ranks are known to have such a loader.
        mismatch: the difference that was found, in words; "": none.
    """

    def __init__(self, loaders: RankLoaders, slot: int) -> None:
        self.loaders, self._slot = loaders, slot
        self.is_settled, self.mismatch = False, ""
        self._asked = 0

    def check(self) -> None:
        """To be called before each batch; compares before the second one, and decides before the fourth.

        Raises:
            OptionError: another rank has a loader with other shards, options or state.
        """
        self._asked += 1
        if self._asked != _COMPARED_AT and not (self._asked == _DECIDED_AT and self.mismatch):
            return
        is_last = self._asked == _DECIDED_AT
        deadline = time.monotonic() + (_PATIENCE_SECONDS if is_last else 0.0)
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it a rank
            self.look()
            while not self.is_settled and (difference := self.loaders.difference(self._slot)):
                self.mismatch = difference
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE_SECONDS)
            else:
                self.mismatch = ""
        if self.mismatch and is_last:
            raise OptionError(
                f"the ranks of this run were given different data, options or states, so samples would come "
                f"twice and others never: {self.mismatch}. Give all ranks the same, shards in one order; a "
                f"loader that ranks shouldn't share takes Order(rank=0, world_size=1)"
            )

    def look(self) -> bool:
        """Look whether all ranks have this loader; True if a rank has failed meanwhile. One request."""
        count: int = self.loaders.store.add(self.loaders.count_key(self._slot), 0)
        self.is_settled = count % _MARK >= self.loaders.world_size
        return count >= _MARK


def _shown(value: Any) -> str:
    """A value for a message; that of a single source without brackets."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return f"{value!r:.200}"
