"""The contract of what is stored beside a shard's index: values of its samples, by column (facts/)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from streamload.shards.columns import Column, Values

if TYPE_CHECKING:
    from streamload.cache.shard import Shard
    from streamload.cache.shard_view import ShardView


class FactsCarrier(Protocol):
    """Carries the values of whole shards between nodes; its answers are checked by who asks."""

    def read(self, shard: Shard, column: Column) -> bytes:
        """The stored values; empty if there are none or no answer comes."""
        ...

    def offer(self, shard: Shard, column: Column, values: Values, records: npt.NDArray[np.void]) -> None:
        """Store the values of a whole shard for other nodes; returns at once.

        Args:
            shard: in the form whose index has the records.
            values: of all samples; not changed any more.
            records: the index records of all samples; not changed any more.
        """
        ...


class Companion(Protocol):
    """The values of one shard, while it is open."""

    def values(self, column: Column) -> Values:
        """The values so far: float64[N], NaN where unknown."""
        ...

    def extend(self, view: ShardView, columns: Sequence[Column], count: int) -> bool:
        """Have the values of the first `count` samples, which have arrived; False while they can't be read.

        Raises:
            DatasetChanged, OriginError: see `ShardView.read`.
            FeatureMismatch: a stored value isn't what is made now.
        """
        ...

    def share(self, columns: Iterable[Column]) -> None:
        """Offer the values of a whole shard to other nodes, once."""
        ...


OpenCompanion = Callable[["FactsCarrier | None"], Companion]
"""Opens the companion of a shard; None: nothing carries its values to other nodes."""
