"""The demo's results: a table, a picture, and the figures as JSON."""

import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from streamload.metrics import format_bytes


@dataclass(frozen=True, slots=True)
class Moment:
    """The loader's counters and the loss, `seconds` after the first iter()."""

    seconds: float
    epoch: int
    origin_bytes: int
    samples: int
    tier_hits: int
    loss: float


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch: its duration, what it trained on and downloaded, and its share of data wait."""

    seconds: float
    samples: int
    origin_bytes: int
    origin_requests: int
    tier_hits: int
    data_wait_share: float
    loss: float

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds


@dataclass(slots=True)
class Figures:
    """What the demo shows.

    Attributes:
        seconds_to_first_batch: from the first iter(), including the start of the workers.
        seconds_of_download: until the last byte of the shards had arrived.
    """

    total_bytes: int
    batch_size: int
    workers: int
    seconds_to_first_batch: float = math.nan
    seconds_of_download: float = math.nan
    epochs: list[Epoch] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    @property
    def trained_share(self) -> float:
        """Samples trained before the last byte had arrived, as a share of the first epoch's."""
        trained = [moment.samples for moment in self.moments if moment.origin_bytes < self.total_bytes]
        return max(trained, default=0) / self.epochs[0].samples


_ROWS: tuple[tuple[str, Callable[[Epoch], str]], ...] = (
    ("seconds", lambda epoch: f"{epoch.seconds:.1f}"),
    ("samples", lambda epoch: f"{epoch.samples:,}"),
    ("samples/s", lambda epoch: f"{epoch.samples_per_second:,.0f}"),
    ("origin bytes", lambda epoch: format_bytes(epoch.origin_bytes)),
    ("origin requests", lambda epoch: f"{epoch.origin_requests:,}"),
    ("cache hits (shards)", lambda epoch: f"{epoch.tier_hits:,}"),
    ("waited for data", lambda epoch: f"{epoch.data_wait_share:.0%}"),
    ("loss at the end", lambda epoch: f"{epoch.loss:.2f}"),
)


def print_table(figures: Figures, console: Console) -> None:
    """Print both epochs side by side, and the time to the first batch beside that of the download."""
    table = Table(title="Training while the data arrives", title_justify="left")
    table.add_column("")
    for number in range(1, len(figures.epochs) + 1):
        table.add_column(f"epoch {number}", justify="right")
    for name, show in _ROWS:
        table.add_row(name, *map(show, figures.epochs))
    console.print(table)
    console.print(
        f"The first batch came after {figures.seconds_to_first_batch:.1f} s; "
        f"the whole download ({format_bytes(figures.total_bytes)}) took {figures.seconds_of_download:.1f} s, "
        f"in which {figures.trained_share:.0%} of the samples were trained. "
        f"Over a link as slow as this one shards are requested in ranges, two at a time, not each at once: "
        f"{figures.epochs[0].origin_requests:,} requests.",
        highlight=False,
    )


def draw(figures: Figures, path: Path) -> None:
    """Draw arrived bytes, trained samples and cache hits over time, as a PNG."""
    moments = figures.moments
    seconds = [0.0, *(moment.seconds for moment in moments)]
    panels: tuple[tuple[str, list[float], str], ...] = (
        ("MB arrived", [0.0, *(moment.origin_bytes / 1e6 for moment in moments)], "tab:blue"),
        ("samples trained", [0.0, *(moment.samples for moment in moments)], "tab:green"),
        ("shards from the cache", [0.0, *(moment.tier_hits for moment in moments)], "tab:orange"),
    )
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(panels), 1, sharex=True))
    for axis, (title, values, colour) in zip(axes, panels, strict=True):
        axis.plot(seconds, values, color=colour, linewidth=2)
        axis.fill_between(seconds, values, color=colour, alpha=0.15)
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.axvline(figures.seconds_to_first_batch, color="black", linestyle=":", linewidth=1)
        axis.axvspan(figures.epochs[0].seconds, seconds[-1], color="black", alpha=0.06)
    axes[0].set_title(
        f"first batch after {figures.seconds_to_first_batch:.1f} s (dotted); download "
        f"{figures.seconds_of_download:.1f} s, {figures.trained_share:.0%} trained by then; "
        "second epoch shaded",
        fontsize=10,
    )
    axes[-1].set_xlabel("seconds")
    axes[-1].set_xlim(0, seconds[-1])
    figure.savefig(path, dpi=120)


def write_figures(figures: Figures, path: Path) -> None:
    """Write all figures, with the machine and the versions."""
    report = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "numpy", "simplejpeg")}
        | {"python": platform.python_version()},
        **asdict(figures),
        "trained_share": figures.trained_share,
    }
    path.write_text(json.dumps(report, indent=1))
