"""The demand of a daemon: the shards of a list, or those ahead of the groups of followed runs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from streamload.cache import demand
from streamload.cache.shard import Shard, ShardList, prepared_form
from streamload.cache.shared.objects import Objects, TooLarge
from streamload.daemon.plan_file import (
    PLAN_LIMIT_BYTES,
    PROGRESS_LIMIT_BYTES,
    Coming,
    Progress,
    RunPlan,
    in_order,
    names_of,
    runs_in,
)
from streamload.derived.recipes import Recipes
from streamload.errors import OptionError, PlanError, SharedTierError
from streamload.options import parse_size
from streamload.origins.access import Named
from streamload.urls import UrlList, origin_of

logger = logging.getLogger("streamload")

DEFAULT_WINDOW = "100GB"
GUESSED_BYTES = 256_000_000
"""What a shard is taken to have before any has been seen."""
_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|sec|m|min|h)\s*")
_READERS = 8
_MOST_LISTED = 100_000
_MOST_IN_SIGHT = 10_000
"""Shards of a group that are looked at in one round."""

SizeOf = Callable[[Shard], float]
"""The bytes of a shard, as far as they are known or can be guessed."""


@dataclass(frozen=True, slots=True)
class PrefetchWindow:
    """How far ahead of the readers shards are held: bytes over all groups, or seconds of each."""

    size_bytes: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> PrefetchWindow:
        """A window from "100GB", "30min" or "2h".

        Raises:
            OptionError: it is neither a size nor a time.
        """
        if match := _TIME.fullmatch(text):
            seconds = float(match[1]) * _SECONDS[match[2]]
            if seconds > 0:
                return cls(seconds=seconds)
            raise OptionError(f'window={text!r} is no time; expected "30min" or "2h", or a size as "100GB"')
        try:
            return cls(size_bytes=parse_size(text, "window"))
        except OptionError:
            raise OptionError(
                f'window={text!r} is neither a size nor a time; expected "100GB", "30min" or "2h"'
            ) from None

    def cut(self, shards: Sequence[Shard], size_of: SizeOf) -> list[Shard]:
        """Those shards, from the first, that lie in a window of bytes; at least one."""
        if self.size_bytes is None:
            return list(shards)
        found: list[Shard] = []
        total = 0.0
        for shard in shards:
            total += size_of(shard)
            if found and total > self.size_bytes:
                break
            found.append(shard)
        return found


class Demand(Protocol):
    """The shards that a daemon is to hold. For one thread."""

    def look(self, size_of: SizeOf) -> list[Shard]:
        """The shards in order of need, each once, as of now.

        Raises:
            SharedTierError: the shared tier can't be asked now.
        """
        ...

    def describe(self) -> str:
        """The demand in words, for logs and status."""
        ...


class ListDemand:
    """The shards of a list: those first that runs on this node need next, then the others as listed.

    Args:
        shards: all of them; of those that have a prepared form it is that which is wanted.
        window: how much of that.
        announced: the `runs/` of a tier in which live runs say what they will visit; None: nobody does.
        own: the file there that is the daemon's.

    Raises:
        OptionError: a long list without a window.
    """

    def __init__(
        self,
        shards: ShardList,
        window: PrefetchWindow,
        announced: Path | None = None,
        own: Path | None = None,
    ):
        if window.size_bytes is None and len(shards) > _MOST_LISTED:
            raise OptionError(
                f"{len(shards):,} shards are too many to be looked at again and again: give a window, or "
                f"follow a run"
            )
        self._shards = shards
        self._window = window
        self._announced = announced
        self._own = own
        form = shards[0].prepared if len(shards) else None
        self._as_what = f", prepared as {form.recipe}" if form is not None else ""
        self._all: dict[str, Shard] | None = None
        self._names: np.ndarray[Any, np.dtype[np.uint64]] | None = None

    def describe(self) -> str:
        """See Demand."""
        return f"{len(self._shards):,} listed shards{self._as_what}"

    def look(self, size_of: SizeOf) -> list[Shard]:
        """See Demand."""
        needed = dict.fromkeys(self._needed())
        first = {task.digest: task for task in map(_wanted_form, (self._shards[place] for place in needed))}
        if self._window.size_bytes is None:
            if self._all is None:
                self._all = {task.digest: task for task in map(_wanted_form, self._shards)}
            return list({**first, **self._all}.values())
        found, total = dict(first), sum(map(size_of, first.values()))
        for task in map(_wanted_form, self._shards):
            if total > self._window.size_bytes:
                break
            if task.digest not in found:
                found[task.digest] = task
                total += size_of(task)
        return self._window.cut(list(found.values()), size_of)

    def _needed(self) -> list[int]:
        """The places of the shards that live runs will visit, by how soon."""
        if self._announced is None:
            return []
        visits = [
            demand.visits_of(path)
            for path in demand.files(self._announced)
            if path != self._own and demand.lives(path)
        ]
        if not any(len(coming) for coming in visits):
            return []
        if self._names is None:
            names = (demand.short(self._shards.digest(place)) for place in range(len(self._shards)))
            self._names = np.fromiter(names, dtype="<u8", count=len(self._shards))
        places = {int(name): place for place, name in enumerate(self._names.tolist())}
        return in_order([places[name] for name in coming.tolist() if name in places] for coming in visits)


class FollowedDemand:
    """The next shards of the groups of runs whose plan files lie in a shared tier.

    Args:
        objects: of the tier.
        storage_options: for the origins; they are a part of what shards are called.
        window: how far.
        names: of the runs; none: the one that was heard of last.
        groups: which of their groups; none: all.
        given: the user's own list of the shards, for plans that can't tell it.
        recipes: by which shards are prepared; None: all stay as they are.
        named: the places that the user named; others that a plan names are logged.
    """

    def __init__(
        self,
        objects: Objects,
        storage_options: dict[str, Any] | None,
        window: PrefetchWindow,
        names: Sequence[str] = (),
        groups: Sequence[int] = (),
        given: UrlList | None = None,
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
        self._refused_objects: set[tuple[str, bytes]] = set()  # names, and digests of what was there
        self._warned: set[tuple[str, str]] = set()  # of runs whose readers look for what isn't made here
        self._said = "no run yet"

    def describe(self) -> str:
        """See Demand."""
        return self._said

    def look(self, size_of: SizeOf) -> list[Shard]:
        """See Demand."""
        published = runs_in(self._objects.names("runs"))
        chosen = self._names or self._latest(published)
        wanted: list[list[Shard]] = []
        describe = []
        for run in chosen:
            found = self._plan(run) if run in published else None
            if found is None:
                describe.append(f"run {run}: {self._refused.get(run, 'not published yet')}")
                continue
            coming, shards = found
            progress = self._progress(coming.plan, published[run])
            tasks = self._coming(coming, progress)
            wanted.append([prepared_form(shards[k], name) if name else shards[k] for k, name in tasks])
            epochs = sorted({one.epoch for one in progress}) or [0]
            as_what = "".join(f", prepared as {name}" for name in sorted({name for _, name in tasks if name}))
            describe.append(f"run {run}, {coming.plan.groups} groups, epoch {epochs[0]}{as_what}")
        self._said = "; ".join(describe) or "no run yet"
        merged: dict[str, Shard] = {}
        for k in range(max(map(len, wanted), default=0)):
            merged.update(
                {own[k].digest: own[k] for own in wanted if k < len(own) and own[k].digest not in merged}
            )
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
        """A run's plan, once it was found good; one that isn't is complained of once."""
        if run in self._known:
            return self._known[run]
        try:
            found = self._known[run] = self._read_plan(run)
        except PlanError as exc:
            if self._refused.get(run) != str(exc):
                logger.warning("%s", exc)
            self._refused[run] = str(exc)
            return None
        except _RefusedBefore:
            return None
        return found

    def _read_plan(self, run: str) -> tuple[Coming, ShardList]:
        with self._refused_once(f"runs/{run}/plan.json", PLAN_LIMIT_BYTES) as data:
            return self._followed(RunPlan.read(run, data or b""))

    @contextlib.contextmanager
    def _refused_once(self, name: str, limit_bytes: int) -> Iterator[bytes | None]:
        """An object, for a block that may refuse it: the same bytes aren't looked into a second time.

        Raises:
            PlanError: it is too large.
            _RefusedBefore: the same was refused at an earlier look.
        """
        try:
            data = self._objects.read(name, limit_bytes)
        except TooLarge as exc:
            raise PlanError(str(exc)) from exc
        seen = name, hashlib.blake2b(data or b"", digest_size=16).digest()
        if seen in self._refused_objects:
            raise _RefusedBefore
        try:
            yield data
        except PlanError:
            self._refused_objects.add(seen)
            raise

    def _followed(self, plan: RunPlan) -> tuple[Coming, ShardList]:
        """A plan that says what a plan may say, if it can be followed here."""
        run = plan.run
        urls = plan.shards if self._given is None else self._given
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
        return Coming(plan), ShardList(urls, self._storage_options)

    def _warn_of_unnamed(self, run: str, shards: UrlList, named: Named) -> None:
        """Say which places only the plan names: without credentials they may not give their shards."""
        unnamed = sorted({origin_of(url) for url in shards.kinds()} - named.origins)
        if unnamed:
            logger.warning(
                "run %s reads from %s%s, which only its plan names: no credentials, headers or requests to "
                "addresses that aren't public go there. Where that is meant: --origin %s",
                *(run, ", ".join(unnamed[:3]), ", …" if len(unnamed) > 3 else "", unnamed[0]),
            )

    def _progress(self, plan: RunPlan, groups: Sequence[int]) -> list[Progress]:
        """How far the groups are that tell it; one whose file can't be read is left out this time."""

        def read(group: int) -> Progress | None:
            try:
                with self._refused_once(f"runs/{plan.run}/group-{group}.json", PROGRESS_LIMIT_BYTES) as data:
                    return None if data is None else Progress.read(plan, group, data)
            except PlanError as exc:
                logger.warning("%s", exc)
                return None
            except _RefusedBefore:
                return None
            except SharedTierError as exc:
                logger.debug("%s", exc)
                return None

        known = [g for g in groups if g < plan.groups and (not self._groups or g in self._groups)]
        with ThreadPoolExecutor(min(_READERS, max(1, len(known)))) as pool:
            return [progress for progress in pool.map(read, known) if progress is not None]

    def _coming(self, coming: Coming, progress: Sequence[Progress]) -> list[tuple[int, str]]:
        """The places of shards in order of need, each with the name of its recipe."""
        return in_order(
            [(place, name) for place in coming.of(one, self._count(one))]
            for one in progress
            for name in (self._recipe_for(coming.plan, one),)
        )

    def _recipe_for(self, plan: RunPlan, progress: Progress) -> str:
        """By which recipe, by its full name, a group's shards are prepared; "": they stay as they are.

        What its readers don't look for, as their libraries make another, would be prepared for nothing.
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

    def _count(self, progress: Progress) -> int:
        """How many shards of a group lie in the window, at most."""
        if self._window.seconds is not None:
            count = self._window.seconds * progress.shards_per_second
        else:
            assert self._window.size_bytes is not None
            count = self._window.size_bytes / (progress.mean_bytes or GUESSED_BYTES)
        return max(1, min(math.ceil(count), _MOST_IN_SIGHT))


class _RefusedBefore(Exception):
    """The same bytes were refused at an earlier look, and logged."""


def _wanted_form(shard: Shard) -> Shard:
    """The prepared form of a shard where that is wanted, else the shard."""
    return shard.prepared or shard
