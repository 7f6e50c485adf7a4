"""In words: what limits a machine on some shards, and what to change. Pure: figures in, sentences out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamload.metrics import format_bytes

Limit = Literal["link", "disk", "decode", "hand-over", "consumer"]

_MUCH_OVERHEAD = 0.25
_LARGE = 1.5
"""How many times the pixels of SHORT_SIDE an image has before smaller ones are worth a word."""
SHORT_SIDE = 256

_FILL = (
    "Fill the cache before the training: streamload warm URLS. It can be stopped and taken up, and run on a "
    "machine without a GPU."
)
_KEEP = (
    "Keep the cache large enough for all of the data ({size} an image), so that only the first epoch has to "
    "wait: STREAMLOAD_CACHE_SIZE, or cache_size=."
)
_FASTER_DISK = (
    "Put the cache on a faster disk (STREAMLOAD_CACHE_DIR), or in memory where the data fits "
    '(cache="memory").'
)
_CONSUMER = "Nothing in the loader would make the training faster; fewer workers would do."
_TRANSFORM = (
    "Leave preprocess= away, or give a transform that is compiled, and batches of some dozens of images."
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; rates are images a second.

    Attributes:
        link: that the origin brings; None where the shards are local files.
        disk: that the disk reads without the page cache; None where it is memory.
        decode: of decoding alone, by as many processes as there are workers.
        loader: of streamload, from its cache.
        consumer: that the training takes; None where that isn't known.
        floor_cpu_us: CPU time that an image costs on the floor, as float32.
        loader_cpu_us: the same of streamload.
        workers: that streamload had.
        cores: that there are.
        width, height: of the images, in the mean.
        size_bytes: of the shards that were measured on.
        samples: in them.
        batch_size: of a step.
    """

    link: float | None
    disk: float | None
    decode: float
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
class Verdict:
    """What limits the first epoch, which fetches, and later ones, which don't; and all of it in words."""

    first_epoch: Limit
    later_epochs: Limit
    lines: tuple[str, ...]


def verdict(figures: Figures) -> Verdict:
    """Judge what was measured."""
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
            f"Every epoch is limited by {_named(first, figures)}, the first one too: {_link(figures)}."
        )
    else:
        lines.append(f"The first epoch is limited by {_named(first, figures)}.")
        lines.append(f"Later epochs, from the cache, are limited by {_named(later, figures)}.")
    lines += [line for limit in dict.fromkeys((first, later)) for line in _advice(limit, figures)]
    if figures.consumer is None:
        longest_ms = figures.batch_size / _rate(later, figures) * 1e3
        lines.append(
            f"A training whose steps take more than {longest_ms:,.0f} ms for {figures.batch_size} images "
            f"never waits for data after the first epoch; --step-seconds takes yours into account."
        )
    return Verdict(first, later, tuple(dict.fromkeys(lines)))


def _compute(figures: Figures) -> Limit:
    """What the loader's own speed is a matter of."""
    overhead = figures.loader_cpu_us - figures.floor_cpu_us
    return "hand-over" if overhead > _MUCH_OVERHEAD * figures.loader_cpu_us else "decode"


def _least(rates: dict[Limit, float | None]) -> Limit:
    known = {limit: rate for limit, rate in rates.items() if rate is not None}
    return min(known, key=lambda limit: known[limit])


def _rate(limit: Limit, figures: Figures) -> float:
    rates = {"link": figures.link, "disk": figures.disk, "consumer": figures.consumer}
    found = rates.get(limit)
    return figures.loader if found is None else found


def _named(limit: Limit, figures: Figures) -> str:
    """The limit with its rate, and what the loader would do without it."""
    rate = f"{_rate(limit, figures):,.0f} images/s"
    without = f"streamload makes {figures.loader:,.0f}"
    if limit == "link":
        return f"the link: it brings {rate}, {without}"
    if limit == "disk":
        return f"the disk: it reads {rate} where their pages aren't cached, {without}"
    if limit == "consumer":
        return f"the training itself: it takes {rate}, {without}"
    share = min(1.0, figures.floor_cpu_us / figures.loader_cpu_us)
    if limit == "decode":
        return (
            f"decoding and resizing: {rate} by {figures.workers} workers; {share:.0%} of the CPU time is "
            f"what that costs at least"
        )
    return (
        f"the hand-over and what else surrounds the decoding: {rate} by {figures.workers} workers; only "
        f"{share:.0%} of the CPU time is what decoding and resizing cost at least"
    )


def _link(figures: Figures) -> str:
    assert figures.link is not None
    return f"the link brings {figures.link:,.0f}"


def _advice(limit: Limit, figures: Figures) -> list[str]:
    """What to change, the most useful first."""
    if limit == "link":
        size = format_bytes(figures.size_bytes / figures.samples)
        return [_FILL, _KEEP.format(size=size), *_smaller(figures)]
    if limit == "disk":
        return [_FASTER_DISK, *_smaller(figures)]
    if limit == "consumer":
        return [_CONSUMER]
    advice = []
    if figures.workers < figures.cores:
        advice.append(f"More workers: {figures.workers} of {figures.cores} cores are used (num_workers=).")
    if limit == "decode":
        if figures.workers >= figures.cores:
            advice.append(
                f"All {figures.cores} cores are used: less work an image, or more cores, would help."
            )
        return advice + _smaller(figures)
    if figures.workers > figures.cores:
        advice.append(f"Fewer workers: {figures.workers} share {figures.cores} cores (num_workers=).")
    return [*advice, _TRANSFORM]


def _smaller(figures: Figures) -> list[str]:
    pixels, enough = figures.width * figures.height, _pixels_of_short_side(figures)
    if not pixels or pixels < _LARGE * enough:
        return []
    line = (
        f"Smaller images: they are {figures.width}×{figures.height} in the mean; with a short side of "
        f"{SHORT_SIDE} they would have {enough / pixels:.0%} of the pixels, for a training at 224."
    )
    return [line]


def _pixels_of_short_side(figures: Figures) -> float:
    short, long = sorted((figures.width, figures.height))
    return SHORT_SIDE * SHORT_SIDE * long / max(1, short)
