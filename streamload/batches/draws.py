"""Random draws of a user's function: its own generators, and a check that a sample's seed decides them."""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import get_worker_info

from streamload.transforms.augment import SeededGenerators

if TYPE_CHECKING:
    from streamload.transforms.generators import OwnGenerator

_logger = logging.getLogger("streamload")
_TEXT = (
    "%s=%r gives two results for one sample and one seed, so batches depend on the number of workers and "
    "differ after a resume: draw from the global generators of random, numpy and torch, or from a generator "
    "in an attribute, not from one made in each call"
)


@dataclass
class UserDraws:
    """The random draws of an argument's functions, in one process."""

    argument: str
    is_checked: bool = False  # or another worker does it
    _own: dict[tuple[int, ...], list[OwnGenerator]] = field(default_factory=dict)

    def generators(self, *functions: Any) -> SeededGenerators:
        """Return the generators to seed for functions that live as long as this; they are searched once."""
        key = tuple(map(id, functions))
        if key not in self._own:
            from streamload.transforms.generators import generators_in

            self._own[key] = generators_in(*functions)
            worker = get_worker_info()
            self.is_checked |= worker is not None and worker.id > 0
        return SeededGenerators(self._own[key])

    def check(self, function: Any, value: Any, seeded: SeededGenerators, seed: int, result: Any) -> None:
        """Warn if a function makes something else of a sample on a second try. Called once, if not checked.

        The second try is made by a copy, which leaves what the function remembers as it is. A function
        written with `def` can't be copied: of samples, which it may count or change, it isn't tried again.
        """
        from streamload.transforms.generators import as_own

        self.is_checked = True
        if self.argument != "preprocess" and isinstance(_called(function), types.FunctionType):
            return
        try:
            copies: dict[int, Any] = {}
            again = copy.deepcopy(function, copies)
            in_copy = [as_own(copies.get(id(each.generator), each.generator)) for each in seeded.generators]
            with SeededGenerators([each for each in in_copy if each is not None]) as generators:
                generators.seed(seed)
                is_same = _content(again(value)) == _content(result)
        except Exception:  # can't be copied or compared
            return
        if not is_same:
            _logger.warning(_TEXT, self.argument, function)


def _called(function: Any) -> Any:
    """What a partial calls."""
    return _called(function.func) if isinstance(function, functools.partial) else function


def _content(value: Any) -> Any:
    """The bytes of a result, which compare as equal if it is."""
    if isinstance(value, Mapping):
        return {name: _content(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_content(part) for part in value]
    array = np.asarray(value)
    return None if array.dtype.hasobject else (array.shape, array.dtype.str, array.tobytes())
