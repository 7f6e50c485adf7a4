"""Runs a patch plan: pixels → the patches of an image, in their place in a batch (step I).

The format is timm's NaFlex: patches row by row, each as [height, width, channel], flat; their coordinates;
and which places of the batch have one. Pixels are Pillow's, to the bit where the kernel can be used.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from streamload.errors import DecodeError
from streamload.patches.grid import Grid, patch_grid
from streamload.patches.plan import NAMES, PatchPlan
from streamload.transforms.augment import Box, Draws, SeededGenerators
from streamload.transforms.decode import Pixels
from streamload.transforms.normalise import Channels
from streamload.transforms.plan import Size, Statistics, run_given
from streamload.transforms.resize import Filter, Place, Put, resizing


class PatchRow(NamedTuple):
    """The place of an image in a batch of L patches a row.

    Attributes:
        patches: uint8 or float32[L, height × width × 3].
        coord: int64[L, 2], row and column of each patch; 0 where there is none.
        valid: bool[L], whether there is one.
    """

    patches: torch.Tensor
    coord: torch.Tensor
    valid: torch.Tensor

    def put_image(self, image: torch.Tensor, grid: Grid, patch_size: Size) -> torch.Tensor:
        """Write the patches of an image [3, H, W] of this grid.

        Returns:
            A view of them, to be normalised.
        """
        (rows, columns), (height, width) = grid, patch_size
        count = rows * columns
        patches = self.patches[:count]
        parts = image.view(3, rows, height, columns, width)
        patches.view(rows, columns, height, width, 3).copy_(parts.permute(1, 3, 2, 4, 0))
        places = self.coord[:count].view(rows, columns, 2)
        places[..., 0] = torch.arange(rows, device="cpu")[:, None]
        places[..., 1] = torch.arange(columns, device="cpu")
        self.valid[:count] = True
        self._pad(count)
        return patches

    def put_given(self, made: Any, patch_size: Size) -> None:
        """Write what a function as given returned: a float image [3, H, W], or timm's Patchify of it.

        Raises:
            TypeError: something else.
            ValueError: it isn't of whole patches, or has more of them than there is room for.
        """
        if isinstance(made, Mapping) and set(NAMES) <= made.keys():
            values = [made[name] for name in NAMES]
            shown, count = f"patches {list(values[0].shape)}", len(values[0])
            fits = values[0].shape[1:] == self.patches.shape[1:]
        elif isinstance(made, torch.Tensor) and made.dtype == torch.float32 and made.ndim == 3:
            sides = zip(made.shape[1:], patch_size, strict=True)
            (rows, above), (columns, before) = (divmod(side, patch) for side, patch in sides)
            shown, count = f"an image {list(made.shape)}", rows * columns
            fits = len(made) == 3 and not (above or before)
        else:
            raise TypeError(
                f"preprocess= returned a {type(made).__name__} for an image; expected float32[3, H, W], or "
                f"a dict with {', '.join(NAMES)}"
            )
        if not fits or not 0 < count <= len(self.valid):
            raise ValueError(
                f"preprocess= returned {shown}; expected at most {len(self.valid)} patches of "
                f"{patch_size[0]}×{patch_size[1]} pixels"
            )
        if isinstance(made, torch.Tensor):
            self.put_image(made, Grid(rows, columns), patch_size)
            return
        for mine, value in zip(self, values, strict=True):
            mine[:count] = value
        self._pad(count)

    def _pad(self, count: int) -> None:
        for tensor in self:
            tensor[count:].zero_()


class PatchChoices(NamedTuple):
    """The random choices for one image; see execute.Choices.

    Attributes:
        box: the part that is used.
        by: the filter.
        colour: whether each of the plan's colour steps is applied.
        seed: of all choices.
        torch_taken: how many numbers of torch's generator they took.
    """

    box: Box
    by: Filter
    colour: tuple[bool, ...]
    seed: int
    torch_taken: int


class PlannedPatches:
    """Runs a patch plan on pixels, for images of at most `seq_len` patches.

    Deterministic in (pixels, choices); functions as given leave the global generators changed. One thread
    at a time.

    Args:
        plan: to run.
        seq_len: the most patches of an image.
        as_bytes: leave out the normalisation.
    """

    def __init__(self, plan: PatchPlan, seq_len: int, as_bytes: bool = True) -> None:
        self.plan = plan
        self._seq_len = seq_len
        self._statistics = None if as_bytes else _flat(plan.statistics, math.prod(plan.patch_size))
        self._levels = torch.empty(seq_len * math.prod(plan.patch_size) * 3, dtype=torch.uint8, device="cpu")
        self._draws = Draws()
        self._generators = SeededGenerators()

    def draw(self, height: int, width: int, seed: int) -> PatchChoices:
        """Make the random choices exactly as the functions of the original transform would.

        Args: as for PlannedTransform.
        """
        self._draws.seed(seed)
        box, by = self._crop(height, width, self._draws.python())
        colour = tuple([step.is_drawn(self._draws) for step in self.plan.colour])
        return PatchChoices(box, by, colour, seed, self._draws.torch_taken)

    def put(self, pixels: Pixels, choices: PatchChoices) -> Put:
        """Return a function that transforms pixels, which may not be decoded yet.

        Args:
            pixels: uint8[H, W, 3], writable.
            choices: for an image of this size.

        Returns:
            A function that writes the image to the PatchRow `out`.

        Raises:
            DecodeError: the image is so long that it has more patches however small it is.
        """
        box, patch_size = choices.box, self.plan.patch_size
        grid = patch_grid(box.height, box.width, self._seq_len, patch_size, self.plan.max_ratio)
        if grid.rows * grid.columns > self._seq_len:
            raise DecodeError(f"image of {box.width}×{box.height} has more than {self._seq_len} patches")
        size = grid.rows * patch_size[0], grid.columns * patch_size[1]
        return functools.partial(
            self._finished, resizing(pixels, box, size, choices.by), size, grid, pixels.shape[:2], choices
        )

    def _crop(self, height: int, width: int, numbers: random.Random) -> tuple[Box, Filter]:
        plan = self.plan
        box = Box(0, 0, height, width)
        if plan.crop is not None:
            box = plan.crop.draw(height, width, numbers)
        return box, plan.by[0] if len(plan.by) == 1 else numbers.choice(plan.by)

    def _finished(
        self, put: Put, size: Size, grid: Grid, whole: Size, choices: PatchChoices, *, out: PatchRow
    ) -> None:
        height, width = size
        levels = self._levels[: height * width * 3].view(1, height, width, 3).permute(0, 3, 1, 2)
        put(out=Place.of(levels))
        image = levels[0]
        for step, is_done in zip(self.plan.colour, choices.colour, strict=True):
            if is_done:
                image = step(image)
        if self.plan.given:
            self._generators.seed(choices.seed, choices.torch_taken)
            numbers = random.Random(choices.seed)
            self._crop(*whole, numbers)
            random.setstate(numbers.getstate())  # the functions draw what follows
            image = run_given(self.plan.given, image)
        patches = out.put_image(image, grid, self.plan.patch_size)
        if self._statistics is not None:
            means, stds = self._statistics
            patches.div_(255).sub_(means).div_(stds)


def _flat(statistics: Statistics, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation for each value of a patch: float32[pixels × 3]."""

    def of(values: Channels) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device="cpu").repeat(pixels)

    return of(statistics.mean), of(statistics.std)
