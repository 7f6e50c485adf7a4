"""The extensions of streamload, each made of the options that ask for it: one entry for each."""

from __future__ import annotations

from streamload.extension import Extension
from streamload.loader.groups import Batches
from streamload.weights import RowWeights
from streamload.weights.sample import read_sample_weight


def extensions_of(batches: Batches) -> tuple[Extension, ...]:
    """The extensions that a loader with these options has."""
    sample_weight = read_sample_weight(batches.sample_weight)
    return () if sample_weight is None else (RowWeights(sample_weight),)
