"""Options that the cache commands share, and the tier that they mean."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from streamload.cache.tier import Tier

CacheDir = Annotated[str | None, typer.Option(help="The cache; as for make_loader by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]


def tier_at(cache_dir: str | None) -> "Tier":
    """The tier that a command is about.

    Raises:
        CacheError: there is none.
    """
    from streamload.cache.tier import Tier
    from streamload.settings import read_settings

    return Tier.open(read_settings(cache_dir=cache_dir).cache_dir)
