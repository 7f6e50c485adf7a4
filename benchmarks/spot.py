"""A thousand trainers and up to two hundred spot nodes, simulated.

Question: with daemons on spot nodes that are taken away as often as clouds do it, what leaves the origin,
what does the shared cache have to answer, how far ahead must the window be, how long does a loss take to be
made up for, what breaks first, and what does it cost?

Command: python -m benchmarks.spot (about four minutes of one core; --quick: some seconds)

A discrete-event simulation, without a real clock, a network or a file; the same seed gives the same result.
Setup (spot_setup.py) has the assumptions; their sources are in docs/results/spot-nodes.md. What needs many
runs is simulated at a twentieth of the size, with the rates that all share a twentieth as well.

Result: results/spot.json; docs/results/spot-nodes.md has it as tables and charts. Nothing in it
depends on the machine.

Explanation: docs/results/spot-nodes.md.
"""

import argparse
import concurrent.futures
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import turns
from benchmarks.contenders.job import versions
from benchmarks.spot_run import simulate
from benchmarks.spot_setup import Setup
from streamload.daemon.demand import DEFAULT_WINDOW
from streamload.daemon.targets import MOST_MISSES
from streamload.options import parse_size

FULL = Setup()
PART = FULL.scaled(0.05)
QUICK = FULL.scaled(0.01)
LOST_PER_HOUR = {
    "5 % a month": -math.log(0.95) / (30.4 * 24),
    "1.6 % an hour": 0.016,
    "19 % an hour": 0.19,
    "60 % an hour": 0.60,
    "132 % an hour": 1.32,
}
USUAL = LOST_PER_HOUR["60 % an hour"]
WINDOWS = (120.0, 600.0, 1800.0)
NODES = (140, 160, 200)
SIZES = (125, 250, 500, 1_000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small form that only shows that it works")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", help="of one table")
    parser.add_argument(
        "--out", type=Path, help="file for the JSON; default benchmarks/results/spot.json, none with --quick"
    )
    given = parser.parse_args()
    chosen = {
        key: replace(setup, seed=given.seed)
        for key, setup in (quick_scenarios() if given.quick else scenarios()).items()
        if given.only in (None, key[0])
    }
    with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
        found = list(pool.map(_run, chosen.items()))
    turns.write(given, "spot", content(given.seed, dict(zip(chosen, found, strict=True))))


def scenarios() -> dict[tuple[str, str], Setup]:
    """What is simulated, by table and row."""
    return {
        **{("egress", name): setup for name, setup in egress(PART).items()},
        **{("requests", name): setup for name, setup in requests(FULL).items()},
        **{
            ("window", f"{often}, {nodes} nodes, {window:.0f} s"): filled(
                replace(PART, nodes=nodes // 20, window=window, lost_per_hour=lost, seconds=1800)
            )
            for often, lost in LOST_PER_HOUR.items()
            if lost > 0.01
            for nodes in NODES
            for window in WINDOWS
        },
        **{
            ("loss", f"{share:.0%}, {window:.0f} s"): lost_at_once(PART, share, window)
            for share in (0.5, 1.0)
            for window in WINDOWS
        },
        ("loss", "100%, 600 s, for good"): replace(lost_at_once(PART, 1.0, 600.0), returns=False),
        **{("size", name): setup for name, setup in sizes(SIZES).items()},
    }


def quick_scenarios() -> dict[tuple[str, str], Setup]:
    return {
        **{("egress", name): replace(setup, seconds=900) for name, setup in egress(QUICK, 100).items()},
        ("requests", "a window of 10 min"): replace(QUICK, seconds=600),
        ("window", "132 % an hour, 200 nodes, 120 s"): replace(QUICK, lost_per_hour=1.32, seconds=600),
        ("loss", "100%, 120 s"): replace(lost_at_once(QUICK, 1.0, 120.0), seconds=900),
        **{("size", name): replace(setup, seconds=360) for name, setup in sizes((10,)).items()},
    }


def egress(of: Setup, shards: int = 1_200) -> dict[str, Setup]:
    """One run in a long pass, and runs that each read all of a smaller data set once."""
    one = replace(of, lost_per_hour=USUAL)
    each = max(2, of.groups // 10)
    many = replace(of, runs=of.groups // each, groups=each, shards=shards, nodes=0, seconds=6 * 3600.0)
    return {
        "one run, no daemons": replace(of, nodes=0, seconds=1800.0),
        "one run, daemons, notice of 120 s": one,
        "one run, daemons, notice of 30 s": replace(one, notice_seconds=30.0),
        "one run, daemons, no notice": replace(one, notice_seconds=0.0),
        f"{many.runs} runs, nothing shared": many,
        f"{many.runs} runs, shared cache, written back": replace(many, write_back=True),
        f"{many.runs} runs, shared cache, daemons": replace(many, nodes=of.nodes, lost_per_hour=USUAL),
        f"{many.runs} runs, shared cache, both": replace(
            many, nodes=of.nodes, lost_per_hour=USUAL, write_back=True
        ),
    }


def requests(of: Setup) -> dict[str, Setup]:
    """The whole run for some minutes, with what a daemon may be told."""
    of = replace(of, lost_per_hour=USUAL, seconds=480.0)
    default = float(parse_size(DEFAULT_WINDOW, "window"))
    return {
        "20 groups a daemon, a window of 10 min": of,
        "the same, when the windows are full": replace(of, head_start=900.0, seconds=300.0),
        "the same, asking only of the next 64": replace(of, asks=MOST_MISSES),
        "all groups, a window of 10 min": replace(of, follows=None),
        f"all groups, the default window ({DEFAULT_WINDOW})": replace(of, follows=None, window_bytes=default),
    }


def filled(setup: Setup) -> Setup:
    """Daemons have had the time to fill the window before the trainers begin."""
    return replace(setup, head_start=2 * setup.window + 300)


def lost_at_once(of: Setup, share: float, window: float) -> Setup:
    setup = filled(replace(of, window=window, seconds=4_200.0))
    return replace(setup, loss=(setup.head_start + 600.0, share))


def sizes(counts: tuple[int, ...]) -> dict[str, Setup]:
    """More and more trainers, with a daemon for five; only what the shared cache answers stays as it is."""
    found = {}
    for count in counts:
        own = FULL.scaled(count / FULL.groups)
        own = replace(own, gets=FULL.gets, puts=FULL.puts, seconds=480.0, shards=count * 200)
        found[f"{count} trainers, 1 partition"] = replace(own, partitions=1)
        found[f"{count} trainers, 1 partition, next 64"] = replace(own, partitions=1, asks=MOST_MISSES)
        found[f"{count} trainers, 8 partitions"] = own
    return found


def _run(of: tuple[tuple[str, str], Setup]) -> dict[str, Any]:
    (name, _), setup = of
    # In the first minutes there is nothing yet: that is no waiting which a window could do anything about.
    found = simulate(setup, from_seconds=0.0 if name in ("egress", "loss") else 180.0)
    if name != "loss":
        del found["minutes"]
    return {
        **found,
        "of_full": setup.runs * setup.groups / FULL.groups,
        "all_seconds": setup.head_start + setup.seconds,
        "lost_at": None if setup.loss is None else setup.loss[0] - setup.head_start,
    }


def content(seed: int, found: Mapping[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    return {
        "settings": {"full": asdict(FULL), "lost_per_hour": LOST_PER_HOUR},
        "versions": {"streamload": {k: v for k, v in versions().items() if k in ("python", "streamload")}},
        "seeds": [seed],
        "rounds": [{"label": f"{name}: {row}", "table": name, **of} for (name, row), of in found.items()],
        "medians": {},
        "targets": [],
    }


if __name__ == "__main__":
    main()
