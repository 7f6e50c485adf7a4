"""The extensions of streamload: the one module by which a loader knows them, with an entry for each.

What methods of a loader ask of them when they are called is in methods.py.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from streamload.cache.selection import KEEP
from streamload.errors import OptionError
from streamload.extension import Extension, RankPart
from streamload.loader.groups import Batches
from streamload.loader.options import LoaderOptions
from streamload.loader.rank_run import RankRun
from streamload.loader.schedule import RunSchedule
from streamload.metrics.findings import Requests
from streamload.observe.observer import ObservedRun, RunObserver
from streamload.observe.publishing import RankProgress
from streamload.options import Settings
from streamload.options import options as all_options
from streamload.order.events import WEIGHTS

if TYPE_CHECKING:
    from streamload.batches.assembly import BatchAssembly
    from streamload.batching.microbatches import Microbatches, Microbatching
    from streamload.cache.shared.sharing import SharedOptions
    from streamload.mixing.reports import Rows
    from streamload.observe.trace import Trace
    from streamload.worker.messages import WorkerConfig

__all__ = [
    "Microbatches",
    "Microbatching",
    "Rows",
    "RunObserver",
    "Trace",
    "backing_of",
    "by_rank",
    "extensions_of",
    "extensions_of_run",
    "observer_of",
    "reports_of",
]


@functools.cache
def by_rank() -> frozenset[str]:
    """The keys of a state of which each rank has its part; see RankPart.by_rank."""
    from streamload.mixing.batch_size import BatchSizing
    from streamload.mixing.decisions import Decisions

    return frozenset({*Decisions.by_rank, *BatchSizing.by_rank})


def extensions_of(options: LoaderOptions) -> tuple[Extension, ...]:
    """The extensions of a loader: those of its options, which are without any, and the user's own.

    Each is imported here, and so in no process of a loader that doesn't use it.

    Raises:
        OptionError: one of the user's own can't be used.
    """
    images, batches, order = options.images, options.batches, options.order
    mixing, decides = options.mixing, order.decisions is not None or order.objective is not None
    extensions: list[Extension] = [] if options.join is None else [options.join]
    if mixing is not None or decides:
        from streamload.mixing.decisions import Mixing
        from streamload.steering.replay import Replay

        extensions.append(Mixing(0 if mixing is None or isinstance(mixing, Replay) else mixing.every))
    if batches.batch_policy is not None:
        from streamload.mixing.batch_size import BatchSizes

        extensions.append(BatchSizes())
    if options.leave_out_file is not None:
        from streamload.journal.leave_out import LeftOutSamples

        extensions.append(LeftOutSamples(options.leave_out_file))
    if images.decode != "host":
        from streamload.pixels.decoding import decoding_by

        extensions.append(decoding_by(images.decode))
    if batches.sample_weight is not None:
        from streamload.weights import RowWeights
        from streamload.weights.sample import read_sample_weight

        sample_weight = read_sample_weight(batches.sample_weight)
        assert sample_weight is not None
        extensions.append(RowWeights(sample_weight))
    if options.features:
        from streamload.features import StoredFeatures

        extensions.append(StoredFeatures())
    if images.patches is not None:
        from streamload.patches.rank import patched_images

        extensions.append(patched_images(options))
    if images.sizes is not None:
        from streamload.aspects.rank import sized_images

        extensions.append(sized_images(options))
    if options.has_modalities:
        from streamload.batching.modalities import RowsOfModalities

        extensions.append(RowsOfModalities())
    if images.patches is not None or batches.text_padding == "longest":
        from streamload.batching.bounds import padded_rows

        extensions.append(padded_rows(options))
    if batches.microbatch == "auto":
        from streamload.batching.retry import RetriedSteps

        extensions.append(RetriedSteps())
    if batches.bucketing is not None:
        from streamload.batching.buckets import bucketing_of

        extensions.append(bucketing_of(options))
    if batches.cost is not None:
        extensions.append(cost_extension(batches))
    if options.workers.memory is not None:
        from streamload.batching.in_flight import memory_limits

        extensions.append(memory_limits(options))
    if order.journal is not None:
        from streamload.journal.recorder import Journal

        extensions.append(Journal(os.fspath(order.journal)))
    _check_own(batches.extensions)
    return (*extensions, *batches.extensions)


def cost_extension(batches: Batches) -> Extension:
    """The extension that plans steps by what samples cost."""
    if batches.max_tokens is None:
        from streamload.batching.equal_costs import EqualCosts

        return EqualCosts(batches.costs)
    from streamload.batching.packed_cells import PackedCells

    return PackedCells(batches.costs, (batches.max_tokens, batches.max_patches))


def _check_own(extensions: Collection[Extension]) -> None:
    """Refuse what is no extension, and names that aren't of one extension alone."""
    if not extensions:
        return
    from streamload.aspects.rank import SizedImages
    from streamload.batching.bounds import PaddedRows
    from streamload.batching.buckets import Bucketing
    from streamload.batching.equal_costs import EqualCosts
    from streamload.batching.in_flight import MemoryLimits
    from streamload.batching.modalities import RowsOfModalities
    from streamload.batching.retry import RetriedSteps
    from streamload.daemon.publication import PlanPublication
    from streamload.features import StoredFeatures
    from streamload.join import JoinedRows
    from streamload.journal.leave_out import LeftOutSamples
    from streamload.journal.recorder import Journal
    from streamload.mixing.batch_size import BatchSizes
    from streamload.mixing.decisions import Mixing
    from streamload.patches.rank import PatchedImages
    from streamload.pixels.decoding import DeviceDecoding
    from streamload.weights import RowWeights

    built_in = (
        Mixing, BatchSizes, DeviceDecoding, RowWeights, PatchedImages, RowsOfModalities, PaddedRows,
        RetriedSteps, Bucketing, EqualCosts, SizedImages, MemoryLimits, StoredFeatures, JoinedRows,
        PlanPublication, LeftOutSamples, Journal,
    )  # fmt: skip
    names = {KEEP, *(extension.name for extension in built_in)}
    for extension in extensions:
        if not isinstance(extension, Extension):
            raise OptionError(f"extensions has {extension!r:.100}; expected a streamload.extension.Extension")
        if not isinstance(getattr(extension, "name", None), str):
            raise OptionError(
                f"the extension {extension!r:.100} has no name: give its class one, such as "
                f'name = "short_captions"'
            )
        if extension.name in names:
            raise OptionError(
                f"extensions has the name {extension.name!r} twice, or it is one of streamload's own"
            )
        if extension.keep is not None and not callable(extension.keep):
            raise OptionError(
                f"keep of the extension {extension.name!r} is {extension.keep!r:.100}; expected a function"
            )
        names.add(extension.name)


def reports_of(options: LoaderOptions) -> RankPart:
    """The part that takes the training's reports where no policy does."""
    from streamload.mixing.reports import ReportedMeans

    return ReportedMeans([source.name for source in options.sources])


def extensions_of_run(
    options: LoaderOptions, config: WorkerConfig, plain: BatchAssembly
) -> tuple[Extension, ...]:
    """The extensions of a run, by what its workers read.

    Args:
        options: of the loader.
        config: of its workers, with the extensions of the options.
        plain: the recipe of its batches without any extension.

    Raises:
        OptionError: a step of the loader has no room, or rows of it.
    """
    extensions = [extension.in_run(options, config, plain) for extension in config.extensions]
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
    run: RankRun,
    requests: Requests,
) -> RunObserver:
    """The observer of a rank, in this process; what it opens ends with its owner."""
    options, schedule, clock = run.options, run.schedule, run.process.clock
    observed = ObservedRun(
        options.num_workers,
        tuple(source.name for source in options.sources),
        options.images.prepare or "",
        options.settings,
        lambda: _described(options),
        lambda: schedule.topology,
        lambda: _progress(schedule),
        run.parts.metrics,
        lambda: clock.wait_began_ns,
        run.process.waits.by_shard,
        run.process.waits.file_name,
        lambda: run.process.checks.skipped,
    )
    observer = RunObserver(owner, observed, run.process.control, requests)
    if not options.num_workers:  # the worker's waits for bytes are in this process
        run.process.control.while_waiting = observer.tick
    return observer


def _progress(schedule: RunSchedule) -> RankProgress:
    """The progress of a rank."""
    position = schedule.tracker.now()
    passes = [group.sources[0].cursor.pass_ for group in position.groups.values()][:1]
    return RankProgress(position.epoch, passes, schedule.tracker.latest.get(WEIGHTS), schedule.left_out)


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
