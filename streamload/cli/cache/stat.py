"""`streamload cache stat`: how full a tier is, with what, and which processes use it. Read-only."""

import json
from typing import TYPE_CHECKING

from streamload.cli.cache.options import AsJson, CacheDir, print_foreign, tier_at

if TYPE_CHECKING:
    from streamload.cache.inventory import Inventory

_SHARES = {
    "published": "published shards",
    "live_parts": "parts being filled",
    "orphaned_parts": "parts without a filler",
    "index_only": "indexes without data",
    "tombstones": "tombstones",
    "trash": "trash",
    "run_files": "files of runs",
}


def stat(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Show how full the cache is, with what, and which processes use it."""
    from streamload.cache.inventory import take_inventory

    inventory = take_inventory(tier_at(cache_dir))
    if as_json:
        print(json.dumps(inventory.as_dict(), indent=2))
    else:
        _print(inventory)


def _print(inventory: "Inventory") -> None:
    from rich.console import Console
    from rich.table import Table

    from streamload.cache.inventory import as_time
    from streamload.metrics import format_bytes

    console = Console(highlight=False)
    console.print(
        f"{inventory.root}: {format_bytes(inventory.used_bytes)} "
        f"of at most {format_bytes(inventory.limit_bytes)}, "
        f"{format_bytes(inventory.free_bytes)} free on the disk",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_column("disk", justify="right")
    for name, words in _SHARES.items():
        share = getattr(inventory, name)
        table.add_row(words, f"{share.count:,}", format_bytes(share.size_bytes))
    if inventory.rows_bytes:
        table.add_row("rows of modules", "", format_bytes(inventory.rows_bytes))
    table.add_row("samples", f"{inventory.samples:,}", "")
    console.print(table)
    if inventory.oldest_use is not None and inventory.newest_use is not None:
        console.print(
            f"shards last used from {as_time(inventory.oldest_use)} to {as_time(inventory.newest_use)}"
        )
    for run in inventory.runs:
        console.print(f"process {run.pid} will read {run.shards:,} shards; {run.held:,} of them are cached")
    for url in inventory.open_shards:
        console.print(f"open: {url}", markup=False, soft_wrap=True)
    print_foreign(console, inventory.foreign)
