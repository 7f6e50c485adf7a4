"""The options of a daemon: of its loop, and of the service around it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamload.cache.shared.leases import LEASE_SECONDS
from streamload.daemon.executor import NO_ROOM_SECONDS
from streamload.daemon.metadata import METADATA
from streamload.daemon.preemption import GRACE_SECONDS, POLL_SECONDS
from streamload.daemon.recipes import MakeRecipe
from streamload.errors import OptionError
from streamload.origins.origin import OriginOptions, Recipe
from streamload.prefetch.prefetcher import STOPPED_SECONDS
from streamload.shards.columns import Column

_GROUPS = re.compile(r"([0-9]{1,9})(?:/([0-9]{1,9}))?")


def parse_groups(text: str) -> range:
    """Groups of a run: "3" is one, "3/8" is 3, 11, 19, …: the share of the fourth of eight daemons.

    Raises:
        OptionError: it is neither.
    """
    match = _GROUPS.fullmatch(text)
    if match is not None:
        first, daemons = int(match[1]), None if match[2] is None else int(match[2])
        if daemons is None:
            return range(first, first + 1)
        if first < daemons:
            return range(first, sys.maxsize, daemons)
    raise OptionError(f'group={text!r} is neither a group ("3") nor a share of all groups ("0/8" to "7/8")')


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Options of a daemon.

    Attributes:
        concurrency: tasks that run at once.
        bytes_per_second: the most to take from origins; None: no cap.
        once: exit when each demanded shard is held or has failed.
        look_seconds: the longest between two looks at the demand.
        retry_seconds: until a failed task is retried, doubled each further time; infinite: it isn't.
        no_room_seconds: how long a task waits for room in the tier of this node before it fails.
        stopped_seconds: after how long without a heartbeat another filler of the tier is taken over from.
        trouble_seconds: how long `once` waits while the shared tier can't be asked; without it a daemon waits
            for as long as it takes.
        refusals: with `once`, tasks in a row that find no room before all others are given up; None: all are
            tried.
        evicts_announced: whether a shard that live runs will read may be evicted for one needed earlier.
        origin: timeouts and retries of transfers; None: those of a training, which waits for a server or
            bucket that is down, or for new credentials, as long as STREAMLOAD_ORIGIN_WAIT says.
    """

    concurrency: int = 8
    bytes_per_second: float | None = None
    once: bool = False
    look_seconds: float = 5.0
    retry_seconds: float = 15.0
    no_room_seconds: float = NO_ROOM_SECONDS
    stopped_seconds: float = STOPPED_SECONDS
    trouble_seconds: float = 60.0
    refusals: int | None = None
    evicts_announced: bool = True
    origin: OriginOptions | None = None


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """The options of a service, as of the command `streamload daemon`.

    Attributes:
        urls: the shards; beside runs, those of plans that don't tell URLs.
        runs: published runs to follow.
        groups: their groups to follow, see `parse_groups`; none: all.
        origins: web servers and buckets, as "https://host" and "s3://bucket", that may get credentials and
            have private addresses although only a plan names them. Those of `urls` may always.
        shared_cache, shared_cache_options, cache_dir, cache_size, storage_options: as for make_loader.
        into: the target, "shared" or "local"; None: the shared cache, if there is one.
        prepare: prepare shards by this recipe, whatever runs ask for.
        recipe_of: makes the recipe that a run asks for; None: shards of runs aren't prepared.
        facts: columns to make of the shards' samples; for the nodes of a Ray cluster.
        window: "100GB", "30min"; None: 100 GB ahead of a run, all of a list.
        concurrency: tasks that run at once; None: 8, of those that prepare images at most one per CPU, or as
            many as the Ray cluster has room for.
        bandwidth: the most bytes per second from origins.
        once: exit when all is held.
        notices: the cloud whose preemption notices are heeded.
        grace_seconds: the time left after a SIGTERM.
        ray: the address of a Ray cluster whose nodes run the tasks; None: this process runs them.
        ray_cpus: the CPUs of a node that a task takes, as Ray counts them.
        listen: the address of the status server; None: the usual port, or any; "none": no server.
        daemon: the options of its loop.
        lease_seconds: see Leases.
        metadata: the addresses of the clouds' metadata services.
        poll_seconds: how often they are polled.
    """

    urls: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    groups: tuple[range, ...] = ()
    origins: tuple[str, ...] = ()
    shared_cache: str | None = None
    shared_cache_options: dict[str, Any] | None = field(default=None, repr=False)
    into: str | None = None
    cache_dir: str | Path | None = None
    cache_size: str | int | None = None
    prepare: Recipe | None = None
    recipe_of: MakeRecipe | None = None
    facts: tuple[Column, ...] = ()
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
