"""Pages of runs in Prometheus' text format: the registry's metrics by run and rank.

Pure. A rank has at most 80 series, and 8 more for each of its sources: of the histogram of data waits every
second bucket from half a millisecond on is here, sums and counts of other metrics are left out, and so are
most of features, and the metrics of a shared cache and of features where there is none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from streamload.metrics.registry import GIVEN, METRICS, Metric
from streamload.observe.page import Labels, RunPage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "streamload_"
_LEFT_OUT = {
    *("transform_seconds", "first_batch_seconds", "batches_yielded", "fresh_tensors", "workers"),
    *("samples_off_size", "samples_of_unknown_size"),  # extension_value has them
} | {
    f"feature_{name}"
    for name in (
        *("rows_stored", "rows_refused", "bytes_read", "bytes_stored", "mismatches", "builds"),
        "saved_seconds",
    )
}
"""Sums of other metrics, the count of the histogram, what is a label of run_info, and details of stats()."""
_OF_SOME = ("shared_", "feature_")
"""Prefixes of metrics that only some runs have."""
_FIRST_BUCKET, _BUCKETS_SKIPPED = 5, 2
_INFO = Metric(
    "run_info",
    "gauge",
    "1 for each live rank; its labels say what it is",
    labels=("host", "pid", "world_size", "workers"),
)
_AGE = Metric(
    "page_age_seconds",
    "gauge",
    "seconds since the rank has published these numbers; it does so about once a second",
    "seconds",
)


def exposition(pages: Iterable[RunPage]) -> str:
    """The metrics of live ranks in Prometheus' text format, version 0.0.4; "" for none."""
    ranks = list(_labelled(pages))
    if not ranks:
        return ""
    lines: list[str] = []
    for metric in (_INFO, _AGE, *METRICS, *GIVEN):
        if metric.name in _LEFT_OUT:
            continue
        name = full_name(metric)
        samples = [line for page, labels in ranks for line in _lines(metric, name, page, labels)]
        if samples:
            lines += [f"# HELP {name} {_help(metric)}", f"# TYPE {name} {metric.kind}", *samples]
    return "\n".join([*lines, ""])


def full_name(metric: Metric) -> str:
    """The name of a metric as exporters have it."""
    return f"{_PREFIX}{metric.name}{'_total' if metric.kind == 'counter' else ''}"


def quoted(value: str) -> str:
    """The value of a label, in quotes."""
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


def _labelled(pages: Iterable[RunPage]) -> Iterator[tuple[RunPage, str]]:
    """Pages, and the labels of each; of two with the same run and rank the second is numbered."""
    shown: Counter[tuple[str, int]] = Counter()
    for page in pages:
        shown[page.run, page.rank] += 1
        count = shown[page.run, page.rank]
        run = page.run if count == 1 else f"{page.run}~{count}"
        yield page, f'run={quoted(run)},rank="{page.rank}"'


def _lines(metric: Metric, name: str, page: RunPage, labels: str) -> Iterator[str]:
    if metric.kind == "histogram":
        yield from _histogram(name, page, labels)
        return
    for label_values, value in _values(metric, page).items():
        more = "".join(
            f",{key}={quoted(label)}" for key, label in zip(metric.labels, label_values, strict=True)
        )
        yield f"{name}{{{labels}{more}}} {_number(value)}"


def _values(metric: Metric, page: RunPage) -> Mapping[Labels, float]:
    """The values of a metric of one rank, by its own labels."""
    if metric is _INFO:
        return {(page.host, str(page.pid), str(page.world_size), str(page.workers)): 1}
    if metric is _AGE:
        return {(): round(page.age_seconds, 3)}
    if not metric.rows:
        values = page.gauges.get(metric.name, {})
        return {(): page.still_seconds} if values and metric.name == "still_seconds" else values
    if metric.name.startswith(_OF_SOME) and not _has_any(page, metric.name):
        return {}
    scale = 1e9 if metric.unit == "seconds" else 1
    return {row.labels: page.counters.get(row.name, 0) / scale for row in metric.rows}


def _has_any(page: RunPage, name: str) -> bool:
    (prefix,) = (prefix for prefix in _OF_SOME if name.startswith(prefix))
    return any(counter.startswith(prefix) for counter in page.counters)


def _histogram(name: str, page: RunPage, labels: str) -> Iterator[str]:
    buckets = page.cumulative_buckets()
    for bound, count in buckets[_FIRST_BUCKET::_BUCKETS_SKIPPED]:
        yield f'{name}_bucket{{{labels},le="{_number(bound)}"}} {count}'
    yield f"{name}_sum{{{labels}}} {_number(page.counters.get('data_wait_ns', 0) / 1e9)}"
    yield f"{name}_count{{{labels}}} {buckets[-1][1]}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _help(metric: Metric) -> str:
    parts = [metric.help]
    parts += [f"near 0: {metric.low}"] if metric.low else []
    parts += [f"near {metric.high}"] if metric.high else []
    return "; ".join(parts).replace("\\", r"\\").replace("\n", r"\n")
