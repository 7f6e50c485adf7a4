"""The demand of followed runs: what their groups read next, by the plan files in a shared tier."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamload import limits
from streamload.cache.shard import Shard, ShardList, prepared_form
from streamload.cache.shared.objects import Objects, TooLarge
from streamload.daemon.demand import GUESSED_BYTES, PrefetchWindow, SizeOf, in_order
from streamload.daemon.plan_file import (
    PLAN_LIMIT_BYTES,
    PROGRESS_LIMIT_BYTES,
    PlanProgress,
    RunPlan,
    names_of,
    runs_in,
)
from streamload.daemon.recipes import Recipes
from streamload.errors import OptionError, PlanError, SharedTierError
from streamload.order.plan import Pieces, pass_order, pieces
from streamload.origins.protocol import Named
from streamload.urls import UrlList, origin_of

logger = logging.getLogger("streamload")

_READERS = 8
_MOST_IN_SIGHT = 10_000
"""Shards of a group that are looked at in one round."""


class Coming:
    """Next shards of the groups of a run, by its plan. Caches the shards of each group; not thread-safe."""

    def __init__(self, plan: RunPlan):
        self.plan = plan
        self._pieces: dict[tuple[int, int], Pieces] = {}

    def of(self, progress: PlanProgress, count: int) -> list[int]:
        """The next shards of a group, after those that its readers fetch themselves, in order of need.

        Args:
            progress: of the group.
            count: the most shards; each is given once.

        Returns:
            Their positions among the shards of the run.
        """
        depth = count + progress.ahead
        coming_shards: list[tuple[float, int]] = []
        first = 0
        for which, source in enumerate(self.plan.sources):
            coming = self._of_source(which, progress, depth)
            # A source is read by as many lanes as its share of the samples.
            coming_shards += [((k + 1) / source.order.lanes, first + int(s)) for k, s in enumerate(coming)]
            first += source.count
        coming_shards.sort()
        return [shard for _, shard in coming_shards[progress.ahead : depth]]

    def _of_source(self, number: int, progress: PlanProgress, count: int) -> npt.NDArray[np.int64]:
        """The next shards of one source: the rest of its pass, then the next pass."""
        source, group = self.plan.sources[number], progress.group
        group_pieces = self._pieces.get((number, group))
        if group_pieces is None:
            group_pieces = self._pieces[number, group] = pieces(source.order, source.count, group)
        pass_, place = progress.fronts[number]
        epoch = progress.epoch
        remaining = pass_order(source.order, group_pieces.shards, group, epoch, pass_)[place:]
        if len(remaining) >= count:
            return remaining[:count]
        epoch, pass_ = (epoch + 1, 0) if self.plan.one_pass else (epoch, pass_ + 1)
        after = pass_order(source.order, group_pieces.shards, group, epoch, pass_)
        return np.concatenate([remaining, after[~np.isin(after, remaining)]])[:count]


class FollowedDemand:
    """The next shards of the groups of runs whose plan files are in a shared tier.

    Args:
        objects: of the shared tier.
        storage_options: for the origins; they are part of the identity of shards.
        window: how far ahead.
        names: the runs to follow; none: the one with the newest files.
        groups: their groups to follow; none: all.
        given: the user's own list of shards, for plans without URLs.
        recipes: by which shards are prepared; None: none are.
        named: the origins that the user named; others in a plan are logged.
    """

    def __init__(
        self,
        objects: Objects,
        storage_options: dict[str, Any] | None,
        window: PrefetchWindow,
        names: Sequence[str] = (),
        groups: Sequence[int] = (),
        given: ShardList | None = None,
        recipes: Recipes | None = None,
        named: Named | None = None,
    ):
        self._objects = objects
        self._storage_options = storage_options
        self._window = window
        self._names = tuple(names)
        self._groups = frozenset(groups)
        self._given = given
        self._recipes = recipes or Recipes()
        self._named = named
        self._known: dict[str, tuple[Coming, ShardList]] = {}
        self._refused: dict[str, str] = {}
        self._refused_objects: set[tuple[str, bytes]] = set()  # names, and digests of their contents
        self._warned: set[tuple[str, str]] = set()  # runs, and their readers' other recipes
        self._description = "no run yet"

    def describe(self) -> str:
        """The demand in words, for logs and status."""
        return self._description

    def look(self, size_of: SizeOf) -> list[Shard]:
        """The shards in order of need, each once, as of now."""
        published = runs_in(self._objects.names("runs"))
        chosen = self._names or self._latest(published)
        by_run: list[list[Shard]] = []
        describe = []
        for run in chosen:
            plan = self._plan(run) if run in published else None
            if plan is None:
                describe.append(f"run {run}: {self._refused.get(run, 'not published yet')}")
                continue
            coming, shards = plan
            progress = self._progress(coming.plan, published[run])
            tasks = self._coming(coming, progress)
            by_run.append([prepared_form(shards[k], name) if name else shards[k] for k, name in tasks])
            epochs = sorted({group_progress.epoch for group_progress in progress}) or [0]
            as_what = "".join(f", prepared as {name}" for name in sorted({name for _, name in tasks if name}))
            describe.append(f"run {run}, {coming.plan.groups} groups, epoch {epochs[0]}{as_what}")
        self._description = "; ".join(describe) or "no run yet"
        merged: dict[str, Shard] = {}
        for shard in itertools.chain.from_iterable(itertools.zip_longest(*by_run)):
            if shard is not None:
                merged.setdefault(shard.digest, shard)
        return self._window.cut(list(merged.values()), size_of)

    def _latest(self, published: Mapping[str, list[int]]) -> list[str]:
        """The run whose files are newest, by the store's clock."""
        if len(published) < 2:
            return list(published)
        last = {}
        for run, groups in published.items():
            name = f"group-{groups[0]}.json" if groups else "plan.json"
            last[run] = self._objects.modified(f"runs/{run}/{name}") or 0.0
        return [max(last, key=lambda run: (last[run], run))]

    def _plan(self, run: str) -> tuple[Coming, ShardList] | None:
        """A run's plan if it is valid; the error of an invalid one is logged once."""
        if run in self._known:
            return self._known[run]
        try:
            with self._refused_once(f"runs/{run}/plan.json", PLAN_LIMIT_BYTES) as data:
                plan = self._known[run] = self._followed(RunPlan.read(run, data or b""))
        except PlanError as exc:
            if self._refused.get(run) != str(exc):
                logger.warning("%s", exc)
            self._refused[run] = str(exc)
            return None
        except _RefusedBefore:
            return None
        return plan

    @contextlib.contextmanager
    def _refused_once(self, name: str, limit_bytes: int) -> Iterator[bytes | None]:
        """Read an object for a block that may refuse it; bytes that were refused once aren't parsed again.

        Raises:
            PlanError: it is too large.
            _RefusedBefore: the same bytes were refused at an earlier look.
        """
        try:
            data = self._objects.read(name, limit_bytes)
        except TooLarge as exc:
            raise PlanError(str(exc)) from exc
        version = name, hashlib.blake2b(data or b"", digest_size=16).digest()
        if version in self._refused_objects:
            raise _RefusedBefore
        try:
            yield data
        except PlanError:
            self._refused_objects.add(version)
            raise

    def _followed(self, plan: RunPlan) -> tuple[Coming, ShardList]:
        """Check that a plan can be followed here."""
        run = plan.run
        urls = plan.shards if self._given is None else self._given.urls
        if urls is None:
            raise PlanError(
                f"the plan of run {run} doesn't tell the URLs of its shards (commands, paths, or what holds "
                f"secrets): give this daemon the same URLs as the trainer has"
            )
        count = sum(source.count for source in plan.sources)
        if len(urls) != count or names_of(urls, self._storage_options) != plan.names:
            raise PlanError(
                f"the {count:,} shards of run {run} aren't called the same here: give this daemon the "
                f"trainer's storage options (the endpoint is a part of a shard's name) and its URLs"
            )
        try:
            self._recipes.asked(plan.prepare)
        except OptionError as exc:
            raise PlanError(f"the plan of run {run} asks for prepared shards: {exc}") from exc
        if self._named is not None:
            self._warn_of_unnamed(run, urls, self._named)
        return Coming(plan), self._given or ShardList(urls, self._storage_options)

    def _warn_of_unnamed(self, run: str, shards: UrlList, named: Named) -> None:
        """Log the origins that only the plan names: they get no credentials, and may refuse their shards."""
        unnamed = sorted({origin_of(url) for url in shards.kinds()} - named.origins)
        if unnamed:
            logger.warning(
                "run %s reads from %s%s, which only its plan names: no credentials, headers or requests to "
                "addresses that aren't public go there. Where that is meant: --origin %s",
                *(run, ", ".join(unnamed[:3]), ", …" if len(unnamed) > 3 else "", unnamed[0]),
            )

    def _progress(self, plan: RunPlan, groups: Sequence[int]) -> list[PlanProgress]:
        """The progress of the groups; one whose file can't be read is left out of this look."""

        def read(group: int) -> PlanProgress | None:
            try:
                with self._refused_once(f"runs/{plan.run}/group-{group}.json", PROGRESS_LIMIT_BYTES) as data:
                    return None if data is None else PlanProgress.read(plan, group, data)
            except PlanError as exc:
                logger.warning("%s", exc)
                return None
            except _RefusedBefore:
                return None
            except SharedTierError as exc:
                logger.debug("%s", exc)
                return None

        followed_groups = [g for g in groups if g < plan.groups and (not self._groups or g in self._groups)]
        with limits.Threads(min(_READERS, max(1, len(followed_groups))), "streamload-progress") as pool:
            return [progress for progress in pool.map(read, followed_groups) if progress is not None]

    def _coming(self, coming: Coming, progress: Sequence[PlanProgress]) -> list[tuple[int, str]]:
        """The positions of shards in order of need, each with the name of its recipe."""
        return in_order(
            [(place, name) for place in coming.of(group_progress, self._count(group_progress))]
            for group_progress in progress
            for name in (self._recipe_for(coming.plan, group_progress),)
        )

    def _recipe_for(self, plan: RunPlan, progress: PlanProgress) -> str:
        """The full name of the recipe by which a group's shards are prepared; "": they aren't.

        Shards prepared with other versions of libraries than the readers' would never be read.
        """
        recipe = self._recipes.asked(plan.prepare)
        if recipe is None:
            return ""
        theirs = progress.prepared
        if theirs is None or theirs == recipe.name:
            return recipe.name
        is_given = self._recipes.given is not None
        if (plan.run, theirs) not in self._warned:
            self._warned.add((plan.run, theirs))
            logger.warning(
                "run %s looks for %s, and this machine prepares by %s: %s",
                plan.run,
                f"shards prepared by {theirs}" if theirs else "no prepared shards",
                recipe.name,
                "it won't see these" if is_given else "it is brought the shards as they are",
            )
        return recipe.name if is_given else ""

    def _count(self, progress: PlanProgress) -> int:
        """The most shards of a group that are in the window."""
        if self._window.seconds is not None:
            count = self._window.seconds * progress.shards_per_second
        else:
            assert self._window.size_bytes is not None
            count = self._window.size_bytes / (progress.mean_bytes or GUESSED_BYTES)
        return max(1, min(math.ceil(count), _MOST_IN_SIGHT))


class _RefusedBefore(Exception):
    """The same bytes were refused at an earlier look, and logged."""
