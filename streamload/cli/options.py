"""The options that several commands have, and what is made of their values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.errors import OptionError
from streamload.options import Option, Settings, read_settings
from streamload.options.storage import FileOptions, parse_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamload.cache.shared.sharing import SharedOptions
    from streamload.derived.prepare.preparation import Preparation
    from streamload.origins.origin import Recipe


def _flag(option: Option[Any]) -> Any:
    """The flag of an option that also has a variable; typer makes its name from the parameter's."""
    return typer.Option(help=f"{option.help} ({option.variable})", show_default=False)


CacheDir = Annotated[str | None, _flag(Settings.cache_dir)]
CacheSize = Annotated[str | None, _flag(Settings.cache_size)]
Cache = Annotated[str | None, _flag(Settings.cache)]
MemorySize = Annotated[str | None, _flag(Settings.memory_size)]
SharedCache = Annotated[str | None, _flag(Settings.shared_cache)]
WriteBack = Annotated[bool | None, _flag(Settings.write_back)]
SharedCacheOptions = Annotated[
    str | None, typer.Option(help="For the shared cache's object store, as --storage-options.")
]
StorageOptions = Annotated[
    str | None,
    typer.Option(help="For the object store, as JSON: '{\"anon\": true}'; or @FILE with that, for secrets."),
]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Shards to work on at the same time. None: 8; with --ray what has room."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(help='Let the nodes of a Ray cluster do the work: "host:6379", "ray://host:10001", "auto".'),
]
Urls = Annotated[list[str], typer.Argument(help="As for make_loader: braces, '::', pipe:, s3:// …")]
CacheDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--cache-dir", help="A cache of the runs; may be given more than once. None: as for make_loader."
    ),
]
ImageKey = Annotated[str, typer.Option(help="As Shards(image_key=…) of the training.")]
TextKey = Annotated[str, typer.Option(help="As Shards(text_key=…) of the training, for texts.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
Features = Annotated[
    str | None,
    typer.Option(
        help="Make rows of features: package.module:name of a module or Features, or of what makes one, "
        "as for `streamload features make`."
    ),
]
RayCpus = Annotated[float, typer.Option(min=0.01, help="With --ray: what each shard takes of their CPUs.")]


def roots_of(cache_dirs: list[str] | None) -> list[Path]:
    """Directories of this node's runs: the named caches, else those that a loader here would use."""
    from streamload.cache.tier import memory_root

    if cache_dirs:
        return [read_settings(cache_dir=directory).cache_dir for directory in cache_dirs]
    settings = read_settings()
    return [settings.cache_dir, memory_root(settings)]


def storage_options_of(text: str | None, name: str = "--storage-options") -> dict[str, Any] | None:
    """The value of --storage-options, or of another option that is like it.

    Args:
        text: JSON, or "@" and the path of a file with it: all users of a machine see a command line. The file
            is read again when its credentials are refused.

    Raises:
        OptionError: it is no JSON object, or there is no such file.
    """
    if text is None:
        return None
    if text.startswith("@"):
        return FileOptions.read(str(Path(text[1:]).expanduser().absolute()), name)
    return parse_options(text, name)


def recipe_of(
    prepare: str | None, features: str | None, cache_dir: str | None, shared: SharedOptions | None = None
) -> Recipe | None:
    """The recipe of --prepare or --features; None: neither was given.

    Args:
        prepare: of --prepare.
        features: of --features.
        cache_dir: of --cache-dir, where rows of features are kept.
        shared: has the rows for other nodes, too; None: they are for this node.

    Raises:
        OptionError: it is none, or both were given.
    """
    if features is None:
        return None if prepare is None else preparation_of(prepare)
    if prepare is not None:
        raise OptionError("--prepare makes images and --features makes rows: give one of them")
    from streamload.features.named import NamedFeatures
    from streamload.loader.feature_recipe import feature_recipe

    return feature_recipe(NamedFeatures(features), cache_dir, shared)


def shared_of(shared_cache: str | None, storage_options: Mapping[str, Any] | None) -> SharedOptions | None:
    """A shared cache that a command stores in; None: there is none."""
    from streamload.cache.shared.sharing import SharedOptions

    return SharedOptions.of(read_settings(shared_cache=shared_cache), storage_options)


def preparation_of(text: str) -> Preparation:
    """The recipe that --prepare, or a run, asks for; from now on each thread works with one of torch's.

    Raises:
        OptionError: it is none.
    """
    import torch

    from streamload.derived.prepare.preparation import Preparation

    preparation = Preparation.parse(text, read_settings().max_image_pixels)
    torch.set_num_threads(1)
    return preparation
