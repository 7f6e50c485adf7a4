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
_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
COLOURS = 10
"""--c0 to --c9 of the style sheet."""


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


def drawn(chart: Chart, seconds: Numbers, end: float) -> str:
    """A chart as a figure of HTML.

    Args:
        chart: the chart.
        seconds: float64[steps], of its values.
        end: of the axis of time, in seconds.
    """
    layers = _layers(chart)
    top = _top(max([chart.top or 0.0, *(_largest(high) for _, _, high in layers)]))
    body = [_rules(top, chart.unit), _times(end)]
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
