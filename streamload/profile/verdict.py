"""Verdict on what limits a training on these shards, and advice. Pure: figures in, sentences out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamload.metrics import format_bytes
from streamload.observe.verdict import CONSUMER, FASTER_DISK, FILL

Limit = Literal["link", "disk", "decode", "hand-over", "consumer"]

_MUCH_OVERHEAD = 0.25
SHORT_SIDE = 256
_LARGE = 1.5
"""Advise smaller images from this many times the pixels of images with SHORT_SIDE."""

_KEEP = (
    "Make the cache large enough for all data ({size} per image), so that only the first epoch has to "
    "wait: STREAMLOAD_CACHE_SIZE, or cache_size=."
)
_TRANSFORM = (
    "Leave out preprocess=, or pass a transform that is compiled, and use batches of some dozens of images."
)


@dataclass(frozen=True, slots=True)
class BenchFigures:
    """The measured figures; rates are in images per second.

    Attributes:
        link: download rate; None where the shards are local files.
        disk: read rate without the page cache; None where the files are in memory.
        loader: rate of the loader, from its cache.
        consumer: rate of the training; None if unknown.
        floor_cpu_us: CPU time per image of the floor, as float32.
        loader_cpu_us: CPU time per image of the loader.
        workers: of the loader.
        cores: of the machine.
        width, height: mean size of the images.
        size_bytes: of the shards.
        samples: in the shards.
        batch_size: of a step.
    """

    link: float | None
    disk: float | None
    loader: float
    consumer: float | None
    floor_cpu_us: float
    loader_cpu_us: float
    workers: int
    cores: int
    width: int
    height: int
    size_bytes: int
    samples: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class BenchVerdict:
    """The limit of the first epoch, which downloads, and of later ones; and sentences that explain both."""

    first_epoch: Limit
    later_epochs: Limit
    lines: tuple[str, ...]


def verdict(figures: BenchFigures) -> BenchVerdict:
    """The verdict on these figures."""
    compute = _compute(figures)
    rates: dict[Limit, float | None] = {
        "link": figures.link,
        compute: figures.loader,
        "consumer": figures.consumer,
    }
    later = _least({**rates, "link": None, "disk": figures.disk})
    first = _least(rates) if figures.link is not None else later
    lines = []
    if figures.link is None:
        lines.append(f"Every epoch is limited by {_named(later, figures)}.")
    elif first == later:
        lines.append(
            f"Every epoch is limited by {_named(first, figures)}, the first one too: the link delivers "
            f"{figures.link:,.0f}."
        )
    else:
        lines.append(f"The first epoch is limited by {_named(first, figures)}.")
        lines.append(f"Later epochs, from the cache, are limited by {_named(later, figures)}.")
    lines += [line for limit in dict.fromkeys((first, later)) for line in _advice(limit, figures)]
    if figures.consumer is None:
        longest_ms = figures.batch_size / _rate(later, figures) * 1e3
        lines.append(
            f"A training whose steps take more than {longest_ms:,.0f} ms for {figures.batch_size} images "
            f"never waits for data after the first epoch; give --step-seconds to compare with yours."
        )
    return BenchVerdict(first, later, tuple(dict.fromkeys(lines)))


def _compute(figures: BenchFigures) -> Limit:
    """The stage that limits the loader itself."""
    overhead = figures.loader_cpu_us - figures.floor_cpu_us
    return "hand-over" if overhead > _MUCH_OVERHEAD * figures.loader_cpu_us else "decode"


def _least(rates: dict[Limit, float | None]) -> Limit:
    known_rates = {limit: rate for limit, rate in rates.items() if rate is not None}
    return min(known_rates, key=lambda limit: known_rates[limit])


def _rate(limit: Limit, figures: BenchFigures) -> float:
    rates = {"link": figures.link, "disk": figures.disk, "consumer": figures.consumer}
    rate = rates.get(limit)
    return figures.loader if rate is None else rate


def _named(limit: Limit, figures: BenchFigures) -> str:
    """The limit, its rate, and the rate of the loader without it."""
    rate = f"{_rate(limit, figures):,.0f} images/s"
    without = f"the loader reaches {figures.loader:,.0f}"
    if limit == "link":
        return f"the link: it delivers {rate}, {without}"
    if limit == "disk":
        return f"the disk: it reads {rate} without the page cache, {without}"
    if limit == "consumer":
        return f"the training itself: it consumes {rate}, {without}"
    # 0: the loader took less than a tick of the kernel's clock.
    share = min(1.0, figures.floor_cpu_us / figures.loader_cpu_us) if figures.loader_cpu_us else 1.0
    if limit == "decode":
        return (
            f"decoding and resizing: {rate} with {figures.workers} workers; {share:.0%} of the CPU time is "
            f"their minimum cost"
        )
    return (
        f"overhead beside decoding, such as the hand-over: {rate} with {figures.workers} workers; only "
        f"{share:.0%} of the CPU time is the minimum cost of decoding and resizing"
    )


def _advice(limit: Limit, figures: BenchFigures) -> list[str]:
    """Advice, most useful first."""
    if limit == "link":
        size = format_bytes(figures.size_bytes / figures.samples)
        return [FILL, _KEEP.format(size=size), *_smaller(figures)]
    if limit == "disk":
        return [FASTER_DISK, *_smaller(figures)]
    if limit == "consumer":
        return [CONSUMER]
    advice = []
    if figures.workers < figures.cores:
        advice.append(f"More workers: {figures.workers} of {figures.cores} cores are used (num_workers=).")
    if limit == "decode":
        if figures.workers >= figures.cores:
            advice.append(
                f"All {figures.cores} cores are used: less work per image, or more cores, would help."
            )
        return advice + _smaller(figures)
    if figures.workers > figures.cores:
        advice.append(f"Fewer workers: {figures.workers} share {figures.cores} cores (num_workers=).")
    return [*advice, _TRANSFORM]


def _smaller(figures: BenchFigures) -> list[str]:
    pixels, (short, long) = figures.width * figures.height, sorted((figures.width, figures.height))
    enough = SHORT_SIDE * SHORT_SIDE * long / max(1, short)
    if not pixels or pixels < _LARGE * enough:
        return []
    line = (
        f"Smaller images: their mean size is {figures.width}×{figures.height}; for a training at 224, a "
        f"short side of {SHORT_SIDE} is enough, and has {enough / pixels:.0%} of the pixels."
    )
    return [line]
