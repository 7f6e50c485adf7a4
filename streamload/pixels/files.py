"""A batch's images as files and random choices, from which the rank makes pixels (steps I, J).

What the device's decoder refuses, what the host's decoder might not take, prepared pixels, and images that a
recipe resizes first are decoded and transformed by the worker, in the same batch. So damage is found, counted
and replaced as where workers decode all of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from streamload.batches.images import (
    BatchImages,
    ImageAssembly,
    ImageMaker,
    ImageMemory,
    ImagesFactory,
    MakeImages,
    Places,
    PlannedImages,
)
from streamload.batches.in_progress import Allocate, Room
from streamload.pixels.auto import Switch
from streamload.pixels.rank import CHOICES, FILES, MADE, NO_FILE, ImagesOfFiles, packed
from streamload.pixels.segments import size_for_device
from streamload.transforms.plan import Choices, ImagePlan, PlannedTransform, Statistics, fitted

_FIRST_FILE_BYTES = 64 << 10
_GROWTH = 1.25
_CHOICES_BYTES = 8 * 8
"""Bytes of a row of CHOICES."""


@dataclass(frozen=True, slots=True)
class FileImages(ImageMaker):
    """The maker of images that the rank decodes.

    Attributes:
        plan: that makes images of pixels.
        is_bounded: whether no batch has more bytes than `row_bytes` says: workers then decode the files that
            are larger than the images made of them, where a batch has no room left by smaller ones.
        switch: off: workers decode, until it is turned on.
    """

    plan: ImagePlan
    is_bounded: bool = False
    switch: Switch = field(default_factory=lambda: Switch(True), compare=False)

    @property
    def statistics(self) -> Statistics | None:
        """The statistics for images that are left as uint8; None: they can't be."""
        return self.plan.statistics

    @property
    def by_workers(self) -> ImagePlan:
        """The plan of the same images where workers make all of them."""
        return self.plan

    def row_bytes(self, as_bytes: bool) -> int | None:
        """The most bytes of an image in a worker's batch; None: that is the size of its file."""
        if not self.is_bounded:
            return None
        item_bytes = 1 if as_bytes or self.switch.is_on or self.statistics is None else 4
        return max(self._image_bytes * item_bytes, self._image_bytes + _CHOICES_BYTES)

    @property
    def _image_bytes(self) -> int:
        return 3 * math.prod(self.plan.size)

    def batch_factory(self, assembly: ImageAssembly) -> ImagesFactory:
        """A function that makes the images of an empty batch."""
        transform, places, room = PlannedTransform(self.plan), Places(), _FileRoom()
        if self.is_bounded:
            room.limit_bytes = self._image_bytes
        in_worker = replace(assembly, preprocess=self.plan).batch_factory()

        def begin(size: int, allocate: Allocate, seq_len: int = 0) -> BatchImages:
            if not self.switch.is_on:
                return in_worker(size, allocate)
            return FilesInProgress(
                self.plan, assembly, transform, _FileMemory(room, size, allocate),
                lambda: PlannedImages(
                    transform, assembly, ImageMemory(self.plan, True, places, size, allocate)
                ),
            )  # fmt: skip

        return begin

    def in_rank(self, assembly: ImageAssembly, device: torch.device) -> MakeImages:
        """The maker of images from a batch's values, on their device; opens its decoder once it is used."""
        make = functools.cache(
            lambda: ImagesOfFiles(self.plan, assembly.as_bytes, device, assembly.most_pixels)
        )
        if self.switch.is_on:
            make()
        return lambda values: make()(values) if CHOICES in values else values


class _FileRoom:
    """Room for the files of a batch, by those before.

    Attributes:
        row_bytes: mean bytes of a row's file.
        limit_bytes: of a row's file in the mean; None: any.
    """

    row_bytes: float = _FIRST_FILE_BYTES
    limit_bytes: int | None = None


class _FileMemory:
    """The files of a batch, one after the other in one tensor.

    Args:
        room: what they need; the files of this batch are added to it.
        size: capacity, in images.
        allocate: makes tensors.
    """

    def __init__(self, room: _FileRoom, size: int, allocate: Allocate):
        self._room, self._size, self._allocate = room, size, allocate
        self._tensor: torch.Tensor | None = None
        self._bytes = np.empty(0, np.uint8)
        self.used = 0

    def has_room(self, file: memoryview, files: int) -> bool:
        """True if a file can be added to so many within the limit."""
        limit_bytes = self._room.limit_bytes
        return limit_bytes is None or self.used + len(file) <= (files + 1) * limit_bytes

    def add(self, file: memoryview) -> None:
        """Add a file."""
        stop = self.used + len(file)
        if stop > len(self._bytes):
            self._grow(stop)
        self._bytes[self.used : stop] = np.frombuffer(file, np.uint8)
        self.used = stop

    def files(self) -> torch.Tensor | None:
        """The files: uint8[bytes]; None if there are none."""
        if self._tensor is None or not self.used:
            return None
        self._room.row_bytes = max(self._room.row_bytes, self.used / self._size)
        return self._tensor[: self.used]

    def _grow(self, least: int) -> None:
        size = int(max(self._room.row_bytes * self._size, least) * _GROWTH)
        tensor = self._allocate((size,), torch.uint8)
        grown = tensor.numpy()
        grown[: self.used] = self._bytes[: self.used]
        self._tensor, self._bytes = tensor, grown


class _Row(NamedTuple):
    """A parsed image.

    Attributes:
        data: its file.
        is_prepared: whether it is a prepared image.
        seed: uint64, of its random choices.
        choices: that were made for it; None: the worker makes it.
        parsed: by the worker's own transform, if that makes it.
    """

    data: memoryview
    is_prepared: bool
    seed: int
    choices: Choices | None
    parsed: Any = None


class FilesInProgress:
    """The images of a batch; see BatchImages.

    Args:
        plan: that makes images of pixels.
        assembly: its limits are used.
        transform: makes the random choices.
        memory: of files.
        make_host: makes the images of rows that the worker decodes.
    """

    def __init__(
        self,
        plan: ImagePlan,
        assembly: ImageAssembly,
        transform: PlannedTransform,
        memory: _FileMemory,
        make_host: Callable[[], PlannedImages],
    ):
        self._plan = plan
        self._most_pixels = assembly.most_pixels
        self._is_resized_first = assembly.resizing is not None
        self._transform, self._memory, self._make_host = transform, memory, make_host
        self._host: PlannedImages | None = None
        self._rows: list[tuple[int, ...]] = []
        self._made = 0
        self.timed_ns, self.decodes = (0, 0), False

    def parse(self, data: memoryview, is_prepared: bool, seed: int, room: Room | None = None) -> _Row:
        """Judge a file by its header and its segments, and make the random choices."""
        is_original = is_prepared or not self._is_resized_first
        size = size_for_device(data, self._most_pixels) if is_original else ""
        if isinstance(size, str):
            return self._of_worker(data, is_prepared, seed)
        choices = self._transform.draw(*size, seed)
        fitted(self._plan, *size, choices.box)  # raises for an image that is too long
        return _Row(data, is_prepared, seed, choices)

    def add(self, parsed: _Row) -> None:
        """Add an image, given the result of `parse`."""
        if parsed.choices is not None and not self._memory.has_room(
            parsed.data, len(self._rows) - self._made
        ):
            parsed = self._of_worker(parsed.data, parsed.is_prepared, parsed.seed)
        if parsed.choices is None:
            host = self._worker_images()
            host.add(parsed.parsed)
            self._made += 1
            self._rows.append((NO_FILE, 0, 0, 0, 0, 0, 0, 0))
            self.timed_ns = host.timed_ns
            return
        self._memory.add(parsed.data)
        self._rows.append(packed(len(parsed.data), parsed.choices))

    def last_image(self) -> Any:
        """There is none in a worker.

        Raises:
            TypeError: always, as images are made in the rank; map_sample= is refused with them.
        """
        raise TypeError("images are decoded behind the workers: a function in the worker can't get them")

    def drop_last(self) -> None:
        """Remove the image that was added last."""
        file_bytes, *_ = self._rows.pop()
        if file_bytes == NO_FILE:
            self._worker_images().drop_last()
            self._made -= 1
        else:
            self._memory.used -= file_bytes

    def as_batch(self, images: list[Any]) -> torch.Tensor | None:
        """None: images aren't in one tensor yet."""
        return None

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of the images that were added."""
        values: dict[str, Any] = {CHOICES: torch.from_numpy(np.array(self._rows, np.int64))}
        files = self._memory.files()
        if files is not None:
            values[FILES] = files
        if self._host is not None and self._made:
            values[MADE] = self._host.finish(keys)["image"]
        return values

    def close(self) -> None:
        """Restore the random generators. Idempotent."""
        if self._host is not None:
            self._host.close()

    def _of_worker(self, data: memoryview, is_prepared: bool, seed: int) -> _Row:
        return _Row(data, is_prepared, seed, None, self._worker_images().parse(data, is_prepared, seed))

    def _worker_images(self) -> PlannedImages:
        if self._host is None:
            self._host = self._make_host()
        return self._host
