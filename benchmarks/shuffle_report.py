"""Writes the tables and chart of docs/results/order.md from results/shuffle.json and results/arrival.json.

Command: python -m benchmarks.shuffle_report

The figures within its sentences are written by report.py.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import arrival, charts, provenance
from benchmarks.markdown import filled, table
from benchmarks.shuffle import DEFAULT, SMALL
from benchmarks.turns import RESULTS, ROOT

PAGE = ROOT / "docs/results/order.md"
CHART = ROOT / "docs/results/images/arrival.svg"
GRID = "1 rank"
OTHERS = (GRID, "large shards, 1 rank", "large shards, 8 ranks", "uneven shards", "few shards")

Row = dict[str, Any]


def main() -> None:
    shuffled, arrived = results()
    PAGE.write_text(filled(PAGE.read_text(), page_tables(shuffled, arrived)))
    CHART.write_text(trained_chart(arrived))


def results() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the committed results of shuffle.py and of arrival.py."""
    shuffled, arrived = (RESULTS / f"{name}.json" for name in ("shuffle", "arrival"))
    return json.loads(shuffled.read_text()), json.loads(arrived.read_text())


def page_tables(shuffled: dict[str, Any], arrived: dict[str, Any]) -> dict[str, str]:
    """Return all tables of the page."""
    measured = provenance.measured({"shuffle": shuffled, "arrival": arrived})
    return {**tables_of(shuffled), **arrival_tables(arrived), "measured": measured}


def tables_of(result: dict[str, Any]) -> dict[str, str]:
    return {
        "ranks": mixing(result, ["8 ranks"], global_too=True),
        "grid_pairs": grid(result, lambda row: f"{_percent(row['rank_pairs'])} ({row['open']:.0f})"),
        "grid_inside": grid(
            result, lambda row: f"{_gap(row, result, GRID)} / {row['span']:.2f} / {row['again']:.1f}"
        ),
        "others": mixing(result, OTHERS),
        "opening": opening(result),
        "cost": cost(result),
    }


def arrival_tables(result: dict[str, Any]) -> dict[str, str]:
    """How much of a first pass is trained when its last byte arrives, and how well its batches are mixed."""
    trained_head = ["shards", "samples", *arrival.ORDERS]
    mixed_head = ["shards", "windows", "pairs, %", "× a later pass", "× the lanes alone", "shards in a batch"]
    mixed_head += ["at least", "a later pass", "gap", "a later pass"]
    trained, mixed = [], []
    for data in dict.fromkeys(row["data"] for row in result["rounds"]):
        rows = {order: result["medians"][f"{data}: {order}"] for order in arrival.ORDERS}
        row = rows[arrival.REMOTE]
        trained.append(
            [data, f"{row['samples']:,.0f}", *(f"{rows[order]['trained']:.0%}" for order in arrival.ORDERS)]
        )
        mixed.append(
            [
                data,
                f"{row['samples'] / row['window']:.1f}",
                _percent(row["pairs"]),
                f"{row['pairs'] / row['later_pairs']:.2f}",
                f"{row['pairs'] / row['lanes_pairs']:.2f}",
                f"{row['shards_in_1']:.1f}",
                f"{row['fewest_shards']:.0f}" if "fewest_shards" in row else "–",
                f"{row['later_shards_in_1']:.1f}",
                f"{row['gap']:.0f}",
                f"{row['later_gap']:.0f}",
            ]
        )
    return {"trained": table(trained_head, trained), "mixed_first": table(mixed_head, mixed)}


def trained_chart(result: dict[str, Any]) -> str:
    """The share that is trained when the last byte arrives, in percent, by the data's size."""
    series = {
        order: [
            (row["samples"], 100 * row["trained"])
            for label, row in result["medians"].items()
            if row["is_on_curve"] and label.endswith(f": {order}")
        ]
        for order in (arrival.REMOTE, arrival.LOCAL)
    }
    title = "Samples trained when the last byte arrives, %"
    return charts.lines(title, "samples of the data set", series)


def mixing(result: dict[str, Any], data: Sequence[str], global_too: bool = False) -> str:
    """A row for each order of these data sets, except those that the grid shows."""
    head = ["order", "pairs in a rank, %" if global_too else "pairs, %", "worst", "first epoch"]
    head += ["in a global batch, %", "worst"] if global_too else []
    head += ["shards in 1 / 8 steps", "gap", "span", "spread", "again, ×", "open", "held"]
    if len(data) > 1:
        head.insert(0, "shards")
    body = []
    for which in data:
        for name, row in orders(result, which).items():
            if which == GRID and "lanes" in name:
                continue
            line = [which] if len(data) > 1 else []
            line.append(called(name, row))
            line += [_percent(row[f"{key}rank_pairs"]) for key in ("", "worst_", "first_epoch_")]
            if global_too:
                line += [_percent(row["pairs"]), _percent(row["worst_pairs"])]
            line += [
                f"{row['shards_in_1']:.0f} / {row['shards_in_8']:.0f}",
                _gap(row, result, which),
                f"{row['span']:.2f}",
                f"{row['spread']:.2f}",
                f"{row['again']:.1f}",
                f"{row['open']:.0f}" if "open" in row else "–",
                f"{row['held']:,.0f}" if "held" in row else "–",
            ]
            body.append(line)
    return table(head, body)


def grid(result: dict[str, Any], cell: Callable[[Row], str]) -> str:
    """A row for each number of lanes, a column for each window, of the orders that give both."""
    cells = {
        (int(row["lanes"]), int(row["window"])): cell(row)
        for name, row in orders(result, GRID).items()
        if "lanes" in name
    }
    windows = sorted({window for _, window in cells})
    rows = [
        [str(lanes), *(cells.get((lanes, window), "–") for window in windows)]
        for lanes in sorted({lanes for lanes, _ in cells})
    ]
    return table(["lanes", *(f"window {window:,}" for window in windows)], rows)


def orders(result: dict[str, Any], data: str) -> dict[str, Row]:
    """The medians of the orders of a data set, by their names."""
    return {
        label.removeprefix(f"{data}: "): row
        for label, row in result["medians"].items()
        if label.startswith(f"{data}: ")
    }


def opening(result: dict[str, Any]) -> str:
    """How the first epoch of a few shards compares with the second, and what it needs to have arrived."""
    head = ["shards", "order", "first epoch", "second epoch", "first batch", "next batch", "at the end"]
    names = {
        DEFAULT: "**remote shards**",
        f"{DEFAULT}, local": "**local shards**",
    }
    body = []
    for which in SMALL:
        for name, row in orders(result, which).items():
            line = [which, names.get(name, called(name, row))]
            found = (row[f"{epoch}place_correlation"] for epoch in ("first_epoch_", ""))
            line += [f"{round(value, 2) + 0:.2f}" for value in found]  # no "-0.00"
            needs = [f"{row[batch]:.1f}" if batch in row else "–" for batch in ("first_batch", "next_batch")]
            body.append([*line, *needs, f"{row['at_the_end']:.0%}" if "at_the_end" in row else "–"])
    return table(head, body)


def called(name: str, row: dict[str, Any]) -> str:
    if name == "permutation":
        return "full permutation"
    if name.startswith(DEFAULT):
        nodes = name.removeprefix(DEFAULT).removeprefix(", ")
        on = f"default on {nodes}" if nodes else "default"
        each = ", of each" if nodes else ""
        return f"**{on}** ({row['lanes']:.0f} lanes, window {row['window']:,.0f}{each})"
    own = name.removeprefix("streamload, ")
    return f"`{own}`" if own.startswith("shuffle") else own


def cost(result: dict[str, Any]) -> str:
    cells: dict[str, dict[int, float]] = {}
    for label, row in result["medians"].items():
        if label.startswith("cost, "):
            which, _, _ = label.removeprefix("cost, ").rpartition(", shards of")
            cells.setdefault(which, {})[int(row["shard_samples"])] = row["us_per_sample"]
    sizes = sorted({size for row in cells.values() for size in row})
    rows = [[which, *(f"{row[size]:.2f}" for size in sizes)] for which, row in cells.items()]
    return table(["µs a sample and worker", *(f"shards of {size:,}" for size in sizes)], rows)


def _gap(row: Row, result: dict[str, Any], data: str) -> str:
    random = orders(result, data).get("permutation")
    return f"{row['gap'] / random['gap']:.2f}" if random else "–"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if share < 1 else "100"


if __name__ == "__main__":
    main()
