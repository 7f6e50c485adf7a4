"""Charts as inline SVG: lines, stacked areas and bars over time, in colours of the page's own style sheet.

Pure text: numbers in, SVG and its legend out. No script, no font, nothing from a network.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
WIDTH, HEIGHT = 560, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 8, 22
_RULES = 5
_MOST_MARKS = 6
_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
COLOURS = 10
"""--c0 to --c9 of the style sheet."""
STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2128;--soft:#5b6673;--line:#e3e7ec;--card:#f7f8fa;
--good:#1a7f4b;--fair:#a86400;--bad:#c0362c;--c0:#3b6fd4;--c1:#e08a1e;--c2:#2f9e6e;--c3:#c9433f;
--c4:#8b5fc7;--c5:#7d6a5a;--c6:#d565a8;--c7:#6b7785;--c8:#a9a430;--c9:#2ba3b8}
@media(prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e4e8ed;--soft:#98a4b1;--line:#2b323b;
--card:#1b2027;--good:#4cc38a;--fair:#e5a54a;--bad:#f2766b;--c0:#6f9bf0;--c1:#f0a750;--c2:#54c492;
--c3:#f07570;--c4:#b190ea;--c5:#b39d8a;--c6:#ee90c6;--c7:#9aa6b4;--c8:#cfca5e;--c9:#5fcadb}}*{
box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.45 system-ui,sans-serif}main{max-width:1200px;margin:0 auto;padding:24px 20px 40px}h1{
font-size:24px;margin:0;overflow-wrap:anywhere}h2{font-size:17px;margin:0 0 6px}.sub,footer{
color:var(--soft);margin:2px 0 16px}section{margin:16px 0}.verdict{border-left:5px solid;
padding:12px 16px;background:var(--card);border-radius:4px}.verdict p{margin:0}.good{
border-color:var(--good)}.fair{border-color:var(--fair)}.bad{border-color:var(--bad)}dl{display:grid;
grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:16px 0}dl div{
background:var(--card);border-radius:4px;padding:8px 12px}dt{color:var(--soft);font-size:13px}dd{
margin:0;font-size:20px;font-variant-numeric:tabular-nums}.charts{display:grid;
grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}figure{margin:0;
background:var(--card);border-radius:4px;padding:12px;min-width:0}figcaption{font-size:13px;
color:var(--soft);min-height:38px}figcaption b{color:var(--fg);font-size:15px;display:block}svg{
display:block;width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.rule{
stroke:var(--line);stroke-width:1}
.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3}ul{
list-style:none;margin:6px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px}
li{overflow-wrap:anywhere}li i{display:inline-block;
width:10px;height:10px;border-radius:2px;margin-right:6px}table{border-collapse:collapse;width:100%;
font-size:14px}td,th{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:anywhere}th{color:var(--soft);font-weight:normal}
"""
"""Style sheet; light or dark, as the reader's system is."""


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: what it shows.
        said: what to see in it.
        series: values by name, float64[steps] each; NaN: unknown there.
        unit: of the values: writes one.
        is_stacked: areas on top of each other, in place of lines.
        top: of the axis at least; None: the largest value.
    """

    title: str
    said: str
    series: Mapping[str, Numbers]
    unit: Callable[[float], str] = "{:g}".format
    is_stacked: bool = False
    top: float | None = None


Mark = tuple[float, str]
"""A moment in seconds, and its name."""


def drawn(chart: Chart, seconds: Numbers, end: float, marks: Sequence[Mark] = ()) -> str:
    """A chart as a figure of HTML.

    Args:
        chart: the chart.
        seconds: float64[steps], of its values.
        end: of the axis of time, in seconds.
        marks: moments that get a line through the chart.
    """
    layers = _layers(chart)
    top = _top(max([chart.top or 0.0, *(_largest(high) for _, _, high in layers)]))
    body = [_rules(top, chart.unit), _times(end), _marks(marks, end)]
    for place, (name, low, high) in enumerate(layers):
        points = _points(seconds, high, end, top)
        title = f"<title>{html.escape(name)}</title>"
        colour = f"var(--c{place % COLOURS})"
        if chart.is_stacked:
            floor = _points(seconds, low, end, top)
            body.append(f'<path d="{_area(points, floor)}" fill="{colour}" fill-opacity=".75">{title}</path>')
        else:
            body.append(
                f'<path d="{_line(points)}" fill="none" stroke="{colour}" stroke-width="1.6" '
                f'stroke-linejoin="round">{title}</path>'
            )
    return _figure(chart, "".join(body), [name for name, _, _ in layers])


def bars(title: str, caption: str, heights: Sequence[float], names: Sequence[str]) -> str:
    """Bars with a name below every third of them, as a figure of HTML."""
    top = _top(max([*heights, 1.0]))
    wide = (WIDTH - _LEFT - _RIGHT) / max(1, len(heights))
    body = [_rules(top, lambda value: f"{value:,.0f}")]
    for place, (height, name) in enumerate(zip(heights, names, strict=True)):
        x, y = _LEFT + place * wide, _y(height, top)
        body.append(
            f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{max(1.0, wide - 2):.1f}" '
            f'height="{_y(0, top) - y:.1f}" fill="var(--c0)">'
            f"<title>{html.escape(name)}: {height:,.0f}</title></rect>"
        )
        if place % 3 == 0:
            body.append(_text(x + wide / 2, HEIGHT - 6, name, "middle"))
    return _figure(Chart(title, caption, {}), "".join(body), [])


def _step(largest: float) -> float:
    """Between two rules: 1, 2, 2.5 or 5 times a power of ten; about _RULES of them reach the largest."""
    least = (largest or 1.0) / _RULES
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= least * 0.9999)


def _top(largest: float) -> float:
    """The end of an axis that has this value on it."""
    step = _step(largest)
    return step * max(1, math.ceil(largest / step - 1e-4))


def duration(seconds: float) -> str:
    """A time in words: "45 s", "12 min", "3.5 h"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _layers(chart: Chart) -> list[tuple[str, Numbers, Numbers]]:
    """The names with the lower and upper bounds of what is drawn."""
    floor = np.zeros(max([len(values) for values in chart.series.values()], default=0))
    areas = []
    for name, values in chart.series.items():
        low = floor if chart.is_stacked else np.zeros(len(values))
        high = low + np.nan_to_num(values) if chart.is_stacked else values
        areas.append((name, low, high))
        floor = high
    return areas


def _largest(values: Numbers) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else 0.0


def _y(value: float, top: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - value / top)


def _x(seconds: float, end: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * seconds / end


def _points(seconds: Numbers, values: Numbers, end: float, top: float) -> list[tuple[float, float] | None]:
    return [
        (_x(float(second), end), _y(float(value), top)) if math.isfinite(value) else None
        for second, value in zip(seconds, values, strict=True)
    ]


def _line(points: Sequence[tuple[float, float] | None]) -> str:
    """A path through the points; a None lifts the pen."""
    path, is_down = [], False
    for point in points:
        if point is not None:
            path.append(f"{'L' if is_down else 'M'}{point[0]:.1f} {point[1]:.1f}")
        is_down = point is not None
    return "".join(path)


def _area(upper: Sequence[tuple[float, float] | None], lower: Sequence[tuple[float, float] | None]) -> str:
    """A path around what is between two lines."""
    there = [point for point in upper if point is not None]
    back = [point for point in reversed(lower) if point is not None]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*there, *back]) + "Z"


def _rules(top: float, unit: Callable[[float], str]) -> str:
    lines = []
    step = _step(top)
    for part in range(round(top / step) + 1):
        value = part * step
        y = _y(value, top)
        lines.append(f'<path class="rule" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        lines.append(_text(_LEFT - 6, y + 3.5, unit(value), "end"))
    return "".join(lines)


def _times(end: float) -> str:
    """The axis of time."""
    lines = []
    step = next((step for step in _TIMES if end / step <= _RULES + 2), end / _RULES)
    for place in range(int(end / step) + 1):
        seconds = place * step
        anchor = "start" if place == 0 else "end" if _x(seconds, end) > WIDTH - 40 else "middle"
        lines.append(_text(_x(seconds, end), HEIGHT - 6, duration(seconds), anchor))
    return "".join(lines)


def _marks(marks: Sequence[Mark], end: float) -> str:
    """Dashed lines from top to bottom; at most _MOST_MARKS have their names, beside their upper ends."""
    every = math.ceil(len(marks) / _MOST_MARKS) or 1
    lines = []
    for place, (second, name) in enumerate(marks):
        x = _x(second, end)
        title = f"<title>{html.escape(name)}</title>"
        lines.append(f'<path class="mark" d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}">{title}</path>')
        if place % every == 0:
            lines.append(_text(x + 3, _TOP + 8, name, "start"))
    return "".join(lines)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _figure(chart: Chart, body: str, names: Sequence[str]) -> str:
    legend = "".join(
        f'<li><i style="background:var(--c{place % COLOURS})"></i>{html.escape(name)}</li>'
        for place, name in enumerate(names)
    )
    return (
        f"<figure><figcaption><b>{html.escape(chart.title)}</b> {html.escape(chart.said)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(chart.title)}">{body}</svg>'
        f"{f'<ul>{legend}</ul>' if len(names) > 1 else ''}</figure>"
    )
