"""The tables and charts of the benchmarks that run peers beside streamload."""

from collections.abc import Callable, Iterable

from benchmarks import charts
from benchmarks.charts import Bar
from benchmarks.markdown import Result, number, spread, table


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
            spread(result, name, "first_batch_seconds"),
            f"{row['bytes_time_seconds']:.2f}",
            spread(result, name, "epoch_1_seconds"),
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
            spread(result, name, "images_per_second", 0),
            number(against.get(name)),
            f"{row['cpu_us_per_image']:,.0f}",
        ]
        for name, row in result["medians"].items()
    ]
    return table(["contender", "images/s (rounds)", "× open_clip", "CPU µs an image"], rows)


def peers(result: Result) -> str:
    """What each contender doesn't do, and what it has to be given first."""
    rows = []
    for name, limits in result["limits"].items():
        made = result["conversions"].get(name)
        if limits:
            first = [f"{made['seconds']:.1f}", f"{made['bytes'] / 1e6:,.2f}"] if made else ["–", "–"]
            rows.append([name, *first, "; ".join(limits)])
    return table(["contender", "made first, s", "its bytes, MB", "what it doesn't do"], rows)


def half(result: Result) -> str:
    """A row for each contender; its epochs one after the other."""
    names = dict.fromkeys(row["contender"] for row in result["rounds"])
    epochs = range(1, result["settings"]["epochs"] + 1)
    rows = []
    for name in names:
        medians = [result["medians"][f"{name}, epoch {epoch}"] for epoch in epochs]
        rows.append(
            [
                name,
                " / ".join(f"{row['held_bytes'] / 1e6:,.0f}" for row in medians),
                " / ".join(f"{row['fetched_bytes'] / 1e6:,.0f}" for row in medians),
                " / ".join(f"{row['images_per_second']:.0f}" for row in medians),
            ]
        )
    for name in dict.fromkeys(failure["contender"] for failure in result["failures"]):
        reasons = [failure["reason"] for failure in result["failures"] if failure["contender"] == name]
        rows.append([name, f"{reasons[0]} ({len(reasons)} of {len(result['seeds'])} rounds)", "–", "–"])
    settings = result["settings"]
    sizes = f"limit {settings['limit_bytes'] / 1e6:,.0f} MB of {settings['bytes'] / 1e6:,.0f} MB"
    return table(["contender", f"held at most, MB ({sizes})", "fetched, MB", "images/s"], rows)


def scaling(result: Result) -> str:
    counts = result["settings"]["workers"]
    rows = []
    for name, labels in _labels(result, "workers").items():
        speeds = [result["medians"][labels[count]]["images_per_second"] for count in counts]
        rows.append(
            [
                name,
                *(spread(result, labels[count], "images_per_second", 0) for count in counts),
                " / ".join(f"{speed / speeds[0]:.2f}" for speed in speeds[1:]),
            ]
        )
    head = [f"{count} worker{'s' if count > 1 else ''}, images/s" for count in counts]
    return table(["contender", *head, f"× 1 worker, with {' / '.join(map(str, counts[1:]))}"], rows)


def consumer(result: Result) -> str:
    speeds = result["settings"]["consumed_per_second"]
    rows = []
    for name, labels in _labels(result, "consumed_per_second").items():
        of_each = [result["medians"][labels[speed]] for speed in speeds]
        rows.append(
            [name, *(f"{row['waited_share']:.1%} ({row['images_per_second']:.0f})" for row in of_each)]
        )
    return table(["waiting (images/s)", *(f"a device of {speed} images/s" for speed in speeds)], rows)


def resume(result: Result) -> str:
    rows = []
    for name, row in result["medians"].items():
        each = [one for one in result["rounds"] if one["label"] == name]
        rest = "as it was to come" if all(one["in_order"] for one in each) else "otherwise"
        rows.append(
            [
                name,
                spread(result, name, "first_batch_seconds"),
                f"{row['start_to_first_batch_seconds']:.1f}",
                _fetched_again(row),
                f"{row['lost']:,.0f} / {row['again']:,.0f} of {row['to_come']:,.0f}",
                rest,
            ]
        )
    for name in dict.fromkeys(failure["contender"] for failure in result["failures"]):
        reasons = [failure["reason"] for failure in result["failures"] if failure["contender"] == name]
        rows.append([name, *["–"] * 4, f"{reasons[0]} ({len(reasons)} of {len(result['seeds'])} rounds)"])
    rows += [[name, *["–"] * 4, f"can't: {reason}"] for name, reason in result["cannot"].items()]
    head = ["contender", "first batch, s (rounds)", "from the process's start, s"]
    head += ["fetched again for it / in all, MB", "samples lost / given again", "the rest of the epoch"]
    return table(head, rows)


def _fetched_again(row: Result) -> str:
    if row["is_local"]:
        return "local files"
    return f"{row['fetched_to_first_batch_bytes'] / 1e6:.0f} / {row['fetched_bytes'] / 1e6:.0f}"


TABLES: dict[str, Callable[[Result], str]] = {
    "cold": cold,
    "cold_large": cold,
    "warm": warm,
    "half": half,
    "resume": resume,
    "scaling": scaling,
    "consumer": consumer,
}


def charts_of(results: dict[str, Result]) -> dict[str, tuple[str, str]]:
    """Of each benchmark that has a chart, its title and its SVG."""
    drawn = {}
    for name, result in results.items():
        if name in CHARTS:
            title, draw = CHARTS[name]
            drawn[name] = title, draw(title, result)
    return drawn


def _scaling_chart(title: str, result: Result) -> str:
    series = {
        name: [
            (count, result["medians"][label]["images_per_second"]) for count, label in sorted(labels.items())
        ]
        for name, labels in _labels(result, "workers").items()
    }
    return charts.lines(title, "workers", series)


def _cores_chart(title: str, result: Result) -> str:
    """The rows "loader, DECODER, N cores", on the device that the result is of."""
    series: dict[str, list[tuple[float, float]]] = {}
    for label, row in result["medians"].items():
        if label.startswith("loader, "):
            _, decoder, cores = label.split(", ")
            series.setdefault(decoder, []).append((int(cores.split()[0]), row["images_per_second"]))
    small = " (small form: no figures)" if result["quick"] else ""
    return charts.lines(f"{title}, {result['device']}{small}", "cores", series)


def _rates(result: Result) -> list[charts.Bar]:
    found = []
    for label, rate in result["ratios"]["rate against the order of the run"].items():
        kind, way, parts = label.split("; ")
        if kind == "captions" and parts == "4":
            found.append(charts.Bar(way, rate, rate, rate, is_ours=way.startswith(("step", "blocks"))))
    return found


def _half_chart(title: str, result: Result) -> str:
    rows = _bars(result, "held_bytes", result["medians"], 1e6)
    return charts.bars(title, rows, limit=result["settings"]["limit_bytes"] / 1e6)


CHARTS: dict[str, tuple[str, Callable[[str, Result], str]]] = {
    "cold": (
        "From nothing: seconds to the first batch",
        lambda title, result: charts.bars(
            title, _bars(result, "first_batch_seconds", result["medians"]), digits=2
        ),
    ),
    "warm": (
        "With the bytes near: images a second",
        lambda title, result: charts.bars(title, _bars(result, "images_per_second", result["medians"])),
    ),
    "buckets": (
        "Useful tokens of captions a second, × those in the order of the run (4 microbatches)",
        lambda title, result: charts.bars(title, _rates(result), digits=2),
    ),
    "gpu_decode": ("Images/s of the loader alone, three decoders", _cores_chart),
    "half": ("Room for half of the data: MB held at most, beside the limit", _half_chart),
    "scaling": ("Images a second by the number of workers", _scaling_chart),
    "consumer": (
        "Waiting for a batch, % of the time",
        lambda title, result: charts.bars(
            title, _bars(result, "waited_share", result["medians"], 0.01), digits=1
        ),
    ),
}


def _bars(result: Result, metric: str, labels: Iterable[str], unit: float = 1.0) -> list[Bar]:
    rows = []
    for label in labels:
        values = [row[metric] / unit for row in result["rounds"] if row["label"] == label]
        median = result["medians"][label][metric] / unit
        rows.append(Bar(label, median, min(values), max(values), label.startswith("streamload")))
    return rows


def _labels(result: Result, setting: str) -> dict[str, dict[int, str]]:
    """By contender, the label of each value of a setting."""
    found: dict[str, dict[int, str]] = {}
    for row in result["rounds"]:
        found.setdefault(row["contender"], {})[row[setting]] = row["label"]
    return found
