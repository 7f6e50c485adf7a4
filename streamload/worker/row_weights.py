"""What the rows of a batch are weighed by: values from facts of the samples that are in it (step I).

The rank makes weights of them (loader/row_weights.py).
"""

from __future__ import annotations

import numpy as np

from streamload.batches.sample_weights import SampleWeight
from streamload.cache.selection import Selection, with_facts
from streamload.shards.samples import Entry
from streamload.worker.reader import Reader

VALUE = np.dtype("<f8")
"""The value of a row, as batches carry it."""


class RowWeights:
    """The rows of one batch after the other.

    Args:
        weight: how rows are weighed.
        selection: has the names of the user's columns.
        reader: has facts and entries.
    """

    def __init__(self, weight: SampleWeight, selection: Selection, reader: Reader):
        self._weight, self._reader = weight, reader
        self._own = selection.of_entries
        self._names = list(weight.facts(self._own))
        self._rows: dict[int, list[tuple[int, int]]] = {}  # by shard: number of the sample, its row
        self._count = 0

    def begin(self) -> None:
        """Begin a batch."""
        self._rows.clear()
        self._count = 0

    def add(self, shard: int, number: int) -> None:
        """The sample of the next row."""
        self._rows.setdefault(shard, []).append((number, self._count))
        self._count += 1

    def values(self) -> bytes:
        """The values of all rows: VALUE[N], NaN where unknown.

        Raises:
            OptionError: see SampleWeight.of.
        """
        found = np.empty(self._count, VALUE)
        for shard, pairs in self._rows.items():
            numbers, rows = np.array(pairs).T
            facts = self._reader.facts(shard, numbers, self._names)
            entries: list[Entry] = []
            if self._weight.reads_entries:
                there = self._reader.entries(shard, numbers.tolist())
                entries = [with_facts(one, self._own, facts, place) for place, one in enumerate(there)]
            found[rows] = self._weight.of(facts, entries)
        return found.tobytes()
