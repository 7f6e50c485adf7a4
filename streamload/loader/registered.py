"""The extensions of streamload: the one module by which a loader knows them, with an entry for each."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from streamload.batches.assembly import BatchAssembly
from streamload.batching.bounds import AgreedLengths, WidestRows
from streamload.batching.buckets import Buckets
from streamload.batching.costs import RowCosts, row_costs
from streamload.batching.in_flight import InFlight, in_flight_of
from streamload.batching.microbatches import Microbatches, Microbatching
from streamload.batching.padding import RowLengths
from streamload.errors import OptionError
from streamload.extension import Extension, RankPart
from streamload.features import RowFeatures
from streamload.features.assembly import bound_features
from streamload.features.columns import FeatureAssembly
from streamload.loader.destination import AUTO
from streamload.loader.groups import Batches, Images, Order
from streamload.loader.observer import Observer
from streamload.loader.options import LoaderOptions
from streamload.loader.output import MODEL_INPUTS
from streamload.loader.rank_process import RankProcess
from streamload.loader.rank_run import RankParts
from streamload.loader.schedule import RunSchedule
from streamload.metrics.findings import Requests
from streamload.mixing.batch_size import BatchSizes, BatchSizing
from streamload.mixing.decisions import Decisions, Mixing
from streamload.mixing.reports import ReportedMeans, Rows
from streamload.observe.observer import ObservedRun, RunObserver
from streamload.options import Settings
from streamload.options import options as all_options
from streamload.patches.rank import PatchedImages
from streamload.ranks.distributed import gather
from streamload.steering import Policy
from streamload.steering.replay import Replay
from streamload.weights import RowWeights
from streamload.weights.sample import read_sample_weight
from streamload.worker import WorkerConfig

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
    "in_flight_of_run",
    "microbatching_of",
    "observer_of",
    "reports_of",
    "row_costs_of",
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
    if images.decode != "host":
        from streamload.pixels.rank import decoding_by

        extensions.append(decoding_by(images.decode))
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
    """The microbatches of a loader; its ranks agree on the size of parts.

    Raises:
        OptionError: `microbatch="auto"` on a device whose memory can't be read.
    """

    def least(value: float) -> float:
        """The least of the ranks' values, in training; in evaluation they have other numbers of parts."""
        return min(gather(value, schedule.topology.world_size)) if options.train else value

    batches, patches, decoding_bytes = options.batches, options.images.patches, 0
    if options.images.decode != "host":
        from streamload.pixels.pipeline import MOST_BYTES as decoding_bytes  # noqa: N811
    microbatching = Microbatching(
        batches.microbatch,
        least,
        longest=0 if patches is None else max(patches.seq_lens),
        max_tokens=batches.max_tokens,
        names=MODEL_INPUTS if options.output == "hf" else {},
        decoding_bytes=decoding_bytes,
    )
    if batches.microbatch == "auto" and options.device != AUTO:
        microbatching.prepare(options.settled_device)
    return microbatching


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
    if config.assembly.trim is not None and schedule.agrees_on_widths:

        def describe_run() -> str:
            position = schedule.tracker.now()
            return repr((schedule.order, options.batches, position.sequence, position.events))

        rows = WidestRows(describe_run, schedule.split(), schedule.topology.rank)
        extensions.append(AgreedLengths(options.batches.text_pad_multiple, rows.of_block))
    elif config.assembly.trim is not None:
        extensions.append(RowLengths())
    if schedule.order.blocks is not None:
        extensions.append(Buckets(row_costs_of(options, config.assembly)))
    if options.workers.memory is not None:
        in_flight = in_flight_of_run(options, config.assembly, options.batch_size)
        steps_ahead = max(1, options.workers.prefetch_factor * options.num_workers)
        in_flight.report(_kinds_of_steps(options, schedule.most_rows), steps_ahead)
        extensions.append(in_flight)
    return (*extensions, *_publication(config))


def row_costs_of(options: LoaderOptions, assembly: BatchAssembly) -> RowCosts:
    """Options of the lengths of rows, by which blocks of steps are planned.

    Raises:
        OptionError: a row may be longer than a part of a batch.
    """
    batches, tokenizer = options.batches, assembly.tokenizer if options.goes_by_tokens else None
    return row_costs(tokenizer, batches.text_pad_multiple, options.images.patches, batches.max_tokens)


def in_flight_of_run(options: LoaderOptions, assembly: BatchAssembly, rows: int) -> InFlight:
    """The limits of `Workers(memory=…)`, checked.

    Args:
        options: of the loader, with limits.
        assembly: of its batches.
        rows: of a rank in a step; with Patches(steps=…), each says its own.

    Raises:
        OptionError: a step has no room, or the bytes of a row aren't known before it is made.
    """
    assert options.workers.memory is not None
    in_flight = in_flight_of(options.workers.memory, assembly)
    return replace(in_flight, most_steps=in_flight.check(_kinds_of_steps(options, rows)))


def _kinds_of_steps(options: LoaderOptions, rows: int) -> Sequence[tuple[int, int]]:
    """Patches of each image and rows of a rank, of each kind of steps; the longest of `rows` come first."""
    patches, table = options.images.patches, options.step_table
    if table is not None:
        return list(dict.fromkeys(table.steps))
    seq_lens = [0] if patches is None else sorted(set(patches.seq_lens), reverse=True)
    return [(seq_len, rows) for seq_len in seq_lens]


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
