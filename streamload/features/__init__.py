"""Stored rows of modules in batches, `Batches(features=…)`: an extension (streamload/extension/).

`columns.py` makes a feature's part of a batch in `worker.py`, from rows of `derived_shards.py` and of the
store of rows (streamload/derived); `rank.py` gives the batch its FeatureRows. `assembly.py` reads a loader's
options; `recipe.py` makes derived shards of rows ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamload.derived.calls.features import BoundFeatures
from streamload.extension import Extension, Run, WorkerProcess
from streamload.features.columns import FeatureAssembly
from streamload.features.rank import NAME, RankFeatures
from streamload.features.worker import WorkerFeatures

__all__ = ["RowFeatures"]


@dataclass(frozen=True, slots=True)
class RowFeatures(Extension):
    """The extension of a loader with features.

    Attributes:
        assemblies: how workers make them.
        bound: the features as the rank uses them, by name; their modules stay there.
    """

    assemblies: tuple[FeatureAssembly, ...]
    bound: Mapping[str, BoundFeatures] = field(default_factory=dict, compare=False, repr=False)

    name = NAME

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.assemblies,)

    def in_worker(self, process: WorkerProcess) -> WorkerFeatures:
        """Its part in a worker process; None: it has none there."""
        return WorkerFeatures(self.assemblies, process)

    def in_rank(self, run: Run) -> RankFeatures:
        """Its part in the rank; None: it has none."""
        return RankFeatures(self.bound, run)
