"""The tables and charts of docs/results/spot-nodes.md, from results/spot.json."""

from typing import Any

from benchmarks import charts
from benchmarks.markdown import Result, table
from benchmarks.spot_run import ASKED

GET_DOLLARS, PUT_DOLLARS = 0.0004e-3, 0.005e-3
NODE_DOLLARS = 0.18  # an hour of a spot node with 8 cores
EGRESS_DOLLARS = {"between regions": 20.0, "to the internet": 50.0}  # a TB
_PURPOSES = ("progress", "leases", "what is held", "reading shards", "writing shards")


def tables(result: Result | None) -> dict[str, str]:
    """By the name of their place on the page; none without a result."""
    if result is None:
        return {}
    return {
        "spot_egress": egress(rows(result, "egress")),
        "spot_requests": requests(rows(result, "requests")),
        "spot_window": window(rows(result, "window")),
        "spot_loss": loss(rows(result, "loss")),
        "spot_size": size(result, rows(result, "size")),
        "spot_cost": cost(result, rows(result, "window")),
        **{
            f"{name}_chart": f"![{title}](images/{name}.svg)"
            for name, (title, _) in charts_of(result).items()
        },
    }


def rows(result: Result, name: str) -> dict[str, Any]:
    """Of a table, by the scenario."""
    return {row["label"].removeprefix(f"{name}: "): row for row in result["rounds"] if row["table"] == name}


def egress(found: dict[str, Any]) -> str:
    head = ["", "left the origin, × of the data", "of it fetched again, broken off, %", "trainers waited"]
    head += ["took from the origin themselves", *(f"$ a 100 TB of data, {how}" for how in EGRESS_DOLLARS)]
    body = []
    for name, row in found.items():
        wasted = [100 * row["wasted_bytes"].get(why, 0.0) / row["egress_bytes"] for why in _WASTES]
        own = row["origin_share"] or 0.0
        body.append(
            [
                name,
                f"{row['egress_times']:.3f}",
                " / ".join(f"{share:.2f}" for share in wasted),
                f"{row['waited_share']:.1%}",
                f"{min(own, 1.0):.1%}",
                *(f"{100 * row['egress_times'] * dollars:,.0f}" for dollars in EGRESS_DOLLARS.values()),
            ]
        )
    return table(head, body)


def requests(found: dict[str, Any]) -> str:
    head = ["requests a second for", *_PURPOSES, "GET / PUT of small objects", "GET / PUT of shards"]
    head += ["refused", "$ an hour", "trainers waited"]
    body = []
    for name, row in found.items():
        asked = row["asked_per_second"]
        gets, puts = asked["small_gets"] + asked["shard_gets"], asked["small_puts"] + asked["shard_puts"]
        body.append(
            [
                name,
                *(f"{row['requests_per_second'].get(what, 0.0):,.0f}" for what in _PURPOSES),
                *(_pair(asked, kind) for kind in ("small", "shard")),
                f"{row['refused_share']:.1%}",
                f"{3600 * (gets * GET_DOLLARS + puts * PUT_DOLLARS):,.0f}",
                f"{row['waited_share']:.1%}",
            ]
        )
    return table(head, body)


def window(found: dict[str, Any]) -> str:
    """A row for each rate and number of nodes, a column for each window."""
    windows = sorted({_seconds(name) for name in found})
    grouped: dict[tuple[str, int], dict[float, Any]] = {}
    for name, row in found.items():
        often, nodes, _ = name.split(", ")
        grouped.setdefault((often, _whole(nodes)), {})[_seconds(name)] = row
    head = ["taken away", "nodes asked for", "there in the mean"]
    head += [f"waited, window {seconds / 60:.0f} min" for seconds in windows]
    body = []
    for (often, nodes), by_window in grouped.items():
        there = sum(row["nodes"] / row["of_full"] for row in by_window.values()) / len(by_window)
        waited = [f"{by_window[seconds]['waited_share']:.2%}" for seconds in windows if seconds in by_window]
        body.append([often, str(nodes), f"{there:.0f}", *waited])
    return table(head, body)


def loss(found: dict[str, Any]) -> str:
    head = ["lost", "window, min", "each trainer waited, s", "until nobody waits, min"]
    head += ["until as much is held as before, min", "least held, min"]
    body = []
    for name, row in found.items():
        share, seconds, *more = name.split(", ")
        after = _after(row)
        before = _before(row)["held_seconds"]
        waiting = [minute["at"] for minute in after if minute["waited_share"] > 0.01]
        full = [minute["at"] for minute in after if minute["held_seconds"] >= 0.95 * before]
        lowest = min(after, key=lambda minute: minute["held_seconds"])
        again = [at for at in full if at > lowest["at"]]
        waited = sum(60 * minute["waited_share"] for minute in after)
        ends = f"{waiting[-1] / 60:.0f}" if waiting and waiting[-1] < after[-1]["at"] else ""
        body.append(
            [
                ", ".join([share, *more]),
                f"{float(seconds.removesuffix(' s')) / 60:.0f}",
                f"{waited:,.0f}",
                ends or ("not while they are away" if waiting else "nobody does"),
                f"{again[0] / 60:.0f}" if again else "not within the hour",
                f"{lowest['held_seconds'] / 60:.1f}",
            ]
        )
    return table(head, body)


def size(result: Result, found: dict[str, Any]) -> str:
    """Of each size the share of what one partition answers, with what daemons ask now and with less."""
    full = result["settings"]["full"]
    head = ["trainers, partitions", *(f"{_SAID[name]}, % of the limit" for name in ASKED)]
    head += ["refused", "trainers waited"]
    body = []
    for name, row in found.items():
        parts = int(name.split(", ")[1].split()[0])
        shares = []
        for kind in ASKED:
            limit = (full["gets"] if "gets" in kind else full["puts"]) * (parts if "shard" in kind else 1)
            shares.append(f"{row['asked_per_second'][kind] / limit:.0%}")
        body.append([name, *shares, f"{row['refused_share']:.1%}", f"{row['waited_share']:.1%}"])
    return table(head, body)


def cost(result: Result, found: dict[str, Any]) -> str:
    """What the nodes cost, with the most of them and the middle window."""
    head = ["taken away", "a node lives, h", "nodes there of those asked for", "begun in an hour"]
    head += ["node-hours an hour", "node-hours a 100 TB", "$ a 100 TB"]
    full = result["settings"]["full"]
    body = []
    most = max((_whole(name.split(", ")[1]) for name in found), default=0)
    windows = sorted({_seconds(name) for name in found})
    for name, row in found.items():
        often, nodes, _ = name.split(", ")
        if _whole(nodes) != most or _seconds(name) != windows[len(windows) // 2]:
            continue
        hours, node_hours = row["seconds"] / 3600, row["node_hours"] / row["of_full"]
        read = full["bytes_per_second"] * full["groups"] * row["read_share"] * row["seconds"] / 1e14
        begun = (row["nodes_begun"] / row["of_full"] - most) / (row["all_seconds"] / 3600)
        per = node_hours / read
        body.append(
            [
                often,
                f"{1 / result['settings']['lost_per_hour'][often]:,.1f}",
                f"{row['nodes'] / row['of_full']:.0f} of {most}",
                f"{begun:.0f}",
                f"{node_hours / hours:.0f}",
                f"{per:.0f}",
                f"{per * NODE_DOLLARS:.0f}",
            ]
        )
    return table(head, body)


def charts_of(result: Result | None) -> dict[str, tuple[str, str]]:
    """Of each chart its title and its SVG."""
    if result is None:
        return {}
    series = {}
    for name, row in rows(result, "loss").items():
        steps = [minute for minute in [_before(row), *_after(row)] if round(minute["at"] / 60) % 5 == 0]
        share, seconds, *more = name.split(", ")
        label = f"{share}{', for good' if more else ''}, window {float(seconds.split()[0]) / 60:.0f} min"
        series[label] = [
            (round(minute["at"] / 60), minute["held_seconds"] / 60)
            for minute in steps
            if 0 <= minute["at"] <= 3600
        ]
    title = "Minutes of reading that are held ahead, after nodes were lost at once"
    if not any(series.values()):
        return {}
    return {"spot_loss": (title, charts.lines(title, "minutes since the loss", series))}


_WASTES = ("fetched again", "broken off")
_SAID = {
    "small_gets": "GET of small objects",
    "small_puts": "PUT of small objects",
    "shard_gets": "GET of shards",
    "shard_puts": "PUT of shards",
}


def _pair(asked: dict[str, float], kind: str) -> str:
    return f"{asked[f'{kind}_gets']:,.0f} / {asked[f'{kind}_puts']:,.0f}"


def _seconds(name: str) -> float:
    return float(name.split(", ")[-1].removesuffix(" s"))


def _whole(words: str) -> int:
    return int(words.split()[0])


def _before(row: Any) -> Any:
    """The last minute before the loss; its time is counted from there."""
    minute = max((m for m in row["minutes"] if m["at"] <= row["lost_at"]), key=lambda m: m["at"])
    return {**minute, "at": minute["at"] - row["lost_at"]}


def _after(row: Any) -> list[Any]:
    return [
        {**minute, "at": minute["at"] - row["lost_at"]}
        for minute in row["minutes"]
        if minute["at"] > row["lost_at"]
    ]


NAMES = ("spot_egress", "spot_requests", "spot_window", "spot_loss", "spot_size", "spot_cost")
