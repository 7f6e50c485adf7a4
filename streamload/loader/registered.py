"""The extensions of streamload, each made of what asks for it: one entry for each."""

from __future__ import annotations

from streamload.daemon.plan_file import PlannedSource
from streamload.daemon.publication import PlanPublication
from streamload.extension import Extension
from streamload.loader.groups import Batches
from streamload.weights import RowWeights
from streamload.weights.sample import read_sample_weight
from streamload.worker import WorkerConfig


def extensions_of(batches: Batches) -> tuple[Extension, ...]:
    """The extensions of a loader, by its options."""
    sample_weight = read_sample_weight(batches.sample_weight)
    return () if sample_weight is None else (RowWeights(sample_weight),)


def extensions_of_run(config: WorkerConfig) -> tuple[Extension, ...]:
    """The extensions of a run, by what its workers read; they have no part in the rank."""
    if config.shared is None or not config.train:
        return ()
    preparation = config.assembly.preparation
    publication = PlanPublication(
        config.shared,
        tuple(PlannedSource(source.count, source.order) for source in config.sources),
        config.one_pass,
        config.shards.urls,
        config.shards.storage_options,
        tuple(config.split.groups_told_by(config.rank)),
        prepare="" if preparation is None else str(preparation),
        prepared_by="" if preparation is None else preparation.name,
    )
    return (publication,)
