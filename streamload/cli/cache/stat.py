"""`streamload cache stat`: how full a tier is, with what, and which processes use it. Read-only."""

from typing import TYPE_CHECKING

from streamload.cli.cache.options import AsJson, CacheDir, print_foreign, tier_at
from streamload.cli.terminal import print_json, print_table, say

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
        print_json(inventory.as_dict())
    else:
        _print(inventory)


def _print(inventory: "Inventory") -> None:
    from streamload.cache.inventory import as_time
    from streamload.metrics import format_bytes

    used, limit, free = (
        format_bytes(size) for size in (inventory.used_bytes, inventory.limit_bytes, inventory.free_bytes)
    )
    say(f"{inventory.root}: {used} of at most {limit}, {free} free on the disk")
    shares = [(words, getattr(inventory, name)) for name, words in _SHARES.items()]
    rows = [(words, f"{share.count:,}", format_bytes(share.size_bytes)) for words, share in shares]
    rows += [("rows of modules", "", format_bytes(inventory.rows_bytes))] if inventory.rows_bytes else []
    print_table(("what", "count", "disk"), [*rows, ("samples", f"{inventory.samples:,}", "")], head=False)
    if inventory.oldest_use is not None and inventory.newest_use is not None:
        say(f"shards last used from {as_time(inventory.oldest_use)} to {as_time(inventory.newest_use)}")
    for run in inventory.runs:
        say(f"process {run.pid} will read {run.shards:,} shards; {run.held:,} of them are cached")
    for url in inventory.open_shards:
        say(f"open: {url}")
    print_foreign(inventory.foreign)
