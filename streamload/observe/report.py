"""The report of a run: one HTML file that needs no network, drawn from recordings, with its numbers inside.

It answers in this order: was data late, when, why, and with which settings. charts.py draws, timeline.py has
the numbers.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.metrics.counters import format_bytes
from streamload.metrics.registry import BUCKET_NS, BUCKETS
from streamload.observe.charts import STYLE, Chart, bars, drawn, duration
from streamload.observe.pictures import Row, cells
from streamload.observe.recording import Recorded
from streamload.observe.timeline import Timeline, flow
from streamload.observe.verdict import ONLY_DATA, is_only_data

Numbers = NDArray[np.float64]
_MOST_RANKS = 8
"""Ranks with a line of their own; of more, the lowest, mean and highest are drawn."""
_LATE = 0.05
_RUN_LENGTH = 12
"""So many characters of a run's name tell it from others."""
_OF_SKIPPED = ("cause", "url", "key", "message")
_CAUSES = ("samples_skipped_", "samples_replaced_")


def report(timeline: Timeline, skipped: Sequence[Row] = ()) -> str:
    """The report as HTML.

    Args:
        timeline: of the run.
        skipped: samples that could not be used, and their pictures; see skipped.py.
    """
    about, charts = timeline.ranks[0].about, _all_charts(timeline)
    title = f"streamload run {str(about['run'])[:_RUN_LENGTH]}"
    parts = [
        f"<h1>{html.escape(title)}</h1><p class=sub>{html.escape(_line(timeline))}</p>",
        _verdict(timeline),
        _tiles(timeline),
        _charts(timeline, charts),
        _alerts(timeline),
        _skipped(timeline, skipped),
        _settings(about.get("settings", {})),
    ]
    data = json.dumps(numbers(timeline, charts), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f'<meta name=viewport content="width=device-width"><style>{STYLE}</style><main>{"".join(parts)}'
        f'<footer>Made by streamload; its numbers are in this file, as JSON (id "data").</footer></main>'
        f'<script type="application/json" id="data">{data}</script></html>\n'
    )


def numbers(timeline: Timeline, charts: list[Chart] | None = None) -> dict[str, Any]:
    """Content of the report as plain values; unknown ones are None.

    Args:
        timeline: of the run.
        charts: of it, where they are known already.
    """
    return {
        "about": [dict(rank.about) for rank in timeline.ranks],
        "seconds": _plain(timeline.middles),
        "charts": {
            chart.title: {name: _plain(values) for name, values in chart.series.items()}
            for chart in (_all_charts(timeline) if charts is None else charts)
        },
        "wait_buckets": timeline.wait_buckets(),
        "epochs": [{"epoch": epoch, "seconds": round(second, 2)} for second, epoch in timeline.epochs()],
        "skipped": [dict(zip(_OF_SKIPPED, sample, strict=True)) for sample in timeline.skipped()],
        "totals": {
            name: timeline.total(name)
            for name in sorted({name for rank in timeline.ranks for name in rank.moments[-1].counters})
        },
        "verdict": _last_verdict(timeline),
        "run_verdict": _run_verdict(timeline),
    }


def wait_share(timeline: Timeline) -> float:
    """The share of the run in which a training loop waited, on average over ranks."""
    seconds = sum(rank.moments[-1].run_seconds for rank in timeline.ranks if rank.moments)
    waited = (timeline.total("data_wait_ns") - timeline.total("first_batch_ns")) / 1e9
    return min(1.0, max(0.0, waited / seconds)) if seconds else 0.0


def _line(timeline: Timeline) -> str:
    about = timeline.ranks[0].about
    start = datetime.fromtimestamp(float(about["began"]), timezone.utc)
    ranks = f"{len(timeline.ranks)} of {about['world_size']} ranks" if about["world_size"] > 1 else "one rank"
    hosts = ", ".join(sorted({str(rank.about["host"]) for rank in timeline.ranks}))
    took = f"began {start:%Y-%m-%d %H:%M} UTC, took {duration(timeline.seconds)}"
    return f"{about['run']}: {ranks} on {hosts}, {about['workers']} workers each; {took}"


def _last_verdict(timeline: Timeline) -> str:
    """The last verdict that a rank gave; "": none ever waited."""
    verdicts = [
        (moment.run_seconds, moment.verdict, rank)
        for rank in timeline.ranks
        for moment in rank.moments
        if moment.verdict
    ]
    _, verdict, rank = max(verdicts, key=lambda verdict: verdict[:2], default=(0.0, "", None))
    return "" if rank is None else _of_rank(timeline, rank, verdict)


def _run_verdict(timeline: Timeline) -> str:
    """The verdict over the whole run, of the rank that waited most; "": none waited much."""
    ranks = [rank for rank in timeline.ranks if rank.moments]
    most = max(ranks, key=lambda rank: rank.moments[-1].counters.get("data_wait_ns", 0))
    return _of_rank(timeline, most, most.moments[-1].run_verdict)


def _of_rank(timeline: Timeline, rank: Recorded, verdict: str) -> str:
    """A verdict with the rank that gave it, where there are several."""
    if not verdict or len(timeline.ranks) == 1:
        return verdict
    return f"rank {_place_of(timeline, rank)}: {verdict}"


def _place_of(timeline: Timeline, rank: Recorded) -> str:
    """The number of a rank, with its host where there are several."""
    hosts = {other.about["host"] for other in timeline.ranks}
    return f"{rank.about['rank']} on {rank.about['host']}" if len(hosts) > 1 else f"{rank.about['rank']}"


def _verdict(timeline: Timeline) -> str:
    share, verdict = wait_share(timeline), _last_verdict(timeline)
    seconds = sum(rank.moments[-1].run_seconds for rank in timeline.ranks if rank.moments)
    gain = 1 / (1 - min(share, 0.99))
    if share < _LATE:
        head, kind = f"Data was hardly ever late: the training waited {share:.1%} of the time.", "good"
    elif is_only_data(seconds, share, timeline.total("batches_yielded")):
        head, kind = f"Data took {share:.0%} of the time: {ONLY_DATA}.", "fair"
    else:
        head = f"The training waited {share:.0%} of the time for data: it could be {gain:.2f}× as fast."
        kind = "bad" if share > 4 * _LATE else "fair"
    whole = _run_verdict(timeline)
    more = f"<p>Over the whole run: {html.escape(whole)}</p>" if whole else ""
    more += f"<p>The last verdict: {html.escape(verdict)}</p>" if verdict else ""
    return f'<section class="verdict {kind}"><h2>{head}</h2>{more}</section>'


def _tiles(timeline: Timeline) -> str:
    samples, seconds = timeline.total("samples_yielded"), timeline.seconds
    started = timeline.total("tier_hits") + timeline.total("tier_misses")
    rate = np.nansum(timeline.rate("samples_yielded"), axis=0)
    padding = timeline.total("text_tokens_padding") + timeline.total("image_tokens_padding")
    tokens = padding + timeline.total("text_tokens_real") + timeline.total("image_tokens_real")
    tiles = {
        "samples": f"{samples:,}",
        "samples/s": f"{samples / seconds:,.0f}",
        "steadiness (CV)": f"{flow(rate):.0%}",
        "wait, p50": _time(timeline.wait_quantile(0.5)),
        "wait, p99": _time(timeline.wait_quantile(0.99)),
        "first batch": duration(timeline.total("first_batch_ns") / 1e9 / len(timeline.ranks)),
        "cache hits": f"{timeline.total('tier_hits') / started:.0%}" if started else "–",
        "from origins": format_bytes(timeline.total("origin_bytes")),
        "retries": f"{timeline.total('origin_retries'):,}",
        "unusable samples": f"{_unusable(timeline):,}",
        "padding": f"{padding / tokens:.0%}" if tokens else "–",
        "shards evicted": f"{timeline.total('shards_evicted'):,}",
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles.items())
    return f"<dl>{cells}</dl>"


def _charts(timeline: Timeline, charts: list[Chart]) -> str:
    seconds, end = timeline.middles, timeline.seconds
    marks = [(second, f"epoch {epoch}") for second, epoch in timeline.epochs()]
    figures = [drawn(chart, seconds, end, marks) for chart in charts]
    names = [_time((BUCKET_NS << place) / 1e9) for place in range(BUCKETS - 1)]
    figures.insert(
        2,
        bars(
            "Waits for one batch",
            "How many took so long. Two hills: some batches come at once, others have to be made or fetched.",
            timeline.wait_buckets(),
            [*names, "more"],
        ),
    )
    return f'<section class="charts">{"".join(figures)}</section>'


def _all_charts(timeline: Timeline) -> list[Chart]:
    charts = [
        Chart(
            "Samples per second",
            "Over all ranks; gaps are waits, evaluations or checkpoints.",
            {"all ranks": np.nansum(timeline.rate("samples_yielded"), axis=0)},
            "{:,.0f}".format,
        ),
        Chart(
            "Data wait",
            "The share of the time that the training loop waited. One rank above the others: the straggler.",
            _by_rank(timeline, np.minimum(timeline.rate("data_wait_ns"), 1.0)),
            "{:.0%}".format,
            top=0.1,
        ),
        Chart(
            "Where workers' time goes",
            "Seconds per second, over all ranks: bytes (origin), shuffle (shuffle= holds samples back), read "
            "(disk), decode to collate (CPU).",
            {name: values for name, values in timeline.stages().items() if values.any()},
            "{:.3g}".format,
            is_stacked=True,
        ),
        Chart(
            "Ready batches",
            "Made and not taken, by rank. Near 0: each is taken as soon as it is made.",
            _by_rank(timeline, timeline.level("ready_batches")),
            "{:.3g}".format,
            top=4,
        ),
        *_cache_charts(timeline),
        *_source_charts(timeline),
    ]
    return [chart for chart in charts if chart.series]


def _cache_charts(timeline: Timeline) -> list[Chart]:
    hits, misses = (np.nansum(timeline.counted(name), axis=0) for name in ("tier_hits", "tier_misses"))
    started = hits + misses
    share = np.where(started > 0, hits / np.where(started > 0, started, 1), np.nan)
    fill = {}
    for tier in timeline.labels("tier_limit_bytes"):
        limit = timeline.gauge("tier_limit_bytes", tier)
        fill[f"fill of the cache ({tier})"] = _mean(timeline.gauge("tier_bytes", tier) / limit)
    bytes_rates = {
        name: np.nansum(timeline.rate(counter), axis=0)
        for name, counter in (("origins", "origin_bytes"), ("shared cache", "shared_bytes"))
    }
    return [
        Chart(
            "Cache",
            "Hits: shards that were complete when their reading started.",
            {"hits": share, **fill},
            "{:.0%}".format,
            top=1.0,
        ),
        Chart(
            "Bytes received per second",
            "Over all ranks.",
            {name: values for name, values in bytes_rates.items() if values.any() or name == "origins"},
            lambda value: format_bytes(value).replace(".0 ", " "),
        ),
    ]


def _source_charts(timeline: Timeline) -> list[Chart]:
    names = timeline.labels("samples")
    samples = {name: timeline.grown("samples", name) for name in names}
    whole = sum(samples.values(), np.zeros(len(timeline.middles)))
    is_known = whole > 0  # where nothing was taken, shares stay what they were
    shares = {
        name: np.interp(timeline.middles, timeline.middles[is_known], counts[is_known] / whole[is_known])
        for name, counts in samples.items()
        if is_known.any()
    }
    charts = [Chart("Share of each source", "Of the samples taken.", shares, "{:.0%}".format, True, 1.0)]
    levels = (
        ("source_weight", "Weight of each source", "In the mix, as given or set."),
        ("source_loss", "Loss by source", "As the training reported it."),
        ("source_alignment", "Alignment by source", "As the training reported it."),
        ("source_loss_weight", "Weight in the loss by source", "Of its rows, as decided."),
        ("source_passes", "Passes by source", "Whole ones over its shards so far."),
    )
    for metric, title, caption in levels:
        series = {name: _mean(timeline.gauge(metric, name)) for name in timeline.labels(metric)}
        charts.append(Chart(title, caption, series, "{:.3g}".format))
    return charts if len(names) > 1 else [chart for chart in charts[1:] if "Loss" in chart.title]


def _by_rank(timeline: Timeline, values: Numbers) -> dict[str, Numbers]:
    if len(timeline.ranks) > _MOST_RANKS:
        with np.errstate(all="ignore"):
            return {
                "highest rank": np.nanmax(values, axis=0),
                "mean": _mean(values),
                "lowest rank": np.nanmin(values, axis=0),
            }
    return {f"rank {rank.about['rank']}": row for rank, row in zip(timeline.ranks, values, strict=True)}


def _mean(values: Numbers) -> Numbers:
    """The mean over ranks, of those that are known."""
    are_finite = np.isfinite(values)
    sums, counts = np.where(are_finite, values, 0.0).sum(axis=0), are_finite.sum(axis=0)
    means: Numbers = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


def _alerts(timeline: Timeline) -> str:
    """A table of the alerts: when each was raised, on which rank, and for how long."""
    rows: list[tuple[float, str, str, int, str, float | None]] = []
    for rank in timeline.ranks:
        place = (int(rank.about["rank"]), _place_of(timeline, rank))
        open_since: dict[str, tuple[float, str]] = {}
        for moment in rank.moments:
            for name, message in moment.alerts.items():
                open_since.setdefault(name, (moment.run_seconds, message))
            over = open_since.keys() - moment.alerts.keys()
            rows += [(*open_since.pop(name), name, *place, moment.run_seconds) for name in sorted(over)]
        rows += [(*since, name, *place, None) for name, since in open_since.items()]
    if not rows:
        return ""
    cells = "".join(
        f"<tr><td>{duration(seconds)}<td>{'to the end' if until is None else duration(until - seconds)}"
        f"<td>{html.escape(place)}<td>{html.escape(name)}<td>{html.escape(message)}"
        for seconds, message, name, _, place, until in sorted(rows, key=lambda row: (row[0], row[3], row[2]))
    )
    head = "<tr><th>at<th>for<th>rank<th>alert<th>what it said"
    return f"<section><h2>Alerts</h2><table>{head}{cells}</table></section>"


def _skipped(timeline: Timeline, rows: Sequence[Row]) -> str:
    """The first samples that could not be used, with their pictures and why."""
    if not rows:
        return ""
    summary = f"{_unusable(timeline):,} over all epochs; the first {len(rows)} different ones are shown."
    return f"<section><h2>Unusable samples</h2><p class=sub>{summary}</p>{cells(rows)}</section>"


def _unusable(timeline: Timeline) -> int:
    causes = [name for name in _names(timeline, _CAUSES) if not name.endswith("_left_out")]
    return sum(map(timeline.total, causes))


def _settings(settings: Mapping[str, Any]) -> str:
    if not settings:
        return ""
    cells = "".join(
        f"<tr><td>{html.escape(str(name))}<td>{html.escape(str(value))}" for name, value in settings.items()
    )
    return f"<section><h2>Settings</h2><table>{cells}</table></section>"


def _names(timeline: Timeline, prefixes: tuple[str, ...]) -> set[str]:
    return {
        name
        for rank in timeline.ranks
        for moment in rank.moments[-1:]
        for name in moment.counters
        if name.startswith(prefixes)
    }


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.0995 else duration(round(seconds, 2))


def _plain(values: Numbers) -> list[float | None]:
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values.tolist()]
