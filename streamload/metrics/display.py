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

_OF_THE_TRAINING = ("training", "device")
"""Stages that aren't workers' time."""
_COLOURS = ("#3b82d6", "#8b6fd0", "#8a8f98", "#d9772b", "#c9a227", "#2f9e6e", "#2ba3b8", "#d5569f")
_WIDTH, _HEIGHT = 600, 44
STYLE = (
    "<style>.streamload{color:inherit;font:13px/1.45 system-ui,sans-serif;max-width:640px;"
    "padding:10px 14px;border:1px solid rgba(128,128,128,.35);border-radius:6px;overflow-wrap:anywhere}"
    ".streamload p{margin:4px 0;color:inherit}.streamload dl{display:grid;gap:6px;margin:8px 0;"
    "grid-template-columns:repeat(3,1fr)}"
    ".streamload dl div{background:rgba(128,128,128,.13);border-radius:4px;padding:4px 10px}.streamload dt{"
    "font-size:12px;font-weight:normal;opacity:.75}.streamload dd{margin:0;font-size:18px;"
    "font-variant-numeric:tabular-nums}.streamload svg{display:block;width:100%;margin:4px 0}.streamload i{"
    "display:inline-block;width:9px;height:9px;border-radius:2px;margin:0 5px 0 0}.streamload span{"
    "margin-right:12px;white-space:nowrap}.streamload .soft{font-size:12px;opacity:.75}</style>"
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
    return _card("", _numbers(stats), stats, _spread(stats.wait_buckets))


def card_of_verdict(verdict: Verdict) -> str:
    """A verdict as a card: its sentence, and the six numbers of its interval."""
    stats = verdict.counted
    numbers = {
        "samples/s": f"{stats.samples_yielded / verdict.seconds:,.0f}" if verdict.seconds > 0 else "–",
        "waited for data": f"{verdict.wait:.0%}",
        "without waits": f"{verdict.gain:.2f} ×" if math.isfinite(verdict.gain) else "–",
        "cache hits": _hits(stats),
        "from origins": format_bytes(stats.origin_bytes),
        "unusable samples": _unusable(stats),
    }
    title = f"<p><b>{_safe(verdict.limit)}</b>: {_safe(str(verdict))}</p>"
    return _card(title, numbers, stats, _spread(stats.wait_buckets))


def card_of_loader(
    summary: str, stats: Snapshot, verdict: Verdict, waits: Sequence[tuple[float, float]]
) -> str:
    """A loader as a card.

    Args:
        summary: its `repr`.
        stats: its counters.
        verdict: on its last minute.
        waits: seconds before now, oldest first, and the share of waiting up to then; a number from 0 to 1.
    """
    title = f"<p><b>{_safe(summary.strip('<>'))}</b></p>"
    title += f"<p>{_safe(str(verdict))}</p>" if stats.batches_yielded else "<p>no batch was taken yet</p>"
    return _card(title, _numbers(stats), stats, _course(waits) or _spread(stats.wait_buckets))


def _numbers(stats: Snapshot) -> dict[str, str]:
    first = stats.seconds_to_first_batch
    return {
        "samples": f"{stats.samples_yielded:,}",
        "first batch": "not yet" if first is None else _time(first),
        "waited for data": _time(stats.data_wait_seconds),
        "cache hits": _hits(stats),
        "from origins": format_bytes(stats.origin_bytes),
        "unusable samples": _unusable(stats),
    }


def _hits(stats: Snapshot) -> str:
    started = stats.tier_hits + stats.tier_misses
    return f"{stats.tier_hits / started:.0%}" if started else "–"


def _unusable(stats: Snapshot) -> str:
    return f"{sum(stats.samples_skipped.values()) + sum(stats.samples_replaced.values()):,}"


def _card(title: str, numbers: Mapping[str, str], stats: Snapshot, line: str) -> str:
    cells = "".join(f"<div><dt>{name}</dt><dd>{_safe(value)}</dd></div>" for name, value in numbers.items())
    return f'{STYLE}<div class="streamload">{title}<dl>{cells}</dl>{_bar(stats.stages)}{line}</div>'


def _bar(seconds_by_stage: Mapping[str, float]) -> str:
    """The workers' time by stage, as one bar with its legend; "" without any."""
    stages = {name: s for name, s in seconds_by_stage.items() if s > 0 and name not in _OF_THE_TRAINING}
    whole, x, parts, legend = sum(stages.values()), 0.0, [], []
    for name, colour in zip(seconds_by_stage, _COLOURS, strict=False):
        if name not in stages:
            continue
        share = stages[name] / whole
        said = f"{name} {share:.0%}"
        parts.append(
            f'<rect x="{x:.1f}" width="{share * _WIDTH:.1f}" height="14" fill="{colour}">'
            f"<title>{said}, {_time(stages[name])}</title></rect>"
        )
        legend.append(f'<span><i style="background:{colour}"></i>{said}</span>')
        x += share * _WIDTH
    if not parts:
        return ""
    return (
        f'<p class="soft">Workers\' time by stage, {_time(whole)}</p>'
        f'<svg viewBox="0 0 {_WIDTH} 14" height="14" preserveAspectRatio="none" role="img" '
        f'aria-label="Workers\' time by stage">{"".join(parts)}</svg><p>{"".join(legend)}</p>'
    )


def _spread(buckets: Sequence[int]) -> str:
    """The histogram of data waits as a line over their lengths; "" without any."""
    count = sum(buckets)
    if not count:
        return ""
    last = max(place for place, n in enumerate(buckets) if n)
    half, most = (_time(_below(buckets, share)) for share in (0.5, 0.99))
    said = f"Waits for a batch: half below {half}, 99 % below {most}"
    top = max(math.log1p(n) for n in buckets)
    points = [(place / max(1, last + 1), math.log1p(n) / top) for place, n in enumerate(buckets[: last + 2])]
    return _line(said, points, _time(BUCKET_NS / 1e9), _time((BUCKET_NS << last) / 1e9))


def _course(waits: Sequence[tuple[float, float]]) -> str:
    """The share of waiting as a line over the last minutes; "" without two moments."""
    if len(waits) < 2 or waits[0][0] <= 0:
        return ""
    oldest = waits[0][0]
    points = [(1 - before / oldest, share) for before, share in waits]
    said = f"Share of the time in which the training waited, at most {max(s for _, s in points):.0%}"
    return _line(said, points, f"{_time(oldest)} ago", "now")


def _line(said: str, points: Sequence[tuple[float, float]], first: str, last: str) -> str:
    """A line through points of 0 to 1 each, with words above and at both ends."""
    path = "L".join(f"{x * _WIDTH:.1f} {2 + (1 - y) * (_HEIGHT - 4):.1f}" for x, y in points)
    return (
        f'<p class="soft">{said}</p><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" height="{_HEIGHT}" '
        f'preserveAspectRatio="none" role="img" aria-label="{said}"><path d="M{path}" fill="none" '
        f'stroke="{_COLOURS[0]}" stroke-width="1.6" vector-effect="non-scaling-stroke"/></svg>'
        f'<p class="soft" style="display:flex;justify-content:space-between"><span>{first}</span>{last}</p>'
    )


def _below(buckets: Sequence[int], share: float) -> float:
    """The bound in seconds below which this share of the waits lay."""
    wanted = share * sum(buckets)
    place = next(place for place, n in enumerate(itertools.accumulate(buckets)) if n >= wanted)
    return float(BUCKET_NS << place) / 1e9


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
