"""From options to the WorkerConfig that the processes of a rank share, and to the node's tier (step A)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from streamload.batches.assembly import BatchAssembly
from streamload.batches.images import ImageAssembly, ImageMaker, Preprocess, Resizing, by_workers
from streamload.batches.in_progress import Choose
from streamload.batches.tokenize import adapt_tokenizer
from streamload.cache.selection import KeySpec, Selection
from streamload.cache.shard import ShardList
from streamload.cache.tier import Placed, Tier, placed_on_disk
from streamload.loader.options import LoaderOptions
from streamload.loader.registered import backing_of, extensions_of_run
from streamload.loader.schedule import RunSchedule
from streamload.options import Settings
from streamload.order.plan import OrderOptions, pieces
from streamload.order.steps import Split
from streamload.origins.access import warn_of_shared_headers
from streamload.origins.origin import OriginOptions, warn_of_compressed
from streamload.prefetch.fallback import remove_all_unused
from streamload.ranks.distributed import first_value
from streamload.shards.columns import TOKENS
from streamload.shards.samples import JOINED
from streamload.topology import run_name
from streamload.transforms import kernel
from streamload.transforms.plan import ImagePlan, clip_plan
from streamload.worker.messages import AheadConfig, SourceOrder, TierConfig, WorkerConfig

if TYPE_CHECKING:
    from streamload.cache.forecast import Measure
    from streamload.cache.shared.sharing import SharedOptions
    from streamload.derived.prepare.decision import RunPreparation

logger = logging.getLogger("streamload")

_MIN_FILLS = 4
_REPLACEMENTS = 64


def worker_config_for(options: LoaderOptions, schedule: RunSchedule) -> tuple[WorkerConfig, Placed]:
    """The configuration of a rank's workers; and the node's tier, open, which the caller has to close.

    Args:
        options: the loader's.
        schedule: of the run; at its start, this fits lanes and windows to the cache.

    Raises:
        CacheError: the cache directory can't be used.
    """
    settings, transform = options.settings(), transform_of(options)
    shards, prepared = listed(options, settings), _named_preparation(options, settings)
    if prepared is not None:
        shards = prepared.of(shards)
    warn_of_shared_headers(options.urls, options.storage_options)
    topology = schedule.topology
    if topology.rank == 0:
        warn_of_compressed(options.urls)
    if settings.cache == "disk":
        placed = placed_on_disk(settings, settings.sources["cache"])
    else:
        from streamload.cache.placement import place_tier

        placed = place_tier(settings, shards, topology.nodes)
    try:
        if shards.copied:
            from streamload.cache.copying import settled

            shards = settled(settings, shards, placed, topology.nodes, logs=topology.local_rank == 0)
        shared = backing_of(options, settings)
        if prepared is not None:
            from streamload.derived.prepare.decision import decide_preparation

            live_shards = functools.partial(schedule.order.live_shards, topology.nodes)
            prepared = decide_preparation(
                options, shards, settings, by_workers(transform), placed, shared, topology, live_shards
            )
            shards = prepared.of(shards)
        recipes = _assembly(options, transform, prepared, settings.max_image_pixels, schedule.split())
        config = _worker_config(options, schedule, settings, shards, _Places(placed, shared), recipes)
        if prepared is not None and prepared.is_made:
            from streamload.prefetch.idle import idle_share

            processes = topology.local_world_size * max(1, options.num_workers)
            config = replace(config, ahead=config.ahead._replace(prepare_share=idle_share(processes)))
        return config, placed
    except BaseException:
        placed.close()
        raise


def _named_preparation(options: LoaderOptions, settings: Settings) -> RunPreparation | None:
    """The preparation that prepare= names, of "auto" one that is yet to be chosen; None: there is none."""
    if options.images.prepare is None:
        return None
    from streamload.derived.prepare.decision import named_preparation

    return named_preparation(options.images.prepare, settings)


def listed(options: LoaderOptions, settings: Settings) -> ShardList:
    """The shards of a run, with the folders that may be copied."""
    shards = ShardList(options.urls, options.storage_options)
    if not any(shards.are_local()):
        return shards
    from streamload.cache.copying import folders_to_copy

    return shards.copied_below(folders_to_copy(options.urls, settings.copy))


class BatchRecipes(NamedTuple):
    """Recipes of batches: that of a loader's workers, and the same without any extension."""

    assembly: BatchAssembly
    plain: BatchAssembly


class _Places(NamedTuple):
    """Places that a run's shards are read from, beside their origins."""

    placed: Placed
    """The node's tier."""
    shared: SharedOptions | None
    """The shared cache; None: there is none."""


def assembly_of(options: LoaderOptions) -> BatchRecipes:
    """Recipes of a loader's workers for batches.

    Not for `prepare="auto"`, which depends on the data.
    """
    settings = options.settings()
    prepared = _named_preparation(options, settings)
    return _assembly(options, transform_of(options), prepared, settings.max_image_pixels)


def check_room(options: LoaderOptions, rows: int) -> None:
    """Refuse another size of a rank's batch, if an extension does.

    Args:
        options: the loader's.
        rows: of a rank in a step.

    Raises:
        OptionError: a step is larger than a limit.
    """
    for extension in options.extensions:
        extension.refuse_rows(rows, options, lambda: assembly_of(options).assembly)


def _worker_config(
    options: LoaderOptions,
    schedule: RunSchedule,
    settings: Settings,
    shards: ShardList,
    places: _Places,
    recipes: BatchRecipes,
) -> WorkerConfig:
    placed, shared = places
    topology, tier = schedule.topology, placed.tier
    remove_all_unused()
    schedule.fit(shards, tier.limit_bytes, lambda: _measure(tier, shared))
    orders, split = schedule.source_orders(), schedule.split()
    lanes, window = (sum(order.lanes for order in orders), sum(order.window for order in orders))
    rank, first_group = (topology.rank, 0) if options.train else (0, topology.rank)
    processes = topology.local_world_size * max(1, options.num_workers)
    if logger.isEnabledFor(logging.INFO):
        from streamload.cache.forecast import forecast

        logger.info("cache %s: %s", tier.root, forecast(tier, shards, lanes, window, topology.nodes))
    groups, reads = orders[0].groups, options.urls.fingerprint()
    sources = _sources(options, orders, [first_group + group for group in split.groups_of(rank)])
    run = run_name(topology, reads)
    if topology.world_size > 1:  # of Lightning's launcher the first rank is the others' parent: another name
        run = first_value(f"run {topology.node} {reads}", run, topology.world_size)
    if shared is not None and shared.write_back and shared.wait_seconds > 0:
        borders = [shards[place] for place in _borders(sources)]
        attempt = schedule.agree_on_attempt()
        shared = shared.in_run(attempt, len(shards), borders, groups, topology, options.num_workers)
    config = WorkerConfig(
        shards=shards,
        origin=OriginOptions(outage_seconds=settings.origin_wait, mounts=shards.copied),
        tier=TierConfig(tier.root, tier.limit_bytes, placed.free_disk, settings.revalidate),
        shared=shared,
        run=run,
        ahead=AheadConfig(
            -(-max(lanes, _MIN_FILLS) // processes),
            settings.ahead,
            by_range=options.is_past and recipes.assembly.preparation is None,
        ),
        sources=sources,
        steps=schedule.step_options,
        rank=rank,
        first_group=first_group,
        one_pass=not options.epochs_continue and (groups == 1 or not options.train),
        train=options.train,
        skip=options.shards.on_error == "skip",
        replacements=None if options.shards.max_bad_samples is None else _REPLACEMENTS,
        selection=selection_of(options),
        assembly=recipes.assembly,
        with_keys=options.batches.with_keys or options.batches.microbatch is not None,
        draws=schedule.draws,
        extensions=options.extensions,
    )
    return replace(config, extensions=extensions_of_run(options, config, recipes.plain))


def _measure(tier: Tier, shared: SharedOptions | None) -> Measure:
    """Sizes of shards and samples, where a tier may be too small."""
    from streamload.cache.forecast import Measure

    return Measure(tier, shared)


def _sources(
    options: LoaderOptions, orders: Sequence[OrderOptions], groups: Sequence[int]
) -> tuple[SourceOrder, ...]:
    sources, first = [], 0
    for source, order in zip(options.sources, orders, strict=True):
        count = len(source.urls)
        by_group = {group: pieces(order, count, group) for group in groups}
        sources.append(SourceOrder(source.name, first, count, order, by_group))
        first += count
    return tuple(sources)


def _borders(sources: Sequence[SourceOrder]) -> list[int]:
    """The positions of the shards that a rank's groups share with others: at most two of each source."""
    return [
        source.first + shard
        for source in sources
        for group_pieces in source.pieces.values()
        for shard in group_pieces.parts
    ]


def selection_of(options: LoaderOptions) -> Selection:
    """The samples that a loader uses, by their index entries."""
    reads_all = options.workers.map_sample is not None
    several = None if options.captions is None else options.shards.text_key
    keys = tuple(
        replace(
            spec := KeySpec.parse(key),
            is_optional=reads_all or JOINED in spec.extensions,
            falls_back=key == several,
        )
        for key in options.keys
    )
    columns = dict(options.columns)
    if any(TOKENS in extension.facts for extension in options.extensions):
        from streamload.facts.recipes import token_count

        columns[TOKENS] = token_count(
            options.shards.text_key, options.tokenizer, options.shards.text_key_probs, options.join
        )
    read_too = () if options.join is None else options.join.reads
    selection = Selection((*keys, *read_too), options.keeps, reads_all, columns, options.repeat)
    if columns:
        from streamload.facts.shard_facts import ShardFacts

        selection = replace(selection, open_companion=ShardFacts)
    if not options.has_modalities:
        return selection
    keys_of = {"image-text": keys, "image": keys[:1], "text": keys[1:]}
    by_source = [replace(selection, keys=keys_of[source.modality]) for source in options.sources]
    return replace(selection, by_source=tuple(zip(options.first_shards, by_source, strict=True)))


def _assembly(
    options: LoaderOptions,
    transform: ImagePlan | ImageMaker | Preprocess | None,
    prepared: RunPreparation | None,
    most_pixels: int,
    split: Split | None = None,
) -> BatchRecipes:
    is_mapped = options.workers.map_sample is not None
    device = options.settled_device
    on_device = device is not None and device.type != "cpu" and not is_mapped
    preparation = None if prepared is None else prepared.preparation
    if preparation is not None and options.images.prepare != "auto":
        size, plan = preparation.size, by_workers(transform)
        if isinstance(plan, ImagePlan) and size is not None and size < max(plan.size):
            logger.warning(
                "prepare=%r makes images smaller than the %d×%d pixels that preprocess= resizes them to",
                *(options.images.prepare, *plan.size),
            )
    resizing = None
    if prepared is not None and preparation is not None and prepared.changes_pixels:
        resizing = Resizing(preparation.name, preparation.pixels)
    images = None
    if transform is not None:
        images = ImageAssembly(
            transform,
            as_bytes=on_device or options.images.dtype == "uint8",
            resizing=resizing,
            most_pixels=most_pixels,
            as_model_inputs=options.output == "hf",
        )
    shards, batches = options.shards, options.batches
    plain = assembly = BatchAssembly(
        image=KeySpec(()).choose if shards.image_key is None else KeySpec.parse(shards.image_key).choose,
        images=images,
        text=_choose(shards.text_key),
        captions=options.captions,
        tokenizer=adapt_tokenizer(options.tokenizer, batches.text_padding == "longest", batches.text_columns),
        blank_captions=shards.blank_captions,
        label=_choose(shards.label_key),
        label_dtype=torch.int64 if shards.label_type == "int" else torch.float32,
        map_sample=options.workers.map_sample,
        collate=options.workers.collate,
        as_model_inputs=options.output == "hf",
        preparation=None if images is None else preparation,
    )
    for extension in options.extensions:
        assembly = extension.assembly(assembly, options, split)
    return BatchRecipes(assembly, plain)


@functools.cache
def _warn_of_missing_kernel() -> None:
    """Warn, once in a process, of an installation without the kernel."""
    if lost := kernel.lost():
        logger.warning("%s", lost)


def _choose(key: str | None) -> Choose | None:
    return None if key is None else KeySpec.parse(key).choose


def transform_of(options: LoaderOptions) -> ImagePlan | ImageMaker | Preprocess | None:
    """The plan of preprocess=, or the function itself if it isn't compiled; None: images stay bytes."""
    is_used = options.workers.map_sample is None or options.preprocess is not None
    if is_used and None in (kernel.resize_into, kernel.jpeg_size):
        _warn_of_missing_kernel()
    plan: ImagePlan | ImageMaker | Preprocess | None
    if any(extension.takes_preprocess for extension in options.extensions):
        plan = None
    elif options.preprocess is not None:
        from streamload.transforms.compile import plan_or_given

        plan = plan_or_given(options.preprocess, options.images.compile)
    else:
        plan = None if options.workers.map_sample is not None else clip_plan(options.train)
    for extension in options.extensions:
        plan = extension.image_maker(options, plan)
    return plan
