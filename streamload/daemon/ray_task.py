"""What a task on a node of a Ray cluster does: it brings one shard into the shared tier by way of its own.

`bring` takes and gives plain values, so that a node with another streamload can say so. A process of Ray's
brings task after task, and keeps its tier and its connections; it may be killed at any time.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import pickle
import platform
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from streamload.cache.demand import DemandFile
from streamload.cache.shard import Shard, prepared_form, shard_of
from streamload.cache.shared.sharing import SharedOptions, Sharing
from streamload.cache.tier import open_tier
from streamload.daemon.executor import NO_ROOM_SECONDS, LocalExecutor
from streamload.daemon.targets import SharedTarget
from streamload.daemon.task_origins import TaskOrigins
from streamload.daemon.throttle import Throttle
from streamload.derived.prepared import Recipe
from streamload.derived.recipes import Recipes
from streamload.errors import OptionError, StreamloadError
from streamload.metrics import Counters
from streamload.options import read_settings
from streamload.origins.access import Named
from streamload.origins.origin import OriginOptions

_TICK_SECONDS = 0.05
_AGAIN_SECONDS = 1.0
"""A task that failed isn't begun again at once by itself: whoever submitted it decides."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all tasks of a daemon have in common.

    Attributes:
        shared: the shared tier.
        sign: the name of an object in it, by which a node sees that it is the same tier.
        storage_options: for origins.
        cache_dir, cache_size: of the tiers of the nodes; None: what each node has set.
        bytes_per_second: the most that a task takes from its origin; None: there is no cap.
        origin: how patient transfers are.
        no_room_seconds: after which a task that finds no room in its node's tier has failed.
        rest_seconds: how long a node that can't do any task keeps the one it got, so that it doesn't
            fail one after the other that another node could do.
        named: see `TaskOrigins`.
    """

    shared: SharedOptions
    sign: str
    storage_options: dict[str, Any] | None = field(default=None, repr=False)
    cache_dir: str | None = None
    cache_size: str | int | None = None
    bytes_per_second: float | None = None
    origin: OriginOptions = field(default_factory=OriginOptions)
    no_room_seconds: float = NO_ROOM_SECONDS
    rest_seconds: float = 5.0
    named: Named | None = None


def bring(version: str, job: bytes, task: bytes) -> dict[str, Any]:
    """Bring a task, unless it is there.

    Args:
        version: of the streamload that asks.
        job: a pickled Job.
        task: pickled, a Shard, and the Recipe by which it is prepared or None.

    Returns:
        "node": the name of this machine; and either "size" and "arrived", in bytes, or one of
        "why": the task can't be had now,
        "trouble": this node can't do any task now,
        "unfit": this node can't do any task as it is set up.
    """
    node = platform.node()
    if (mine := own_version()) != version:
        return {"node": node, "unfit": f"it has streamload {mine}, and {version} is wanted"}
    shard, recipe = pickle.loads(task)
    try:
        return {"node": node, **_carrier(job).bring(shard, recipe)}
    except OptionError as exc:
        return {"node": node, "unfit": str(exc)}
    except (StreamloadError, OSError) as exc:
        _drop_carriers()
        time.sleep(pickle.loads(job).rest_seconds)
        return {"node": node, "trouble": str(exc)}


def own_version() -> str:
    """The version of streamload that is installed here."""
    return importlib.metadata.version("streamload")


_carriers: dict[bytes, _Carrier] = {}  # by job; of a process of Ray's, which does one task at a time


def _carrier(job: bytes) -> _Carrier:
    if job not in _carriers:
        _drop_carriers()
        _carriers[job] = _Carrier(pickle.loads(job))
    return _carriers[job]


def _drop_carriers() -> None:
    while _carriers:
        _carriers.popitem()[1].close()


class _Carrier:
    """Brings tasks into a shared tier, one at a time, as long as its process lives.

    Raises:
        OptionError: this node's settings can't be used, or don't lead to the same shared tier.
        CacheError: the tier of this node, or the shared one, can't be used.
    """

    def __init__(self, job: Job):
        self._job = job
        self._counts = Counters()
        self._recipes = Recipes()
        self._change = threading.Condition()
        # Guarded by _change:
        self._digest = ""  # of the task that is worked on
        self._ended: dict[str, Any] | None = None  # how it ended
        with contextlib.ExitStack() as stack:
            sharing = stack.enter_context(contextlib.closing(Sharing(job.shared, self._counts)))
            shared = sharing.tier
            assert shared is not None
            self._target = stack.enter_context(contextlib.closing(SharedTarget(shared)))
            if shared.objects.read(job.sign) is None:
                raise OptionError(
                    f"the shared cache {shared.objects.url} is another one there: name an object store, or a "
                    f"folder that is mounted at the same place on all nodes"
                )
            tier = open_tier(read_settings(cache_dir=job.cache_dir, cache_size=job.cache_size))
            self._demand_file = stack.enter_context(contextlib.closing(DemandFile(tier.root / "runs")))
            origins = TaskOrigins(
                self._counts,
                job.storage_options,
                job.origin,
                Throttle(job.bytes_per_second),
                self._recipes,
                through_source=sharing.through,
                named=job.named,
            )
            here = LocalExecutor(
                self._completed,
                self._failed,
                lambda shard: 0.0,
                tier=tier,
                target=self._target,
                open_origin=origins,
                threads=1,
                no_room_seconds=job.no_room_seconds,
                counts=self._counts,
            )
            self._here = stack.enter_context(contextlib.closing(here))
            self._stack = stack.pop_all()

    def bring(self, shard: Shard, recipe: Recipe | None) -> dict[str, Any]:
        """See `bring`."""
        known = shard_of(shard.url, self._job.storage_options)
        if recipe is not None:
            if recipe.name != shard.recipe:
                raise OptionError(
                    f"images are prepared by {recipe.name} there, and {shard.recipe} is wanted: all nodes "
                    f"and the machine of the command need the same libraries and the same kind of processor"
                )
            self._recipes.add(recipe)
            known = prepared_form(known, recipe.name)
        if known.digest != shard.digest:
            raise OptionError(
                f"{shard.name} has another identity there: the environment that is a part of it (endpoints, "
                f"configuration of commands) has to be the same on all nodes"
            )
        if self._target.holds(shard):
            return {"size": 0, "arrived": 0}
        before = self._counts.snapshot().origin_bytes
        with self._change:
            self._digest, self._ended = shard.digest, None
        self._demand_file.announce([shard.digest])  # or it may be evicted before it is stored
        self._here.want([shard])
        try:
            while (ended := self._waited()) is None:
                self._here.check()
        finally:
            self._here.want(())
            self._demand_file.announce([])
        return {**ended, "arrived": self._counts.snapshot().origin_bytes - before}

    def close(self) -> None:
        """Give back what it holds; once is enough."""
        self._stack.close()

    def _waited(self) -> dict[str, Any] | None:
        with self._change:
            if self._ended is None:
                self._change.wait(_TICK_SECONDS)
            return self._ended

    def _completed(self, shard: Shard, size: int) -> None:
        self._end(shard, {"size": size})

    def _failed(self, shard: Shard, why: str) -> float:
        self._end(shard, {"why": why})
        return _AGAIN_SECONDS

    def _end(self, shard: Shard, how: dict[str, Any]) -> None:
        with self._change:
            if shard.digest == self._digest:
                self._ended = how
                self._change.notify_all()
