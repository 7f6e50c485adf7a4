"""Images resized and cropped to the size of their cell, in the memory of a batch (steps I, J)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from streamload.aspects.sizes import Sizes
from streamload.batches.images import (
    ImageAssembly,
    ImageMaker,
    ImageMemory,
    ImagesFactory,
    Places,
    PlannedImages,
)
from streamload.batches.in_progress import Allocate, Room
from streamload.errors import OptionError
from streamload.transforms.augment import Box
from streamload.transforms.chain import TORCHVISION, Chain, after_resize, filter_of, shown
from streamload.transforms.decode import Pixels
from streamload.transforms.plan import (
    Choices,
    Flip,
    ImagePlan,
    KeepRatio,
    NotRecognised,
    PlannedTransform,
    Put,
    Statistics,
    fitted,
)
from streamload.transforms.resize import Filter, Place

CONDITIONS = ("original_size", "crop_top_left", "target_size")
"""Values of a batch, int64[N, 2], by which SDXL is conditioned: down, then across, in pixels."""


@dataclass(frozen=True, slots=True)
class Cover(KeepRatio):
    """Resize so that a size is just covered, to be cut in the middle, or at random as by RandomCrop."""

    cuts_at_random: bool = False


@dataclass(frozen=True, slots=True)
class SizedPlan(ImageMaker):
    """The transform of images to the sizes of their cells.

    Attributes:
        sizes: by number.
        plan: to any size; its own doesn't matter.
        rows: of a cell of its own size; None: all images of a batch have one.
    """

    sizes: Sizes
    plan: ImagePlan
    rows: int | None

    @property
    def statistics(self) -> Statistics | None:
        """The statistics for images that are left as uint8; None: they can't be."""
        return self.plan.statistics

    def row_bytes(self, as_bytes: bool) -> int:
        """The most bytes of an image in a worker's batch."""
        item_bytes = 1 if as_bytes or self.statistics is None else 4
        return 3 * max(map(math.prod, self.sizes)) * item_bytes

    def to(self, number: int) -> ImagePlan:
        """The plan to one size."""
        (width, height), fit = self.sizes[number], self.plan.fit
        assert isinstance(fit, Cover)
        return replace(self.plan, size=(height, width), fit=replace(fit, size=(height, width)))

    def batch_factory(self, assembly: ImageAssembly) -> ImagesFactory:
        """A function that makes the images of an empty batch."""
        as_bytes, places, rows = assembly.as_bytes, Places(), self.rows

        @functools.cache
        def transform(number: int) -> SizedTransform:
            return SizedTransform(self.to(number), as_bytes)

        def images(size: int, allocate: Allocate, seq_len: int = 0) -> ImagesInCells:
            memory = CellMemory(
                lambda number: ImageMemory(transform(number).plan, as_bytes, places, rows or size, allocate)
            )
            return ImagesInCells(transform, assembly, memory, allocate)

        return images


def sized_plan(preprocess: Any, sizes: Sizes, rows: int | None) -> SizedPlan:
    """Return the transform to sizes that does all else as one to a single size does.

    Supported are chains of Resize, CenterCrop or RandomCrop, and then as for `compile_transform`.

    Args:
        preprocess: the transform; None: a random cut, normalised as by CLIP.
        sizes: of the loader.
        rows: of a cell of its own size; None: all images of a batch have one.

    Raises:
        OptionError: the transform contains something else.
    """
    anything = (1, 1)
    if preprocess is None:
        return SizedPlan(sizes, ImagePlan(anything, Cover(anything, 0.0, cuts_at_random=True)), rows)
    try:
        chain = Chain(preprocess)
        by = chain.next(_filter)
        cuts_at_random = None if by is None else chain.next(_cuts_at_random)
        if by is None or cuts_at_random is None:
            chain.end()
            raise NotRecognised("it doesn't resize and crop")
        colour, given, statistics = after_resize(chain)
    except NotRecognised as exc:
        raise OptionError(
            f"sizes= resizes and crops images to the size of their cell, for which it reads preprocess=, and "
            f"{exc}: give torchvision's Resize, then CenterCrop or RandomCrop (their sizes don't matter), "
            f"then what keeps the size, ToTensor and Normalize"
        ) from exc
    fit = Cover(anything, 0.0, cuts_at_random)
    return SizedPlan(sizes, ImagePlan(anything, fit, by, (0, 0, 0), colour, given, statistics), rows)


def _filter(step: Any, name: tuple[str, str]) -> Filter | None:
    return filter_of(step, step.interpolation) if name == (TORCHVISION, "Resize") else None


def _cuts_at_random(step: Any, name: tuple[str, str]) -> bool | None:
    if name == (TORCHVISION, "RandomCrop"):
        if step.padding is not None or step.pad_if_needed:
            raise NotRecognised(f"{shown(step)} pads images")
        return True
    return False if name == (TORCHVISION, "CenterCrop") else None


class SizedTransform(PlannedTransform):
    """Runs a plan to one size; the box of its choices is the part of the resized image that is used."""

    def draw(self, height: int, width: int, seed: int) -> Choices:
        """Make the random choices, those of RandomCrop as torchvision does."""
        self._draws.seed(seed)
        _, resized, part = fitted(self.plan, height, width, None)
        assert isinstance(self.plan.fit, Cover)
        if self.plan.fit.cuts_at_random and resized != self.plan.size:
            top, left = (
                self._draws.torch_below(side - cut + 1)
                for side, cut in zip(resized, self.plan.size, strict=True)
            )
            part = Box(top, left, *self.plan.size)
        colour = tuple([step.is_drawn(self._draws) for step in self.plan.colour])
        return Choices(part, colour, seed, self._draws.torch_taken)

    def top_left(self, height: int, width: int, choices: Choices) -> tuple[int, int]:
        """The corner of the part in the resized image, which is mirrored first if the part is."""
        part = choices.box
        assert part is not None
        steps = zip(self.plan.colour, choices.colour, strict=True)
        if sum(is_done for step, is_done in steps if isinstance(step, Flip)) % 2 == 0:
            return part.top, part.left
        across = fitted(self.plan, height, width, None)[1][1]
        return part.top, across - part.width - part.left


Transforms = Callable[[int], SizedTransform]
"""The transform to each size, by number."""


class CellMemory:
    """The images of a batch, those of each cell in memory for its size.

    Args:
        cell: makes the memory of a cell, by the number of its size.

    Attributes:
        places: of the images of the cells that were begun.
    """

    def __init__(self, cell: Callable[[int], ImageMemory]):
        self._cell = cell
        self._tensors: list[torch.Tensor] = []
        self.places: list[Place] = []

    def begin(self, number: int) -> None:
        """Begin a cell of a size."""
        memory = self._cell(number)
        self._tensors.append(memory.batch)
        self.places += memory.places

    def values(self, count: int) -> dict[str, Any]:
        """The values of the first `count` images."""
        if len(self._tensors) == 1:
            return {"image": self._tensors[0][:count]}
        return {f"image[{place}]": tensor for place, tensor in enumerate(self._tensors)}


class ImagesInCells(PlannedImages):
    """Images by a plan, each in the size that its row has room for."""

    def __init__(
        self, transform: Transforms, assembly: ImageAssembly, memory: CellMemory, allocate: Allocate
    ):
        self._sized = transform(0)  # of the row that is parsed or added
        super().__init__(self._sized, assembly, memory)
        self._cells, self._transforms, self._allocate = memory, transform, allocate
        self._conditions: list[tuple[int, ...]] = []

    def parse(self, data: memoryview, is_prepared: bool, seed: int, room: Room | None = None) -> Any:
        """Do all of an image's work before its pixels: header and random choices."""
        assert room is not None  # all steps are planned
        self._sized = self._transforms(room[1])
        return room[1], super().parse(data, is_prepared, seed)

    def add(self, parsed: Any) -> None:
        """Decode and transform an image; the first one of a cell begins it."""
        number, planned = parsed
        self._sized = self._transforms(number)
        if self._count == len(self._places):
            self._cells.begin(number)
        super().add(planned)

    def _put(self, pixels: Pixels, seed: int) -> Put:
        height, width, _ = pixels.shape
        transform = self._sized
        choices = transform.draw(height, width, seed)
        corner = transform.top_left(height, width, choices)
        conditions = (height, width, *corner, *transform.plan.size)
        return functools.partial(self._placed, transform.put(pixels, choices), conditions)

    def _placed(self, put: Put, conditions: tuple[int, ...], *, out: Place) -> None:
        put(out=out)
        del self._conditions[self._count :]  # of a row that was dropped
        self._conditions.append(conditions)

    def finish(self, keys: Any) -> dict[str, Any]:
        """The values of the images that were added, and what SDXL is conditioned by."""
        values = self._memory.values(self._count)
        conditions = torch.tensor(self._conditions[: self._count], device="cpu").view(-1, 3, 2)
        for name, pairs in zip(CONDITIONS, conditions.unbind(1), strict=True):
            values[name] = self._allocate(pairs.shape, torch.int64).copy_(pairs)
        return values
