"""The demand of followed runs: what their groups read next, by the plan files in a shared tier."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.cache.shard import Shard, ShardList, prepared_form
from streamload.cache.shared.objects import Objects, TooLarge
from streamload.daemon.demand import GUESSED_BYTES, PrefetchWindow, SizeOf
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
from streamload.order.plan import pass_order, pieces, shard_axis
from streamload.origins.protocol import Named
from streamload.urls import UrlList, origin_of

logger = logging.getLogger("streamload")

_PROGRESS_READS = 2
"""Files of progress of a run that are read in a look."""
_FRESH_SECONDS = 30.0
"""A group's own progress counts if it was written at most this long before the latest of any group."""
_KEPT_SECONDS, _TIDIED = 7 * 86400.0, 64
"""Files of a run are deleted, a few in each look, once they are this much older than the latest run's."""
_MOST_IN_SIGHT = 10_000
"""Shards of a group that are looked at in one round."""


class Coming:
    """Next shards of the groups of a run, by its plan. Caches the shards of each group; not thread-safe."""

    def __init__(self, plan: RunPlan):
        self.plan = plan
        self._axes: dict[int, npt.NDArray[np.int64]] = {}
        self._pieces: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self._passes: dict[tuple[int, int], tuple[tuple[int, int], npt.NDArray[np.int64]]] = {}

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

    def estimated(self, group: int, front: PlanProgress) -> PlanProgress:
        """The progress of a group as that of another group shows it: each step takes equally much of all."""
        fronts = []
        for number, (pass_, place) in enumerate(front.fronts):
            size, of_size = (self._shards_of(number, each).size for each in (group, front.group))
            fronts.append((pass_, min(place * size // max(1, of_size), size)))
        return replace(front, group=group, fronts=tuple(fronts))

    def _shards_of(self, number: int, group: int) -> npt.NDArray[np.int64]:
        """The shards of a group of one source."""
        shards = self._pieces.get((number, group))
        if shards is None:
            source = self.plan.sources[number]
            if number not in self._axes:
                self._axes[number] = shard_axis(source.order, source.count)
            shards = pieces(source.order, source.count, group, self._axes[number]).shards
            self._pieces[number, group] = shards
        return shards

    def _of_source(self, number: int, progress: PlanProgress, count: int) -> npt.NDArray[np.int64]:
        """The next shards of one source: the rest of its pass, then the next pass."""
        source, group = self.plan.sources[number], progress.group
        shards = self._shards_of(number, group)
        pass_, place = progress.fronts[number]
        epoch = progress.epoch
        in_pass, remaining = self._passes.get((number, group), ((-1, -1), shards))
        if in_pass != (epoch, pass_):
            remaining = pass_order(source.order, shards, group, epoch, pass_)
            self._passes[number, group] = (epoch, pass_), remaining
        remaining = remaining[place:]
        if len(remaining) >= count:
            return remaining[:count]
        epoch, pass_ = (epoch + 1, 0) if self.plan.one_pass else (epoch, pass_ + 1)
        after = pass_order(source.order, shards, group, epoch, pass_)
        return np.concatenate([remaining, after[~np.isin(after, remaining)]])[:count]


class _Followed(NamedTuple):
    """A run that is followed: its plan, its shards, and what was read of its groups."""

    coming: Coming
    shards: ShardList
    progress: dict[int, PlanProgress]
    """The latest progress that was read, by group."""
    read: dict[str, tuple[int, float | None]]
    """The look at which each file of progress was read, and the file's time then."""


class FollowedDemand:
    """The next shards of the groups of runs whose plan files are in a shared tier.

    Args:
        objects: of the shared tier.
        storage_options: for the origins; they are part of the identity of shards.
        window: how far ahead.
        names: the runs to follow; none: the one with the newest files.
        groups: their groups to follow, by number; none: all.
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
        groups: Sequence[range] = (),
        given: ShardList | None = None,
        recipes: Recipes | None = None,
        named: Named | None = None,
    ):
        self._objects = objects
        self._storage_options = storage_options
        self._window = window
        self._names = tuple(names)
        self._groups = tuple(groups) or (range(sys.maxsize),)
        self._given = given
        self._recipes = recipes or Recipes()
        self._named = named
        self._known: dict[str, _Followed] = {}
        self._looks = 0
        self._latest_run = ""
        self._may_delete = True
        self._refused: dict[str, str] = {}
        self._refused_objects: set[tuple[str, bytes]] = set()  # names, and digests of their contents
        self._warned: set[tuple[str, str]] = set()  # runs, and their readers' other recipes
        self._description = "no run yet"

    def describe(self) -> str:
        """The demand in words, for logs and status."""
        return self._description

    def look(self, size_of: SizeOf) -> list[Shard]:
        """The shards in order of need, each once, as of now.

        Asks for a list of files, and the progress of some groups; that of the others is estimated from it.
        """
        self._looks += 1
        times = self._objects.times("runs")
        published = runs_in(times)
        chosen = [*self._names] or self._latest(published, times)
        by_run: list[Iterator[Shard]] = []
        describe: list[str] = []
        for run in chosen:
            followed = self._plan(run) if run in published else None
            if followed is None:
                describe.append(f"run {run}: {self._refused.get(run, 'not published yet')}")
                continue
            count = followed.coming.plan.groups
            groups = sorted(
                {
                    group
                    for group in published[run]
                    if group < count and any(group in each for each in self._groups)
                }
            )
            self._read_progress(followed, groups, times)
            epochs = [followed.progress[group].epoch for group in groups if group in followed.progress]
            describe.append(f"run {run}, {count} groups, epoch {min(epochs, default=0)}")
            by_run.append(self._coming(followed, groups))
        tasks = self._window.cut(_once_each(_in_turn(by_run)), size_of)
        as_what = "".join(f", prepared as {name}" for name in sorted({task.recipe for task in tasks} - {""}))
        self._description = "; ".join(describe) + as_what or "no run yet"
        return tasks

    def _latest(self, published: Mapping[str, list[int]], times: Mapping[str, float | None]) -> list[str]:
        """The run whose files are newest, by the store's clock; a choice among several is logged.

        Files of runs that are much older are deleted: a run that goes on publishes itself again.
        """
        written = dict.fromkeys(published, 0.0)
        for name, modified in times.items():
            run = name.split("/")[1]
            if run in written:
                written[run] = max(written[run], modified or 0.0)
        latest = max(written, key=lambda run: (written[run], run), default="")
        if latest != self._latest_run and len(published) > 1:
            logger.warning(
                "%d runs are published, and the one whose files are newest is followed: %s. Where another is "
                "meant, or several are: --run",
                *(len(published), latest),
            )
        self._latest_run = latest
        for run, modified in written.items():
            if self._may_delete and modified < written[latest] - _KEPT_SECONDS:
                self._delete(run, published[run])
        return [latest] if latest else []

    def _delete(self, run: str, groups: Sequence[int]) -> None:
        """Delete files of a run, the plan last, by which the others are found."""
        try:
            for name in [*(f"group-{group}" for group in groups), "plan"][:_TIDIED]:
                self._objects.delete(f"runs/{run}/{name}.json")
        except SharedTierError as exc:
            logger.debug("files of an old run can't be deleted: %s", exc)
            self._may_delete = False

    def _plan(self, run: str) -> _Followed | None:
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

    def _followed(self, plan: RunPlan) -> _Followed:
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
        return _Followed(Coming(plan), self._given or ShardList(urls, self._storage_options), {}, {})

    def _warn_of_unnamed(self, run: str, shards: UrlList, named: Named) -> None:
        """Log the origins that only the plan names: they get no credentials, and may refuse their shards."""
        unnamed = sorted({origin_of(url) for url in shards.kinds()} - named.origins)
        if unnamed:
            logger.warning(
                "run %s reads from %s%s, which only its plan names: no credentials, headers or requests to "
                "addresses that aren't public go there. Where that is meant: --origin %s",
                *(run, ", ".join(unnamed[:3]), ", …" if len(unnamed) > 3 else "", unnamed[0]),
            )

    def _read_progress(
        self, run: _Followed, groups: Sequence[int], times: Mapping[str, float | None]
    ) -> None:
        """Read the progress of some groups whose files are new, those that were read longest ago first."""
        plan, read = run.coming.plan, run.read
        names = {f"runs/{plan.run}/group-{group}.json": group for group in groups}
        new = [name for name in names if times[name] is None or read.get(name, (0, None))[1] != times[name]]
        new.sort(key=lambda name: read.get(name, (0, None))[0])
        for name in new[:_PROGRESS_READS]:
            read[name] = self._looks, times[name]
            try:
                with self._refused_once(name, PROGRESS_LIMIT_BYTES) as data:
                    if data is not None:
                        run.progress[names[name]] = PlanProgress.read(plan, names[name], data)
            except PlanError as exc:
                logger.warning("%s", exc)
            except _RefusedBefore:
                pass
            except SharedTierError as exc:
                logger.debug("%s", exc)

    def _coming(self, run: _Followed, groups: Sequence[int]) -> Iterator[Shard]:
        """The shards that groups read next: the next of each, then those after; made as they are asked for.

        The progress of a group that hasn't been read lately is estimated by the group that was written last.
        """
        coming = run.coming
        written = {
            group: run.read[f"runs/{coming.plan.run}/group-{group}.json"][1] or math.inf
            for group in groups
            if group in run.progress
        }
        if not written:
            return
        front = max(written, key=lambda group: written[group])

        def of_group(group: int) -> Iterator[Shard]:
            progress = run.progress[front]
            if written.get(group, -math.inf) >= written[front] - _FRESH_SECONDS:
                progress = run.progress[group]
            else:
                progress = coming.estimated(group, progress)
            name, count = self._recipe_for(coming.plan, progress), self._count(progress)
            done, depth = 0, 1
            while done < depth:
                for place in coming.of(progress, depth)[done:]:
                    yield prepared_form(run.shards[place], name) if name else run.shards[place]
                done, depth = depth, min(2 * depth, count)

        yield from _in_turn([of_group(group) for group in groups])

    def _recipe_for(self, plan: RunPlan, progress: PlanProgress) -> str:
        """The full name of the recipe by which a group's shards are prepared; "": they aren't.

        Shards prepared with other versions of libraries than the readers' would never be read.
        """
        recipe = self._recipes.asked(plan.prepare)
        if recipe is None:
            return ""
        theirs = progress.prepared
        if theirs == recipe.name:
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


def _in_turn(sequences: Iterable[Iterator[Shard]]) -> Iterator[Shard]:
    """Yield the first shard of each sequence, then the second of each, as long as one has any."""
    left = list(sequences)
    while left:
        heads = ((sequence, next(sequence, None)) for sequence in left)
        going_on = []
        for sequence, shard in heads:
            if shard is not None:
                going_on.append(sequence)
                yield shard
        left = going_on


def _once_each(shards: Iterable[Shard]) -> Iterator[Shard]:
    """Yield shards without those that came before."""
    digests: set[str] = set()
    for shard in shards:
        if shard.digest not in digests:
            digests.add(shard.digest)
            yield shard


class _RefusedBefore(Exception):
    """The same bytes were refused at an earlier look, and logged."""
