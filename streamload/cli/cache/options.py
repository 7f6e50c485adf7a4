"""Options and output that the cache commands share, and the tier they select."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from streamload.cli.terminal import say

if TYPE_CHECKING:
    from streamload.cache.inventory import Foreign
    from streamload.cache.tier import Tier

CacheDir = Annotated[
    str | None,
    typer.Option(help='The cache; default: as for make_loader (with "auto", the one on disk if it exists).'),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]


def tier_at(cache_dir: str | None) -> "Tier":
    """The tier that a command works on.

    Raises:
        CacheError: it doesn't exist.
    """
    from streamload.cache.placement import memory_root
    from streamload.cache.tier import Tier
    from streamload.errors import CacheError
    from streamload.options import read_settings

    settings = read_settings(cache_dir=cache_dir)
    on_disk, in_memory = settings.cache_dir, memory_root(settings)
    if cache_dir is not None or in_memory == on_disk:
        return Tier.open(on_disk, free_disk=settings.free_disk)
    first, other = (in_memory, on_disk) if settings.cache == "memory" else (on_disk, in_memory)
    if (first / "tier.json").is_file() or not (other / "tier.json").is_file():
        return Tier.open(first, free_disk=settings.free_disk)
    if settings.cache == "auto":
        return Tier.open(other, free_disk=settings.free_disk)
    raise CacheError(f"there is no streamload cache at {first}, but one at {other}: --cache-dir={other}")


def print_foreign(foreign: Iterable["Foreign"]) -> None:
    """Print what is in the tier's directory, but isn't part of the tier."""
    for entry in foreign:
        say(f"not part of the cache, left alone: {entry.path} ({entry.what})")
