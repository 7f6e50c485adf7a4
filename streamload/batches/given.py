"""The images of a batch by a function of the user's, run as given (steps I, J)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import monotonic_ns
from typing import Any

import torch
from PIL import Image

from streamload.batches.collate import collate_images
from streamload.batches.draws import UserDraws
from streamload.batches.in_progress import Allocate, Room
from streamload.transforms.decode import Pixels
from streamload.transforms.plan import UserTransform
from streamload.transforms.processors import GivenProcessor, image_processor_of


class GivenImages:
    """The user's own transform, run as given.

    Args:
        preprocess: the transform, or an image processor of transformers.
        draws: of it, in this process.
        resized: the pixels of an image that is prepared or is to be; None: images are decoded as they are.
        most_pixels: the limit of an image that is decoded.
        as_model_inputs: keep all values of an image processor, and refuse images that aren't tensors.
        allocate: makes the batch's tensors.
    """

    def __init__(
        self,
        preprocess: Callable[[Any], Any],
        draws: UserDraws,
        resized: Callable[[memoryview, bool], Pixels] | None,
        most_pixels: int,
        as_model_inputs: bool,
        allocate: Allocate,
    ):
        processor = image_processor_of(preprocess)
        self._is_processor = processor is not None
        self._transform = UserTransform(
            GivenProcessor(processor) if self._is_processor else preprocess, most_pixels
        )
        self._preprocess, self._draws, self._resized = preprocess, draws, resized
        self._as_model_inputs = as_model_inputs
        self._allocate = allocate
        self._values: list[Any] = []
        self.timed_ns, self.decodes = (0, 0), True
        self._exit = ExitStack()
        self._generators = self._exit.enter_context(self._draws.generators(preprocess))

    def parse(
        self, data: memoryview, is_prepared: bool, seed: int, room: Room | None = None
    ) -> tuple[memoryview, bool, int]:
        """Nothing can be done before the function runs."""
        return data, is_prepared, seed

    def add(self, parsed: tuple[memoryview, bool, int]) -> None:
        """Add an image, given the result of `parse`."""
        data, is_prepared, seed = parsed
        start_ns = monotonic_ns()
        image = self._decoded(data, is_prepared)
        decoded = monotonic_ns()
        value = self._transform(image, self._generators, seed)
        if value is None:
            raise TypeError(
                "preprocess= returned None for an image; expected a tensor (does it lack a return?)"
            )
        self._values.append(value)
        before = self.timed_ns
        self.timed_ns = before[0] + decoded - start_ns, before[1] + monotonic_ns() - decoded
        if not (self._draws.is_checked or self._is_processor):
            again = self._decoded(data, is_prepared)
            self._draws.check(self._preprocess, again, self._generators, seed, value)

    def _decoded(self, data: memoryview, is_prepared: bool) -> Image.Image:
        if self._resized is None:
            return self._transform.decoded(data)
        return Image.fromarray(self._resized(data, is_prepared).copy())

    def last_image(self) -> Any:
        """The last result of the function."""
        return self._values[-1]["image"] if self._is_processor else self._values[-1]

    def drop_last(self) -> None:
        """Remove the last result."""
        del self._values[-1]

    def as_batch(self, images: list[Any]) -> torch.Tensor | None:
        """None: results aren't in one tensor."""
        return None

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
        """The results, collated."""
        if not self._values:
            return {"image": []}
        return {
            name: collate_images(
                values,
                keys,
                self._allocate,
                name=name,
                only_tensors=self._is_processor or self._as_model_inputs,
            )
            for name, values in self._columns().items()
        }

    def _columns(self) -> dict[str, list[Any]]:
        """The values of all samples by name; of an image processor only "image" unless for model inputs."""
        if not self._is_processor:
            return {"image": self._values}
        names = self._values[0] if self._as_model_inputs else ("image",)
        return {name: [value[name] for value in self._values] for name in names}

    def close(self) -> None:
        """Restore the random generators. Idempotent."""
        self._exit.close()
