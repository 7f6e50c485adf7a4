"""The names of the columns of a process's shards, by which rows of their samples are found (step I)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from xxhash import xxh3_64

from streamload.columns.columns import FIRST, name_of
from streamload.shards.record import NO_CHECKSUM
from streamload.shards.samples import Sample
from streamload.worker.reader import Reader

NameOf = Callable[[Sample], "bytes | None"]
"""Names the columns of a sample's shard; b"": it is too small for any; None: not known yet."""


class ColumnNames:
    """The names of the columns of a process's shards, for an epoch.

    Args:
        reader: of the process.
    """

    def __init__(self, reader: Reader):
        self._reader = reader
        self._names: dict[tuple[int, bool], bytes] = {}

    def of(self, sample: Sample) -> bytes | None:
        """The name of the columns of a sample's shard; b"": it is too small for any; None: not known yet.

        Raises:
            DatasetChanged, OriginError: by reading the first samples of a local shard.
        """
        which = sample.shard, bool(sample.prepared)  # a prepared shard has other checksums
        name = self._names.get(which)
        if name is None and (name := self._find(sample.shard)) is not None:
            self._names[which] = name
        return name

    def clear(self) -> None:
        """Forget all names: shards may have other versions."""
        self._names.clear()

    def _find(self, shard: int) -> bytes | None:
        index = self._reader.index(shard)
        if index is None or index.count < FIRST:
            return b"" if index is not None and index.ended else None
        first = index.records[:FIRST]
        if not (first["flags"] & NO_CHECKSUM).any():
            return name_of(first["checksum"])
        samples = (self._reader.sample(shard, number) for number in range(FIRST))
        return name_of([checksum_of(sample.members) for sample in samples])


def checksum_of(members: Mapping[str, memoryview]) -> int:
    """The checksum of a sample's members; a shard that isn't local has it in its index."""
    digest = xxh3_64()
    for payload in members.values():
        digest.update(payload)
    return digest.intdigest()
