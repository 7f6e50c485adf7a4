"""`streamload daemon`: hold shards before they are needed, on this node or for others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from streamload import limits
from streamload.cli.logs import logger, progress, progress_console
from streamload.cli.options import (
    AsJson,
    CacheDir,
    CacheSize,
    Concurrency,
    Features,
    RayAddress,
    RayCpus,
    SharedCache,
    SharedCacheOptions,
    StorageOptions,
    preparation_of,
    recipe_of,
    shared_of,
    storage_options_of,
)
from streamload.cli.terminal import format_bytes
from streamload.errors import OptionError

if TYPE_CHECKING:
    from streamload.daemon.options import ServiceOptions
    from streamload.daemon.service import Service
    from streamload.daemon.status import Status

_SHOW_SECONDS = 0.5
_PLAIN_SECONDS = 10.0


Urls = Annotated[
    list[str] | None,
    typer.Argument(help="The shards, as for make_loader; or the one word 'status'. None: see --run."),
]
Run = Annotated[
    list[str] | None,
    typer.Option(help="Which published run to follow; may be given more than once. None: the latest."),
]
Group = Annotated[
    list[str] | None,
    typer.Option(
        help='Which of its groups: "3", or "3/8" for the fourth of 8 daemons: 3, 11, 19, …; may be given '
        "more than once. None: all."
    ),
]
TrustedOrigin = Annotated[
    list[str] | None,
    typer.Option(
        help="Where a followed run may read with this daemon's credentials, and within this network: "
        '"https://host", "s3://bucket"; may be given more than once.'
    ),
]
Into = Annotated[str | None, typer.Option(help='Where to: "shared", or "local": this node\'s cache.')]
Window = Annotated[str | None, typer.Option(help='How far ahead of the readers: "100GB", "30min", "2h".')]
Prepare = Annotated[
    str | None,
    typer.Option(
        help='Hold them prepared: "raw", "raw-256". None: as the runs ask for it; "none": as they are.'
    ),
]
Bandwidth = Annotated[str | None, typer.Option(help='The most to take from origins in a second: "200MB".')]
Once = Annotated[bool, typer.Option("--once", help="End when all is held.")]
Notices = Annotated[
    str, typer.Option(help="Whose notices of preemption to heed: auto, aws, gcp, azure, none.")
]
Grace = Annotated[float, typer.Option(min=0.0, help="Seconds that are left after a SIGTERM.")]
Listen = Annotated[
    str | None, typer.Option(help='Where /metrics, /healthz and /status are; "none": nowhere.')
]


def daemon(
    urls: Urls = None,
    shared_cache: SharedCache = None,
    run: Run = None,
    group: Group = None,
    origin: TrustedOrigin = None,
    into: Into = None,
    window: Window = None,
    prepare: Prepare = None,
    features: Features = None,
    cache_dir: CacheDir = None,
    cache_size: CacheSize = None,
    shared_cache_options: SharedCacheOptions = None,
    storage_options: StorageOptions = None,
    concurrency: Concurrency = None,
    bandwidth: Bandwidth = None,
    once: Once = False,
    notices: Notices = "auto",
    grace: Grace = 30.0,
    ray: RayAddress = None,
    ray_cpus: RayCpus = 1.0,
    listen: Listen = None,
    as_json: AsJson = False,
) -> None:
    """Keep the next shards cached ahead of the readers: in this node's cache, or in a shared one for others.

    Ends on SIGTERM, on a cloud's notice that it takes the machine away, or with --once when all is held; the
    exit code is 1 if --once could not have a shard. Start it again, and as many as you like, at any time.
    """
    from streamload.daemon.options import ServiceOptions, parse_groups
    from streamload.daemon.status_server import DEFAULT_LISTEN

    if urls == ["status"]:
        show_status(listen or DEFAULT_LISTEN, as_json)
        return
    shared_options = storage_options_of(shared_cache_options, "--shared-cache-options")
    shared = shared_of(shared_cache, shared_options) if features is not None and into != "local" else None
    options = ServiceOptions(
        urls=tuple(urls or ()),
        runs=tuple(run or ()),
        groups=tuple(map(parse_groups, group or ())),
        origins=tuple(origin or ()),
        into=into,
        shared_cache_options=shared_options,
        shared_cache=shared_cache,
        prepare=recipe_of(None if prepare == "none" else prepare, features, cache_dir, shared),
        recipe_of=preparation_of if prepare is None else None,
        window=window,
        cache_dir=cache_dir,
        cache_size=cache_size,
        storage_options=storage_options_of(storage_options),
        concurrency=concurrency,
        bandwidth=bandwidth,
        once=once,
        notices=notices,
        grace_seconds=grace,
        ray=ray,
        ray_cpus=ray_cpus,
        listen=listen,
    )
    serve(options, as_json)


def serve(options: ServiceOptions, as_json: bool = False) -> None:
    """Run a daemon to its end, and print how it ended.

    Raises:
        typer.Exit: with 1 if `--once` could not hold a shard.
    """
    status = run_to_end(options)
    if as_json:
        print(json.dumps(dataclasses.asdict(status)))
    else:
        print(_line(status))
        print_failures(status)
    if options.once and not status.notice and (status.failed or not status.is_complete):
        raise typer.Exit(1)


def run_to_end(options: ServiceOptions) -> Status:
    """Run a daemon to its end, and show its status meanwhile."""
    from streamload.daemon.service import Service
    from streamload.limits import allow_many_files

    allow_many_files()
    with Service(options) as service, _shown(service):
        return service.run()


def print_failures(status: Status) -> None:
    """Print why shards could not be had."""
    for name, why in status.failed.items():
        print(f"{name}: {why}")


def show_status(listen: str, as_json: bool = False) -> None:
    """Print the status of a daemon on this machine.

    Raises:
        OptionError: no daemon answers there.
    """
    import urllib3

    from streamload.observe.page_server import url_at
    from streamload.options import listen_at

    url = url_at(*listen_at(listen))
    with urllib3.PoolManager(retries=False, timeout=5.0) as pools:
        try:
            answer = pools.request("GET", f"{url}/status", redirect=False)
            status = json.loads(answer.data)
            rows = {
                "following": status["following"],
                "window": f"{status['held']:,} of {status['wanted']:,} shards are held",
                "working on": ", ".join(status["working"]) or "nothing",
                "elsewhere": f"{status['elsewhere']:,} shards",
                "brought": f"{status['done']:,} shards, {format_bytes(status['bytes_arrived'])} arrived",
                "taken over": f"{status['taken_over']:,} leases",
                "waiting for": "; ".join(f"{name}: {why}" for name, why in status["waiting_for"].items())
                or "nothing",
                "failing": "; ".join(f"{name}: {why}" for name, why in status["failed"].items()) or "nothing",
                "trouble": status["trouble"] or "none",
                "notice": status["notice"] or "none",
            }
        except (urllib3.exceptions.HTTPError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise OptionError(f"no daemon answers at {listen}: {exc}; name another with --listen") from exc
    if as_json:
        print(json.dumps(status))
        return
    for name, text in rows.items():
        print(f"{name:<11} {text}")


@contextlib.contextmanager
def _shown(service: Service) -> Iterator[None]:
    """Show a daemon's status: a bar on a terminal, else lines of the log, ten seconds apart."""
    console, ended = progress_console(), threading.Event()
    follow = _bar if console.is_terminal and not console.quiet else _lines
    thread = threading.Thread(target=follow, args=(service.status, ended), name="streamload-show")
    limits.start(thread)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bar(status: Callable[[], Status], ended: threading.Event) -> None:
    with progress("shards, {task.description}", "looking") as show:
        while not ended.wait(_SHOW_SECONDS):
            current = status()
            show(total=current.wanted or None, completed=current.held, description=_short(current))


def _lines(status: Callable[[], Status], ended: threading.Event) -> None:
    last = ""
    while not ended.wait(_PLAIN_SECONDS):
        if (line := _line(status())) != last:
            logger.info("%s", line)
            last = line


def _line(status: Status) -> str:
    return f"{status.held:,} of {status.wanted:,} shards are held ({status.following}), {_short(status)}"


def _short(status: Status) -> str:
    parts = [f"{status.done:,} brought, {format_bytes(status.bytes_arrived)} arrived"]
    parts += [f"{len(status.failed):,} failing"] if status.failed else []
    parts += [status.trouble] if status.trouble else []
    parts += [f"told to end by {status.notice}"] if status.notice else []
    return ", ".join(parts)
