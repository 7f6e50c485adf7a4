"""Facts of samples in a shared cache: one object for each shard and column, beside the shard's index.

    shards/<digest>/facts.<column>   magic, a frame for each sample

The column is named by the digest of its definition, so another tokenizer's counts are another object. Frames
are checked by their readers against that digest and the index records of their samples (shards/facts.py);
with one for each sample, values can be checked as the samples arrive. What is missing or damaged is made by
the node.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from streamload.cache.companion import FactsCarrier
from streamload.cache.shard import Shard
from streamload.cache.shared.objects import OBJECT_LIMIT_BYTES
from streamload.cache.shared.tier import SharedTier
from streamload.cache.shared.write_back import WriteBack
from streamload.errors import OriginStopped
from streamload.shards.columns import Column, Values
from streamload.shards.facts import pack_each

_MAGIC = b"SLFACTS1"


class SharedFacts(FactsCarrier):
    """The facts that nodes share. For one process.

    Args:
        tier: asked by a process that waits for the answer, so with a short timeout.
        write_back: stores what this process has made; None: nothing does.
    """

    def __init__(self, tier: SharedTier, write_back: WriteBack | None):
        self._tier = tier
        self._write_back = write_back

    def read(self, shard: Shard, column: Column) -> bytes:
        """The frames of a shard's values, unchecked; empty if there are none or no answer comes."""
        if shard.local is not None:
            return b""
        try:
            stored = self._tier.attempt(lambda: self._tier.beside(shard, object_name(column)), shard)
        except OriginStopped:
            return b""
        return stored[len(_MAGIC) :] if stored is not None and stored.startswith(_MAGIC) else b""

    def offer(self, shard: Shard, column: Column, values: Values, records: npt.NDArray[np.void]) -> None:
        """Queue the values of a whole shard, to be stored unless the same are there."""
        if self._write_back is not None and shard.local is None:
            pack = functools.partial(_packed, column, values, records)
            self._write_back.add_beside(shard, object_name(column), pack)

    def wait(self) -> None:
        """Wait until what was offered is stored, or has failed."""
        if self._write_back is not None:
            self._write_back.wait()

    def close(self) -> None:
        """End all waits for answers. Idempotent."""
        self._tier.close()


def object_name(column: Column) -> str:
    """The name of the object that has a column's values of a shard."""
    return f"facts.{column.digest}"


def _packed(column: Column, values: Values, records: npt.NDArray[np.void]) -> bytes:
    """The object; empty if it would be larger than any that is read."""
    packed = _MAGIC + pack_each(column.digest, values, column.dtype, records)
    return packed if len(packed) <= OBJECT_LIMIT_BYTES else b""
