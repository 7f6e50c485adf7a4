"""`prepare="auto"`: the recipe that makes an image cheapest on this machine, by measured costs.

Only recipes are considered that leave the pixels of the given transform as they are, to the bit. So the
choice changes speed and room, never a batch. `measure` times decoding and reading; `choose` is arithmetic.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from streamload.cache.tier import Choice
from streamload.derived.prepare.preparation import SIZES, Preparation
from streamload.metrics import format_bytes
from streamload.transforms.compile import leading_resize

_LEAST_GAIN = 2.0
"""Least speed-up of an image by a recipe: prepared shards take space and have to be written."""
_REPEATS = 3
_PROBE_BYTES = 8 << 20


class Form(NamedTuple):
    """Costs of an image in one form."""

    recipe: str  # by which it is prepared; "": as it is
    image_bytes: float  # the mean size of an image
    compute_seconds: float  # CPU time from these bytes to the pixels that the rest of the transform gets


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of forms of images, and of reading them."""

    forms: tuple[Form, ...]  # the first is images as they are
    memory_seconds: float  # to read and check a byte that the page cache has
    disk_seconds: float  # the same of a byte that is read from the disk, by one process alone


@dataclass(frozen=True, slots=True)
class Room:
    """Resources of a node for its data."""

    data_bytes: int | None  # the size of the data as it is; None: unknown
    cache_bytes: int  # what the cache may hold
    memory_bytes: int  # what the page cache may hold
    processes: int  # that decode at once, and share the disk


def exact_recipes(transform: Any, most_pixels: int) -> list[Preparation]:
    """The recipes that leave a transform's pixels as they are: all pixels; its own first resize."""
    recipes = [Preparation(most_pixels=most_pixels)]
    resize = leading_resize(transform)
    if resize is not None and resize.size in SIZES:
        recipes.append(Preparation(resize.size, most_pixels=most_pixels))
    return recipes


def choose(costs: Costs, room: Room) -> Choice:
    """The recipe that pays, and why; "": images stay as they are.

    A recipe has to fit into the cache for all of the data, and to make an image at least twice as cheap.
    """
    if room.data_bytes is None:
        return Choice("", "the size of the data is unknown")
    seconds: dict[str, float] = {}
    described: list[str] = []
    for form in costs.forms:
        total_bytes = room.data_bytes * form.image_bytes / costs.forms[0].image_bytes
        in_memory = min(1.0, room.memory_bytes / max(1.0, total_bytes))
        byte_seconds = in_memory * costs.memory_seconds
        byte_seconds += (1.0 - in_memory) * costs.disk_seconds * room.processes
        cost = form.compute_seconds + form.image_bytes * byte_seconds
        takes = f"{form.recipe or 'as it is'} {cost * 1e6:,.0f} µs and {format_bytes(int(total_bytes))}"
        if not form.recipe or total_bytes <= room.cache_bytes:
            seconds[form.recipe] = cost
        else:
            takes += f" (the cache takes {format_bytes(room.cache_bytes)})"
        described.append(takes)
    best = min(seconds, key=lambda recipe: seconds[recipe])
    pays = seconds[best] * _LEAST_GAIN <= seconds[""]
    return Choice(
        best if pays else "",
        f"decoding and reading an image takes {', '.join(described)} for all of the data",
    )


def measure(images: Sequence[bytes], recipes: Sequence[Preparation], directory: Path) -> Costs | None:
    """Time decoding and reading on this machine, in some tenths of a second.

    Args:
        images: files of images; those that can't be decoded don't count.
        recipes: from `exact_recipes`; the last goes furthest.
        directory: on the disk to be read; nothing stays there.

    Returns:
        None: no image can be decoded.

    Raises:
        OSError: the disk can't be written.
    """
    sound = [image for image in images if recipes[0].prepare(image) is not None]
    if not sound:
        return None
    stored = {"": sound} | {
        str(recipe): [recipe.prepare(image) or image for image in sound] for recipe in recipes
    }
    forms = [_form(recipe, files, recipes[-1]) for recipe, files in stored.items()]
    memory_seconds, disk_seconds = _reading(directory, int(max(form.image_bytes for form in forms)))
    return Costs(tuple(forms), memory_seconds, disk_seconds)


def _form(recipe: str, files: Sequence[bytes], last: Preparation) -> Form:
    """Costs of images in one form, up to the pixels of the last recipe."""
    views = [memoryview(bytearray(file)) for file in files]  # writable, as when they are read
    seconds = _fastest(lambda: [last.pixels(view) for view in views])
    return Form(recipe, sum(map(len, files)) / len(files), seconds / len(files))


def _reading(directory: Path, image_bytes: int) -> tuple[float, float]:
    """Seconds to read and check a byte of images of this size: from memory, and from the disk."""
    piece = bytearray(min(image_bytes, _PROBE_BYTES))
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        file.write(np.random.default_rng(0).bytes(_PROBE_BYTES))
        os.fsync(file.fileno())

        def read() -> None:
            for start in range(0, _PROBE_BYTES, len(piece)):
                os.preadv(file.fileno(), [piece], start)
                xxhash.xxh3_64_intdigest(piece)

        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        disk_seconds = _fastest(read, repeats=1)
        return _fastest(read) / _PROBE_BYTES, disk_seconds / _PROBE_BYTES


def _fastest(work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Seconds of the fastest of several runs: other processes only ever make one slower."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
