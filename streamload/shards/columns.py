"""Columns: a fact of each sample of a shard, as a number, such as its width or the tokens of its caption.

Some are in the index records; others are in files beside the index, if a run needs them (streamload/facts).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from streamload.shards.samples import Entry

Values = npt.NDArray[np.float64]
"""Facts of samples in order; NaN: unknown."""

FactFunction = Callable[[dict[str, Any]], "float | Sequence[float | None] | None"]
"""Takes a sample: `__key__`, `__images__` (`Entry.images`), extension → bytes without images.

Returns a number, or one for each of several names; None: unknown."""

Fact = str | Path | FactFunction | tuple[FactFunction, str]
"""A fact as `Shards(facts=…)` has it: "tokens", "json:<field>", a table, or a function (and its version)."""

FactNames = str | tuple[str, ...]
"""The name of a fact, or those of the numbers that one function returns."""
Facts = Mapping[str, Fact] | Mapping[FactNames, Fact]

BUILT_IN = ("width", "height", "caption_bytes", "image_bytes")
"""Facts that every run has: the first three are in the index records."""
IN_RECORDS = frozenset(BUILT_IN[:3])
TOKENS = "tokens of the caption"
"""The name of the column of token counts by which a run plans and weighs."""
LISTED = "listed by keep"
"""The name of the column of samples that a list of uids names."""


class FactSample(NamedTuple):
    """A sample of which facts are made: its entry, and the bytes of the members that were asked for."""

    entry: Entry
    members: Mapping[str, bytes]


class Column(Protocol):
    """Recipe of one fact of a sample: from its members' bytes or its key alone, the same everywhere."""

    @property
    def digest(self) -> str:
        """32 hex characters of all that the values depend on beside the sample; names the file."""
        ...

    @property
    def dtype(self) -> str:
        """The type of a sample's stored value: "<u2", "<u4" or "<f8"; "(2,)<f8" of two numbers."""
        ...

    @property
    def from_members(self) -> bool:
        """True if members' bytes are read for it: then values from another node are worth a request."""
        ...

    @property
    def check_name(self) -> str:
        """The name or names, in quotes, under which a few stored values are made again in each run; or ""."""
        ...

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select those of a sample's extensions whose bytes are needed; none of them an image's."""
        ...

    def make(self, samples: Sequence[FactSample]) -> Values:
        """Return the value of each sample."""
        ...
