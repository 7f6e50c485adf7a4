"""Which samples of a shard a run uses, decided from the index alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamload.shards.index import IndexReader
from streamload.shards.keys import KeySpec, needed, usable
from streamload.shards.samples import Entry

Keep = Callable[[Entry], bool]


@dataclass(frozen=True, slots=True)
class Selection:
    """The samples that have what is asked for, and that the user's own function keeps.

    Attributes:
        image: members of which a sample has to have one; None asks for none.
        text: the same for the caption.
        keep: takes an entry; False leaves the sample out. Its errors are raised.
    """

    image: KeySpec | None
    text: KeySpec | None
    keep: Keep | None = None

    def needed(self, extensions: Collection[str]) -> set[str]:
        """The members of a sample that are read of it."""
        return needed(extensions, self.image, self.text)

    def of(self, reader: IndexReader, start: int) -> tuple[npt.NDArray[np.bool_], int]:
        """For each entry from number `start` on whether it is used, and how many lack what is asked for."""
        mask = usable(reader, self.image, self.text, start)
        missing = len(mask) - int(mask.sum())
        if self.keep is not None:
            for place in np.flatnonzero(mask).tolist():
                mask[place] = bool(self.keep(reader.entry(start + place)))
        return mask, missing
