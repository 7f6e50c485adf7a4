"""The demand of a daemon: how much of it is held in advance, and the shards of a list."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from streamload.cache import demand
from streamload.cache.locks import is_locked
from streamload.cache.shard import Shard, ShardList
from streamload.errors import OptionError
from streamload.options import parse_size

DEFAULT_WINDOW = "100GB"
GUESSED_BYTES = 256_000_000
"""The assumed size of a shard before any size is known."""
_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|sec|m|min|h)\s*")
_SIZES_KEPT = 100_000

SizeOf = Callable[[Shard], float]
"""The size of a shard in bytes, known or guessed."""
_Needed = TypeVar("_Needed", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PrefetchWindow:
    """Distance ahead of the readers that is held: bytes over all groups, or seconds of each group."""

    size_bytes: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> PrefetchWindow:
        """A window from "100GB", "30min" or "2h".

        Raises:
            OptionError: it is neither a size nor a time.
        """
        if match := _TIME.fullmatch(text):
            seconds = float(match[1]) * _SECONDS[match[2]]
            if seconds > 0:
                return cls(seconds=seconds)
            raise OptionError(f'window={text!r} is no time; expected "30min" or "2h", or a size as "100GB"')
        try:
            return cls(size_bytes=parse_size(text, "window"))
        except OptionError:
            raise OptionError(
                f'window={text!r} is neither a size nor a time; expected "100GB", "30min" or "2h"'
            ) from None

    def cut(self, shards: Iterable[Shard], size_of: SizeOf) -> list[Shard]:
        """The first shards, up to the window's bytes; at least one."""
        if self.size_bytes is None:
            return list(shards)
        held: list[Shard] = []
        total = 0.0
        for shard in shards:
            total += size_of(shard)
            if held and total > self.size_bytes:
                break
            held.append(shard)
        return held


class Sizes:
    """The sizes of shards as far as they are known. For one thread."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # by digest
        self._total_bytes = 0

    def note(self, digest: str, size_bytes: int) -> None:
        """Note the size of a shard."""
        if len(self._sizes) < _SIZES_KEPT:
            self._total_bytes += size_bytes - self._sizes.get(digest, 0)
            self._sizes[digest] = size_bytes

    def of(self, shard: Shard) -> float:
        """The size of a shard in bytes: its own if it is known, else the mean of those that are."""
        if not self._sizes:
            return float(GUESSED_BYTES)
        return self._sizes.get(shard.digest, self._total_bytes / len(self._sizes))


def in_order(coming: Iterable[Sequence[_Needed]]) -> list[_Needed]:
    """Merge what several groups need, each in order: the next of each group, then those after, each once."""
    ranked = [(k, n, shard) for n, shards in enumerate(coming) for k, shard in enumerate(shards)]
    ranked.sort(key=lambda entry: entry[:2])
    return list(dict.fromkeys(shard for _, _, shard in ranked))


class Demand(Protocol):
    """The shards that a daemon is to hold. For one thread."""

    def look(self, size_of: SizeOf) -> list[Shard]:
        """The shards in order of need, each once, as of now.

        Raises:
            SharedTierError: the shared tier can't be asked now.
        """
        ...

    def describe(self) -> str:
        """The demand in words, for logs and status."""
        ...


class ListDemand:
    """The shards of a list: first those that live runs on this node need next, then the others as listed.

    Args:
        shards: the list; a shard that has a prepared form is demanded in that form.
        window: how much of the list to hold.
        announced: the `runs/` of a tier, in which live runs announce what they will read; None: nobody does.
        own: the daemon's own file there.
    """

    def __init__(
        self,
        shards: ShardList,
        window: PrefetchWindow,
        announced: Path | None = None,
        own: Path | None = None,
    ):
        self._shards = shards
        self._window = window
        self._announced = announced
        self._own = own
        form = shards[0].prepared if len(shards) else None
        self._as_what = f", prepared as {form.recipe}" if form is not None else ""
        self._all: dict[str, Shard] | None = None
        self._names: np.ndarray[Any, np.dtype[np.uint64]] | None = None

    def describe(self) -> str:
        """The demand in words, for logs and status."""
        return f"{len(self._shards):,} listed shards{self._as_what}"

    def look(self, size_of: SizeOf) -> list[Shard]:
        """The shards in order of need, each once, as of now."""
        needed = dict.fromkeys(self._needed())
        first = {task.digest: task for task in map(_wanted_form, (self._shards[place] for place in needed))}
        if self._window.size_bytes is None:
            if self._all is None:
                self._all = {task.digest: task for task in map(_wanted_form, self._shards)}
            return list({**first, **self._all}.values())
        tasks, total = dict(first), sum(map(size_of, first.values()))
        for task in map(_wanted_form, self._shards):
            if total > self._window.size_bytes:
                break
            if task.digest not in tasks:
                tasks[task.digest] = task
                total += size_of(task)
        return self._window.cut(list(tasks.values()), size_of)

    def _needed(self) -> list[int]:
        """The positions of the shards that live runs will read, the soonest first."""
        if self._announced is None:
            return []
        visits = [
            demand.visits_of(path)
            for path in demand.files(self._announced)
            if path != self._own and is_locked(path)
        ]
        if not any(len(coming) for coming in visits):
            return []
        if self._names is None:
            names = (demand.short(self._shards.digest(place)) for place in range(len(self._shards)))
            self._names = np.fromiter(names, dtype="<u8", count=len(self._shards))
        places = {int(name): place for place, name in enumerate(self._names.tolist())}
        return in_order([places[name] for name in coming.tolist() if name in places] for coming in visits)


def _wanted_form(shard: Shard) -> Shard:
    """The prepared form of a shard if it has one, else the shard."""
    return shard.prepared or shard
