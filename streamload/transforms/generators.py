"""Random generators that belong to a user's function, seeded by the sample like the global ones (step I)."""

from __future__ import annotations

import builtins
import functools
import gc
import random
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

_MOST_OBJECTS = 20_000
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_NOT_ENTERED: tuple[Any, ...] = (
    random._inst,
    np.random.mtrand._rand,
    torch.default_generator,
    vars(builtins),
)
_LEAVES = (str, bytes, int, float, set, frozenset, types.ModuleType, torch.Tensor, np.ndarray)
_PCG64: Any = np.random.PCG64(0).state
_PCG64_FACTOR = 0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835


class OwnGenerator(NamedTuple):
    """A generator that belongs to a user's function, and how to seed it by a uint64."""

    generator: Any
    seed: Callable[[int], Any]
    save: Callable[[], Any]
    restore: Callable[[Any], Any]


def generators_in(*functions: Any) -> list[OwnGenerator]:
    """Find generators in all that functions refer to, and in the globals that they name, nearest first.

    The search ends after some thousand objects. It doesn't enter sets, whose order differs between processes,
    nor globals of libraries, some of which must stay random (such as the names of temporary files).
    """
    queue, visited = [*functions], set(map(id, _NOT_ENTERED))
    generators = []
    for value in queue:  # grows
        if isinstance(value, _LEAVES) or id(value) in visited:
            continue
        visited.add(id(value))
        if generator := as_own(value):
            generators.append(generator)
        elif len(queue) < _MOST_OBJECTS:
            queue.extend(_parts(value))
    return generators


def as_own(value: Any) -> OwnGenerator | None:
    """Return how to seed a generator; None: it isn't one that can be seeded."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return OwnGenerator(value, value.seed, value.getstate, value.setstate)
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return OwnGenerator(value, value.manual_seed, value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        state_of = _pcg64_state if type(bits) is np.random.PCG64 else lambda seed: type(bits)(seed).state
        restore = functools.partial(setattr, bits, "state")
        return OwnGenerator(value, lambda seed: restore(state_of(seed)), lambda: bits.state, restore)
    if isinstance(value, np.random.RandomState) and isinstance(value._bit_generator, np.random.MT19937):
        return OwnGenerator(value, lambda seed: value.seed(seed >> 32), value.get_state, value.set_state)
    return None


def _pcg64_state(seed: int) -> dict[str, Any]:
    """A state for each seed, in a fifth of the time of `PCG64(seed)`: far apart on one sequence of 2**128."""
    return {**_PCG64, "state": {**_PCG64["state"], "state": seed * _PCG64_FACTOR & (1 << 128) - 1}}


def _parts(value: Any) -> list[Any]:
    """What a value refers to, in an order that is the same in every process."""
    if isinstance(value, type):
        return [] if _is_of_library(value.__module__) else gc.get_referents(value)
    if type(value).__module__.startswith("streamload."):
        return []
    parts = gc.get_referents(value)  # attributes, elements, slots, closures, defaults
    if isinstance(value, types.FunctionType):
        names = value.__globals__
        parts = [part for part in parts if part is not names]
        if not _is_of_library(names.get("__name__", "")):
            codes = [value.__code__]
            for code in codes:  # grows by functions and comprehensions within the function
                codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
                parts += [names.get(name) for name in code.co_names]
    return parts


def _is_of_library(module: str) -> bool:
    path = getattr(sys.modules.get(module), "__file__", None) or _LIBRARIES[0]
    is_installed = "-packages/" in path or path.startswith(_LIBRARIES)
    return module != "__main__" and (is_installed or module.startswith("streamload"))
