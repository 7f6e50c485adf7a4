"""Writes the tables and charts of the README, docs/results and benchmarks/README.md from results/.

Command: python -m benchmarks.report

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`, the chart of a benchmark between the same with
NAME_chart, a figure of a sentence between marks that say its place in results/ (markdown.py); what is around
them is written by hand and left alone. `measured` says when, at which commit and on which machine a page's
results were measured, `targets` what they are to reach. `all_targets` has the targets of all results, and
`missed` those that aren't reached. Charts are drawn into docs/results/images.
"""

import argparse
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import mixing_tables, overview, peer_tables, provenance
from benchmarks.markdown import (
    FIGURE,
    Result,
    figure_sources,
    filled,
    number,
    spread,
    table,
    with_figures,
)
from benchmarks.turns import RESULTS, ROOT

IMAGES = ROOT / "docs/results/images"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pages", type=Path, nargs="+", default=pages())
    parser.add_argument("--images", type=Path, default=IMAGES)
    write(parser.parse_args())


def pages() -> list[Path]:
    """Return the pages with a table or a figure that is written here."""
    named = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    texts = {page: page.read_text() for page in named if "_build" not in page.parts}
    return [page for page, text in texts.items() if FIGURE.search(text) or _marks(text) & _WRITTEN]


def write(given: argparse.Namespace) -> None:
    every = _with_parts(provenance.read_all(given.results))
    results = {name: every[name] for name in TABLES if name in every}
    tables = tables_of(results)
    given.images.mkdir(parents=True, exist_ok=True)
    drawn = {
        **peer_tables.charts_of(results),
        **overview.charts_of(results),
        **mixing_tables.charts_of(results),
    }
    for name, (_, drawing) in drawn.items():
        (given.images / f"{name}.svg").write_text(drawing)
    for page in given.pages:
        text = with_figures(page.read_text(), every)
        page.write_text(filled(text, {**tables, **_tables_of_page(text, every)}))


def _tables_of_page(page: str, every: dict[str, Result]) -> dict[str, str]:
    """The tables on the results that the page shows."""
    shown = shown_results(page)
    tables = {"to_measure_again": overview.to_measure_again(shown)}
    marks = _marks(page)
    if "measured" in marks and marks & SHOWN.keys():
        results = {name: result for name, result in every.items() if name in shown}
        tables |= {"measured": provenance.measured(results), "targets": targets(results)}
    return tables


def shown_results(page: str) -> set[str]:
    """Return the names of the results that a page's tables, charts and figures come from."""
    return figure_sources(page).union(*(SHOWN[mark] for mark in _marks(page) & SHOWN.keys()))


def _marks(page: str) -> set[str]:
    return set(re.findall(r"^<!-- (\w+) -->$", page, re.MULTILINE))


def _with_parts(results: dict[str, Result]) -> dict[str, Result]:
    """The results, and those parts of one that were measured at another time."""
    store = results.get("scale", {}).get("store")
    return {**results, "scale_store": {"benchmark": "scale", **store}} if store else results


def tables_of(results: dict[str, Result]) -> dict[str, str]:
    results = _with_parts(results)
    tables = {name: TABLES[name](result) for name, result in results.items()}
    tables |= {
        f"{name}_chart": f"![{title}](images/{name}.svg)"
        for name, (title, _) in peer_tables.charts_of(results).items()
    }
    tables |= {
        name: make(*(results[each] for each in needed))
        for name, (make, needed) in FROM_SEVERAL.items()
        if results.keys() >= {*needed}
    }
    if results.keys() >= overview.NEEDED:
        tables["beside"] = overview.beside(results)
        tables["beside_in_short"] = overview.beside(results, most=3)
    return {"all_targets": targets(results), "missed": targets(results, missed_only=True), **tables}


def targets(results: dict[str, Result], missed_only: bool = False) -> str:
    rows = []
    for name, result in results.items():
        for target in result["targets"]:
            if missed_only and target["met"] is not False:
                continue
            sign, limit = ("≤", target["at_most"])
            if limit is None:
                sign, limit = "≥", target["at_least"]
            met = {True: "yes", False: "no", None: "not measured"}[target["met"]]
            measured = number(target["value"])
            if target["met"] is False and measured == number(limit):
                measured = f"{target['value']:.4g}"
            rows.append([name, target["claim"], f"{sign} {number(limit)}", measured, met])
    return table(["benchmark", "claim", "target", "measured", "reached"], rows)


def memory(result: Result) -> str:
    rows = [
        [name, *(f"{row[f'{which}_bytes'] / 1e6:,.0f}" for which in ("peak", "steady", "before"))]
        for name, row in result["medians"].items()
    ]
    return table(["contender", "peak, MB", "steady, MB", "before the first batch was asked for, MB"], rows)


def gpu_feed(result: Result) -> str:
    ratios = result["ratios"]["images_per_second against synthetic"]
    has_use = any("gpu_use" in row for row in result["medians"].values())
    rows = []
    for name, row in result["medians"].items():
        waited = f"{row['waited_share']:.1%}" if "waited_share" in row else "–"
        use = [f"{row['gpu_use']:.0f}%" if "gpu_use" in row else "–"] if has_use else []
        ratio = f"{ratios.get(name, 1.0):.3f}"
        rows.append([name, spread(result, name, "images_per_second"), ratio, waited, *use])
    head = ["batches", "images/s (rounds)", "× synthetic", "waiting", *(["GPU use"] if has_use else [])]
    return table(head, rows)


def gpu_decode(result: Result) -> str:
    """Rates and CPU time; then the differences of pixels by kind of file."""
    rows = [
        [name, spread(result, name, "images_per_second"), f"{row['cpu_microseconds']:,.0f}"]
        for name, row in result["medians"].items()
    ]
    differences = [
        [kind, f"{row['mean']:.3f}", str(row["largest"]), f"{row['same']:.0%}"]
        for kind, row in result["differences"].items()
    ]
    rates = table(["", "images/s (rounds)", "CPU µs an image"], rows)
    return f"{rates}\n\n{table(['files', 'mean difference', 'largest', 'the same'], differences)}"


def decode_workers(result: Result) -> str:
    ratios = result["ratios"]["worker_cpu_microseconds"]
    rows = []
    for name, row in result["medians"].items():
        both = f"{row['cpu_microseconds']:,.0f}"
        ratio = "–" if ratios[name] is None else f"{ratios[name]:.3f}"
        rows.append([name, spread(result, name, "worker_cpu_microseconds"), ratio, both])
    head = ["", "worker, CPU µs an image (rounds)", "× decoding it", "worker and rank, CPU µs"]
    return table(head, rows)


def handover(result: Result) -> str:
    """Beside one copy of each batch; and with a busy core beside the same without."""
    rows = []
    for name, row in result["medians"].items():
        if "workers_wait" not in row:
            continue
        copy = f"{row['of_the_copy']:.2f}" if "of_the_copy" in row else "–"
        quiet = f"{row['of_the_quiet']:.2f}" if "of_the_quiet" in row else "–"
        gigabytes = f"{row['bytes_per_second'] / 1e9:.2f}" if "of_the_copy" in row else "–"
        cpu = [f"{row[f'{whose}_cpu_ms']:.1f}" for whose in ("consumer", "worker")]
        switches = [f"{row[f'{whose}_switches']:.1f}" for whose in ("consumer", "worker")]
        waits = [f"{row[f'{whose}']:.0%}" for whose in ("consumer_waits", "workers_wait")]
        rows.append([name, gigabytes, copy, quiet, *(" / ".join(pair) for pair in (cpu, switches, waits))])
    of_both = [f"{what} of consumer / worker" for what in ("CPU ms", "context switches", "waiting")]
    return table(["", "GB/s", "× one copy", "× without the busy core", *of_both], rows)


def flat(result: Result) -> str:
    rows = [
        [name, f"{row['private_bytes'] / 1e6:.1f}", f"{row['slope'] / 1e3:+.1f}"]
        for name, row in result["medians"].items()
    ]
    return table(["worker of", "of its own at the end, MB", "growth, KB a thousand samples"], rows)


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


def overhead(result: Result) -> str:
    """Beside the floor; a ratio is the median of those of all turns."""
    rows = []
    for pair, ratios in _ratios(result).items():
        cpu, speed = (ratios[metric] for metric in ("loading_us_per_image", "images_per_second"))
        own, _, floor = pair.partition(" beside ")
        row = result["medians"][own]
        rows.append(
            [
                own,
                floor,
                f"{row['loading_us_per_image']:,.0f}",
                _of_turns(cpu),
                f"{row['consumer_us_per_image']:,.0f}",
                _of_turns(speed),
            ]
        )
    columns = ["beside", "CPU µs an image", "× the floor's (middle half)", "beside it the consumer, µs"]
    return table(["", *columns, "images/s, × the floor's (middle half)"], rows)


def _of_turns(values: list[float]) -> str:
    """The median, and between what half of them lie."""
    low, high = np.percentile(values, (25, 75))
    return f"{statistics.median(values):.3f} ({low:.2f}–{high:.2f})"


def _ratios(result: Result) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for name, values in result["ratios"].items():
        own, _, metric = name.rpartition(", ")
        if values:
            found.setdefault(own, {})[metric] = values
    return found


def stages(result: Result) -> str:
    """A row for each stage, in the order of the journey; the whole last."""
    timed = {name: row for name, row in result["medians"].items() if "the rest" in row}
    rows = [
        [stage, *(f"{row[stage]:,.1f}" for row in timed.values())] for stage in result["settings"]["stages"]
    ]
    rows.append(["all", *(f"{row['cpu_us_per_image']:,.0f}" for row in timed.values())])
    return table(["stage", *(f"{name.removeprefix('stages, ')}, µs an image" for name in timed)], rows)


def prepared(result: Result) -> str:
    rows = [
        [
            name,
            spread(result, name, "cpu_us_per_image", 0),
            spread(result, name, "images_per_second", 0),
        ]
        for name, row in result["medians"].items()
    ]
    return table(["shards, images", "CPU µs an image (rounds)", "images/s (rounds)"], rows)


def strategies(result: Result) -> str:
    medians = result["medians"]
    base = next(iter(medians.values()))["training_images_per_second"]
    rows = [
        [
            name,
            f"{row['first_seconds']:.0f}",
            f"{row['loading_images_per_second']:,.0f}",
            f"{row['training_images_per_second']:,.0f}",
            f"{row['training_images_per_second'] / base - 1:+.0%}",
            f"{row['training_cpu_us_per_image']:,.0f}",
            f"{row['kept_bytes_per_image'] / 1e3:,.0f}",
        ]
        for name, row in medians.items()
    ]
    head = ["strategy", "first epoch, s", "loading, images/s", "training, images/s", "against the first"]
    return table([*head, "training, CPU µs an image", "kept, KB an image"], rows)


def preparing(result: Result) -> str:
    plain = result["settings"]["bytes"] / result["settings"]["samples"]
    rows = [
        [
            recipe,
            f"{cost['cpu_us_per_image']:,.0f}",
            f"{cost['bytes_per_image'] / 1e3:,.0f}",
            f"{cost['bytes_per_image'] / plain:.2f} ×",
            *(f"{of[each]:.1f}" if of else "the same" for each in ("mean_db", "lowest_tenth_db")),
        ]
        for recipe, cost in result["preparing"].items()
        for of in (result["psnr"].get(recipe),)
    ]
    head = ["recipe", "CPU µs an image, once", "KB an image", "of the shard's", "PSNR of a crop, dB"]
    return table([*head, "of a tenth of them below"], rows)


def module_cache(result: Result) -> str:
    rows = [
        [
            name,
            spread(result, name, "hit_cpu_us", 1) if row["hit_cpu_us"] else "–",
            f"{row['disk_ratio']:.2f}" if row["disk_ratio"] else "–",
        ]
        for name, row in result["medians"].items()
        if "ViT" not in name
    ]
    return table(["rows of 3 KB", "CPU µs a stored row (rounds)", "bytes on disk ÷ payload"], rows)


def features(result: Result) -> str:
    rows = [
        [
            name,
            f"{row['first_cpu_us'] / 1e3:.2f}",
            spread(result, name, "epoch_cpu_us", 0),
            spread(result, name, "epoch_seconds"),
        ]
        for name, row in result["medians"].items()
    ]
    head = ["an epoch of a linear head", "first: CPU ms a sample", "later: CPU µs a sample (rounds)"]
    return table([*head, "later: seconds (rounds)"], rows)


def articles(features: Result, strategies: Result) -> str:
    """What articles report of caching, beside what was measured here."""
    faster = {
        name: f"{features['medians']['computed']['epoch_cpu_us'] / row['epoch_cpu_us']:,.0f} ×"
        for name, row in features["medians"].items()
    }
    gains = {
        name: f"{ratio - 1:+.0%}"
        for name, ratio in strategies["ratios"][
            "training_images_per_second against Dataset, no cache"
        ].items()
    }
    rows = [
        ["a frozen model's features", "30 ×, 87 ×", faster["calls, streamload"], faster["features"]],
        ["tensors in memory", "+200%", gains["Dataset, tensors in memory"], gains["streamload, raw-256"]],
        ["tensors on disk", "+80%", gains["Dataset, a file a sample"], gains["streamload, raw"]],
    ]
    return table(["kept", "articles", "their way, here", "by the loader"], rows)


def row_memory(result: Result) -> str:
    names = {"none": "no cache", "disk": "rows on disk", "memory": "and rows in memory"}
    rows = [
        [names[name], f"{row['total_bytes'] / (1 << 20):,.0f}"] for name, row in result["medians"].items()
    ]
    limit_mib = result["settings"]["limit_bytes"] >> 20
    head = f"2 ranks with 4 workers each, limit {limit_mib} MiB"
    return table([head, "all processes, MiB"], rows)


def row_columns(result: Result) -> str:
    measures = {
        "shards of 1,000: a row stored, CPU µs": ("store_1000_us", 1),
        "shards of 1,000: a row read, CPU µs": ("read_1000_us", 1),
        "shards of 100: a row stored, CPU µs": ("store_100_us", 1),
        "shards of 100: a row read, CPU µs": ("read_100_us", 1),
        "shards of 8: a row stored, CPU µs": ("store_8_us", 1),
        "shards of 8: a row read, CPU µs": ("read_8_us", 1),
        "bytes on disk ÷ payload, shards of 1,000": ("disk_ratio", 3),
        "a sample through the loader: rows of columns, CPU µs": ("columns_us", 1),
        "a sample through the loader: no feature, CPU µs": ("order_us", 1),
    }
    rows = [[said, spread(result, "columns", name, digits)] for said, (name, digits) in measures.items()]
    return table(["rows of samples, 3 KB each", "(rounds)"], rows)


def daemons(result: Result) -> str:
    rows = [
        [
            f"{row['link_bytes_per_second'] / 1e6:.2f} ({row['share']:g} ×)",
            f"{row['daemons']:g}",
            spread(result, name, "seconds", 1),
            f"{row['least_seconds']:.1f}",
            f"{row['waited_share']:.0%}",
            f"{row['from_origin']:.2f} ×",
            f"{row['shared_hits']:g} of {result['settings']['shards']}",
        ]
        for name, row in result["medians"].items()
        if row["trainers"] == 1
    ]
    head = ["link of a node, MB/s (× what is consumed)", "daemons", "epoch, s (rounds)", "least, s"]
    return table([*head, "waiting", "from the origin", "shards by the shared cache"], rows)


def daemons_trainers(result: Result) -> str:
    rows = [
        [
            f"{row['trainers']:g}",
            "a daemon, then they begin" if row["filled"] else "they and a daemon, at once",
            spread(result, name, "seconds", 1),
            f"{row['waited_share']:.0%}",
            spread(result, name, "from_origin"),
            f"{row['shared_bytes'] / result['settings']['bytes']:.2f}",
        ]
        for name, row in result["medians"].items()
        if row["filled"] or row["trainers"] > 1 or (row["daemons"], row["share"]) == (1, 0.5)
    ]
    head = ["trainers", "who fills", "longest epoch, s (rounds)", "waiting", "from the origin, × (rounds)"]
    return table([*head, "each from the shared cache, ×"], rows)


def scale(result: Result) -> str:
    rows = [
        [
            name,
            spread(result, name, "start_seconds"),
            f"{row['start_cpu_seconds']:.2f}",
            spread(result, name, "first_batch_seconds"),
            *(f"{row[f'above_{which}'] / 1e6:,.0f}" for which in ("bytes", "later_bytes", "peak_rss_bytes")),
        ]
        for name, row in result["medians"].items()
        if "start_seconds" in row
    ]
    idle = next(name for name in result["medians"] if name.startswith("idle"))
    rows.append([idle, "–", "–", "–", f"{result['medians'][idle]['above_bytes'] / 1e6:,.0f}", "–", "–"])
    head = ["rank with", "order known, s (rounds)", "CPU, s", "first batch, s (rounds)"]
    return table([*head, "above torch, MB", "later, MB", "peak RSS, MB"], rows)


def scale_store(result: Result) -> str:
    steps = ("start", "report", "read", "decide", "beat", "look")
    rows = [
        [
            label,
            *(f"{row[f'{step}_cpu_seconds'] * 1e3:,.1f}" for step in steps),
            f"{row['start_slowest_seconds']:.2f}",
        ]
        for label, row in result["medians"].items()
    ]
    lines = {what: result[f"extrapolated_{what}"] for what in ("start", "outage")}
    rows.append(
        [
            f"{lines['start']['ranks']:,} ranks, by a + b × ranks",
            f"{lines['start']['cpu_seconds'] * 1e3:,.0f}",
            f"{lines['outage']['cpu_seconds'] * 1e3:,.0f} for both",
            *["–"] * 5,
        ]
    )
    head = ["store's CPU, ms", "start", "outage: reported", "outage: read", "a decision of mixing="]
    return table([*head, "heartbeats", "rank 0's look", "start, slowest rank, s"], rows)


def nodes(result: Result) -> str:
    rows = [
        [label, spread(result, label, "first_batch_seconds"), spread(result, label, "load_before")]
        for label in result["medians"]
    ]
    return table(["first batch", "s (rounds)", "load before"], rows)


def memory_tier(result: Result) -> str:
    rows = [
        [
            name,
            spread(result, name, "images_per_second", 0),
            spread(result, name, "cpu_us_per_image", 0),
            f"{row['disk_bytes_per_image'] / 1e3:,.0f}",
        ]
        for name, row in result["medians"].items()
    ]
    return table(
        ["work and tier", "images/s (rounds)", "CPU µs an image (rounds)", "from the disk, KB"], rows
    )


def start(result: Result) -> str:
    rows = []
    for name, row in result["medians"].items():
        if "seconds" in row:
            rows.append([name, spread(result, name, "seconds"), "–"])
        else:
            times = [f"{since}_to_first_batch_seconds" for since in ("making", "iter")]
            rows.append([name, *(spread(result, name, metric) for metric in times)])
    head = ["loader or command", "from making it (or calling it), s (rounds)", "from iter(), s (rounds)"]
    return table(head, rows)


def link_busy(result: Result) -> str:
    rows = [
        [
            name,
            f"{row['share']:.1%}",
            f"{row['bytes'] / row['seconds'] / 1e6:,.0f}",
            spread(result, name, "seconds"),
            f"{row['cpu_seconds_per_gb']:.2f}",
        ]
        for name, row in result["medians"].items()
        if "share" in row
    ]
    head = ["client and link", "of what it carries", "MB/s", "first request to last byte, s (rounds)"]
    return table([*head, "CPU s a GB"], rows)


def held(result: Result) -> str:
    rows = [
        [name, spread(result, name, "first_batch_seconds"), spread(result, name, "epoch_seconds")]
        for name in result["medians"]
    ]
    return table(["held shards", "first batch, s (rounds)", "epoch, s (rounds)"], rows)


def mount(result: Result) -> str:
    rows = [
        [
            name,
            spread(result, name, "first_batch_seconds"),
            f"{row['first_batch_cpu_seconds']:.2f} + {row['first_batch_server_cpu_seconds']:.2f}",
            f"{row['cpu_us']:,.0f}",
            f"{row['read_times']:.2f} ×",
        ]
        for name, row in result["medians"].items()
    ]
    head = ["shards on", "first batch, s (rounds)", "CPU s until then: training + server"]
    return table(
        [*head, "CPU µs of an image, epoch 1", "read from the mount in two epochs, of the data"], rows
    )


def small_shards(result: Result) -> str:
    rows = [
        [name, f"{row['samples_per_second']:,.0f}", f"{row['cpu_us']:,.0f}"]
        for name, row in result["medians"].items()
    ]
    return table(["loader, shards, epoch", "samples/s", "CPU µs of a sample"], rows)


def converted(result: Result) -> str:
    rows = [
        [name, *(f"{row[metric]:,.{digits}f}" for metric, digits in _CONVERTED)]
        for name, row in result["medians"].items()
        if "cpu_us" in row
    ]
    return table(["read from", "samples/s", "CPU µs of a sample", "first batch, s"], rows)


_CONVERTED = (("samples_per_second", 0), ("cpu_us", 0), ("first_batch_seconds", 1))


def small_cache(result: Result) -> str:
    rows = [
        [
            name,
            f"{row['seconds']:.1f}",
            f"{row['first_batch_seconds']:.2f}",
            f"{row['fetched']:.2f}",
            f"{row['requests']:.0f}",
            f"{row['range_reads']:.0f}",
        ]
        for name, row in result["medians"].items()
    ]
    head = [
        "lanes and window",
        "epoch, s",
        "first batch, s",
        "fetched, × the data",
        "requests",
        "range reads",
    ]
    return table(head, rows)


def buckets(result: Result) -> str:
    rates, medians = result["ratios"]["rate against the order of the run"], result["medians"]
    rows = []
    for way in dict.fromkeys(label.split("; ")[1] for label in rates):
        row = [way]
        for label in (f"captions; {way}; 1", f"captions; {way}; 4"):
            row += [f"{medians[label]['padding']:.1%}", f"{rates[label]:.2f}"]
        rows.append([*row, f"{rates[f'captions and images; {way}; 4']:.2f}"])
    head = ["a step's rows", "padding", "rate", "padding, 4 microbatches", "rate, 4 microbatches"]
    return table([*head, "rate with images that vary, 4 microbatches"], rows)


def naflex_step(result: Result) -> str:
    rates = result["ratios"]["rate against the order of the run"]
    rows = [
        [name, f"{row['padding']:.0%}", f"{row['training_us_per_image'] / 1e3:.1f}", f"{rates[name]:.2f}"]
        for name, row in result["medians"].items()
    ]
    return table(["a step's rows", "padding", "ms an image", "speed, × the order of the run"], rows)


def packing(result: Result) -> str:
    ratios = result["ratios"]["useful, × first fit"]
    rows = []
    for label, row in result["medians"].items():
        kind, _, rule = label.partition("; ")
        rows.append([kind, rule, f"{row['slowest']:.3f}", f"{row['filled']:.1%}", f"{ratios[label]:.2f}"])
    return table(["lengths", "rule", "slowest rank ÷ mean", "tokens ÷ budget", "useful, × first fit"], rows)


def journal(result: Result) -> str:
    medians = result["medians"]
    training, size = medians["training"], medians["journal"]["bytes_per_step"]
    rows = [
        ["a step of a training, without ÷ with", f"{training['ratio']:.4f}"],
        ["what it adds to a step of 256 rows, CPU ms", f"{training['cpu_us_per_step'] / 1e3:.2f}"],
        ["bytes a step and rank", f"{size:.0f}"],
        ["256 rows again, CPU s", f"{medians['replay']['cpu_seconds']:.2f}"],
    ]
    for label, row in medians.items():
        if label.startswith("seek: "):
            scale, ways = label.removeprefix("seek: "), ("one_group_seconds", "all_groups_seconds")
            values = " / ".join(f"{row[way]:.1f}" for way in ways)
            rows.append([f"the state before a step, {scale}, of one group / of all, CPU s", values])
        elif label.startswith("used: "):
            said = f"the steps of a shard's samples, {label.removeprefix('used: ')}, CPU s"
            rows.append([said, f"{row['cpu_seconds']:.2f}"])
    return table(["a journal", ""], rows)


TABLES = {
    **peer_tables.TABLES,
    "journal": journal,
    "buckets": buckets,
    "naflex_step": naflex_step,
    "packing": packing,
    "mixing_policies": mixing_tables.policies,
    "mixing_clip": mixing_tables.clip,
    "start": start,
    "link_busy": link_busy,
    "memory": memory,
    "flat": flat,
    "gpu_feed": gpu_feed,
    "gpu_decode": gpu_decode,
    "decode_workers": decode_workers,
    "handover": handover,
    "handover_gpu": handover,
    "memory_tier": memory_tier,
    "hits": hits,
    "small_cache": small_cache,
    "held": held,
    "mount": mount,
    "small_shards": small_shards,
    "converted": converted,
    "fill": fill,
    "verification": verification,
    "overhead": overhead,
    "prepared": prepared,
    "module_cache": module_cache,
    "features": features,
    "row_memory": row_memory,
    "row_columns": row_columns,
    "strategies": strategies,
    "daemons": daemons,
    "scale": scale,
    "scale_store": scale_store,
    "nodes": nodes,
}


FROM_SEVERAL: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "peers": (peer_tables.peers, ("warm",)),
    "stages": (stages, ("overhead",)),
    "articles": (articles, ("features", "strategies")),
    "preparing": (preparing, ("prepared",)),
    "daemons_trainers": (daemons_trainers, ("daemons",)),
}
"""Further tables: what makes each, and the results that it is made from."""

SHOWN: dict[str, set[str]] = {
    **{name: {name} for name in TABLES},
    **{f"{name}_chart": {name} for name in peer_tables.CHARTS},
    **{name: set(needed) for name, (_, needed) in FROM_SEVERAL.items()},
    **dict.fromkeys(("beside", "beside_in_short"), overview.NEEDED),
}
"""By the mark of a table or chart, the results that it shows."""

_WRITTEN = SHOWN.keys() | {"all_targets", "missed"}


if __name__ == "__main__":
    main()
