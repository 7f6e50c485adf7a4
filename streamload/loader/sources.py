"""The sources of a run: one set of shards, or several that are mixed by weight (step A)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from streamload.cache.selection import Modality
from streamload.errors import OptionError
from streamload.options.values import parse_choice
from streamload.urls import UrlList, Urls, expand_urls, split_sources

Factors = str | Sequence[float]
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """Shards that are mixed with others by weight.

    Attributes:
        urls: as for make_loader.
        weight: its share of all samples, in proportion to the other sources' weights.
        name: in stats(), set_weights() and states; None: its index, "0", "1", ….
        floor: its smallest share of all samples, 0 to 1, for any weights.
        modality: what its rows have: "image-text", "text" without images, or "image" without texts
            (docs/guides/mixing.md); its samples needn't have the other member.
    """

    urls: Urls = field(repr=False)
    weight: float = 1.0
    name: str | None = None
    floor: float = 0.0
    modality: Modality = "image-text"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """A source, checked, with its URLs expanded.

    Attributes:
        per: whether the weight is of the source, or of each of its samples ("shard": of each of its shards if
            the number of samples is neither known nor estimated).
    """

    name: str
    urls: UrlList = field(repr=False)
    weight: float
    floor: float
    per: Literal["source", "shard"] = "source"
    modality: Modality = "image-text"


def read_sources(
    urls: Urls | Source | Sequence[Source], factors: Factors | None = None, storage: Options | None = None
) -> tuple[SourceOptions, ...]:
    """The sources that make_loader's arguments describe; a single one if nothing is mixed.

    Raises:
        OptionError: a source or factor that can't be used.
    """
    if isinstance(urls, Iterator):
        urls = cast("Urls", list(urls))
    if isinstance(urls, Source) or (isinstance(urls, Sequence) and any(isinstance(u, Source) for u in urls)):
        sources = [urls] if isinstance(urls, Source) else list(urls)
        if factors is not None:
            raise OptionError("upsampling_factors= is for 'a::b': a Source has a weight of its own")
        return _checked(sources, storage)
    plain = cast("Urls", urls)
    if factors is None:
        return (SourceOptions("0", expand_urls(plain, storage).anchored(), 1.0, 0.0),)
    parts, numbers = split_sources(plain), _numbers(factors)
    if len(parts) != len(numbers):
        raise OptionError(
            f"upsampling_factors= has {len(numbers)} factors for {len(parts)} sources (the URLs between '::')"
        )
    return tuple(
        SourceOptions(str(place), expand_urls(part, storage).anchored(), number, 0.0, "shard")
        for place, (part, number) in enumerate(zip(parts, numbers, strict=True))
    )


def _checked(sources: Sequence[object], storage: Options | None) -> tuple[SourceOptions, ...]:
    by_name: dict[str, SourceOptions] = {}
    for place, source in enumerate(sources):
        if not isinstance(source, Source):
            raise OptionError(f"sources are mixed only with Sources, not with {type(source).__name__}")
        name = str(place) if source.name is None else source.name
        if name in by_name:
            raise OptionError(f"two sources are named {name!r}: give each a name= of its own")
        if not 0 <= source.floor <= 1:
            raise OptionError(f"source {name!r}: floor={source.floor!r}; expected a number from 0 to 1")
        if not (math.isfinite(source.weight) and source.weight >= 0):
            raise OptionError(f"source {name!r}: weight={source.weight!r}; expected a number from 0")
        parse_choice(source.modality, get_args(Modality), f"source {name!r}: modality")
        urls = expand_urls(source.urls, storage).anchored()
        by_name[name] = SourceOptions(name, urls, source.weight, source.floor, modality=source.modality)
    return tuple(by_name.values())


def _numbers(factors: Factors) -> list[float]:
    """OpenCLIP's '1::2.5', or numbers."""
    parts = factors.split("::") if isinstance(factors, str) else list(factors)
    try:
        numbers = [float(part) for part in parts]
    except (TypeError, ValueError) as exc:
        raise OptionError(
            f"upsampling_factors={factors!r}; expected numbers with '::' between them, or a list"
        ) from exc
    if any(not math.isfinite(number) or number < 0 for number in numbers):
        raise OptionError(f"upsampling_factors={factors!r}; expected numbers from 0")
    return numbers
