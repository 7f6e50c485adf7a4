"""Candidates for replacing a sample that can't be used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from streamload.order.hashing import pick
from streamload.worker.messages import Visit, WorkerConfig
from streamload.worker.reader import Reader

_OF_A_SHARD = 8
"""Replacements that are tried from one shard before those of the next."""
_REPLACEMENTS_FROM = 256
"""Replacements from another shard start at a random one of this many samples: no sample replaces many."""


class Replacements:
    """Candidates for the place of a sample; they depend on the data alone.

    Args:
        config: what is read.
        reader: has the samples.
    """

    def __init__(self, config: WorkerConfig, reader: Reader):
        self._config, self._reader = config, reader

    def of(
        self, visit: Visit, seed: int, fits: Callable[[Visit, int, int], bool]
    ) -> Iterator[tuple[int, int]]:
        """The shards and numbers of samples that may take its place, at most as many as are to be tried.

        Where its width is known, first those that fit. Where any number may be tried, all of its shard in the
        end.

        Args:
            visit: of a sample that can't be used.
            seed: uint64, of its random choices.
            fits: see Sampler.
        """
        tried = self._config.replacements
        fitting = (place for place in self._near(visit, seed) if fits(visit, *place))
        yield from itertools.islice(fitting, tried)
        if visit.most is not None:
            yield from itertools.islice(self._near(visit, seed), tried)
        if tried is None:
            yield from self._usable_after(visit.shard, -1, None)

    def _near(self, visit: Visit, seed: int) -> Iterator[tuple[int, int]]:
        """1. Earlier samples of its shard, 2. later ones, 3. some of each of the source's next shards."""
        usable = self._reader.arrived(visit.shard)
        earlier = usable[usable < visit.number]
        for attempt in range(_OF_A_SHARD if len(earlier) else 0):
            yield visit.shard, int(earlier[pick(seed, attempt, len(earlier))])
        yield from self._usable_after(visit.shard, visit.number)
        source = self._config.sources[visit.source]
        place, count = visit.shard - source.first, source.count
        for distance in range(1, count):
            shard = source.first + (place + distance) % count
            start = pick(seed, distance, _REPLACEMENTS_FROM)
            if self._reader.next_usable(shard, start) < 0:  # the shard is shorter: then any of its samples
                usable = self._reader.arrived(shard)
                start = int(usable[pick(seed, distance, len(usable))]) - 1 if len(usable) else start
            yield from self._usable_after(shard, start)

    def _usable_after(
        self, shard: int, number: int, most: int | None = _OF_A_SHARD
    ) -> Iterator[tuple[int, int]]:
        """The next usable samples of a shard after one of its samples."""
        for _ in itertools.count() if most is None else range(most):
            number = self._reader.next_usable(shard, number)
            if number < 0:
                return
            yield shard, number
