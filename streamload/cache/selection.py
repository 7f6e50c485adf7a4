"""Which samples of a shard a run uses, decided from the index alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamload.shards.index import IndexReader
from streamload.shards.keys import KeySpec, chosen, usable
from streamload.shards.samples import Entry

Keep = Callable[[Entry], bool]


@dataclass(frozen=True, slots=True)
class Selection:
    """The samples that have what is asked for, and that the user's own function keeps.

    Attributes:
        keys: of the image, the text, the label: members of which a sample has to have one each.
        keep: takes an entry; False leaves the sample out. Its errors are raised.
        reads_all: whether all members of a sample are read, or those that the keys choose.
    """

    keys: tuple[KeySpec, ...]
    keep: Keep | None = None
    reads_all: bool = False

    def needed(self, extensions: Collection[str]) -> set[str]:
        """The members of a sample that are read of it."""
        return set(extensions) if self.reads_all else chosen(extensions, self.keys)

    def of(self, reader: IndexReader, start: int) -> tuple[npt.NDArray[np.bool_], int]:
        """For each entry from number `start` on whether it is used, and how many lack what is asked for."""
        mask = usable(reader, self.keys, start)
        missing = len(mask) - int(mask.sum())
        if self.keep is not None:
            for place in np.flatnonzero(mask).tolist():
                mask[place] = bool(self.keep(reader.entry(start + place)))
        return mask, missing
