"""Stored rows of modules in batches, `Batches(features=…)`: an extension (streamload/extension/).

`columns.py` makes a feature's part of a batch in `worker.py`, from rows that are stored (streamload/derived,
streamload/columns) under the names of `names.py`; `sharing.py` brings those of other nodes. `rank.py` gives
the batch its FeatureRows. `assembly.py` reads a loader's options; `recipe.py` makes rows ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streamload.batches.assembly import BatchAssembly
from streamload.derived.calls.features import BoundFeatures
from streamload.errors import OptionError
from streamload.extension import Extension
from streamload.features.assembly import bound_features, feature_assemblies
from streamload.features.columns import FeatureAssembly
from streamload.features.rank import NAME, RankFeatures
from streamload.features.worker import WorkerFeatures
from streamload.order.steps import Split

if TYPE_CHECKING:
    from streamload.extension import LoaderOptions, Run, WorkerConfig, WorkerProcess

__all__ = ["RowFeatures", "StoredFeatures"]


@dataclass(frozen=True, slots=True)
class StoredFeatures(Extension):
    """The extension of a loader with features; a run has `RowFeatures`."""

    name = NAME

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse features of what batches don't have, or in batches without names."""
        if options.output == "tuple":
            raise OptionError('features= is for output="dict" or "hf", whose values have names')
        if options.workers.map_sample is not None:
            raise OptionError("features= is for images and texts, and map_sample= makes the whole example")
        for name, feature in options.features.items():
            if feature.inputs != "image" and options.shards.text_key is None:
                raise OptionError(f"text_key=None selects no captions for the feature {name!r}")
            if feature.inputs == "sample" and options.captions is not None and options.captions.is_drawn:
                raise OptionError(
                    f"text_key={options.shards.text_key!r} draws a caption for each pass, and the feature "
                    f'{name!r} has inputs="sample", one row for each sample: make rows of texts alone, '
                    f'Features(inputs="text"), which are found by the text, or leave out [*] and '
                    f"text_key_probs="
                )

    def assembly(self, assembly: BatchAssembly, options: LoaderOptions, split: Split | None) -> BatchAssembly:
        """Batches without images of their own, if only features need them."""
        wanted = [feature.images for feature in options.features.values()]
        are_read = any(feature.inputs != "text" for feature in options.features.values())
        are_read = are_read and assembly.images is not None
        if True in wanted or not (are_read or False in wanted):
            return assembly
        return replace(assembly, images=None, preparation=assembly.preparation if are_read else None)

    def in_run(self, options: LoaderOptions, config: WorkerConfig, plain: BatchAssembly) -> RowFeatures:
        """The extension of a run."""
        assemblies = feature_assemblies(options, plain.images)
        return RowFeatures(assemblies, bound_features(options, assemblies))


@dataclass(frozen=True, slots=True)
class RowFeatures(Extension):
    """The extension of a run with features."""

    assemblies: tuple[FeatureAssembly, ...]  # how workers make them
    bound: Mapping[str, BoundFeatures] = field(default_factory=dict, compare=False, repr=False)
    """The features as the rank uses them, by name; their modules stay there."""

    name = NAME

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.assemblies,)

    def in_worker(self, process: WorkerProcess) -> WorkerFeatures:
        """Its part in a worker process; None: it has none there."""
        return WorkerFeatures(self.assemblies, process)

    def in_rank(self, run: Run) -> RankFeatures:
        """Its part in the rank; None: it has none."""
        return RankFeatures(self.bound, run)
