"""`streamload top`: what this node's runs do now, as a table that follows them, as lines, or as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.options import AsJson, CacheDirs, roots_of
from streamload.cli.terminal import cursor_stream, format_bytes, say, table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from streamload.observe.live import LiveRank, LiveSource

_ONCE_SECONDS = 1.5
"""Time for which --once watches for rates: a rank publishes once a second."""
_KEYS = {
    "n": ("rank", lambda rank: (rank.run, rank.rank)),
    "r": ("rate", lambda rank: -rank.samples_per_second),
    "w": ("wait", lambda rank: -rank.wait),
    "b": ("bytes", lambda rank: -rank.origin_bytes_per_second),
    "a": ("age", lambda rank: -rank.age_seconds),
}
_WORK = ("bytes", "shuffle", "read", "decode", "resize", "tokenize", "collate", "hand-over")
_COLOURS = ("blue", "bright_blue", "yellow", "green", "red", "magenta", "cyan", "white")
_BAR = 20
_RUN_LENGTH = 12
"""So many characters of a run's name tell it from others."""
_LATE, _VERY_LATE = 0.05, 0.2

Looks = Iterable["list[LiveRank]"]


def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    sort: Annotated[str, typer.Option(help="Which ranks come first: rank, rate, wait, bytes, age.")] = "rank",
    once: Annotated[bool, typer.Option("--once", help="Show the runs once, and end.")] = False,
    cache_dirs: CacheDirs = None,
    as_json: AsJson = False,
) -> None:
    """Show what the runs of this node do: rates, waits, stages, cache, sources, and what limits them.

    On a terminal the table follows the runs; keys: n, r, w, b, a sort by rank, rate, wait, bytes, age; q ends
    it. Without a terminal it is a line for each rank at each look, with --json an array a line.
    """
    from rich.console import Console

    from streamload.errors import OptionError

    names = {name: key for key, (name, _) in _KEYS.items()}
    if sort not in names:
        raise OptionError(f"--sort={sort}: it has to be one of {', '.join(names)}")
    console = Console(highlight=False)
    looks = _looks(cache_dirs, every, once)
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            for ranks in looks:
                print(json.dumps([rank.as_dict() for rank in ranks]), flush=True)
        elif console.is_terminal and not once:
            _follow(looks, Console(highlight=False, file=cursor_stream()), names[sort])
        else:
            for ranks in looks:
                _print(_sorted(ranks, names[sort]), console)


def _looks(cache_dirs: list[str] | None, every: float, once: bool) -> Iterator[list[LiveRank]]:
    """The ranks at each look; the first look is for rates alone."""
    from streamload.observe.live import RunWatch
    from streamload.observe.page import read_runs

    roots, watch = roots_of(cache_dirs), RunWatch()
    ranks = watch.look(read_runs(roots))
    time.sleep(_ONCE_SECONDS if ranks else 0)
    while True:
        yield watch.look(read_runs(roots))
        if once:
            return
        _pause(every)


def _sorted(ranks: list[LiveRank], key: str) -> list[LiveRank]:
    return sorted(ranks, key=_KEYS[key][1])


def _print(ranks: list[LiveRank], console: Console) -> None:
    """A table on a terminal, else a line for each rank."""
    if console.is_terminal:
        console.print(shown(ranks))
        return
    for rank in ranks:
        say(line(rank))
    if not ranks:
        say("no run is live in the cache")


def line(rank: LiveRank) -> str:
    """A rank in a line of text."""
    parts = [
        f"run {rank.run} rank {rank.rank}: {rank.samples_per_second:,.0f} samples/s",
        f"waits {rank.wait:.1%}",
        f"{rank.ready_batches} ready",
        f"{format_bytes(rank.origin_bytes_per_second)}/s from origins",
    ]
    parts += [] if rank.hits is None else [f"{rank.hits:.0%} hits"]
    parts += [f"{name} {share:.2f}" for name, share in rank.stages.items() if name in _WORK and share >= 0.01]
    parts += [f"still for {rank.still_seconds:.0f} s"] if rank.still_seconds >= 10 else []
    parts += [rank.verdict] if rank.verdict else []
    parts += [f"ALERT {name}: {text}" for name, text in rank.alerts.items()]
    return ", ".join(parts)


def shown(ranks: list[LiveRank], sorted_by: str = "") -> RenderableType:
    """All runs: of each a headline, its ranks, its sources, and what limits it."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    parts: list[RenderableType] = []
    for run in dict.fromkeys(rank.run for rank in ranks):
        ranks_of_run = [rank for rank in ranks if rank.run == run]
        first = ranks_of_run[0]
        name, host = escape(run[:_RUN_LENGTH]), escape(first.host)
        head = f"[bold]run {name}[/]  {len(ranks_of_run)} of {first.world_size} ranks on {host}"
        epoch = "" if first.epoch is None else f", epoch {first.epoch}"
        total = f"{sum(rank.samples_per_second for rank in ranks_of_run):,.0f} samples/s"
        parts.append(Text.from_markup(f"{head}{epoch}, {_age(first.run_seconds)}, [bold]{total}[/]"))
        parts += [_ranks(ranks_of_run), Text.from_markup(_legend())]
        parts += [_sources(ranks_of_run)] if len(first.sources) > 1 else []
        worst = max(ranks_of_run, key=lambda rank: rank.wait)
        if worst.verdict:
            parts.append(Text(f"rank {worst.rank} {worst.verdict}", style="yellow"))
        alerts = [(rank.rank, name, text) for rank in ranks_of_run for name, text in rank.alerts.items()]
        parts += [Text(f"! rank {rank} {name}: {text}", style="red") for rank, name, text in alerts]
        parts.append(Text())
    if not ranks:
        parts.append(Text("no run is live in the cache; those that start are shown\n"))
    if sorted_by:
        keys = "  ".join(f"{key} {name}" for key, (name, _) in _KEYS.items())
        parts.append(Text(f"sorted by {_KEYS[sorted_by][0]}   {keys}  q quit", style="dim"))
    return Group(*parts)


def _ranks(ranks: list[LiveRank]) -> Table:
    from rich.text import Text

    titles = (
        ">rank",
        ">samples/s",
        ">waits",
        ">ready",
        ">from origins",
        ">hits",
        ">cache",
        ">device",
        ">age",
    )
    rows = []
    for rank in ranks:
        used, limit = next(iter(rank.tiers.values()), (0.0, 0.0))
        style = "red" if rank.wait >= _VERY_LATE else "yellow" if rank.wait >= _LATE else "green"
        rows.append(
            (
                str(rank.rank),
                f"{rank.samples_per_second:,.0f}",
                Text(f"{rank.wait:.1%}", style),
                str(rank.ready_batches),
                f"{format_bytes(rank.origin_bytes_per_second)}/s",
                "–" if rank.hits is None else f"{rank.hits:.0%}",
                f"{used / limit:.0%} of {format_bytes(limit)}" if limit else "–",
                "–" if rank.device_memory is None else f"{rank.device_memory:.0%}",
                _age(max(rank.age_seconds, rank.still_seconds)),
                Text.from_markup(_bar(rank)),
            )
        )
    return table((*titles, "workers' time"), rows)


def _legend() -> str:
    names = (f"[{colour}]{name}[/]" for name, colour in zip(_WORK, _COLOURS, strict=True))
    return f"[dim]workers' time:[/] {' '.join(names)} [dim]idle[/]"


def _bar(rank: LiveRank) -> str:
    """The workers' time by stage; what is left is idle."""
    whole = max(sum(rank.stages.get(name, 0.0) for name in _WORK), float(rank.workers or 1))
    shares = [rank.stages.get(name, 0.0) / whole * _BAR for name in _WORK]
    drawn, done, filled = [], 0.0, 0
    for share, colour in zip(shares, _COLOURS, strict=True):
        done += share
        cells = round(done) - filled
        filled += cells
        drawn.append(f"[{colour}]{'█' * cells}[/]" if cells else "")
    return "".join(drawn) + f"[dim]{'░' * (_BAR - filled)}[/]"


def _sources(ranks: list[LiveRank]) -> Table:
    """The sources over all ranks of a run."""
    titles = ("source", ">samples/s", ">share", ">weight", ">waits", ">loss", ">alignment", ">passes")
    sources = [source for rank in ranks for source in rank.sources]
    whole = sum(source.samples_per_second for source in sources) or 1.0
    rows = []
    for name in dict.fromkeys(source.name for source in sources):
        same_named = [source for source in sources if source.name == name]
        rate = sum(source.samples_per_second for source in same_named)
        rows.append(
            (
                name,
                f"{rate:,.0f}",
                f"{rate / whole:.1%}",
                _mean(same_named, lambda source: source.weight),
                f"{sum(source.wait for source in same_named):.2f} s/s",
                _mean(same_named, lambda source: source.loss),
                _mean(same_named, lambda source: source.alignment),
                _mean(same_named, lambda source: source.passes),
            )
        )
    return table(titles, rows)


def _mean(sources: list[LiveSource], value: Callable[[LiveSource], float | None]) -> str:
    numbers = [number for source in sources if (number := value(source)) is not None]
    return f"{sum(numbers) / len(numbers):.3g}" if numbers else "–"


def _age(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _follow(looks: Looks, console: Console, key: str) -> None:
    """Show the table until q or Ctrl-C; keys are read between two looks."""
    from rich.live import Live

    with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        for ranks in looks:
            for pressed in _pressed():
                if pressed == "q":
                    return
                key = pressed if pressed in _KEYS else key
            live.update(shown(_sorted(ranks, key), key), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Let keys be read as they are pressed, where the input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before: Any = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed() -> Iterator[str]:
    """The keys that were pressed since the last look."""
    if sys.stdin.isatty() and select.select([sys.stdin], [], [], 0)[0]:
        yield from os.read(sys.stdin.fileno(), 64).decode(errors="replace")


def _pause(seconds: float) -> None:
    """Wait, on a terminal at most until a key is pressed."""
    if sys.stdin.isatty():
        select.select([sys.stdin], [], [], seconds)
    else:
        time.sleep(seconds)
