"""Writes the tables of docs/performance.md and benchmarks/README.md from results/*.json.

Command: python -m benchmarks.report

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; what is around them is written by hand and left
alone.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.turns import RESULTS, ROOT

PAGES = (ROOT / "docs/performance.md", ROOT / "benchmarks/README.md")
NAMES = ("cold", "warm", "memory", "memory_tier", "hits", "fill", "verification", "scale")

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    given = parser.parse_args()
    results = {name: _read(given.results / f"{name}.json") for name in NAMES}
    tables = tables_of({name: result for name, result in results.items() if result is not None})
    for page in given.pages:
        page.write_text(filled(page.read_text(), tables))


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with the tables that are there put into their places."""
    for name, table in tables.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page = place.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
    return page


def tables_of(results: dict[str, Result]) -> dict[str, str]:
    makers = {
        "cold": cold,
        "warm": warm,
        "memory": memory,
        "memory_tier": memory_tier,
        "hits": hits,
        "fill": fill,
        "verification": verification,
        "scale": scale,
    }
    tables = {name: makers[name](result) for name, result in results.items()}
    return {"targets": targets(results), "machine": machine(results), **tables}


def targets(results: dict[str, Result]) -> str:
    rows = []
    for name, result in results.items():
        for target in result["targets"]:
            sign, limit = ("≤", target["at_most"])
            if limit is None:
                sign, limit = "≥", target["at_least"]
            met = {True: "yes", False: "no", None: "not measured"}[target["met"]]
            rows.append([name, target["claim"], f"{sign} {_number(limit)}", _number(target["value"]), met])
    return table(["benchmark", "claim", "target", "measured", "reached"], rows)


def machine(results: dict[str, Result]) -> str:
    lines = []
    for name, result in results.items():
        on, rounds = result["machine"], len(result["seeds"])
        found = ", ".join(
            f"{package} {version}"
            for package, version in sorted(
                {pair for found in result["versions"].values() for pair in found.items()}
            )
        )
        lines.append(
            f"{name}: {result['date']}, {rounds} rounds; {on['cpu']}, {on['cores']} cores, "
            f"{on['memory_bytes'] / 2**30:.0f} GiB, Linux {on['kernel']}; {found}"
        )
    return "\n".join(f"- {line}" for line in lines)


def cold(result: Result) -> str:
    head = [
        "contender and link",
        "first batch, s",
        "its bytes' time, s",
        "epoch 1, s",
        "download / compute, s",
        "epoch 2, s",
        "fetched, MB, epochs 1 / 2",
    ]
    rows = [
        [
            name,
            _spread(result, name, "first_batch_seconds"),
            f"{row['bytes_time_seconds']:.2f}",
            _spread(result, name, "epoch_1_seconds"),
            f"{row['download_seconds']:.1f} / {row['compute_seconds']:.1f}",
            f"{row['epoch_2_seconds']:.1f}",
            f"{row['epoch_1_bytes'] / 1e6:.0f} / {row['epoch_2_bytes'] / 1e6:.0f}",
        ]
        for name, row in result["medians"].items()
    ]
    return table(head, rows)


def warm(result: Result) -> str:
    against = next(iter(result["ratios"].values()))
    rows = [
        [
            name,
            _spread(result, name, "images_per_second", 0),
            _number(against.get(name)),
            f"{row['cpu_us_per_image']:,.0f}",
        ]
        for name, row in result["medians"].items()
    ]
    return table(["contender", "images/s (rounds)", "× open_clip", "CPU µs an image"], rows)


def memory(result: Result) -> str:
    rows = [
        [name, *(f"{row[f'{which}_bytes'] / 1e6:,.0f}" for which in ("peak", "steady", "before"))]
        for name, row in result["medians"].items()
    ]
    return table(["contender", "peak, MB", "steady, MB", "before the first batch was asked for, MB"], rows)


def hits(result: Result) -> str:
    """The last round's epochs; the targets hold for those of all rounds."""
    head = ["room", "epoch", "limit, MB", "live, MB", "data, MB", "(limit − live) / data", "hits (rounds)"]
    head += ["counted by the loaders"]
    last = max(row["round"] for row in result["rounds"])
    rows = []
    for row in (row for row in result["rounds"] if row["round"] == last):
        same = [
            r["hits"] for r in result["rounds"] if (r["label"], r["epoch"]) == (row["label"], row["epoch"])
        ]
        sizes = [f"{row[f'{which}_bytes'] / 1e6:.1f}" for which in ("limit", "live", "data")]
        rows.append(
            [
                row["label"],
                str(row["epoch"]),
                *sizes,
                f"{row['expected']:.1%}" if row["epoch"] > 1 else "–",
                f"{row['hits']:.1%} ({min(same):.1%}–{max(same):.1%})",
                f"{row['hits_counted']:.1%}",
            ]
        )
    return table(head, rows)


def fill(result: Result) -> str:
    rows = [
        [name, *(f"{row[f'bytes_per_{of}'] / 1e6:,.0f}" for of in ("cpu_second", "second"))]
        for name, row in result["medians"].items()
    ]
    return table(["", "MB/s of CPU time", "MB/s by the clock"], rows)


def verification(result: Result) -> str:
    rows = [
        [
            name,
            f"{row['cpu_us_per_image']:,.0f}",
            f"{row['check_us_per_image']:.1f}" if row["checked"] else "–",
            f"{row['share']:.2%}" if row["checked"] else "–",
        ]
        for name, row in result["medians"].items()
    ]
    return table(["", "CPU µs an image", "of it for the check, µs", "share"], rows)


def scale(result: Result) -> str:
    rows = [
        [
            name,
            _spread(result, name, "start_seconds"),
            f"{row['start_cpu_seconds']:.2f}",
            _spread(result, name, "first_batch_seconds"),
            *(f"{row[f'above_{which}'] / 1e6:,.0f}" for which in ("bytes", "later_bytes", "peak_rss_bytes")),
        ]
        for name, row in result["medians"].items()
        if "start_seconds" in row
    ]
    idle = next(name for name in result["medians"] if name.startswith("idle"))
    rows.append([idle, "–", "–", "–", f"{result['medians'][idle]['above_bytes'] / 1e6:,.0f}", "–", "–"])
    head = ["rank with", "order known, s (rounds)", "CPU, s", "first batch, s (rounds)"]
    return table([*head, "above torch, MB", "later, MB", "peak RSS, MB"], rows)


def memory_tier(result: Result) -> str:
    rows = [
        [
            name,
            _spread(result, name, "images_per_second", 0),
            _spread(result, name, "cpu_us_per_image", 0),
            f"{row['disk_bytes_per_image'] / 1e3:,.0f}",
        ]
        for name, row in result["medians"].items()
    ]
    return table(
        ["work and tier", "images/s (rounds)", "CPU µs an image (rounds)", "from the disk, KB"], rows
    )


def _read(path: Path) -> Result | None:
    return json.loads(path.read_text()) if path.exists() else None


def _spread(result: Result, name: str, metric: str, digits: int = 2) -> str:
    """The median, and the least and most of the rounds."""
    values = [row[metric] for row in result["rounds"] if row["label"] == name]
    return f"{result['medians'][name][metric]:.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e6:,.0f} MB" if value >= 1e6 else f"{value:.2f}".rstrip("0").rstrip(".")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
