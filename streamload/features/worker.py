"""The features of a loader in a worker: stored rows are read, the inputs of others are made (step I)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamload.batches.collate import Allocate
from streamload.derived.calls.feature_rows import FeatureStart
from streamload.extension import Event, WorkerPart
from streamload.features.columns import FeatureAssembly, FeatureInProgress, MakeFeature
from streamload.features.derived_shards import DerivedShards
from streamload.worker.reader import Reader

if TYPE_CHECKING:
    from streamload.extension import WorkerProcess


class WorkerFeatures(WorkerPart):
    """The worker's part; its process reads derived shards beside the shards."""

    def __init__(self, assemblies: Sequence[FeatureAssembly], process: WorkerProcess):
        reader = process.reader
        assert isinstance(reader, Reader)
        names = [assembly.name for assembly in assemblies if assembly.has_derived_shards]
        self._assemblies = assemblies
        self._derived = DerivedShards(names, reader)
        self._makers: list[MakeFeature] = []
        if names:
            reader.follow(self._derived)
        if len(names) == len(assemblies) and not reader.uses_members:
            reader.read_lazily_if(self._derived.has_all)

    def apply(self, event: Event) -> None:
        """Begin an epoch, given the FeatureStart of each feature by name."""
        starts = {name: FeatureStart(*start) for name, start in event.value.items()}
        self._derived.begin({name: start.fingerprint for name, start in starts.items()})
        self._makers = [
            assembly.batch_factory(starts[assembly.name], self._derived.rows) for assembly in self._assemblies
        ]

    def columns(self, size: int, allocate: Allocate) -> list[FeatureInProgress]:
        """Values of an empty batch that aren't decoded from its samples: a BatchColumn of each feature."""
        return [make(size, allocate) for make in self._makers]

    def close(self) -> None:
        """Stop all transfers, and close all that is open. Idempotent."""
        self._derived.close()
