"""From `Images(prepare=…)` to the recipe of a run, named or chosen, and whether fills prepare (step A)."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from streamload.cache import memory
from streamload.cache.backing import Backing
from streamload.cache.forecast import Measure
from streamload.cache.placement import SharedDecision
from streamload.cache.shard import Shard, ShardList, fingerprint, prepared_form, spread
from streamload.cache.tier import Choice, Placed, Tier, memory_root
from streamload.derived.prepare.choice import Room, choose, exact_recipes, measure
from streamload.derived.prepare.preparation import AUTO, Preparation, growth, images_of
from streamload.errors import StreamloadError
from streamload.metrics import format_bytes
from streamload.options import Settings, file_system
from streamload.topology import Topology

logger = logging.getLogger("streamload")

_SHARDS_LOOKED_AT = 64
_HEAD_BYTES = 4 << 20
_SAMPLES_TIMED = 12
_PAGE_CACHE_SHARE = 0.5
"""Share of the free memory that is counted as page cache for the data: the training needs memory, too."""
_MARGIN = 1.1
"""Factor by which prepared shards may exceed the estimate from a few samples."""
_KEPT_BY_BYTES = "rows of features are found by the bytes of samples, so this run prepares no more"


class RunPreparation(NamedTuple):
    """Preparation of a run's images."""

    preparation: Preparation | None  # None: they aren't prepared
    changes_pixels: bool = True  # the training gets other pixels by it
    is_made: bool = False  # the run's own fills prepare shards

    def of(self, shards: ShardList) -> ShardList:
        """The run's shards, read as prepared where such shards exist."""
        return shards.prepared_by("" if self.preparation is None else self.preparation.name)


UNPREPARED = RunPreparation(None)
LiveShards = Callable[[float], float]
"""Returns how many shards a node has open at once, given the samples of a shard."""


def named_preparation(prepare: str, settings: Settings) -> RunPreparation:
    """The preparation that `prepare=` names; of "auto" none, which is yet to be chosen."""
    if prepare == AUTO:
        return UNPREPARED
    preparation = Preparation.parse(prepare, settings.max_image_pixels)
    return RunPreparation(preparation, changes_pixels=not preparation.is_exact)


def possible_preparations(prepare: str, settings: Settings, transform: Any) -> list[RunPreparation]:
    """Return the preparations in which the cache may have the run's data."""
    if prepare != AUTO:
        return [named_preparation(prepare, settings)]
    return [RunPreparation(recipe) for recipe in exact_recipes(transform, settings.max_image_pixels)]


def decide_preparation(
    options: Any,
    shards: ShardList,
    settings: Settings,
    transform: Any,
    placed: Placed,
    shared: Backing | None,
    topology: Topology,
    live_shards: LiveShards,
) -> RunPreparation:
    """Decide how a run that gives `prepare=` has its images prepared, and whether its fills do it; log that.

    All processes of the node that ask the same get one answer.

    Args:
        options: of the loader, `LoaderOptions`.
        shards: of the run.
        transform: a plan, or a function from Pillow image to value.
        placed: the run's tier; keeps the answer until it is closed.
        shared: the shared cache; None: there is none.
        live_shards: of the run's order.
    """
    prepare, shards = options.images.prepare, shards.prepared_by("")
    named = named_preparation(prepare, settings)
    recipes = [possible.preparation for possible in possible_preparations(prepare, settings, transform)]
    recipes_by_name = {str(recipe): recipe for recipe in recipes if recipe is not None}
    if named.preparation is None and options.images.decode == "device":
        answer = Choice("", "the device decodes them")
    elif named.preparation is None and shared is not None:
        answer = Choice("", "nodes with a shared cache have to agree on a recipe: name one")
    elif named.preparation is not None and options.features:
        answer = Choice("", _KEPT_BY_BYTES)
    else:
        recipe_names = [recipe.name for recipe in recipes_by_name.values()]
        question = [prepare, str(placed.tier.root), fingerprint(shards), *recipe_names]
        agreement = SharedDecision(memory_root(settings), question)
        placed.on_close.append(agreement.close)

        def decide() -> Choice:
            with Measure(placed.tier, shared) as sizes:
                if named.preparation is not None:
                    return _fits(named.preparation, named.of(shards), sizes, topology.nodes, live_shards)
                processes = topology.local_world_size * max(1, options.num_workers)
                return _cheapest([*recipes_by_name.values()], shards, sizes, topology.nodes, processes)

        answer = agreement.join(decide)
    if named.preparation is None:
        logger.info("prepare: auto chose %s: %s", answer.chosen or "images as they are", answer.why)
        return RunPreparation(
            recipes_by_name.get(answer.chosen), changes_pixels=False, is_made=bool(answer.chosen)
        )
    if topology.local_rank == 0:
        _log(named.preparation, named.of(shards), placed.tier, answer)
    return named._replace(is_made=bool(answer.chosen))


def _log(recipe: Preparation, shards: ShardList, tier: Tier, answer: Choice) -> None:
    """Say what a run prepares, and how much of its data is prepared."""
    looked_at = spread(shards)
    count = sum(tier.published(shard.prepared.digest).is_dir() for shard in looked_at if shard.prepared)
    share = f"{100 * count // max(1, len(looked_at))} % of the data is prepared in the cache"
    level = logging.INFO if answer.chosen or count == len(looked_at) else logging.WARNING
    rest = ", and this run prepares the rest" if answer.chosen and count < len(looked_at) else ""
    logger.log(level, "prepare: %s: %s; %s%s", recipe, share, answer.why, rest)


def _fits(
    recipe: Preparation, forms: ShardList, sizes: Measure, nodes: int, live_shards: LiveShards
) -> Choice:
    """The recipe, if the tier has room for all data, prepared, beside the shards that are open at once."""
    tier = sizes.tier
    command = f"streamload warm URLS --prepare {recipe}"
    if file_system(tier.root).is_memory:
        command += " --cache memory --memory-size"
    else:
        place = "A_LARGER_DISK" if tier.budget.is_bound_by_disk else tier.root
        command += f" --cache-dir {place} --cache-size"
    limit_bytes = tier.budget.allowed_bytes
    estimate = _prepared_and_open_bytes(recipe, forms, sizes, nodes, live_shards)
    if estimate is None:
        size = f"{math.ceil(limit_bytes / 1e9)}GB"
        why = "as the size of the data is unknown, this run prepares no more"
        return Choice("", f"{why}. To prepare all, with a limit that is large enough: {command} {size}")
    prepared_bytes, open_bytes = estimate
    whole = f"prepared, all of it takes about {format_bytes(prepared_bytes)}{' on each node' * (nodes > 1)}"
    room = f"{format_bytes(limit_bytes)} of the cache at {tier.root}"
    if prepared_bytes + open_bytes <= limit_bytes:
        return Choice(str(recipe), f"{whole} of the {room}")
    size = f"{math.ceil((prepared_bytes + open_bytes) / 1e8) / 10:g}GB"
    return Choice(
        "",
        f"{whole}, and the shards open at once {format_bytes(open_bytes)}, which is more than the {room}: "
        f"this run prepares no more, and each image that isn't prepared whenever it is used. "
        f"To prepare all: {command} {size}",
    )


def _prepared_and_open_bytes(
    recipe: Preparation, forms: ShardList, sizes: Measure, nodes: int, live_shards: LiveShards
) -> tuple[int, int] | None:
    """About what a node's data takes prepared, and what is open at once as it is; None: that isn't known."""
    prepared_bytes = [sizes.prepared_bytes(shard) for shard in _some(forms)]
    if all(prepared_bytes):
        return int(sum(prepared_bytes) / len(prepared_bytes) * len(forms) / nodes), 0
    shards = forms.prepared_by("")
    data_bytes, head = _data_bytes(shards, sizes, nodes), _head(shards, sizes)
    by_samples = growth(head, recipe, _SAMPLES_TIMED)
    if data_bytes is None or by_samples is None:
        return None
    shard_bytes = data_bytes * nodes / len(shards)
    live = live_shards(shard_bytes / by_samples.sample_bytes)
    return int(data_bytes * by_samples.factor * _MARGIN), int(min(data_bytes, live * shard_bytes))


def _cheapest(
    recipes: Sequence[Preparation], shards: ShardList, sizes: Measure, nodes: int, processes: int
) -> Choice:
    """The recipe that the tier mostly has already; else the cheapest."""
    tier, looked_at = sizes.tier, spread(shards)[:_SHARDS_LOOKED_AT]
    for recipe in recipes:
        forms = [prepared_form(shard, recipe.name) for shard in looked_at]
        whole = sum(tier.has_whole(form) for form in forms)
        if 2 * whole > len(forms):
            return Choice(str(recipe), f"{whole} of {len(forms)} shards looked for are in the cache so")
    try:
        costs = measure(images_of(_head(shards, sizes))[:_SAMPLES_TIMED], recipes, tier.root)
    except OSError as exc:
        return Choice("", f"{tier.root} can't be written, to measure reading: {exc}")
    if costs is None:
        return Choice("", "no image of the data could be looked at")
    room = Room(
        data_bytes=_data_bytes(shards, sizes, nodes),
        cache_bytes=tier.budget.allowed_bytes,
        memory_bytes=int(memory.available().free_bytes * _PAGE_CACHE_SHARE),
        processes=min(processes, os.cpu_count() or 1),
    )
    return choose(costs, room)


def _data_bytes(shards: ShardList, sizes: Measure, nodes: int) -> int | None:
    """About what the data takes as it is, by some shards; None if the size of one isn't known."""
    sizes_of_some = [
        _local_bytes(shard) if shard.local else sizes.shard_bytes(shard) for shard in _some(shards)
    ]
    return sum(sizes_of_some) * len(shards) // (len(sizes_of_some) * nodes) if all(sizes_of_some) else None


def _some(shards: ShardList) -> list[Shard]:
    """The first, the middle and the last shard, which stand for all."""
    return [shards[place] for place in sorted({0, len(shards) // 2, len(shards) - 1})]


def _local_bytes(shard: Shard) -> int:
    """The size of a local file; 0: it isn't one."""
    if shard.local is not None and shard.local.is_file():
        with contextlib.suppress(OSError):
            return shard.local.stat().st_size
    return 0


def _head(shards: ShardList, sizes: Measure) -> bytes:
    """The first bytes of a shard with images: of one that is here, else of the first; empty: unknown."""
    for shard in spread(shards)[:_SHARDS_LOOKED_AT]:
        local = shard.in_place
        is_local = local is not None and local.is_file()  # a pipe in the file system isn't read
        path = (local if is_local else None) or sizes.tier.published(shard.digest) / "data"
        with contextlib.suppress(OSError, StreamloadError), path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if images_of(head):
                return head
    with contextlib.suppress(StreamloadError):
        head = sizes.head(shards[0], _SAMPLES_TIMED)
        images_of(head)
        return head
    return b""
