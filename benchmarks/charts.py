"""Charts as plain SVG, drawn from results: bars that lie, and lines.

Colours are written into the file, with others for dark pages: `prefers-color-scheme` is that of the page that
shows it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 760
_LABELS = 260  # what the labels of bars take
_ROW = 24
_TOP = 44
_MARGIN = 16
_PLOT_HEIGHT = 240
OURS, THEIRS, INK, FAINT = "#1f6feb", "#8c959f", "#24292f", "#d0d7de"
DARK = (
    "<style>@media (prefers-color-scheme: dark) {svg{fill:#e6edf3}[fill=white]{fill:#14181d}"
    f'[stroke="{INK}"]{{stroke:#e6edf3}}[stroke="{FAINT}"]{{stroke:#30363d}}'
    "polyline,circle,rect:not([fill=white]){filter:brightness(1.35)}}</style>"
)
"""The colours of a chart that is shown on a dark page."""
_SERIES = (OURS, "#bc4c00", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#57606a")


@dataclass(frozen=True)
class Bar:
    """A median, with the least and the most of the rounds."""

    label: str
    value: float
    least: float
    most: float
    is_ours: bool = False


def bars(title: str, rows: Sequence[Bar], digits: int = 0, limit: float | None = None) -> str:
    """A bar for each row, its number behind it; a dashed line at a limit."""
    return _drawing(title, _TOP + _ROW * len(rows) + _MARGIN, _bars(rows, _TOP, digits, limit))


def panels(title: str, several: Mapping[str, tuple[Sequence[Bar], int]]) -> str:
    """Bars of several measures, each with a heading and a scale of its own.

    Args:
        title: of the whole.
        several: by heading: the bars, and the digits of their numbers.
    """
    parts, top = [], _TOP
    for heading, (rows, digits) in several.items():
        parts += [_text(_MARGIN, top + 14, heading), *_bars(rows, top + _ROW, digits)]
        top += _ROW * (len(rows) + 1) + _MARGIN
    return _drawing(title, top, parts)


def _bars(rows: Sequence[Bar], top: float, digits: int, limit: float | None = None) -> list[str]:
    across = WIDTH - _LABELS - 70
    top_value = max([row.most for row in rows] + ([limit] if limit is not None else [])) or 1.0
    parts = []
    for place, row in enumerate(rows):
        y = top + _ROW * place
        end, least, most = (
            _LABELS + across * value / top_value for value in (row.value, row.least, row.most)
        )
        colour = OURS if row.is_ours else THEIRS
        parts += [
            _text(_LABELS - 8, y + 15, row.label, anchor="end"),
            _box(_LABELS, y + 3, end - _LABELS, _ROW - 8, colour),
            _line(least, y + 11, most, y + 11, INK),
            _text(most + 6, y + 15, f"{row.value:,.{digits}f}"),
        ]
    if limit is not None:
        at = _LABELS + across * limit / top_value
        parts.append(_line(at, top - 4, at, top + _ROW * len(rows), INK, dashed=True))
    return parts


def lines(title: str, across: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A line for each series of (x, y), from zero; equal steps of x, which are few and named."""
    xs = sorted({x for points in series.values() for x, _ in points})
    step = _round_step(max(y for points in series.values() for _, y in points))
    top_value = step * math.ceil(max(y for points in series.values() for _, y in points) / step)
    left, right, bottom = 60, WIDTH - _LABELS, _TOP + _PLOT_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        share = (xs.index(x) + 0.5) / len(xs)
        return left + share * (right - left), bottom - y / top_value * _PLOT_HEIGHT

    parts = []
    for count in range(round(top_value / step) + 1):
        y = place(xs[0], count * step)[1]
        parts += [_line(left, y, right, y, FAINT), _text(left - 8, y + 4, f"{count * step:,g}", anchor="end")]
    parts += [_text(place(x, 0)[0], bottom + 18, f"{x:,.10g}", anchor="middle") for x in xs]
    parts.append(_text((left + right) / 2, bottom + 36, across, anchor="middle"))
    for number, (name, points) in enumerate(series.items()):
        colour = _SERIES[number % len(_SERIES)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        key = _TOP + 14 + 20 * number
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            *('<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'.format(*place(*p), colour) for p in points),
            _line(right + 16, key - 4, right + 36, key - 4, colour),
            _text(right + 42, key, name),
        ]
    return _drawing(title, bottom + 36 + _MARGIN, parts)


def _round_step(top: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that cuts the axis into five at most."""
    power = 10.0 ** math.floor(math.log10(top or 1.0))
    return next(power * factor for factor in (0.2, 0.5, 1.0, 2.0) if top <= 5 * power * factor)


def _drawing(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    head += f"\n<title>{escape(title)}</title>\n{DARK}"
    ground = _box(0, 0, WIDTH, height, "white")
    heading = f'<text x="{_MARGIN}" y="26" font-size="15" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, ground, heading, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
