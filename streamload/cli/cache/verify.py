"""`streamload cache verify`: read a tier, compare it with its checksums, and repair it."""

from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.cache.options import AsJson, CacheDir, print_foreign, tier_at
from streamload.cli.logs import progress_bar
from streamload.cli.options import StorageOptions, storage_options_of
from streamload.cli.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from streamload.cache.repair import Repair
    from streamload.cache.shard import Shard
    from streamload.cache.tier import Tier
    from streamload.cache.verify import ShardDamage, VerifiedShard


@dataclass(slots=True)
class _Tally:
    """The shards verified so far."""

    shards: int = 0
    parts: int = 0
    gone: int = 0
    samples: int = 0
    read_bytes: int = 0
    bad_facts: int = 0
    damages: "list[ShardDamage]" = field(default_factory=list)

    def add(self, look: "VerifiedShard | None") -> None:
        if look is None:
            self.gone += 1
            return
        self.shards += look.held.kind == "shards"
        self.parts += look.held.kind == "parts"
        self.samples += look.samples
        self.read_bytes += look.size_bytes
        self.bad_facts += look.bad_facts
        if look.damage is not None:
            self.damages.append(look.damage)


def verify(
    urls: Annotated[
        list[str] | None,
        typer.Argument(help="The shards' URLs, as for make_loader: where to fetch damaged ones from."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove damaged shards and fetch them again.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Shards to read, or fetch, concurrently.")] = 2,
    storage_options: StorageOptions = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every shard in the cache and compare it with its checksums.

    The exit code is 1 if a shard is damaged, or with --repair if a damaged shard couldn't be fetched again.
    The cache stores URLs without secrets, and never opens stored commands or paths: give URLS for these.
    """
    from streamload.cache.repair import repair as fetch_again

    storage = storage_options_of(storage_options)
    tier = tier_at(cache_dir)
    shards = _named(urls or [], storage)
    tally = _read_all(tier, shards, jobs, take_out=repair)
    repairs: list[Repair] = []
    if repair:
        repairs = list(fetch_again(tier, tally.damages, by_digest=shards, storage_options=storage, jobs=jobs))
    if as_json:
        _print_json(tier, tally, repairs)
    else:
        _print(tier, tally, repairs)
    if len(tally.damages) > sum(done.is_done for done in repairs):
        raise typer.Exit(1)


def _named(urls: list[str], storage: dict[str, Any] | None) -> "dict[str, Shard]":
    if not urls:
        return {}
    from streamload.cache.shard import shard_of
    from streamload.urls import expand_urls

    return {shard.digest: shard for shard in (shard_of(url, storage) for url in expand_urls(urls))}


def _read_all(tier: "Tier", shards: "dict[str, Shard]", jobs: int, *, take_out: bool) -> _Tally:
    """Verify all shards, with a progress bar on a terminal."""
    from streamload.cache.verify import verify as look_at_all
    from streamload.metrics import format_bytes

    tally = _Tally()
    with progress_bar("shards, {task.description}") as bar:
        task = bar.add_task("0 B read", total=None)

        def begin(count: int) -> None:
            bar.update(task, total=count)

        with closing(
            look_at_all(tier, by_digest=shards, jobs=jobs, take_out=take_out, on_total=begin)
        ) as results:
            for look in results:
                tally.add(look)
                read = f"{format_bytes(tally.read_bytes)} read, {len(tally.damages)} damaged"
                bar.update(task, advance=1, description=read)
    return tally


def _print_json(tier: "Tier", tally: _Tally, repairs: "list[Repair]") -> None:
    from streamload.cache.inventory import foreign

    report = {"cache_dir": str(tier.root), **asdict(tally)}
    bad = report["bad"] = report.pop("damages")
    for damage, done in zip(bad, repairs, strict=False):
        damage |= {"fate": done.fate, "repaired": done.is_done}
    report["foreign"] = [{"path": str(entry.path), "what": entry.what} for entry in foreign(tier)]
    print_json(report)


def _print(tier: "Tier", tally: _Tally, repairs: "list[Repair]") -> None:
    from streamload.cache.inventory import foreign
    from streamload.metrics import format_bytes

    if tally.damages:
        rows = [[damage.url or damage.digest, damage.cause] for damage in tally.damages]
        for row, done in zip(rows, repairs, strict=False):
            row.append(done.fate)
        print_table(("damaged", "cause", "repair")[: 3 if repairs else 2], rows)
    print_foreign(foreign(tier))
    if tally.bad_facts:
        say(f"{tally.bad_facts:,} files of facts fail their checksums: a run makes them again")
    repaired = f", {sum(done.is_done for done in repairs):,} of them repaired" if repairs else ""
    result = f"{len(tally.damages):,} damaged{repaired}" if tally.damages else "no damage"
    say(
        f"{tally.shards:,} shards and {tally.parts:,} parts with {tally.samples:,} samples "
        f"({format_bytes(tally.read_bytes)}) in {tier.root}: {result}"
    )
