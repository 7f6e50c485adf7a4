"""`streamload warm`: fill the cache once, before or during a training."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.logs import progress
from streamload.cli.options import (
    AsJson,
    Cache,
    CacheDir,
    CacheSize,
    Concurrency,
    Features,
    ImageKey,
    MemorySize,
    RayAddress,
    RayCpus,
    SharedCache,
    SharedCacheOptions,
    StorageOptions,
    TextKey,
    Urls,
    WriteBack,
    recipe_of,
    shared_of,
    storage_options_of,
)
from streamload.cli.terminal import format_bytes
from streamload.errors import OptionError

if TYPE_CHECKING:
    from streamload.daemon.warm import WarmProgress, WarmReport
    from streamload.shards.columns import Column


Prepare = Annotated[
    str | None, typer.Option(help='Keep their images prepared: "raw", "raw-256", "jpeg-256-q90".')
]
Facts = Annotated[
    list[str] | None,
    typer.Option(
        help="Make a fact of Shards(facts=…) for each sample: NAME=FORM, or FORM alone where the name "
        "doesn't matter: tokens, json:FIELD, a table (.parquet, .npz, .csv, .jsonl), or package.module:name "
        "of a function. Repeatable."
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="package.module:name of the training's tokenizer, for --facts tokens.")
]


Into = Annotated[
    str | None,
    typer.Option(help='With --ray, where to: "shared", or "local": all of them into each node\'s own cache.'),
]


def warm(
    urls: Urls,
    cache_dir: CacheDir = None,
    cache_size: CacheSize = None,
    cache: Cache = None,
    memory_size: MemorySize = None,
    shared_cache: SharedCache = None,
    shared_cache_options: SharedCacheOptions = None,
    write_back: WriteBack = None,
    storage_options: StorageOptions = None,
    concurrency: Concurrency = None,
    ray: RayAddress = None,
    ray_cpus: RayCpus = 1.0,
    into: Into = None,
    prepare: Prepare = None,
    features: Features = None,
    facts: Facts = None,
    tokenizer: Tokenizer = None,
    image_key: ImageKey = "jpg;png;jpeg;webp",
    text_key: TextKey = "txt",
    as_json: AsJson = False,
) -> None:
    """Fill the cache with shards once.

    Stop it at any time: a second call takes up where the first one was. The exit code is 1 if a shard could
    not be had, or not be stored in the shared cache as --write-back asked. With --ray it is the shared cache
    that is filled, by all nodes of a cluster; with --into local, too, the own cache of each node.
    """
    shared_options = storage_options_of(shared_cache_options, "--shared-cache-options")
    is_stored = features is not None and (write_back or (ray is not None and into != "local"))
    shared = shared_of(shared_cache, shared_options) if is_stored else None
    common: dict[str, Any] = {
        "cache_dir": cache_dir,
        "cache_size": cache_size,
        "shared_cache": shared_cache,
        "shared_cache_options": shared_options,
        "write_back": write_back,
        "storage_options": storage_options_of(storage_options),
        "prepare": recipe_of(prepare, features, cache_dir, shared),
    }
    if into not in (None, "shared", "local") or (into == "shared" and ray is None):
        raise OptionError(f'--into {into}: it is "shared" or "local", and for --ray; see --write-back')
    columns = tuple(_columns(facts or [], image_key, text_key, tokenizer))
    of_a_node: dict[str, Any] = {"cache": cache, "memory_size": memory_size, "facts": columns}
    of_a_node["concurrency"] = 8 if concurrency is None else concurrency
    if ray is not None and into == "local":
        _warm_each_node(ray, ray_cpus, as_json, urls=urls, **common, **of_a_node)
        return
    if ray is not None:
        by_ray: dict[str, Any] = {
            "ray": ray,
            "ray_cpus": ray_cpus,
            "concurrency": concurrency,
            "facts": columns,
        }
        _warm_by_ray(urls, [cache, memory_size], as_json, **common, **by_ray)
        return
    from streamload.daemon.warm import warm as fill
    from streamload.limits import allow_many_files

    allow_many_files()
    with _bar() as show:
        report = fill(
            urls,
            on_progress=show,
            **common,
            **of_a_node,
        )
    if as_json:
        print(json.dumps(_plain(report)))
    else:
        _print(report)
    if report.failures or report.shared_failures:
        raise typer.Exit(1)


def _columns(facts: list[str], image_key: str, text_key: str, tokenizer: str | None) -> "list[Column]":
    """The columns of --facts; torch is imported only if there are any."""
    if not facts:
        return []
    from streamload.facts.recipes import read_facts
    from streamload.features.named import named

    forms: dict[str, Any] = {}
    for text in facts:
        name, equals, form = text.partition("=")
        form = form if equals else name
        is_form = form == "tokens" or form.startswith("json:") or ".csv" in form or ".parquet" in form
        forms[name] = form if is_form else named(form)
    return list(
        read_facts(forms, image_key, text_key, None if tokenizer is None else named(tokenizer)).values()
    )


def _print(report: "WarmReport") -> None:
    shared = f" and {format_bytes(report.bytes_shared)} from the shared cache" if report.bytes_shared else ""
    print(
        f"{report.shards_complete} of {report.shards} shards are in {report.cache_dir} "
        f"({report.shards_found_complete} were before), {format_bytes(report.bytes_arrived)} arrived{shared}"
    )
    if report.shards_local:
        print(
            f"{report.shards_local} of them are local files: only their indexes are in the cache, their data "
            f"is read where it is"
        )
    if report.shards_with_facts:
        print(f"the facts of {report.shards_with_facts} shards are beside their indexes")
    if report.shared_stored:
        print(f"{report.shared_stored} were stored in the shared cache")
    without_room = set(report.no_room)
    for url, why in (*report.failures.items(), *report.shared_failures.items()):
        if url not in without_room:
            print(f"{url}: {why}")
    if report.no_room:
        print(
            f"{len(report.no_room):,} were left, the first of which is {report.no_room[0]}: "
            f"{report.failures[report.no_room[0]]}"
        )


def _plain(report: "WarmReport | str") -> Any:
    """A report, or why there is none, for JSON."""
    return report if isinstance(report, str) else {**asdict(report), "cache_dir": str(report.cache_dir)}


def _warm_each_node(ray: str, ray_cpus: float, as_json: bool, **options: Any) -> None:
    """Warm up each node of a Ray cluster, and print their reports as they come.

    Raises:
        typer.Exit: with 1 if a node lacks a shard, or couldn't be warmed up.
    """
    from streamload.daemon.ray_nodes import warm_nodes

    has_failed, reports = False, []
    for node, report in warm_nodes(ray, options, ray_cpus):
        reports.append({"node": node, "report": _plain(report)})
        has_failed |= isinstance(report, str) or bool(report.failures or report.shared_failures)
        if not as_json:
            print(f"{node}: ", end="")
            print(report) if isinstance(report, str) else _print(report)
    if as_json:
        print(json.dumps(reports))
    if has_failed:
        raise typer.Exit(1)


def _warm_by_ray(
    urls: list[str],
    of_this_node: list[str | None],
    as_json: bool,
    *,
    write_back: bool | None,
    **options: Any,  # of ServiceOptions
) -> None:
    from streamload.cli.daemon import serve
    from streamload.daemon.options import ServiceOptions

    if any(of_this_node):
        raise OptionError("--cache and --memory-size are for this node's cache, which --ray doesn't fill")
    if write_back is False:
        raise OptionError("--no-write-back leaves --ray nothing to do: it fills the shared cache")
    service = ServiceOptions(urls=tuple(urls), once=True, notices="none", listen="none", **options)
    serve(service, as_json)


@contextlib.contextmanager
def _bar() -> "Iterator[Callable[[WarmProgress], None]]":
    """Yield what draws the progress; the bar begins with the first: rich is imported while shards arrive."""
    with contextlib.ExitStack() as stack:
        show: Callable[..., None] | None = None

        def draw(done: "WarmProgress") -> None:
            nonlocal show
            if show is None:
                show = stack.enter_context(progress("shards, {task.description}", "connecting", always=True))
            arrived = f"{format_bytes(done.bytes_arrived)} arrived"
            show(total=done.shards, completed=done.shards_complete, description=arrived)

        yield draw
