"""`streamload cache gc` and `cache clear`: remove garbage, what is over a new limit, or everything unused."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from streamload.cli.cache.options import AsJson, CacheDir, DryRun, print_foreign, tier_at
from streamload.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from streamload.cache.garbage import Removal


def gc(
    all_parts: Annotated[
        bool, typer.Option("--all-parts", help="Also remove partial shards that a run could resume.")
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option(help='A new cache size, "500GB" or "80%", which is stored; evicts down to it.'),
    ] = None,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove what dead processes left, and with --limit what is over the new limit.

    What a running process has open or is filling stays.
    """
    import shutil

    from streamload.cache.garbage import collect_garbage
    from streamload.options import parse_cache_size

    tier = tier_at(cache_dir)
    limit_bytes = None
    if limit is not None:
        size = parse_cache_size(limit, "--limit")
        limit_bytes = size.limit_bytes(shutil.disk_usage(tier.root).free, tier.used_bytes)
    removal = collect_garbage(tier, all_parts=all_parts, limit_bytes=limit_bytes, dry_run=dry_run)
    _show(removal, as_json)


def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove all shards that no running process has open or is filling; the limit stays."""
    from streamload.cache.garbage import clear as remove
    from streamload.errors import OptionError
    from streamload.metrics import format_bytes

    tier = tier_at(cache_dir)
    if not (yes or dry_run):
        if not sys.stdin.isatty():
            raise OptionError(
                f"this removes the contents of {tier.root}: say --yes, or --dry-run to see them"
            )
        going = remove(tier, dry_run=True)
        items = f"{len(going.removed):,} items ({format_bytes(going.removed_bytes)})"
        typer.confirm(f"Remove {items} from {tier.root}?", abort=True, err=True)
    _show(remove(tier, dry_run=dry_run), as_json)


def _show(removal: "Removal", as_json: bool) -> None:
    """Print what was removed, or would be, and what was kept."""
    from streamload.metrics import format_bytes

    if as_json:
        print_json(removal.as_dict())
        return
    removed, takes = ("would remove", "would take") if removal.dry_run else ("removed", "takes")
    if removal.removed:
        rows = ((item.url or item.path, format_bytes(item.size_bytes), item.why) for item in removal.removed)
        print_table((removed, "disk", "reason"), rows)
    for item in removal.kept:
        say(f"kept: {item.url or item.path}: {item.why}")
    print_foreign(removal.foreign)
    say(
        f"{removed} {len(removal.removed):,} items, {format_bytes(removal.removed_bytes)}; the cache {takes} "
        f"{format_bytes(removal.used_bytes)} of at most {format_bytes(removal.limit_bytes)}"
    )
    if removal.used_bytes > removal.limit_bytes:
        say("still over the limit: the rest is in use, but will not grow")
