"""From `Images(prepare=…)` to the recipe of a run: named, or chosen for this machine (step A)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from streamload.cache import memory
from streamload.cache.forecast import Measure
from streamload.cache.placement import Agreement, Answer, Placed, memory_root
from streamload.cache.shard import Shard, ShardList, fingerprint, prepared_form, spread
from streamload.cache.tier import Tier
from streamload.derived.choice import Room, choose, exact_recipes, measure
from streamload.derived.preparation import AUTO, Preparation
from streamload.derived.prepared import image_of
from streamload.errors import StreamloadError
from streamload.loader.options import LoaderOptions
from streamload.options import Settings
from streamload.shards.samples import ShardScanner
from streamload.topology import Topology

logger = logging.getLogger("streamload")

_SHARDS_LOOKED_AT = 64
_HEAD_BYTES = 4 << 20
_IMAGES_TIMED = 12
_PAGE_CACHE_SHARE = 0.5
"""How much of the free memory is counted as page cache for the data: the training needs memory, too."""


class RunPreparation(NamedTuple):
    """How a run's images are prepared.

    Attributes:
        preparation: None: they aren't.
        changes_pixels: whether the training gets other pixels by it.
        is_made: whether the run's own fills prepare shards.
    """

    preparation: Preparation | None
    changes_pixels: bool = True
    is_made: bool = False

    def of(self, shards: ShardList) -> ShardList:
        """The run's shards, read as prepared where such shards exist."""
        name = "" if self.preparation is None else self.preparation.name
        return ShardList(shards.urls, shards.storage_options, name)


def named_preparation(options: LoaderOptions, settings: Settings) -> RunPreparation:
    """The preparation that the options name; of "auto" none, which is yet to be chosen."""
    if options.images.prepare in (None, AUTO):
        return RunPreparation(None)
    preparation = Preparation.parse(options.images.prepare or "", settings.max_image_pixels)
    return RunPreparation(preparation, changes_pixels=not preparation.is_exact)


def possible_preparations(options: LoaderOptions, settings: Settings, transform: Any) -> list[RunPreparation]:
    """Those in which the cache may have the run's data."""
    if options.images.prepare != AUTO:
        return [named_preparation(options, settings)]
    return [RunPreparation(recipe) for recipe in exact_recipes(transform, settings.max_image_pixels)]


def choose_preparation(
    settings: Settings, transform: Any, shards: ShardList, placed: Placed, topology: Topology, workers: int
) -> RunPreparation:
    """Choose the recipe of `prepare="auto"`; all processes of the node that ask the same get one answer.

    Args:
        settings: the run's.
        transform: a plan, or a function from Pillow image to value.
        shards: all that the run reads, as they are.
        placed: the run's tier; keeps the answer until it is closed.
        topology: of this rank.
        workers: of each rank.
    """
    recipes = {str(recipe): recipe for recipe in exact_recipes(transform, settings.max_image_pixels)}
    if settings.shared_cache is not None:
        answer = Answer("", "nodes with a shared cache have to agree on a recipe: name one")
    else:
        asked = [AUTO, str(placed.tier.root), fingerprint(shards), *(each.name for each in recipes.values())]
        agreement = Agreement(memory_root(settings), asked)
        placed.agreements.append(agreement)
        processes = min(topology.local_world_size * max(1, workers), os.cpu_count() or 1)
        answer = agreement.join(
            lambda: _decide([*recipes.values()], shards, placed.tier, topology.nodes, processes)
        )
    logger.info("prepare: auto chose %s: %s", answer.chosen or "images as they are", answer.why)
    return RunPreparation(recipes.get(answer.chosen), changes_pixels=False, is_made=bool(answer.chosen))


def _decide(
    recipes: Sequence[Preparation], shards: ShardList, tier: Tier, nodes: int, processes: int
) -> Answer:
    """What the tier mostly has already; else what costs least."""
    looked_at = spread(shards)[:_SHARDS_LOOKED_AT]
    for recipe in recipes:
        forms = [prepared_form(shard, recipe.name) for shard in looked_at]
        found = sum(tier.has_whole(form) for form in forms)
        if 2 * found > len(forms):
            return Answer(str(recipe), f"{found} of {len(forms)} shards looked for are in the cache so")
    try:
        costs = measure(_images_at_hand(shards, tier), recipes, tier.root)
    except OSError as exc:
        return Answer("", f"{tier.root} can't be written, to measure reading: {exc}")
    room = Room(
        data_bytes=_data_bytes(shards, tier, nodes),
        cache_bytes=tier.budget.allowed_bytes,
        memory_bytes=int(memory.available().free_bytes * _PAGE_CACHE_SHARE),
        processes=processes,
    )
    return choose(costs, room)


def _data_bytes(shards: ShardList, tier: Tier, nodes: int) -> int | None:
    """About what the data takes as it is, by its first, middle and last shard; None if one isn't known."""
    some = [shards[place] for place in sorted({0, len(shards) // 2, len(shards) - 1})]
    with Measure(tier, None) as sizes:
        found = [_local_bytes(shard) if shard.local else sizes.shard_bytes(shard) for shard in some]
    return sum(found) * len(shards) // (len(found) * nodes) if all(found) else None


def _local_bytes(shard: Shard) -> int:
    """The size of a local file; 0: it isn't one."""
    if shard.local is not None and shard.local.is_file():
        with contextlib.suppress(OSError):
            return shard.local.stat().st_size
    return 0


def _images_at_hand(shards: ShardList, tier: Tier) -> list[bytes]:
    """Some images of a shard that can be read without its origin; empty if there is none."""
    for shard in spread(shards)[:_SHARDS_LOOKED_AT]:
        is_local = shard.local is not None and shard.local.is_file()  # a pipe in the file system isn't read
        path = (shard.local if is_local else None) or tier.published(shard.digest) / "data"
        with contextlib.suppress(OSError, StreamloadError), path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            members = map(image_of, ShardScanner(checksums=False).feed(head))
            images = [head[start : start + size] for _, start, size in filter(None, members)]
            if images:
                return images[:_IMAGES_TIMED]
    return []
