"""`streamload cache ls`: the shards of a tier. Read-only."""

from contextlib import closing
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from streamload.cli.cache.options import AsJson, CacheDir, tier_at
from streamload.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from streamload.cache.eviction import HeldShard
    from streamload.cache.tier import Tier

_STATES = {"shards": "complete", "parts": "arriving", "bare": "index only", "gone": "given up"}


def list_shards(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List the cached shards, how much of each has arrived, and when it was last used.

    A last line has the room of rows of modules, which `streamload features ls` lists.
    """
    from streamload.cache.directory import reserved_for_rows

    tier = tier_at(cache_dir)
    rows = sorted((_describe(shard) for shard in tier.shards()), key=lambda row: (row["url"], row["digest"]))
    rows_bytes = reserved_for_rows(tier.root)
    if as_json:
        used = {"used_bytes": tier.used_bytes, "rows_bytes": rows_bytes}
        print_json({"cache_dir": str(tier.root), **used, "limit_bytes": tier.limit_bytes, "shards": rows})
    else:
        _print(tier, rows, rows_bytes)


def _describe(shard: "HeldShard") -> dict[str, Any]:
    """A shard's row; its URL, samples and sizes come from its index, if that can be read."""
    from streamload.errors import StreamloadError
    from streamload.shards.index import IndexReader

    described: dict[str, Any] = {"url": "", "samples": 0, "size_bytes": None, "arrived_bytes": 0}
    try:
        with closing(IndexReader(shard.path)) as index:
            index.refresh()
            stated = None if "prepared" in index.meta else index.meta.get("size")
            described = {
                "url": index.meta["url"],
                "samples": index.count,
                "size_bytes": stated or index.size,
                "arrived_bytes": int(index.records["stop"].max()) if index.count else 0,
            }
    except (OSError, StreamloadError, KeyError) as exc:
        described["url"] = f"({type(exc).__name__}: {exc})"
    state = _STATES[shard.kind]
    if state == "complete":
        described["arrived_bytes"] = described["size_bytes"]
    used = datetime.fromtimestamp(shard.used_at, timezone.utc).isoformat(timespec="seconds")
    return {
        "digest": shard.digest,
        "state": state,
        **described,
        "disk_bytes": shard.size_bytes,
        "last_used": None if shard.is_superseded else used,
    }


def _print(tier: "Tier", rows: list[dict[str, Any]], rows_bytes: int) -> None:
    from streamload.metrics import format_bytes

    cells = (
        (
            row["url"],
            _state(row),
            f"{row['samples']:,}",
            format_bytes(row["disk_bytes"]),
            row["last_used"] or "superseded by its prepared form",
        )
        for row in rows
    )
    print_table(("shard", "state", "samples", "disk", "last used"), cells)
    used, limit = format_bytes(tier.used_bytes), format_bytes(tier.limit_bytes)
    say(f"{len(rows)} shards in {tier.root}: {used} of at most {limit}")
    if rows_bytes:
        say(f"rows of modules beside them: {format_bytes(rows_bytes)}")


def _state(row: dict[str, Any]) -> str:
    if row["state"] == "arriving" and row["size_bytes"]:
        return f"arriving, {row['arrived_bytes'] / row['size_bytes']:.0%}"
    return str(row["state"])
