"""A task on a node of a Ray cluster: brings one shard into the shared tier, through the tier of its node.

`bring` takes and returns plain values, so that a node with another version of streamload can report that. A
Ray worker process runs task after task with one tier and its connections; it may be killed at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import pickle
import platform
import time
from dataclasses import dataclass, field
from typing import Any

from streamload.cache.companion import FactsCarrier
from streamload.cache.demand import DemandFile
from streamload.cache.shard import Shard, prepared_form, shard_of
from streamload.cache.shared.leases import LEASE_SECONDS
from streamload.cache.shared.sharing import SharedOptions, Sharing
from streamload.cache.tier import open_tier
from streamload.daemon.executor import NO_ROOM_SECONDS, LocalExecutor, LocalOptions, TaskResult
from streamload.daemon.recipes import Recipes
from streamload.daemon.targets import SharedTarget
from streamload.daemon.task_leases import open_leases
from streamload.daemon.task_origins import TaskOrigins, Throttle
from streamload.errors import FeatureError, OptionError, StreamloadError
from streamload.metrics import Counters
from streamload.options import read_settings
from streamload.origins.origin import OriginOptions, Recipe
from streamload.origins.protocol import Named
from streamload.prefetch.scheduler import FillRequest
from streamload.shards.columns import Column

_TICK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Job:
    """Values that all tasks of a daemon share.

    Attributes:
        shared: the shared tier.
        sign: the name of an object in it, which proves to a node that it has the same tier.
        storage_options: for origins.
        cache_dir, cache_size: of the tiers of the nodes; None: what each node has set.
        bytes_per_second: the most that a task takes from its origin; None: no cap.
        origin: timeouts and retries of transfers.
        no_room_seconds: how long a task waits for room in the tier of its node before it fails.
        rest_seconds: how long a broken node holds on to its task, so that it doesn't fail one task after
            the other that healthy nodes could run.
        named: see `TaskOrigins`.
        lease_seconds: see Leases.
        facts: columns to make of the shards' samples.
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
    lease_seconds: float = LEASE_SECONDS
    facts: tuple[Column, ...] = ()


def bring(version: str, job: bytes, task: bytes) -> dict[str, Any]:
    """Run a task, unless the target holds its shard.

    Args:
        version: of the caller's streamload.
        job: a pickled Job.
        task: a pickled pair: a Shard, and the Recipe by which it is derived or None.

    Returns:
        "node": the name of this machine; and either "size" and "arrived", in bytes, or one of
        "busy": another process has the task's lease,
        "why": the task has failed,
        "trouble": this node can't run tasks now,
        "unfit": this node can't run tasks as it is set up.
    """
    node = platform.node()
    if (mine := own_version()) != version:
        return {"node": node, "unfit": f"it has streamload {mine}, and {version} is wanted"}
    try:
        shard, recipe = pickle.loads(task)  # a recipe of features builds their module
        return {"node": node, **_carrier(job).bring(shard, recipe)}
    except FeatureError as exc:  # as it would be on any node
        return {"node": node, "why": str(exc), "arrived": 0}
    except OptionError as exc:
        return {"node": node, "unfit": str(exc)}
    except (StreamloadError, OSError) as exc:
        _drop_carriers()
        time.sleep(pickle.loads(job).rest_seconds)
        return {"node": node, "trouble": str(exc)}


def own_version() -> str:
    """The installed version of streamload."""
    return importlib.metadata.version("streamload")


_carriers: dict[bytes, _TaskActor] = {}  # by job; a Ray worker process runs one task at a time


def _carrier(job: bytes) -> _TaskActor:
    if job not in _carriers:
        _drop_carriers()
        _carriers[job] = _TaskActor(pickle.loads(job))
    return _carriers[job]


def _drop_carriers() -> None:
    while _carriers:
        _carriers.popitem()[1].close()


class _TaskActor:
    """Runs tasks one at a time, as long as its process lives.

    Raises:
        OptionError: this node's settings are invalid, or lead to another shared tier.
        CacheError: the tier of this node, or the shared tier, can't be used.
    """

    def __init__(self, job: Job):
        self._job = job
        self._counts = Counters()
        self._recipes = Recipes()
        with contextlib.ExitStack() as stack:
            sharing = stack.enter_context(contextlib.closing(Sharing(job.shared, self._counts)))
            shared = sharing.tier
            assert shared is not None
            self._target = stack.enter_context(contextlib.closing(SharedTarget(shared, job.facts)))
            if shared.objects.read(job.sign) is None:
                raise OptionError(
                    f"the shared cache {shared.objects.url} is another one there: name an object store, or a "
                    f"folder that is mounted at the same place on all nodes"
                )
            self._tier = tier = open_tier(read_settings(cache_dir=job.cache_dir, cache_size=job.cache_size))
            self._demand_file = stack.enter_context(contextlib.closing(DemandFile(tier.root / "runs")))
            self._leases = open_leases(shared.objects, tier, self._demand_file, job.lease_seconds)
            stack.callback(self._leases.close)
            origins = TaskOrigins(
                self._counts,
                job.storage_options,
                job.origin,
                Throttle(job.bytes_per_second),
                self._recipes,
                through=functools.partial(sharing.through, single_flight=False) if job.facts else None,
                through_source=sharing.through,
                named=job.named,
            )
            self._facts: FactsCarrier | None = None
            if job.facts:
                storing = dataclasses.replace(job.shared, write_back=True)
                self._facts = stack.enter_context(contextlib.closing(Sharing(storing, self._counts))).facts
            executor = LocalExecutor(
                tier,
                self._target,
                origins.open,
                LocalOptions(threads=1, no_room_seconds=job.no_room_seconds),
                counts=self._counts,
            )
            self._executor = stack.enter_context(contextlib.closing(executor))
            self._stack = stack.pop_all()

    def bring(self, shard: Shard, recipe: Recipe | None) -> dict[str, Any]:
        """Bring a shard to the shared cache, as `bring` does."""
        local = shard_of(shard.url, self._job.storage_options, is_copied=shard.is_copied)
        if recipe is not None:
            if recipe.name != shard.recipe:
                raise OptionError(
                    f"shards are derived by {recipe.name} there, and {shard.recipe} is wanted: all nodes "
                    f"and the machine of the command need the same libraries and the same kind of processor"
                )
            self._recipes.add(recipe)
            local = prepared_form(local, recipe.name)
        if local.digest != shard.digest:
            raise OptionError(
                f"{shard.name} has another identity there: the environment that is a part of it (endpoints, "
                f"configuration of commands) has to be the same on all nodes"
            )
        if self._target.holds(shard):
            return {"size": 0, "arrived": 0}
        if not self._leases.take(shard.digest):
            return {"busy": True}
        try:
            if self._target.holds(shard):  # the last holder has just delivered it
                return {"size": 0, "arrived": 0}
            return self._fetched(shard)
        finally:
            self._leases.release(shard.digest)

    def close(self) -> None:
        """Release the tiers and connections. Idempotent."""
        self._stack.close()

    def _fetched(self, shard: Shard) -> dict[str, Any]:
        before = self._counts.snapshot().origin_bytes
        self._demand_file.announce([shard.digest])  # else it may be evicted before it is stored
        self._executor.results.drain(0)  # those of a task that was left
        self._executor.want([FillRequest(shard, 0.0)])
        try:
            result = self._result(shard)
            if self._facts is not None and not result.error:
                result = dataclasses.replace(result, error=self._without_facts(shard, self._facts))
        finally:
            self._executor.want(())
            self._demand_file.announce([])
        ended = {"why": result.error} if result.error else {"size": result.size_bytes}
        return {**ended, "arrived": self._counts.snapshot().origin_bytes - before}

    def _without_facts(self, shard: Shard, shared: FactsCarrier) -> str:
        """Make a shard's facts, from the tier of this node; returns why the shared cache lacks them."""
        from streamload.daemon.warm import make_facts

        try:
            make_facts(self._tier, shard, self._job.facts, shared)
        except StreamloadError as exc:
            return f"its facts can't be made: {exc}"
        shared.wait()
        return "" if self._target.holds(shard) else "its facts couldn't be stored in the shared cache"

    def _result(self, shard: Shard) -> TaskResult:
        while True:
            for result in self._executor.results.drain(_TICK_SECONDS):
                if result.shard.digest == shard.digest:
                    return result
            self._executor.check()
