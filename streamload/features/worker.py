"""The features of a loader in a worker: stored rows are read, the inputs of others are made (step I)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from streamload.batches.in_progress import Allocate
from streamload.derived.calls.feature_rows import FeatureStart
from streamload.derived.store.row_store import RowStore
from streamload.extension import Event, WorkerPart
from streamload.features.columns import FeatureAssembly, FeatureInProgress, MakeFeature
from streamload.features.names import ColumnNames
from streamload.features.sharing import SharedColumns
from streamload.worker.reader import Reader

if TYPE_CHECKING:
    from streamload.extension import WorkerProcess


class WorkerFeatures(WorkerPart):
    """The worker's part; its process fetches rows from other nodes beside the shards."""

    def __init__(self, assemblies: Sequence[FeatureAssembly], process: WorkerProcess):
        reader = process.reader
        assert isinstance(reader, Reader)
        self._assemblies = assemblies
        self._reader = reader
        self._names = ColumnNames(reader)
        self._shared: SharedColumns | None = None
        if reader.fills.backing is not None and any(assembly.are_shared for assembly in assemblies):
            from streamload.cache.shared.sharing import Sharing

            assert isinstance(reader.fills.backing, Sharing)
            self._shared = SharedColumns(reader.fills.backing.tier, reader.counts)
        self._makers: list[MakeFeature] = []
        if not reader.uses_members and all(assembly.images is not None for assembly in assemblies):
            reader.read_lazily()

    def apply(self, event: Event) -> None:
        """Begin an epoch, given the FeatureStart of each feature by name."""
        starts = {name: FeatureStart(*start) for name, start in event.value.items()}
        self._names.clear()
        if self._shared is not None:
            self._shared.begin()
        self._makers = [
            assembly.batch_factory(
                starts[assembly.name], self._names.of, None if self._shared is None else self._await_rows
            )
            for assembly in self._assemblies
        ]

    def columns(self, size: int, allocate: Allocate) -> list[FeatureInProgress]:
        """Values of an empty batch that aren't decoded from its samples: a BatchColumn of each feature."""
        return [make(size, allocate) for make in self._makers]

    def close(self) -> None:
        """Stop all transfers. Idempotent."""
        if self._shared is not None:
            self._shared.close()

    def _await_rows(self, store: RowStore, fingerprint: str, names: Mapping[bytes, int]) -> None:
        assert self._shared is not None
        shards = {name: self._reader.shards[shard] for name, shard in names.items()}
        self._shared.await_rows(store, fingerprint, shards)
