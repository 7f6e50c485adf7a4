"""The extensions of streamload: the one module by which a loader knows them, with an entry for each."""

from __future__ import annotations

import functools
import platform
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from streamload.batches.padding import RowLengths
from streamload.buckets import Buckets
from streamload.buckets.bounds import AgreedLengths
from streamload.errors import OptionError
from streamload.extension import Extension, RankPart
from streamload.features import RowFeatures
from streamload.features.columns import FeatureAssembly
from streamload.loader.bounds import AgreedBounds, are_bounds_agreed, row_costs
from streamload.loader.distributed import gather
from streamload.loader.features import bound_features
from streamload.loader.groups import Batches, Images, Order
from streamload.loader.in_flight import check_step, in_flight_of, report
from streamload.loader.microbatches import Microbatches, Microbatching
from streamload.loader.mixing.batch_size import BatchSizes, BatchSizing
from streamload.loader.mixing.decisions import Decisions, Mixing
from streamload.loader.mixing.means import ReportedMeans
from streamload.loader.mixing.reports import Rows
from streamload.loader.observer import Observer
from streamload.loader.options import LoaderOptions
from streamload.loader.rank_process import RankProcess
from streamload.loader.rank_run import RankParts
from streamload.loader.schedule import RunSchedule
from streamload.metrics.findings import Requests
from streamload.observe.observer import ObservedRun, RunObserver
from streamload.options import Settings
from streamload.options import options as all_options
from streamload.patches.rank import PatchedImages
from streamload.steering import Policy
from streamload.steering.replay import Replay
from streamload.weights import RowWeights
from streamload.weights.sample import read_sample_weight
from streamload.worker import WorkerConfig
from streamload.worker.in_flight import InFlight

if TYPE_CHECKING:
    from streamload.cache.shared.sharing import SharedOptions

__all__ = [
    "BY_RANK",
    "Microbatches",
    "Microbatching",
    "Rows",
    "backing_of",
    "extensions_of",
    "extensions_of_run",
    "microbatching_of",
    "observer_of",
    "reports_of",
    "warn_of_decoder",
]

BY_RANK = frozenset({*Decisions.by_rank, *BatchSizing.by_rank})
"""The keys of a state of which each rank has its part; see RankPart.by_rank."""


def extensions_of(
    images: Images, batches: Batches, order: Order, mixing: Policy | Replay | None
) -> tuple[Extension, ...]:
    """The extensions of a loader: those of its options, and the user's own.

    Raises:
        OptionError: one of the user's own can't be used.
    """
    extensions: list[Extension] = []
    if mixing is not None or order.decisions is not None or order.objective is not None:
        extensions.append(Mixing(0 if mixing is None or isinstance(mixing, Replay) else mixing.every))
    if batches.batch_policy is not None:
        extensions.append(BatchSizes())
    if images.decode == "device":
        from streamload.pixels.rank import DeviceDecoding

        extensions.append(DeviceDecoding())
    sample_weight = read_sample_weight(batches.sample_weight)
    if sample_weight is not None:
        extensions.append(RowWeights(sample_weight))
    _check_own(batches.extensions)
    return (*extensions, *batches.extensions)


def _check_own(extensions: Collection[Extension]) -> None:
    """Refuse what is no extension, and names that aren't of one extension alone."""
    if not extensions:
        return
    from streamload.daemon.publication import PlanPublication
    from streamload.pixels.rank import DeviceDecoding

    of_runs = (DeviceDecoding, PlanPublication, RowFeatures, PatchedImages, RowLengths, Buckets, InFlight)
    names = {Mixing.name, BatchSizes.name, RowWeights.name, *(extension.name for extension in of_runs)}
    for extension in extensions:
        if not isinstance(extension, Extension):
            raise OptionError(f"extensions has {extension!r:.100}; expected a streamload.extension.Extension")
        if extension.name in names:
            raise OptionError(
                f"extensions has the name {extension.name!r} twice, or it is one of streamload's own"
            )
        names.add(extension.name)


def warn_of_decoder(state: Mapping[str, Any], options: LoaderOptions) -> None:
    """Warn where a run of images that a device decoded goes on with the host's decoder.

    Args:
        state: of the loader.
        options: of the loader that continues it.
    """
    if "decoder" in state and options.images.decode == "host":
        from streamload.pixels.rank import warn_of_other

        warn_of_other(str(state["decoder"]), None)


def reports_of(options: LoaderOptions) -> RankPart:
    """The part that takes the training's reports where no policy does."""
    return ReportedMeans([source.name for source in options.sources])


def microbatching_of(options: LoaderOptions, schedule: RunSchedule) -> Microbatching:
    """The microbatches of a loader; its ranks agree on the size of parts."""

    def least(value: float) -> float:
        """The least of the ranks' values, in training; in evaluation they have other numbers of parts."""
        return min(gather(value, schedule.topology.world_size)) if options.train else value

    return Microbatching(options, least)


def extensions_of_run(
    options: LoaderOptions, config: WorkerConfig, schedule: RunSchedule, features: tuple[FeatureAssembly, ...]
) -> tuple[Extension, ...]:
    """The extensions of a run, by what its workers read.

    Args:
        options: of the loader.
        config: of its workers.
        schedule: of its epochs.
        features: how they make its features.

    Raises:
        OptionError: a step of the loader has no room, or rows of it.
    """
    extensions: list[Extension] = []
    if features:
        extensions.append(RowFeatures(features, bound_features(options, features)))
    if options.images.patches is not None:
        extensions.append(PatchedImages())
    if config.assembly.trim is not None and are_bounds_agreed(schedule):
        extensions.append(AgreedLengths(functools.partial(AgreedBounds, options, schedule)))
    elif config.assembly.trim is not None:
        extensions.append(RowLengths())
    if schedule.order.blocks is not None:
        extensions.append(Buckets(row_costs(options, config.assembly)))
    in_flight = None if options.workers.memory is None else in_flight_of(options, config.assembly)
    if in_flight is not None:
        report(options, in_flight, schedule.most_rows)
        extensions.append(replace(in_flight, most_steps=check_step(options, in_flight, options.batch_size)))
    return (*extensions, *_publication(config))


def _publication(config: WorkerConfig) -> tuple[Extension, ...]:
    """The plan of a training that shares a cache."""
    if config.shared is None or not config.train:
        return ()
    from streamload.cache.shared.sharing import SharedOptions
    from streamload.daemon.plan_file import PlannedSource
    from streamload.daemon.publication import PlanPublication

    assert isinstance(config.shared, SharedOptions)
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


def backing_of(options: LoaderOptions, settings: Settings) -> SharedOptions | None:
    """The backing store of a loader's tier: a shared cache; None: it has none.

    Raises:
        OptionError: its URL can't be one.
    """
    if settings.shared_cache is None:
        return None
    from streamload.cache.shared.sharing import SharedOptions

    return SharedOptions.of(settings, options.cache.shared_options)


def observer_of(
    owner: object,
    options: LoaderOptions,
    schedule: RunSchedule,
    process: RankProcess,
    parts: RankParts,
    requests: Requests,
) -> Observer:
    """The observer of a rank, in this process; what it opens ends with its owner."""
    run = ObservedRun(
        options.num_workers,
        tuple(source.name for source in options.sources),
        options.images.prepare or "",
        options.urls.kinds,
        options.settings,
        lambda: _described(options),
        schedule,
        parts.metrics,
    )
    observer = RunObserver(owner, run, process.control, process.waits, process.clock, requests)
    if not options.num_workers:  # the worker's waits for bytes are in this process
        process.control.while_waiting = observer.tick
    return observer


def _described(loader: LoaderOptions) -> Mapping[str, Any]:
    """The options of a loader, for people; without secrets, URLs and paths of the data."""
    settings = loader.settings()
    sources = ", ".join(f"{source.name}: {len(source.urls):,} shards" for source in loader.sources)
    shown: dict[str, Any] = {
        "sources": sources,
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "train": loader.train,
        "output": loader.output,
        "device": "",  # known once the run begins
        "seed": loader.seed,
    }
    for option in all_options():
        if not option.is_secret and option.name not in ("metrics", "record"):
            shown[option.name] = str(getattr(settings, option.name))
    return shown | {
        "streamload": version("streamload"),
        "torch": version("torch"),
        "python": platform.python_version(),
    }
