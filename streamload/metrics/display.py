"""What people see of counters and verdicts: lines of text, and a card in a notebook. Loaded when asked for.

A card is one element of HTML with inline SVG, in the notebook's own text colour: it needs no script and no
network, and is legible on light and dark pages. All text is escaped and without secrets.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from streamload.metrics.counters import format_bytes
from streamload.metrics.registry import BUCKET_NS
from streamload.urls import redact_text

if TYPE_CHECKING:
    from streamload.metrics.counters import Snapshot
    from streamload.metrics.findings import Verdict

_COLOURS = ("#3b82d6", "#8b6fd0", "#8a8f98", "#d9772b", "#c9a227", "#2f9e6e", "#2ba3b8", "#d5569f")
"""Colours of the workers' stages, in the registry's order; the training's come after them."""
_WIDTH, _HEIGHT = 600, 44
_STYLE = (
    "<style>.streamload{color:inherit;font:13px/1.45 system-ui,sans-serif;max-width:640px;"
    "padding:10px 14px;border:1px solid rgba(128,128,128,.35);border-radius:6px;overflow-wrap:anywhere}"
    ".streamload p{margin:4px 0;color:inherit}.streamload dl{display:grid;gap:6px;margin:8px 0;"
    "grid-template-columns:repeat(3,1fr)}"
    ".streamload dl div{background:rgba(128,128,128,.13);border-radius:4px;padding:4px 10px}.streamload dt{"
    "font-size:12px;font-weight:normal;opacity:.75}.streamload dd{margin:0;font-size:18px;"
    "font-variant-numeric:tabular-nums}.streamload svg{display:block;width:100%;margin:4px 0}.streamload i{"
    "display:inline-block;width:9px;height:9px;border-radius:2px;margin:0 5px 0 0}.streamload span{"
    "margin-right:12px;white-space:nowrap}.streamload .soft{font-size:12px;opacity:.75}"
    ".streamload .ends{display:flex;justify-content:space-between}</style>"
)


def text_of(stats: Snapshot) -> str:
    """A snapshot in six lines."""
    first = stats.seconds_to_first_batch
    shared = (
        f"shared   {stats.shared_hits:,} hits, {stats.shared_misses:,} misses, "
        f"{format_bytes(stats.shared_bytes)}, {stats.shared_errors:,} errors, "
        f"{stats.shared_stored:,} stored; {stats.shared_waits:,} fills waited for other nodes, "
        f"{stats.shared_wait_seconds:.2f} s\n"
    )
    longest = next(iter(stats.shard_wait_seconds.items()), None)
    left_out = f", {_by_cause(stats.samples_left_out)} left out" if stats.samples_left_out else ""
    return (
        f"origin   {stats.origin_requests:,} requests, {format_bytes(stats.origin_bytes)}, "
        f"{stats.origin_retries:,} retries\n"
        f"{shared if stats.shared_requests else ''}"
        f"tier     {stats.tier_hits:,} hits, {stats.tier_misses:,} misses\n"
        f"shards   {stats.shards_complete:,} complete ({stats.shards_published:,} published here), "
        f"{stats.shards_evicted:,} evicted, {stats.shards_given_up:,} given up\n"
        f"samples  {stats.samples_yielded:,} yielded, {_by_cause(stats.samples_skipped)} skipped, "
        f"{_by_cause(stats.samples_replaced)} replaced{left_out}\n"
        f"batches  {stats.batches_yielded:,} yielded, the first "
        f"{'not yet' if first is None else f'after {first:.2f} s'}; "
        f"{stats.data_wait_seconds:.2f} s waited for data"
        f"{'' if longest is None else f', {longest[1]:.2f} s of it for {longest[0]}'}"
    )


def card_of_stats(stats: Snapshot) -> str:
    """A snapshot as a card: six numbers, the workers' time by stage, and how long batches were waited for."""
    return _card("", _numbers(stats), stats)


def card_of_verdict(verdict: Verdict) -> str:
    """A verdict as a card: its sentence, and the same of its interval."""
    samples = verdict.counted.samples_yielded
    numbers = {
        "samples/s": f"{samples / verdict.seconds:,.0f}" if verdict.seconds > 0 else "–",
        "without waits": f"{verdict.gain:.2f} ×" if math.isfinite(verdict.gain) else "–",
        **_numbers(verdict.counted),
        "waited for data": f"{verdict.wait:.0%}",
    }
    del numbers["samples"], numbers["first batch"]
    title = f"<p><b>{_safe(verdict.limit)}</b>: {_safe(str(verdict))}</p>"
    return _card(title, numbers, verdict.counted)


def card_of_loader(name: str, stats: Snapshot, verdict: Verdict) -> str:
    """A loader as a card: its name, a verdict's sentence, and all that it has counted."""
    title = f"<p><b>{_safe(name.strip('<>'))}</b></p><p>{_safe(str(verdict))}</p>"
    return _card(title, _numbers(stats), stats)


def _numbers(stats: Snapshot) -> dict[str, str]:
    first, started = stats.seconds_to_first_batch, stats.tier_hits + stats.tier_misses
    unusable = sum(stats.samples_skipped.values()) + sum(stats.samples_replaced.values())
    return {
        "samples": f"{stats.samples_yielded:,}",
        "first batch": "not yet" if first is None else _time(first),
        "waited for data": _time(stats.data_wait_seconds),
        "cache hits": f"{stats.tier_hits / started:.0%}" if started else "–",
        "from origins": format_bytes(stats.origin_bytes),
        "unusable samples": f"{unusable:,}",
    }


def _card(title: str, numbers: Mapping[str, str], stats: Snapshot) -> str:
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in numbers.items())
    drawn = f"{_bar(stats.stages)}{_line(stats.wait_buckets)}"
    return f'{_STYLE}<div class="streamload">{title}<dl>{cells}</dl>{drawn}</div>'


def _bar(seconds_by_stage: Mapping[str, float]) -> str:
    """The workers' time by stage, as one bar with its legend; "" without any."""
    colours = dict(zip(seconds_by_stage, _COLOURS, strict=False))
    stages = {name: s for name, s in seconds_by_stage.items() if s > 0 and name in colours}
    whole, x, parts, legend = sum(stages.values()), 0.0, [], []
    for name, seconds in stages.items():
        wide, label = seconds / whole * _WIDTH, f"{name} {seconds / whole:.0%}"
        title = f"<title>{label}, {_time(seconds)}</title>"
        parts.append(
            f'<rect x="{x:.1f}" width="{wide:.1f}" height="14" fill="{colours[name]}">{title}</rect>'
        )
        legend.append(f'<span><i style="background:{colours[name]}"></i>{label}</span>')
        x += wide
    label = f"Workers' time by stage, {_time(whole)}"
    return f"{_drawing(label, 14, ''.join(parts))}<p>{''.join(legend)}</p>" if parts else ""


def _line(buckets: Sequence[int]) -> str:
    """A line through the histogram of data waits, of which heights are logarithms; "" without any."""
    count = sum(buckets)
    if not count:
        return ""
    bounds = [(BUCKET_NS << place) / 1e9 for place in range(len(buckets))]
    reached = list(itertools.accumulate(buckets))
    half, most = (bounds[next(p for p, n in enumerate(reached) if n >= q * count)] for q in (0.5, 0.99))
    stop = min(len(buckets), max(place for place, n in enumerate(buckets) if n) + 2)
    top = math.log1p(max(buckets))
    path = "L".join(
        f"{place / (stop - 1) * _WIDTH:.1f} {2 + (1 - math.log1p(n) / top) * (_HEIGHT - 4):.1f}"
        for place, n in enumerate(buckets[:stop])
    )
    line = f'<path d="M{path}" fill="none" stroke="{_COLOURS[0]}" stroke-width="1.6"/>'
    label = f"Waits for a batch: half below {_time(half)}, 99 % below {_time(most)}"
    ends = f"<span>{_time(bounds[0])}</span>{_time(bounds[stop - 1])}"
    return f'{_drawing(label, _HEIGHT, line)}<p class="soft ends">{ends}</p>'


def _drawing(label: str, height: int, parts: str) -> str:
    return (
        f'<p class="soft">{label}</p><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        f"{parts}</svg>"
    )


def _time(seconds: float) -> str:
    """A time for people: "250 ms", "12 s", "3.5 min"."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.00995 else f"{seconds * 1e3:.2g} ms"
    return f"{seconds:,.3g} s" if seconds < 100 else f"{seconds / 60:,.3g} min"


def _by_cause(counts: Mapping[str, int]) -> str:
    named = ", ".join(f"{cause} {count:,}" for cause, count in counts.items() if count)
    return f"{sum(counts.values()):,}" + (f" ({named})" if named else "")


def _safe(text: str) -> str:
    return html.escape(redact_text(text))
