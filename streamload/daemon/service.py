"""A daemon from its options: demand, target, executor, leases, notices and status server."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
from pathlib import Path
from types import TracebackType
from typing import get_args

from streamload.cache.copying import folders_to_copy, settled
from streamload.cache.demand import DemandFile
from streamload.cache.shard import ShardList
from streamload.cache.shared.leases import DAEMONS, Leases
from streamload.cache.shared.objects import Objects
from streamload.cache.shared.sharing import SharedOptions, Sharing
from streamload.cache.tier import Tier, memory_root, placed_on_disk
from streamload.daemon.daemon import Daemon
from streamload.daemon.demand import DEFAULT_WINDOW, Demand, ListDemand, PrefetchWindow
from streamload.daemon.executor import LocalExecutor, LocalOptions
from streamload.daemon.followed import FollowedDemand
from streamload.daemon.metadata import Cloud
from streamload.daemon.options import DaemonOptions, ServiceOptions
from streamload.daemon.preemption import Notice, NoticeWatch, on_signals
from streamload.daemon.ray_executor import RayExecutor, connect
from streamload.daemon.ray_task import Job
from streamload.daemon.recipes import Recipes
from streamload.daemon.status import Status
from streamload.daemon.status_server import DEFAULT_LISTEN, StatusServer
from streamload.daemon.targets import LocalTarget, SharedTarget, WarmTarget
from streamload.daemon.task_leases import open_leases
from streamload.daemon.task_origins import TaskOrigins, Throttle
from streamload.errors import OptionError
from streamload.metrics import Counters
from streamload.options import Settings, parse_size, read_settings
from streamload.origins.access import warn_of_shared_headers
from streamload.origins.origin import OriginOptions
from streamload.origins.protocol import Named
from streamload.urls import expand_urls

logger = logging.getLogger("streamload")

_MOST_LISTED = 100_000


class Service:
    """A daemon with its surroundings. A context manager for the main thread: within it signals are notices.

    Raises:
        OptionError: options that are invalid or don't go together.
        CacheError: the tier of this node can't be used.
    """

    def __init__(self, options: ServiceOptions):
        self._options = options
        self._tuned = _tuned(options)
        self._patience = self._tuned.origin or OriginOptions()
        self._cloud = _cloud(options.notices)
        self._recipes = Recipes(options.prepare, options.recipe_of)
        self._named = None if options.urls else Named.of(options.origins)
        self._notice = Notice()
        self._roots: tuple[Path, ...] = ()  # of this node's tiers
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._daemon = self._made(stack)
            self.status_server = self._status_server(stack)
            self._stack = stack.pop_all()

    def __enter__(self) -> Service:
        self._stack.enter_context(on_signals(self._notice, self._options.grace_seconds))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close everything. Idempotent."""
        self._stack.close()

    def status(self) -> Status:
        """The current status; callable from any thread."""
        return self._daemon.status()

    def run(self) -> Status:
        """Work until a signal or a cloud's notice, or with `once` until all is held."""
        options = self._options
        bases, poll_seconds = options.metadata, options.poll_seconds
        watch = NoticeWatch(self._notice, self._cloud, bases=bases, poll_seconds=poll_seconds)
        with contextlib.closing(watch):
            return self._daemon.run(self._notice)

    def _made(self, stack: contextlib.ExitStack) -> Daemon:
        options = self._options
        settings = read_settings(
            cache_dir=options.cache_dir, cache_size=options.cache_size, shared_cache=options.shared_cache
        )
        self._roots = (settings.cache_dir, memory_root(settings))
        if self._tuned.origin is None:
            self._patience = OriginOptions(outage_seconds=settings.origin_wait)
        shared = SharedOptions.of(settings, options.shared_cache_options)
        if shared is not None:  # the target stores shards itself
            shared = dataclasses.replace(shared, write_back=False)
        if shared is None and not options.urls:
            raise OptionError("nothing to do: give URLs, or a shared cache in which runs are published")
        if shared is None and (options.runs or options.into == "shared"):
            raise OptionError("give --shared-cache: that is where runs are published, and shards stored")
        if options.into not in (None, "shared", "local"):
            raise OptionError(f"into={options.into!r}: it has to be shared or local")
        listed = self._listed(settings) if options.urls else None
        if options.ray is not None:
            return self._on_ray(stack, options.ray, shared, listed)
        placed = stack.enter_context(
            contextlib.closing(placed_on_disk(settings, settings.sources["cache_dir"]))
        )
        if listed is not None and (shared is None or options.into == "local"):
            listed = settled(settings, listed, placed, nodes=1, logs=True)
            self._patience = dataclasses.replace(self._patience, mounts=listed.copied)
        return self._on_this_node(stack, placed.tier, shared, listed)

    def _listed(self, settings: Settings) -> ShardList:
        """The shards that are given, with the folders that may be copied."""
        storage = self._options.storage_options
        listed = expand_urls(self._options.urls, storage)
        warn_of_shared_headers(listed, storage)
        shards = ShardList(listed, storage, copied=folders_to_copy(listed, settings.copy))
        self._patience = dataclasses.replace(self._patience, mounts=shards.copied)
        return shards

    def _on_this_node(
        self, stack: contextlib.ExitStack, tier: Tier, shared: SharedOptions | None, listed: ShardList | None
    ) -> Daemon:
        """A daemon that runs its tasks in this process."""
        options, tuned, counts = self._options, self._tuned, Counters()
        demand_file = stack.enter_context(contextlib.closing(DemandFile(tier.root / "runs")))
        sharing = stack.enter_context(contextlib.closing(Sharing(shared, counts)))
        is_for_node = sharing.tier is None or options.into == "local"
        target: WarmTarget = LocalTarget(tier)
        leases = None
        if sharing.tier is not None and not is_for_node:
            target = stack.enter_context(contextlib.closing(SharedTarget(sharing.tier)))
            leases = open_leases(sharing.tier.objects, tier, demand_file, options.lease_seconds)
            stack.callback(leases.close)
        origins = TaskOrigins(
            counts,
            options.storage_options,
            self._patience,
            Throttle(tuned.bytes_per_second),
            self._recipes,
            through=sharing.through if is_for_node else None,
            through_source=sharing.through,
            named=self._named,
        )
        executor = LocalExecutor(
            tier,
            target,
            origins.open,
            LocalOptions(
                tuned.concurrency,
                preparing=len(os.sched_getaffinity(0)) if options.concurrency is None else None,
                no_room_seconds=tuned.no_room_seconds,
                stopped_seconds=tuned.stopped_seconds,
            ),
            counts=counts,
        )
        stack.callback(executor.close)
        objects = None if sharing.tier is None else sharing.tier.objects
        runs = (tier.root / "runs", demand_file.path) if is_for_node else (None, None)
        return Daemon(
            self._demand(listed, objects, *runs),
            target,
            executor,
            leases=leases,
            options=tuned,
            announce=demand_file.announce,
        )

    def _on_ray(
        self,
        stack: contextlib.ExitStack,
        address: str,
        shared: SharedOptions | None,
        listed: ShardList | None,
    ) -> Daemon:
        """A daemon that runs its tasks on the nodes of a Ray cluster."""
        options, tuned = self._options, self._tuned
        if shared is None or options.into == "local":
            raise OptionError(
                "--ray needs a shared cache to bring shards into (--shared-cache); for trainers on the "
                "cluster itself, `streamload warm --ray ADDRESS --into local` fills each node's own cache"
            )
        if listed is not None and any(listed.are_local()):
            raise OptionError(
                "--ray can't bring files of this machine, which other nodes don't see: give URLs of an origin"
            )
        if tuned.bytes_per_second is not None and options.concurrency is None:
            raise OptionError(
                "--bandwidth with --ray needs --concurrency: each of so many shards gets its part of it"
            )
        counts = Counters()
        tier = shared.open_tier(counts)
        facts = tuple(column for column in options.facts if column.from_members)  # others cost nothing
        target = stack.enter_context(contextlib.closing(SharedTarget(tier, facts)))
        sign = f"probes/{secrets.token_hex(8)}"
        job = Job(
            shared=shared,
            sign=sign,
            storage_options=options.storage_options,
            cache_dir=None if options.cache_dir is None else str(options.cache_dir),
            cache_size=options.cache_size,
            bytes_per_second=tuned.bytes_per_second and tuned.bytes_per_second / tuned.concurrency,
            origin=self._patience,
            no_room_seconds=tuned.no_room_seconds,
            named=self._named,
            lease_seconds=options.lease_seconds,
            facts=facts,
        )
        ray = connect(address)
        stack.callback(ray.shutdown)
        tier.objects.write(sign, b"one tier for all nodes")
        stack.callback(lambda: tier.objects.until(threading.Event()).delete(sign))
        demand = self._demand(listed, tier.objects, None, None)
        executor = RayExecutor(
            ray,
            job,
            self._recipes,
            cpus=options.ray_cpus,
            most=options.concurrency,
            leases=Leases(tier.objects, lease_seconds=options.lease_seconds, attempt=DAEMONS),
            counts=counts,
        )
        stack.callback(executor.close)
        return Daemon(demand, target, executor, options=tuned)

    def _demand(
        self, listed: ShardList | None, objects: Objects | None, announced: Path | None, own: Path | None
    ) -> Demand:
        """The demand of followed runs, or of a list; `announced` and `own` as for ListDemand."""
        options = self._options
        if objects is not None and (options.runs or listed is None):
            window = PrefetchWindow.parse(options.window or DEFAULT_WINDOW)
            storage, named = options.storage_options, self._named
            runs, groups = options.runs, options.groups
            return FollowedDemand(objects, storage, window, runs, groups, listed, self._recipes, named)
        assert listed is not None
        window = PrefetchWindow() if options.window is None else PrefetchWindow.parse(options.window)
        if window.seconds is not None:
            raise OptionError(f"window={options.window!r}: a list has no pace; give a size, or follow a run")
        if window.size_bytes is None and len(listed) > _MOST_LISTED:
            raise OptionError(
                f"{len(listed):,} shards are too many to be looked at again and again: give a window, or "
                f"follow a run"
            )
        shards = listed.prepared_by(options.prepare.name if options.prepare else "")
        return ListDemand(shards, window, announced, own)

    def _status_server(self, stack: contextlib.ExitStack) -> StatusServer | None:
        """The status server; by default on the usual port, or on any if another daemon has that."""
        listen = self._options.listen
        if listen == "none":
            return None
        try:
            server = StatusServer(self._daemon.status, listen or DEFAULT_LISTEN, self._roots)
        except OptionError:
            if listen is not None:
                raise
            server = StatusServer(self._daemon.status, "127.0.0.1:0", self._roots)
        logger.info("/metrics, /healthz and /status are at %s", server.url)
        return stack.enter_context(server)


def _tuned(options: ServiceOptions) -> DaemonOptions:
    """The daemon's options with those of the service."""
    bandwidth = options.bandwidth
    return dataclasses.replace(
        options.daemon,
        concurrency=options.daemon.concurrency if options.concurrency is None else options.concurrency,
        bytes_per_second=None if bandwidth is None else parse_size(bandwidth, "bandwidth"),
        once=options.once,
    )


def _cloud(text: str) -> Cloud:
    for cloud in get_args(Cloud):
        if cloud == text:
            instance: Cloud = cloud
            return instance
    raise OptionError(f"notices={text!r}: it has to be one of {', '.join(get_args(Cloud))}")
