"""Tables that several cache commands print."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from streamload.cache.garbage import Removal
    from streamload.cache.inventory import Foreign


def show_removal(removal: "Removal", as_json: bool) -> None:
    """Print what was removed, or would be, and what stayed."""
    if as_json:
        print(json.dumps(removal.as_dict(), indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from streamload.metrics import format_bytes

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("would go" if removal.dry_run else "removed", overflow="fold")
    table.add_column("disk", justify="right")
    table.add_column("why")
    for item in removal.removed:
        table.add_row(escape(item.url or item.path), format_bytes(item.size_bytes), escape(item.why))
    if removal.removed:
        console.print(table)
    for item in removal.kept:
        console.print(f"stays: {item.url or item.path}: {item.why}", markup=False, soft_wrap=True)
    print_foreign(console, removal.foreign)
    console.print(
        f"{'would remove' if removal.dry_run else 'removed'} {len(removal.removed):,} things, "
        f"{format_bytes(removal.removed_bytes)}; the cache {'would take' if removal.dry_run else 'takes'} "
        f"{format_bytes(removal.used_bytes)} of at most {format_bytes(removal.limit_bytes)}"
    )
    if removal.used_bytes > removal.limit_bytes:
        console.print("still over the limit: the rest is in use; what runs will not grow beyond it")


def print_foreign(console: "Console", foreign: Sequence["Foreign"]) -> None:
    """Say what lies in the directory that is none of the cache's."""
    for found in foreign:
        console.print(
            f"not the cache's, left alone: {found.path} ({found.what})", markup=False, soft_wrap=True
        )
