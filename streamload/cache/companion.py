"""The contract of what is stored beside a shard's index: values of its samples, by column (facts/)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamload.shards.columns import Column, Values

if TYPE_CHECKING:
    from streamload.cache.shard import Shard
    from streamload.cache.shard_view import ShardView


class FactsCarrier:
    """Carries the values of whole shards between nodes; here none. Its answers are checked by who asks."""

    def read(self, shard: Shard, column: Column) -> bytes:
        """The stored values; empty if there are none or no answer comes."""
        return b""

    def offer(self, shard: Shard, column: Column, values: Values, records: npt.NDArray[np.void]) -> None:
        """Store the values of a whole shard for other nodes; returns at once.

        Args:
            shard: in the form whose index has the records.
            values: of all samples; not changed any more.
            records: the index records of all samples; not changed any more.
        """

    def wait(self) -> None:
        """Wait until what was offered is stored, or has failed."""

    def close(self) -> None:
        """End all waits for answers. Idempotent."""


class Companion:
    """The values of one shard, while it is open; facts/ subclasses it."""

    def values(self, column: Column) -> Values:
        """The values so far: float64[N], NaN where unknown."""
        raise NotImplementedError

    def extend(self, view: ShardView, columns: Sequence[Column], count: int) -> bool:
        """Have the values of the first `count` samples, which have arrived; False while they can't be read.

        Raises:
            DatasetChanged, OriginError: see `ShardView.read`.
            FeatureMismatch: a stored value isn't what is made now.
        """
        raise NotImplementedError

    def share(self, columns: Iterable[Column]) -> None:
        """Offer the values of a whole shard to other nodes, once."""
        raise NotImplementedError


OpenCompanion = Callable[[FactsCarrier], Companion]
"""Opens the companion of a shard."""
