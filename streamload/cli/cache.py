"""`streamload cache`: inspect, verify and clean up shards and rows; safe while trainings run."""

from __future__ import annotations

import enum
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.joins import held, remove_joins, show_joins
from streamload.cli.logs import progress
from streamload.cli.options import AsJson, DryRun, StorageOptions, Yes, storage_options_of
from streamload.cli.rows import clear_rows, collect_rows, has_rows, list_rows, verify_rows
from streamload.cli.terminal import confirm, format_bytes, print_json, print_table, say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streamload.cache.eviction import HeldShard
    from streamload.cache.garbage import Removal
    from streamload.cache.inventory import Foreign
    from streamload.cache.repair import Repair
    from streamload.cache.shard import Shard
    from streamload.cache.tier import Tier
    from streamload.cache.verify import ShardDamage
    from streamload.join.table import HeldJoin

cache = typer.Typer(
    help="Inspect, verify and clean up the cache; safe while trainings run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        "--path",
        help='The cache, or a cache_path of cache_module; default: as for make_loader (with "auto", the one '
        "on disk if it exists).",
        show_default=False,
    ),
]


class Kind(str, enum.Enum):
    """A kind of what a cache holds."""

    SHARDS = "shards"
    PREPARED = "prepared"
    COLUMNS = "columns"
    JOINS = "joins"


KindOption = Annotated[
    Kind | None,
    typer.Option(
        help="Only shards as their origins have them, prepared shards, columns: rows of modules, those of "
        "calls, too; or joins: indexes of joined files.",
        show_default=False,
    ),
]
_STATES = {"shards": "complete", "parts": "arriving", "bare": "index only", "gone": "given up"}
_SHARES = {
    "published": "published shards",
    "live_parts": "parts being filled",
    "orphaned_parts": "parts without a filler",
    "index_only": "indexes without data",
    "tombstones": "tombstones",
    "columns": "columns of shards",
    "trash": "trash",
    "run_files": "files of runs",
}


def _tier_for(cache_dir: str | None, kind: Kind | None) -> Tier | None:
    """The tier that a command works on; None: only rows are asked for, or there are only rows.

    Raises:
        CacheError: there is neither.
    """
    from streamload.errors import CacheError

    if kind in (Kind.COLUMNS, Kind.JOINS):
        return None
    try:
        return tier_at(cache_dir)
    except CacheError:
        if kind is None and has_rows(cache_dir):
            return None
        raise


def _joins(cache_dir: str | None, kind: Kind | None) -> list[HeldJoin]:
    """The indexes of joined files that a command works on."""
    return held(cache_dir) if kind in (None, Kind.JOINS) else []


def tier_at(cache_dir: str | None) -> Tier:
    """The tier that a command works on.

    Raises:
        CacheError: it doesn't exist.
    """
    from streamload.cache.tier import Tier, memory_root
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


def _print_foreign(foreign: Iterable[Foreign]) -> None:
    for entry in foreign:
        say(f"not part of the cache, left alone: {entry.path} ({entry.what})")


@cache.command()
def ls(kind: KindOption = None, cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List the cached shards, how much of each has arrived, and when it was last used; rows; joined files.

    Rows are listed by label and fingerprint. When rows of calls are read is noted only while they take more
    than 70 % of their limit. The dtype is that of autocast, else torch's default.
    """
    tier = _tier_for(cache_dir, kind)
    report = {} if tier is None else _listed_shards(tier, kind, as_json=as_json)
    if kind is Kind.COLUMNS or (kind is None and has_rows(cache_dir)):
        report["rows"] = list_rows(cache_dir, as_json=as_json)
    if entries := _joins(cache_dir, kind):
        report["joins"] = show_joins(entries, "joined file", as_json=as_json)
    if as_json:
        print_json(report)


def _listed_shards(tier: Tier, kind: Kind | None, *, as_json: bool) -> dict[str, Any]:
    """List the shards of a kind; returns them for JSON, or prints them."""
    from streamload.cache.directory import reserved_for_rows

    rows = sorted(
        (_described(shard) for shard in tier.shards() if _is_of(shard, kind)),
        key=lambda row: (row["url"], row["digest"]),
    )
    rows_bytes = reserved_for_rows(tier.root)
    if not as_json:
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
        print_table(("shard", "state", ">samples", ">disk", "last used"), cells)
        used, limit = format_bytes(tier.used_bytes), format_bytes(tier.limit_bytes)
        say(f"{len(rows)} shards in {tier.root}: {used} of at most {limit}")
        if rows_bytes:
            say(f"rows of calls beside them: {format_bytes(rows_bytes)}")
    about = {"cache_dir": str(tier.root), "used_bytes": tier.used_bytes, "rows_bytes": rows_bytes}
    return {**about, "limit_bytes": tier.limit_bytes, "shards": rows}


def _is_of(shard: HeldShard, kind: Kind | None) -> bool:
    """True if a shard is of a kind."""
    from streamload.cache.inventory import meta_of

    return kind is None or ("prepared" in meta_of(shard.path)) == (kind is Kind.PREPARED)


def _described(shard: HeldShard) -> dict[str, Any]:
    """A shard's row; its URL, samples and sizes come from its index, if that can be read."""
    from streamload.cache.inventory import as_time
    from streamload.errors import StreamloadError
    from streamload.shards.index import IndexReader
    from streamload.shards.record import shown_url

    described: dict[str, Any] = {"url": "", "samples": 0, "size_bytes": None, "arrived_bytes": 0}
    try:
        with closing(IndexReader(shard.path)) as index:
            index.refresh()
            stated = None if "prepared" in index.meta else index.meta.get("size")
            described = {
                "url": shown_url(index.meta),
                "samples": index.count,
                "size_bytes": stated or index.size,
                "arrived_bytes": int(index.records["stop"].max()) if index.count else 0,
            }
    except (OSError, StreamloadError, KeyError) as exc:
        described["url"] = f"({type(exc).__name__}: {exc})"
    if shard.kind == "shards":
        described["arrived_bytes"] = described["size_bytes"]
    return {
        "digest": shard.digest,
        "state": _STATES[shard.kind],
        **described,
        "disk_bytes": shard.size_bytes,
        "last_used": None if shard.is_superseded else as_time(shard.used_at),
    }


def _state(row: dict[str, Any]) -> str:
    if row["state"] == "arriving" and row["size_bytes"]:
        return f"arriving, {row['arrived_bytes'] / row['size_bytes']:.0%}"
    return str(row["state"])


@cache.command()
def stat(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Show how full the cache is, with what, and which processes use it."""
    from streamload.cache.inventory import as_time, take_inventory

    inventory = take_inventory(tier_at(cache_dir))
    if as_json:
        print_json(inventory.as_dict())
        return
    used, limit, free = map(format_bytes, (inventory.used_bytes, inventory.limit_bytes, inventory.free_bytes))
    say(f"{inventory.root}: {used} of at most {limit}, {free} free on the disk")
    shares = [(words, getattr(inventory, name)) for name, words in _SHARES.items()]
    rows = [(words, f"{share.count:,}", format_bytes(share.size_bytes)) for words, share in shares]
    rows += [("rows of calls", "", format_bytes(inventory.rows_bytes))] if inventory.rows_bytes else []
    print_table(("", ">", ">"), [*rows, ("samples", f"{inventory.samples:,}", "")], head=False)
    if inventory.oldest_use is not None and inventory.newest_use is not None:
        say(f"shards last used from {as_time(inventory.oldest_use)} to {as_time(inventory.newest_use)}")
    for run in inventory.runs:
        say(f"process {run.pid} will read {run.shards:,} shards; {run.held:,} of them are cached")
    for url in inventory.open_shards:
        say(f"open: {url}")
    _print_foreign(inventory.foreign)


@dataclass(slots=True)
class _Tally:
    """The shards verified so far."""

    shards: int = 0
    parts: int = 0
    gone: int = 0
    samples: int = 0
    read_bytes: int = 0
    bad_facts: int = 0
    damages: list[ShardDamage] = field(default_factory=list)


@cache.command()
def verify(
    urls: Annotated[
        list[str] | None,
        typer.Argument(help="The shards' URLs, as for make_loader: where to fetch damaged ones from."),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Remove damaged shards and fetch them again; delete damaged rows."),
    ] = False,
    kind: KindOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Shards to read, or fetch, concurrently.")] = 2,
    storage_options: StorageOptions = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every shard and every row in the cache and compare it with its checksums.

    The exit code is 1 if a shard or row is damaged, or with --repair if a damaged shard couldn't be fetched
    again. The cache stores URLs without secrets, and never opens stored commands or paths: give URLS for
    these. With --repair a database of rows that can't be read is replaced by an empty one. A row of a sample
    is compared where its shard is cached, too.
    """
    tier, is_left, report = _tier_for(cache_dir, kind), False, dict[str, Any]()
    if tier is not None:
        storage, options = storage_options_of(storage_options), {"repair": repair, "as_json": as_json}
        report, is_left = _verify_shards(tier, urls or [], storage, kind, jobs, **options)
    if kind is Kind.COLUMNS or (kind is None and has_rows(cache_dir)):
        report["rows"], are_left = verify_rows(cache_dir, delete=repair, as_json=as_json)
        is_left = is_left or are_left
    if as_json:
        print_json(report)
    if is_left:
        raise typer.Exit(1)


def _verify_shards(
    tier: Tier,
    urls: list[str],
    storage: dict[str, Any] | None,
    kind: Kind | None,
    jobs: int,
    *,
    repair: bool,
    as_json: bool,
) -> tuple[dict[str, Any], bool]:
    """Verify the shards of a kind; returns the result for JSON, or prints it, and whether damage is left."""
    from streamload.cache.inventory import foreign
    from streamload.cache.repair import repair as fetch_again
    from streamload.cache.shard import shard_of
    from streamload.urls import expand_urls, is_local

    listed = expand_urls(urls) if urls else []
    named = [shard_of(url, storage) for url in listed]
    named += [shard_of(url, storage, is_copied=True) for url in listed if is_local(url)]
    by_digest = {shard.digest: shard for shard in named}
    tally = _read_all(tier, by_digest, jobs, kind, take_out=repair)
    repairs: list[Repair] = []
    if repair:
        repairs += fetch_again(tier, tally.damages, by_digest=by_digest, storage_options=storage, jobs=jobs)
    report = {"cache_dir": str(tier.root), **asdict(tally)}
    bad = report["bad"] = report.pop("damages")
    for damage, done in zip(bad, repairs, strict=False):
        damage |= {"fate": done.fate, "repaired": done.is_done}
    report["foreign"] = [{"path": str(entry.path), "what": entry.what} for entry in foreign(tier)]
    if not as_json:
        _print_tally(tier, tally, repairs)
    return report, len(tally.damages) > sum(done.is_done for done in repairs)


def _read_all(
    tier: Tier, by_digest: dict[str, Shard], jobs: int, kind: Kind | None, *, take_out: bool
) -> _Tally:
    """Verify all shards, with a progress bar on a terminal."""
    from streamload.cache.verify import verify as look_at_all

    tally = _Tally()
    with progress("shards, {task.description}", "0 B read") as show:
        options: dict[str, Any] = {"by_digest": by_digest, "jobs": jobs, "take_out": take_out}
        options["is_asked"] = lambda shard: _is_of(shard, kind)
        with closing(look_at_all(tier, on_total=lambda count: show(total=count), **options)) as looks:
            for look in looks:
                if look is None:
                    tally.gone += 1
                else:
                    tally.shards += look.held.kind == "shards"
                    tally.parts += look.held.kind == "parts"
                    tally.samples += look.samples
                    tally.read_bytes += look.size_bytes
                    tally.bad_facts += look.bad_facts
                    tally.damages += [] if look.damage is None else [look.damage]
                read = f"{format_bytes(tally.read_bytes)} read, {len(tally.damages)} damaged"
                show(advance=1, description=read)
    return tally


def _print_tally(tier: Tier, tally: _Tally, repairs: list[Repair]) -> None:
    from streamload.cache.inventory import foreign

    if tally.damages:
        rows = [[damage.url or damage.digest, damage.cause] for damage in tally.damages]
        for row, done in zip(rows, repairs, strict=False):
            row.append(done.fate)
        print_table(("damaged", "cause", "repair")[: 3 if repairs else 2], rows)
    _print_foreign(foreign(tier))
    if tally.bad_facts:
        say(f"{tally.bad_facts:,} files of facts fail their checksums: a run makes them again")
    repaired = f", {sum(done.is_done for done in repairs):,} of them repaired" if repairs else ""
    result = f"{len(tally.damages):,} damaged{repaired}" if tally.damages else "no damage"
    say(
        f"{tally.shards:,} shards and {tally.parts:,} parts with {tally.samples:,} samples "
        f"({format_bytes(tally.read_bytes)}) in {tier.root}: {result}"
    )


@cache.command()
def gc(
    all_parts: Annotated[
        bool, typer.Option("--all-parts", help="Also remove partial shards that a run could resume.")
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option(help='A new cache size, "500GB" or "80%", which is stored; evicts down to it.'),
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Delete the rows of fingerprints that a newer one has replaced.")
    ] = False,
    kind: KindOption = None,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove what dead processes left, and with --limit what is over the new limit; notes without rows, too.

    What a running process has open or is filling stays. With --stale rows of old fingerprints go. Old is one
    if another of the same label, arguments and transform is newer: a row of that was stored later, or read
    later as far as that was noted. So of two checkpoints in one module the rows of one go: look with
    --dry-run. A row that is deleted is computed again.
    """
    import shutil

    from streamload.cache.garbage import collect_garbage
    from streamload.errors import OptionError
    from streamload.options import parse_cache_size

    if limit is not None and kind is not None:
        raise OptionError("--limit is of the whole cache: give it without --kind")
    tier, report = _tier_for(cache_dir, kind), dict[str, Any]()
    if tier is not None:
        limit_bytes = None
        if limit is not None:
            size = parse_cache_size(limit, "--limit")
            limit_bytes = size.limit_bytes(shutil.disk_usage(tier.root).free, tier.used_bytes)
        removal = collect_garbage(tier, all_parts=all_parts, limit_bytes=limit_bytes, dry_run=dry_run)
        report = _show_removal(removal, as_json)
    if kind is Kind.COLUMNS or (kind is None and has_rows(cache_dir)):
        report["rows"] = collect_rows(cache_dir, stale=stale, dry_run=dry_run, as_json=as_json)
    if unfinished := [entry for entry in _joins(cache_dir, kind) if not entry.rows]:
        report["joins"] = remove_joins(unfinished, yes=True, dry_run=dry_run, as_json=as_json)
    if as_json:
        print_json(report)


@cache.command()
def clear(
    label: Annotated[
        str | None, typer.Argument(help="Only the rows of this label, a cache_name or class; default: all.")
    ] = None,
    kind: KindOption = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove all that no running process has open or is filling; the limit stays.

    With a label only its rows go, with their notes. A running process may still read what it has in memory.
    """
    from streamload.cache.garbage import clear as remove

    kind = Kind.COLUMNS if label is not None else kind
    tier, report = _tier_for(cache_dir, kind), dict[str, Any]()
    if tier is not None:
        is_asked = None if kind is None else lambda shard: _is_of(shard, kind)
        if not (yes or dry_run):
            going = remove(tier, is_asked, dry_run=True)
            size = format_bytes(going.removed_bytes)
            confirm(f"remove {len(going.removed):,} items ({size}) from {tier.root}")
        report = _show_removal(remove(tier, is_asked, dry_run=dry_run), as_json)
    if kind is Kind.COLUMNS or (kind is None and has_rows(cache_dir)):
        is_confirmed = yes or tier is not None
        report["rows"] = clear_rows(cache_dir, label, yes=is_confirmed, dry_run=dry_run, as_json=as_json)
    if entries := _joins(cache_dir, kind):
        is_confirmed = yes or tier is not None
        report["joins"] = remove_joins(entries, yes=is_confirmed, dry_run=dry_run, as_json=as_json)
    if as_json:
        print_json(report)


def _show_removal(removal: Removal, as_json: bool) -> dict[str, Any]:
    """What was removed, or would be, and what was kept: for JSON, or printed."""
    if as_json:
        return removal.as_dict()
    removed, takes = ("would remove", "would take") if removal.dry_run else ("removed", "takes")
    if removal.removed:
        rows = ((item.url or item.path, format_bytes(item.size_bytes), item.why) for item in removal.removed)
        print_table((removed, ">disk", "reason"), rows)
    for item in removal.kept:
        say(f"kept: {item.url or item.path}: {item.why}")
    _print_foreign(removal.foreign)
    say(
        f"{removed} {len(removal.removed):,} items, {format_bytes(removal.removed_bytes)}; the cache {takes} "
        f"{format_bytes(removal.used_bytes)} of at most {format_bytes(removal.limit_bytes)}"
    )
    if removal.used_bytes > removal.limit_bytes:
        say("still over the limit: the rest is in use, but will not grow")
    return removal.as_dict()
