"""`streamload features make`: compute the features of all samples ahead of a training."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from streamload.cli.options import (
    AsJson,
    SharedCache,
    SharedCacheOptions,
    StorageOptions,
    named,
    storage_options_of,
)
from streamload.errors import OptionError

if TYPE_CHECKING:
    from streamload.loader import Features, Loader
    from streamload.metrics import Snapshot

Urls = Annotated[list[str], typer.Argument(help="As for make_loader: braces, '::', pipe:, s3:// …")]
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
ImageKey = Annotated[str, typer.Option(help="As Shards(image_key=…) of the training.")]
TextKey = Annotated[str, typer.Option(help="As Shards(text_key=…), for features of texts.")]
Prepare = Annotated[str | None, typer.Option(help="As Images(prepare=…) of the training.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples that are computed together.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes that decode.")]
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
    shared_cache: SharedCache = None,
    shared_cache_options: SharedCacheOptions = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Compute the features of all samples, and store them where a training finds them.

    Stop it at any time: a second call computes what is missing. Rows are found by a training whose module,
    transform and image_key are the same; `streamload features why` names what differs. Several of these may
    run at the same time. STREAMLOAD_CACHE_DIR and STREAMLOAD_CACHE_SIZE hold as for the training.
    """
    import streamload

    features = _features(module, device)
    has_texts = features.inputs != "image"
    given = streamload.make_loader(
        "::".join(urls),
        named(tokenizer) if tokenizer is not None else None,
        preprocess=named(preprocess) if preprocess is not None else None,
        batch_size=batch_size,
        num_workers=workers,
        train=False,
        output="dict",
        device=device,
        shards=streamload.Shards(
            image_key=image_key,
            text_key=text_key if has_texts else None,
            storage_options=storage_options_of(storage_options),
            max_bad_samples=None,
        ),
        images=streamload.Images(prepare=prepare),
        cache=streamload.Cache(
            shared=shared_cache,
            shared_options=storage_options_of(shared_cache_options, "--shared-cache-options"),
        ),
        features={"features": features},
    )
    with given as loader:
        found = _computed(loader, features)
    _report(found, features, as_json)


def _report(found: Snapshot, features: Features, as_json: bool) -> None:
    """Say what was computed; the exit code is 1 if not all of it could be stored."""
    from streamload.derived.module_cache import cache_info

    refused = cache_info(features.module).refused
    report = {
        "samples": found.samples_yielded,
        "computed": found.feature_rows_computed,
        "found": found.feature_rows_read,
        "skipped": sum(found.samples_skipped.values()),
        "not_stored": refused,
    }
    if as_json:
        print(json.dumps(report))
    else:
        print(
            f"{report['samples']:,} samples: {report['computed']:,} features were computed, "
            f"{report['found']:,} were there; {report['skipped']:,} samples can't be used"
        )
        if refused:
            print(f"{refused:,} rows were not stored: no room, or the disk refused them")
    if refused:
        raise typer.Exit(1)


def _computed(loader: Loader, features: Features) -> Snapshot:
    """Compute all batches, and show how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("samples"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=loader.num_samples)
        for batch in loader:
            features(batch)
            bar.advance(task, len(batch["features"]))
    return loader.stats()


def _features(name: str, device: str | None) -> Features:
    import torch

    from streamload.loader import Features

    found = named(name)
    if not isinstance(found, torch.nn.Module | Features):
        if not callable(found):
            raise OptionError(
                f"--module {name}: expected a module, Features, or a class or function that makes one"
            )
        found = found()
        if isinstance(found, torch.nn.Module):
            found.eval()
    features = found if isinstance(found, Features) else Features(found)
    if device is not None:
        features.module.to(device)
    return features
