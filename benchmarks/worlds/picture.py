"""A picture of a run's sources as plain SVG: lines by step, in panels with a scale each, one key for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from benchmarks.charts import DARK
from streamload.errors import printable

Series = Mapping[str, Sequence[tuple[float, float]]]
"""By source, the points (step, value); NaN where nothing is known."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP = 760, 190, 64, 560, 40
_COLOURS = ("#1f6feb", "#bc4c00", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#57606a", "#0a7ea4")


def drawing(title: str, panels: Mapping[str, Series]) -> str:
    """Return an SVG.

    Args:
        title: of the whole.
        panels: by heading, what is drawn below it; a panel without points is left out.
    """
    drawn = {
        heading: series for heading, series in panels.items() if any(_points(s) for s in series.values())
    }
    names = list(dict.fromkeys(name for series in drawn.values() for name in series))
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
    parts = [f'<text x="16" y="24" font-size="15" font-weight="bold">{_xml(title)}</text>']
    for place, (heading, series) in enumerate(drawn.items()):
        parts += _panel(heading, series, colours, _TOP + place * (_HEIGHT + 56))
    for place, (name, colour) in enumerate(colours.items()):
        y = _TOP + 22 + 20 * place
        parts += [_line(_RIGHT + 20, y - 4, _RIGHT + 40, y - 4, colour, 2), _text(_RIGHT + 46, y, name)]
    height = _TOP + max(1, len(drawn)) * (_HEIGHT + 56)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" font-family="sans-serif" font-size="12" fill="#24292f">'
        f"\n<title>{_xml(title)}</title>\n{DARK}\n"
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _xml(text: str) -> str:
    """Text of an untrusted name, for XML."""
    return escape(printable(text))


def _points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _panel(heading: str, series: Series, colours: Mapping[str, str], top: float) -> list[str]:
    every = [point for points in series.values() for point in _points(points)]
    last = max(x for x, _ in every) or 1.0
    low, high = min(y for _, y in every), max(y for _, y in every)
    low = 0.0 if 0 <= low < high / 2 or low == high > 0 else low
    high = high if high > low else low + 1
    begin, bottom = top + 24, top + 24 + _HEIGHT - 30
    parts = [_text(16, top + 12, heading)]
    for count in range(5):
        value = low + (high - low) * count / 4
        y = bottom - (bottom - begin) * count / 4
        parts += [
            _line(_LEFT, y, _RIGHT, y, "#d0d7de", 1),
            _text(_LEFT - 8, y + 4, f"{value:.3g}", "end"),
            _text(_LEFT + (_RIGHT - _LEFT) * count / 4, bottom + 18, f"{last * count / 4:,.0f}", "middle"),
        ]
    parts.append(_text(_RIGHT + 20, bottom + 18, "steps"))
    for name, points in series.items():
        across, up = (_RIGHT - _LEFT) / last, (bottom - begin) / (high - low)
        path = " ".join(f"{_LEFT + x * across:.1f},{bottom - (y - low) * up:.1f}" for x, y in _points(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
    return parts


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_xml(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'
