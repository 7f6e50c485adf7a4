"""Commands on derived shards of rows, in this node's cache and in a shared cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamload.cli.features.options import SHORT, minute
from streamload.cli.logs import progress_bar
from streamload.cli.options import roots_of, storage_options_of
from streamload.cli.terminal import print_table, say

if TYPE_CHECKING:
    from streamload.derived.store.shard_catalog import FingerprintShards, HeldRows, Removed, RowShards


def places_of(
    directory: str | None, shared_cache: str | None, shared_cache_options: str | None
) -> "list[RowShards]":
    """Where a command looks for derived shards: this node's caches that exist, and the shared cache."""
    from streamload.cache.shared.objects import Objects, refuse_url
    from streamload.cache.tier import Tier
    from streamload.derived.store.shard_catalog import NodeRowShards, SharedRowShards
    from streamload.options import read_settings

    free_disk = read_settings().free_disk
    roots = dict.fromkeys(roots_of(None if directory is None else [directory]))
    tiers = [Tier.open(root, free_disk=free_disk) for root in roots if (root / "tier.json").is_file()]
    places: list[RowShards] = [NodeRowShards(tier) for tier in tiers]
    if shared_cache is not None:
        refuse_url(shared_cache, "--shared-cache")
        storage = storage_options_of(shared_cache_options, "--shared-cache-options")
        places.append(SharedRowShards(Objects(shared_cache, storage)))
    return places


def fingerprints_in(places: "Iterable[RowShards]") -> "list[FingerprintShards]":
    """Derived shards in these places."""
    return [entry for place in places for entry in place.fingerprints()]


def as_dict_of_shards(held: "FingerprintShards") -> dict[str, Any]:
    """The derived shards of a fingerprint for JSON."""
    from streamload.cache.inventory import as_time

    return {
        "where": held.where,
        "label": held.label,
        "fingerprint": held.fingerprint,
        "shards": len(held.shards),
        "rows": held.rows,
        "size_bytes": held.size_bytes,
        "last_used": as_time(held.used_at),
        "unreadable": sum(bool(shard.cause) for shard in held.shards),
    }


def print_shards(held: "Sequence[FingerprintShards]", title: str = "derived shards of") -> None:
    """Print a table of them; nothing if there are none."""
    from streamload.cache.inventory import as_time
    from streamload.metrics import format_bytes

    if held:
        cells = (
            (entry.label or "(unreadable)", entry.fingerprint[:SHORT], f"{len(entry.shards):,}",
             f"{entry.rows:,}", format_bytes(entry.size_bytes), minute(as_time(entry.used_at)), entry.where)
            for entry in held
        )  # fmt: skip
        print_table((title, "fingerprint", "shards", "rows", "size", "last used", "in"), cells)


@dataclass(slots=True)
class VerifiedShards:
    """The derived shards that were read.

    Attributes:
        damaged: each with its place, and what is wrong.
        deleted: how many of these were deleted.
    """

    shards: int = 0
    rows: int = 0
    read_bytes: int = 0
    damaged: "list[tuple[RowShards, HeldRows, tuple[str, ...]]]" = field(default_factory=list)
    deleted: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        damaged = [
            {
                "where": place.where,
                "fingerprint": shard.fingerprint,
                "url": shard.url or shard.digest,
                "cause": cause,
            }
            for place, shard, causes in self.damaged
            for cause in causes
        ]
        counts = {"shards": self.shards, "rows": self.rows, "read_bytes": self.read_bytes}
        return {**counts, "damaged": damaged, "deleted": self.deleted}


def verify_shards(places: "Iterable[RowShards]", *, delete: bool) -> VerifiedShards:
    """Read all derived shards in these places, with a progress line on a terminal; delete damaged ones."""
    verified = VerifiedShards()
    with progress_bar("{task.description}", is_counted=False) as bar:
        task = bar.add_task("0 derived shards", total=None)
        for place in places:
            for shard in place.held():
                checked = place.check(shard)
                if checked is None:
                    continue
                verified.shards += 1
                rows, causes = checked
                verified.rows += rows
                verified.read_bytes += shard.size_bytes
                if causes:
                    verified.damaged.append((place, shard, causes))
                    verified.deleted += len(place.remove([shard], "damaged").shards) if delete else 0
                bar.update(
                    task, description=f"{verified.shards:,} derived shards, {len(verified.damaged)} damaged"
                )
    return verified


def print_verified(verified: VerifiedShards) -> None:
    """Print what is damaged; nothing if there are no derived shards."""
    from streamload.metrics import format_bytes

    if not verified.shards:
        return
    if verified.damaged:
        cells = (
            (held.url or held.digest, held.fingerprint[:SHORT],
             causes[0] + (f", and {len(causes) - 1} more" if len(causes) > 1 else ""), place.where)
            for place, held, causes in verified.damaged
        )  # fmt: skip
        print_table(("damaged rows of", "fingerprint", "cause", "in"), cells)
    result = (
        f"{len(verified.damaged):,} damaged, {verified.deleted:,} deleted"
        if verified.damaged
        else "no damage"
    )
    size = format_bytes(verified.read_bytes)
    say(f"{verified.shards:,} derived shards with {verified.rows:,} rows ({size}): {result}")


def remove_shards(
    places: "Sequence[RowShards]", chosen: "Sequence[FingerprintShards]", why: str, *, dry_run: bool
) -> "Removed":
    """Delete the derived shards of these fingerprints, each in its place."""
    from streamload.derived.store.shard_catalog import Removed

    done = []
    for place in places:
        going = [shard for held in chosen if held.where == place.where for shard in held.shards]
        if going:
            done.append(place.remove(going, why, dry_run=dry_run))
    return Removed(
        tuple(shard for removed in done for shard in removed.shards),
        tuple(shard for removed in done for shard in removed.kept),
    )


def as_dict_of_removed(removed: "Removed") -> dict[str, Any]:
    """Deleted and kept derived shards, for JSON."""
    return {
        "shards": len(removed.shards),
        "rows": sum(shard.rows for shard in removed.shards),
        "size_bytes": sum(shard.size_bytes for shard in removed.shards),
        "kept": [{"url": shard.url or shard.digest, "why": why} for shard, why in removed.kept],
    }


def print_removed(removed: "Removed", *, dry_run: bool) -> None:
    """Print it; nothing if there was nothing to delete."""
    from streamload.metrics import format_bytes

    for shard, why in removed.kept:
        print(f"kept the rows of {shard.url or shard.digest}: {why}")
    if removed.shards:
        size = format_bytes(sum(shard.size_bytes for shard in removed.shards))
        rows = sum(shard.rows for shard in removed.shards)
        deleted = "would delete" if dry_run else "deleted"
        print(f"{deleted} {len(removed.shards):,} derived shards with {rows:,} rows: {size}")
