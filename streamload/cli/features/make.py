"""`streamload features make` and `check`: compute features ahead of a training, or some of them again."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.logs import progress
from streamload.cli.options import (
    AsJson,
    CacheDir,
    ImageKey,
    RayAddress,
    RayCpus,
    SharedCache,
    SharedCacheOptions,
    StorageOptions,
    TextKey,
    Urls,
    shared_of,
    storage_options_of,
)
from streamload.errors import OptionError

if TYPE_CHECKING:
    from streamload import Stats
    from streamload.derived.calls.features import Features
    from streamload.features.named import NamedFeatures

_CHECKED_TOGETHER = 8

Module = Annotated[
    str,
    typer.Option(
        help="Where the features are: package.module:name of a module or Features, or of a class or function "
        "that returns one when called without arguments. A module that a class makes is put into eval mode."
    ),
]
Preprocess = Annotated[
    str | None,
    typer.Option(help="package.module:name of the preprocess= of the training, where Features has none."),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="package.module:name of the tokenizer, for features of texts.")
]
Prepare = Annotated[str | None, typer.Option(help="As Images(prepare=…) of the training.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples that are computed together.")]
Workers = Annotated[
    int, typer.Option(min=0, help="Processes that decode; with --shared-cache shards that are made at once.")
]
Samples = Annotated[int, typer.Option(min=1, help="Samples whose rows are looked up.")]
Device = Annotated[str | None, typer.Option(help="Where the module computes: it is moved there.")]


def make(
    urls: Urls,
    module: Module,
    preprocess: Preprocess = None,
    tokenizer: Tokenizer = None,
    image_key: ImageKey = "jpg;png;jpeg;webp",
    text_key: TextKey = "txt",
    prepare: Prepare = None,
    batch_size: BatchSize = 64,
    workers: Workers = 4,
    device: Device = None,
    cache_dir: CacheDir = None,
    shared_cache: SharedCache = None,
    shared_cache_options: SharedCacheOptions = None,
    storage_options: StorageOptions = None,
    ray: RayAddress = None,
    ray_cpus: RayCpus = 1.0,
    as_json: AsJson = False,
) -> None:
    """Compute the features of all samples, and store them where a training finds them.

    Without --shared-cache they are rows of this node. With it they are stored there for other nodes:
    those of each shard by one of the machines that run this command at the same time, or by a node of --ray.

    Stop it at any time: a second call computes what is missing. Rows are found by a training whose module,
    transform and image_key are the same; `streamload features why` names what differs. Several of these may
    run at the same time. STREAMLOAD_CACHE_DIR and STREAMLOAD_CACHE_SIZE hold as for the training.
    """
    from streamload.features.named import NamedFeatures

    named = NamedFeatures(module, preprocess, tokenizer, image_key, text_key, prepare, batch_size, device)
    storage = storage_options_of(storage_options)
    if shared_cache is None and ray is None:
        _store_rows(urls, named, storage, workers, as_json, cache_dir)
        return
    _make_shards(
        urls,
        named,
        as_json,
        shared_cache=shared_cache,
        shared_cache_options=storage_options_of(shared_cache_options, "--shared-cache-options"),
        storage_options=storage,
        cache_dir=cache_dir,
        concurrency=max(1, workers),
        ray=ray,
        ray_cpus=ray_cpus,
    )


def _make_shards(
    urls: list[str],
    named: NamedFeatures,
    as_json: bool,
    **options: Any,  # of ServiceOptions
) -> None:
    """Make rows in the shared cache; the exit code is 1 if those of some shards could not be made."""
    from streamload.cache.copying import folders_to_copy
    from streamload.cache.shard import ShardList
    from streamload.cli.daemon import print_failures, run_to_end
    from streamload.daemon.options import ServiceOptions
    from streamload.loader.feature_recipe import feature_recipe
    from streamload.options import read_settings
    from streamload.urls import expand_urls

    listed = expand_urls(urls)
    if any(ShardList(listed, None, copied=folders_to_copy(listed, read_settings().copy)).are_local()):
        raise OptionError(
            "rows of files of this machine aren't shared: give URLs of an origin, or leave out --shared-cache"
        )
    shared = shared_of(options["shared_cache"], options["shared_cache_options"])
    recipe = feature_recipe(named, options["cache_dir"], shared)
    service = ServiceOptions(
        urls=tuple(urls), prepare=recipe, into="shared", once=True, notices="none", listen="none", **options
    )
    status, counts = run_to_end(service), recipe.counts.snapshot()
    report = {
        "shards": status.wanted,
        "held": status.held,
        "made": status.done,
        "computed": counts.feature_rows_computed,
        "found": counts.feature_rows_read,
        "failed": status.failed,
    }
    if as_json:
        print(json.dumps(report))
    else:
        print(
            f"the rows of {status.held:,} of {status.wanted:,} shards are in the shared cache, those of "
            f"{status.done:,} were made now: {report['computed']:,} features were computed here, "
            f"{report['found']:,} read"
        )
        print_failures(status)
    if not status.is_complete:
        raise typer.Exit(1)


def _store_rows(
    urls: list[str],
    named: NamedFeatures,
    storage: dict[str, Any] | None,
    workers: int,
    as_json: bool,
    cache_dir: str | None,
) -> None:
    """Store rows of this node, by a loader; the exit code is 1 if not all of them could be stored."""
    from streamload.derived.calls.module_cache import cache_info

    features = named.features()
    stats = _read_rows(urls, named, features, storage, workers, cache_dir)
    report = {
        "samples": stats.samples_yielded,
        "computed": stats.feature_rows_computed,
        "found": stats.feature_rows_read,
        "skipped": sum(stats.samples_skipped.values()),
        "not_stored": cache_info(features.module).refused,
    }
    if as_json:
        print(json.dumps(report))
    else:
        print(
            f"{report['samples']:,} samples: {report['computed']:,} features were computed, "
            f"{report['found']:,} were there; {report['skipped']:,} samples can't be used"
        )
        if report["not_stored"]:
            print(f"{report['not_stored']:,} rows were not stored: no room, or the disk refused them")
    if report["not_stored"]:
        raise typer.Exit(1)


def _read_rows(
    urls: list[str],
    named: NamedFeatures,
    features: Features,
    storage: dict[str, Any] | None,
    workers: int,
    cache_dir: str | None,
    samples: int | None = None,
) -> Stats:
    """Read the rows of samples, or of all, by a loader; missing ones are computed and stored."""
    from dataclasses import replace

    import streamload
    from streamload.loader.feature_recipe import loader_arguments

    features.images = False
    options = loader_arguments(named, features)
    options["shards"] = replace(options["shards"], storage_options=storage)
    made = streamload.make_loader(
        "::".join(urls), num_workers=workers, device=named.device, cache_dir=cache_dir, **options
    )
    with made as loader, progress("samples", always=True) as show:
        show(total=samples or loader.num_samples)
        for batch in loader:
            features(batch)
            show(advance=len(batch["features"]))
            if samples is not None and loader.stats().samples_yielded >= samples:
                break
        return loader.stats()


def check(
    urls: Urls,
    module: Module,
    preprocess: Preprocess = None,
    tokenizer: Tokenizer = None,
    image_key: ImageKey = "jpg;png;jpeg;webp",
    text_key: TextKey = "txt",
    prepare: Prepare = None,
    samples: Samples = 256,
    device: Device = None,
    cache_dir: CacheDir = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Compute some stored features again and compare, within what rounding explains.

    A training computes nothing again where all rows are there and the module isn't built; this does, by the
    same module, transform and image_key. Rows that differ are never read again, by no training. Samples
    without a row get one.
    """
    from streamload.derived.calls.module_cache import switches
    from streamload.derived.proof.lazy import build
    from streamload.derived.proof.row_check import checks_made
    from streamload.errors import FeatureMismatch
    from streamload.features.named import NamedFeatures

    named = NamedFeatures(
        module, preprocess, tokenizer, image_key, text_key, prepare, _CHECKED_TOGETHER, device
    )
    features = named.features()
    build(features.module)
    switches.hits_between = (1, 1)
    try:
        counts = _read_rows(urls, named, features, storage_options_of(storage_options), 0, cache_dir, samples)
    except FeatureMismatch as exc:
        print(exc, file=sys.stderr)
        raise typer.Exit(1) from exc
    report = {
        "samples": counts.samples_yielded,
        "rows": counts.feature_rows_read,
        "checked": checks_made(),
    }
    if as_json:
        print(json.dumps(report))
    else:
        print(
            f"{report['rows']:,} of {report['samples']:,} samples have rows; {report['checked']:,} "
            f"comparisons with what the module computes now found no difference"
        )
