"""`streamload cache gc`: remove what no run can use, and what is over a smaller limit."""

from typing import Annotated

import typer

from streamload.cli.cache.options import AsJson, CacheDir, DryRun, tier_at


def gc(
    all_parts: Annotated[
        bool, typer.Option("--all-parts", help="Also remove begun shards that a run could go on with.")
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option(help='The new limit, kept with the cache: "500GB", "80%"; evicts down to it.'),
    ] = None,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove what is of no use: what dead processes left, and with --limit what is too much.

    Never what a running process has open or fills.
    """
    import shutil

    from streamload.cache.garbage import collect_garbage
    from streamload.cli.cache.show import show_removal
    from streamload.options import parse_cache_size

    tier = tier_at(cache_dir)
    limit_bytes = None
    if limit is not None:
        size = parse_cache_size(limit, "--limit")
        limit_bytes = size.limit_bytes(shutil.disk_usage(tier.root).free, tier.used_bytes)
    removal = collect_garbage(tier, all_parts=all_parts, limit_bytes=limit_bytes, dry_run=dry_run)
    show_removal(removal, as_json)
