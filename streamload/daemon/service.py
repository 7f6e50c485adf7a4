"""A daemon from its options: tier, target, leases, notices and status server."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from streamload.cache.demand import DemandFile, lives
from streamload.cache.shard import ShardList
from streamload.cache.shared.leases import LEASE_SECONDS, Leases
from streamload.cache.shared.objects import Objects
from streamload.cache.shared.sharing import SharedOptions, Sharing
from streamload.cache.tier import Tier, open_tier
from streamload.daemon.daemon import Daemon, DaemonOptions
from streamload.daemon.demand import DEFAULT_WINDOW, Demand, FollowedDemand, ListDemand, PrefetchWindow
from streamload.daemon.executor import LocalExecutor
from streamload.daemon.preemption import (
    GRACE_SECONDS,
    METADATA,
    POLL_SECONDS,
    Cloud,
    Notice,
    Watch,
    on_signals,
)
from streamload.daemon.ray_executor import RayExecutor, connect
from streamload.daemon.ray_task import Job
from streamload.daemon.status import Status
from streamload.daemon.status_server import DEFAULT_LISTEN, StatusServer
from streamload.daemon.targets import LocalTarget, SharedTarget, Target
from streamload.daemon.task_origins import TaskOrigins
from streamload.daemon.throttle import Throttle
from streamload.derived.prepared import Recipe
from streamload.derived.recipes import MakeRecipe, Recipes
from streamload.errors import OptionError
from streamload.metrics import Counters
from streamload.options import parse_size, read_settings
from streamload.origins.access import Named, warn_of_shared_headers
from streamload.urls import UrlList, expand_urls, is_local

logger = logging.getLogger("streamload")

_RUN_FILE = re.compile(r"[0-9]+\.[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What a daemon is asked for.

    Attributes:
        urls: the shards; with `runs`, or none of both and a shared cache, what their plans can't tell.
        runs: published runs to follow.
        groups: which of their groups; none: all.
        origins: web servers and buckets, as "https://host" and "s3://bucket": what a plan names there gets
            credentials, and need not be at a public address. Of listed URLs all are named.
        shared_cache, shared_cache_options, cache_dir, cache_size, storage_options: as for make_loader.
        into: "shared" or "local": where shards are to be held; None: in the shared cache, if there is one.
        prepare: hold shards prepared by this recipe, whatever runs ask for.
        recipe_of: makes the recipe that a run asks for; None: what it asks for isn't prepared.
        window: "100GB", "30min"; None: 100 GB in front of a run, all of a list.
        concurrency: shards that are worked on at once; None: 8, of those that are prepared no more than there
            are CPUs, or as many as the Ray cluster has room for.
        bandwidth: the most to take from origins in a second.
        once: end when all is held.
        notices: whose to heed.
        grace_seconds: what is left after a SIGTERM.
        ray: the address of a Ray cluster, whose nodes do the work; None: this process does.
        ray_cpus: what a shard that is worked on takes of their CPUs, as Ray counts them.
        listen: where the page is; None: at the usual place, or at any; "none": nowhere.
        daemon: the finer points.
        lease_seconds: see Leases.
        metadata: addresses of the clouds' metadata services.
        poll_seconds: how often these are asked.
    """

    urls: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    origins: tuple[str, ...] = ()
    shared_cache: str | None = None
    shared_cache_options: dict[str, Any] | None = field(default=None, repr=False)
    into: str | None = None
    cache_dir: str | Path | None = None
    cache_size: str | int | None = None
    prepare: Recipe | None = None
    recipe_of: MakeRecipe | None = None
    window: str | None = None
    storage_options: dict[str, Any] | None = field(default=None, repr=False)
    concurrency: int | None = None
    bandwidth: str | None = None
    once: bool = False
    notices: str = "auto"
    grace_seconds: float = GRACE_SECONDS
    ray: str | None = None
    ray_cpus: float = 1.0
    listen: str | None = None
    daemon: DaemonOptions = field(default_factory=DaemonOptions)
    lease_seconds: float = LEASE_SECONDS
    metadata: Mapping[str, str] = field(default_factory=lambda: METADATA)
    poll_seconds: float = POLL_SECONDS


class Service:
    """A daemon and what is around it; a context manager of the main thread: within it signals are notices.

    Raises:
        OptionError: something that can't be asked for.
        CacheError: the tier of this node can't be used.
    """

    def __init__(self, options: ServiceOptions):
        self._options = options
        self._cloud = _cloud(options.notices)
        self._recipes = Recipes(options.prepare, options.recipe_of)
        self._named = None if options.urls else Named.of(options.origins)
        self._notice = Notice()
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
        """Give back all that it holds; once is enough."""
        self._stack.close()

    def status(self) -> Status:
        """How far it is; at any time, from any thread."""
        return self._daemon.status()

    def run(self) -> Status:
        """Work until it is told to end, by a signal or a cloud, or with `once` until all is held."""
        options = self._options
        bases, poll_seconds = options.metadata, options.poll_seconds
        watch = Watch(self._notice, self._cloud, bases=bases, poll_seconds=poll_seconds)
        with contextlib.closing(watch):
            return self._daemon.run(self._notice)

    def _made(self, stack: contextlib.ExitStack) -> Daemon:
        options = self._options
        settings = read_settings(
            cache_dir=options.cache_dir, cache_size=options.cache_size, shared_cache=options.shared_cache
        )
        shared = SharedOptions.of(settings, options.shared_cache_options)
        if shared is not None:  # what is to be stored is stored by the target
            shared = dataclasses.replace(shared, write_back=False)
        if shared is None and not options.urls:
            raise OptionError("nothing to do: give URLs, or a shared cache in which runs are published")
        if shared is None and (options.runs or options.into == "shared"):
            raise OptionError("give --shared-cache: that is where runs are published, and shards stored")
        if options.into not in (None, "shared", "local"):
            raise OptionError(f"into={options.into!r}: it has to be shared or local")
        listed = expand_urls(options.urls) if options.urls else None
        if listed is not None:
            warn_of_shared_headers(listed, options.storage_options)
        if options.ray is not None:
            return self._spread(stack, options.ray, shared, listed)
        tier = open_tier(settings)
        demand_file = stack.enter_context(contextlib.closing(DemandFile(tier.root / "runs")))
        counts = Counters()
        sharing = stack.enter_context(contextlib.closing(Sharing(shared, counts)))
        objects = None if sharing.tier is None else sharing.tier.objects
        is_near = sharing.tier is None or options.into == "local"
        target: Target = LocalTarget(tier)
        leases = None
        if sharing.tier is not None and not is_near:
            target = stack.enter_context(contextlib.closing(SharedTarget(sharing.tier)))
            node = _node(tier)
            own = Leases(
                sharing.tier.objects,
                lease_seconds=options.lease_seconds,
                address=f"{node}.{demand_file.path.name}",
                has_gone=lambda address: _has_gone(tier, node, address),
            )
            leases = stack.enter_context(contextlib.closing(own))
        tuned = self._tuned()
        origins = TaskOrigins(
            counts,
            options.storage_options,
            tuned.origin,
            Throttle(tuned.bytes_per_second),
            self._recipes,
            through=sharing.through if is_near else None,
            through_source=sharing.through,
            named=self._named,
        )
        make_executor = functools.partial(
            LocalExecutor,
            tier=tier,
            target=target,
            open_origin=origins,
            threads=tuned.concurrency,
            preparing=_cpus() if options.concurrency is None else None,
            no_room_seconds=tuned.no_room_seconds,
            stopped_seconds=tuned.stopped_seconds,
            counts=counts,
        )
        return Daemon(
            self._wanted(listed, objects, tier, demand_file, is_near=is_near),
            target,
            make_executor,
            leases=leases,
            options=tuned,
            demand_file=demand_file,
            counts=counts,
        )

    def _spread(
        self, stack: contextlib.ExitStack, address: str, shared: SharedOptions | None, listed: UrlList | None
    ) -> Daemon:
        """A daemon that runs its tasks on the nodes of a Ray cluster."""
        options, tuned = self._options, self._tuned()
        if shared is None or options.into == "local":
            raise OptionError(
                "--ray needs a shared cache to bring shards into (--shared-cache): what lies on the disks of "
                "the cluster's nodes is of no use to trainers, and goes with them"
            )
        if listed is not None and any(map(is_local, listed)):
            raise OptionError(
                "--ray can't bring files of this machine, which other nodes don't see: give URLs of an origin"
            )
        if tuned.bytes_per_second is not None and options.concurrency is None:
            raise OptionError(
                "--bandwidth with --ray needs --concurrency: each of so many shards gets its part of it"
            )
        counts = Counters()
        tier = shared.open_tier(counts)
        target = stack.enter_context(contextlib.closing(SharedTarget(tier)))
        sign = f"probes/{secrets.token_hex(8)}"
        job = Job(
            shared=shared,
            sign=sign,
            storage_options=options.storage_options,
            cache_dir=None if options.cache_dir is None else str(options.cache_dir),
            cache_size=options.cache_size,
            bytes_per_second=tuned.bytes_per_second and tuned.bytes_per_second / tuned.concurrency,
            origin=tuned.origin,
            no_room_seconds=tuned.no_room_seconds,
            named=self._named,
        )
        ray = connect(address)
        stack.callback(ray.shutdown)
        tier.objects.write(sign, b"one tier for all nodes")
        stack.callback(lambda: tier.objects.until(threading.Event()).delete(sign))
        make_executor = functools.partial(
            RayExecutor,
            ray=ray,
            job=job,
            recipes=self._recipes,
            cpus=options.ray_cpus,
            most=options.concurrency,
            counts=counts,
        )
        wanted = self._wanted(listed, tier.objects, None, None, is_near=False)
        return Daemon(wanted, target, make_executor, options=tuned, counts=counts)

    def _wanted(
        self,
        listed: UrlList | None,
        objects: Objects | None,
        tier: Tier | None,
        demand_file: DemandFile | None,
        *,
        is_near: bool,
    ) -> Demand:
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
        shards = ShardList(listed, options.storage_options, options.prepare.name if options.prepare else "")
        if tier is None or demand_file is None or not is_near:
            return ListDemand(shards, window)
        return ListDemand(shards, window, tier.root / "runs", demand_file.path)

    def _tuned(self) -> DaemonOptions:
        options = self._options
        return dataclasses.replace(
            options.daemon,
            concurrency=options.daemon.concurrency if options.concurrency is None else options.concurrency,
            bytes_per_second=None
            if options.bandwidth is None
            else parse_size(options.bandwidth, "bandwidth"),
            once=options.once,
        )

    def _status_server(self, stack: contextlib.ExitStack) -> StatusServer | None:
        """The page; at the usual place, or beside a daemon that has it."""
        listen = self._options.listen
        if listen == "none":
            return None
        try:
            server = StatusServer(self._daemon.status, listen or DEFAULT_LISTEN)
        except OptionError:
            if listen is not None:
                raise
            server = StatusServer(self._daemon.status, "127.0.0.1:0")
        logger.info("/metrics, /healthz and /status are at %s", server.url)
        return stack.enter_context(server)


def _cpus() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _node(tier: Tier) -> str:
    """A name of this node's cache, as long as the machine runs."""
    status = tier.root.stat()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        known = repr([boot, str(tier.root), status.st_dev, status.st_ino])
        return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()
    return secrets.token_hex(16)


def _has_gone(tier: Tier, node: str, address: str) -> bool:
    """Whether a daemon of this node has ended: by the lock on the file in which it says what it fills."""
    of, _, name = address.partition(".")
    if of != node or not _RUN_FILE.fullmatch(name):
        return False
    with contextlib.suppress(OSError):
        return not lives(tier.root / "runs" / name)
    return False


def _cloud(text: str) -> Cloud:
    for cloud in get_args(Cloud):
        if cloud == text:
            found: Cloud = cloud
            return found
    raise OptionError(f"notices={text!r}: it has to be one of {', '.join(get_args(Cloud))}")
