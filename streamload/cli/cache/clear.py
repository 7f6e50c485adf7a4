"""`streamload cache clear`: remove all that no running process uses."""

import sys
from typing import Annotated

import typer

from streamload.cli.cache.options import AsJson, CacheDir, DryRun, tier_at


def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove all shards but those that a running process has open or fills; the limit is kept."""
    from streamload.cache.garbage import clear as remove
    from streamload.cli.cache.show import show_removal
    from streamload.errors import OptionError
    from streamload.metrics import format_bytes

    tier = tier_at(cache_dir)
    if not (yes or dry_run):
        if not sys.stdin.isatty():
            raise OptionError(f"this removes what {tier.root} holds: say --yes, or --dry-run to see it first")
        going = remove(tier, dry_run=True)
        what = f"{len(going.removed):,} things ({format_bytes(going.removed_bytes)})"
        typer.confirm(f"Remove {what} from {tier.root}?", abort=True, err=True)
    show_removal(remove(tier, dry_run=dry_run), as_json)
