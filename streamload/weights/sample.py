"""The value of a sample by which it is weighed in the loss, from facts that need no decoding.

Pure functions of a sample; they change neither which samples come nor how often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from streamload.cache.selection import RateFunction, number_of
from streamload.errors import OptionError
from streamload.shards.columns import TOKENS, Values
from streamload.shards.samples import Entry

if TYPE_CHECKING:
    from streamload.extension import ShardRows

_LEAST, _MOST = 0.2, 5.0
"""Bounds of a weight relative to the mean."""


class SampleWeight(Protocol):
    """Weighting of rows."""

    @property
    def is_relative(self) -> bool:
        """True if values are divided by their mean and clipped."""
        ...

    @property
    def definition(self) -> str:
        """Dependencies of values beside the sample."""
        ...

    @property
    def mean(self) -> float | None:
        """The mean that was given; None: none was."""
        ...

    @property
    def facts(self) -> Sequence[str]:
        """The names of the built-in facts that `of` needs."""
        ...

    def of(self, rows: ShardRows) -> Values:
        """The value of each of a shard's samples, NaN where it is unknown: float64[N].

        Raises:
            OptionError: the user's function returned something else; it names the sample.
        """
        ...


@dataclass(frozen=True, slots=True)
class Complexity:
    """Weights by how much is in the image and in the caption; see `complexity`."""

    image: float
    text: float
    mean: float | None = None

    is_relative = True

    @property
    def definition(self) -> str:
        """Dependencies of values beside the sample."""
        return f"complexity {self.image!r} {self.text!r}"

    @property
    def facts(self) -> Sequence[str]:
        """The names of the built-in facts that `of` needs."""
        image = ["image_bytes", "width", "height"] if self.image else []
        return [*image, TOKENS] if self.text else image

    def of(self, rows: ShardRows) -> Values:
        """The value of each of a shard's samples, NaN where it is unknown: float64[N]."""
        facts = rows.facts(self.facts)
        value: Values = np.zeros(len(rows.places))
        if self.image:
            bits = 8 * facts["image_bytes"] / (facts["width"] * facts["height"])
            value += self.image * bits / 100
        if self.text:
            value += self.text * facts[TOKENS] / 100
        return value


@dataclass(frozen=True, slots=True)
class WeightFunction:
    """Weights that a user's function returns for index entries; they are used as they are."""

    function: RateFunction

    is_relative = False
    definition = "function"
    mean = None
    facts = ()

    def of(self, rows: ShardRows) -> Values:
        """The value of each of a shard's samples, NaN where it is unknown: float64[N]."""
        return np.array([self._value(entry) for entry in rows.entries()], np.float64)

    def _value(self, entry: Entry) -> float:
        value = number_of("sample_weight", self.function, entry)
        if value < 0:
            raise OptionError(
                f"the function of sample_weight= returned {value:g} for sample {entry.key!r}; expected a "
                f"number from 0, or None if it is unknown"
            )
        return value


def complexity(image: float = 0.3, text: float = 0.7, *, mean: float | None = None) -> Complexity:
    """Weigh samples in the loss by the complexity of image and caption, from facts that the index has.

    The complexity of a sample is (image × bits of its file per pixel + text × tokens of its caption) / 100.
    Its weight is this divided by the mean, from 0.2 to 5; 1 where a fact is unknown.

    Args:
        image: how much the image counts, from 0.
        text: how much the caption counts, from 0; it needs a tokenizer.
        mean: of the complexity over the data. None: that of the first step of the run, over all ranks; it is
            kept in the state.

    Returns:
        For `Batches(sample_weight=…)`.

    Raises:
        OptionError: a number that can't be used.
    """
    for name, value in (("image", image), ("text", text)):
        if not _is_number(value) or value < 0:
            raise OptionError(f"complexity({name}={value!r}); expected a number from 0")
    if not image and not text:
        raise OptionError("complexity(0, 0) weighs nothing: give image= or text= above 0")
    if mean is not None and not (_is_number(mean) and mean > 0):
        raise OptionError(f"complexity(mean={mean!r}); expected a number above 0, or None")
    return Complexity(image, text, mean)


def read_sample_weight(option: object) -> SampleWeight | None:
    """The sample weight of `Batches(sample_weight=…)`; None: rows aren't weighed.

    Raises:
        OptionError: neither a complexity nor a function.
    """
    if option is None or isinstance(option, Complexity):
        return option
    if callable(option) and not isinstance(option, type) and option is not complexity:
        return WeightFunction(option)
    raise OptionError(
        f"sample_weight={option!r:.60}; expected streamload.complexity(…), or a function of a sample's index "
        f"entry that returns a number"
    )


def scaled(values: Values, mean: float) -> Values:
    """Divide values by their mean, and clip: float64[N]; 1 where a value is NaN."""
    return np.where(np.isnan(values), 1.0, np.clip(values / mean, _LEAST, _MOST))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
