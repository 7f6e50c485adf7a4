"""The images of a batch: by a compiled plan straight into the batch's memory, or by a function as given."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from streamload.batches.collate import Allocate, collate_images
from streamload.derived.preparation import Preparation
from streamload.transforms.decode import (
    Pixels,
    decode_jpeg_or_image,
    decode_there,
    is_stored,
    place_in_scratch,
    stored_pixels,
)
from streamload.transforms.execute import PlannedTransform, Put
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.plan import ImagePlan, Statistics
from streamload.transforms.processors import GivenProcessor, image_processor_of
from streamload.transforms.resize import Place
from streamload.transforms.user import SeededGenerators, UserTransform

Preprocess = Callable[[Any], Any]


class Images(Protocol):
    """The images of a batch; they are added one after the other, as samples to a BatchInProgress."""

    def look_at(self, data: memoryview, is_prepared: bool, seed: int) -> Any:
        """Do what can be done before the pixels, so that it can be done for some images in a row."""
        ...

    def add(self, seen: Any) -> None:
        """Make an image the next of the batch, by what `look_at` returned for it."""
        ...

    def last(self) -> Any:
        """The image that was added last, needed until the batch has been handed over."""
        ...

    def drop(self) -> None:
        """Take back the image that was added last."""
        ...

    def joined(self, images: list[Any]) -> torch.Tensor | None:
        """The batch of these images where there is no need to stack them: `last` of each; else None."""
        ...

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values, `image` among them, of the samples with these keys."""
        ...

    def close(self) -> None:
        """Return what the batch has borrowed; may be called again."""
        ...


@dataclass(frozen=True, slots=True)
class ImageAssembly:
    """How the images of batches are made.

    Attributes:
        preprocess: pixels to an image of the batch by a plan, or PIL image to value by a function as given.
        as_bytes: leave a plan's images as uint8, to be normalised where they are used.
        preparation: applied to each image that isn't prepared yet, before anything else; None: nothing.
        most_pixels: of an image that is decoded (transforms/limits.py); a preparation has its own limit.
        as_model_inputs: keep all values that an image processor returns, and refuse images that aren't
            tensors.
    """

    preprocess: ImagePlan | Preprocess
    as_bytes: bool = False
    preparation: Preparation | None = None
    most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    as_model_inputs: bool = False

    @property
    def unnormalised(self) -> Statistics | None:
        """The statistics by which images that are left as uint8 have still to be normalised, if any."""
        return (
            self.preprocess.statistics if self.as_bytes and isinstance(self.preprocess, ImagePlan) else None
        )

    def ready(self) -> Callable[[int, Allocate], Images]:
        """A function that begins the images of a batch of at most so many; one batch at a time."""
        preprocess = self.preprocess
        if isinstance(preprocess, ImagePlan):
            transform, places = PlannedTransform(preprocess, self.as_bytes), _Places()
            return lambda size, allocate: _PlannedImages(transform, self, places, size, allocate)
        return lambda size, allocate: _GivenImages(preprocess, self, allocate)

    def pixels(self, data: memoryview, is_prepared: bool) -> Pixels:
        """The pixels that the transform gets, valid until the next call."""
        if self.preparation is None or is_prepared:
            return decode_jpeg_or_image(data, in_scratch=True, most_pixels=self.most_pixels)
        return self.preparation.pixels(data)


class _Planned(NamedTuple):
    """An image before its pixels, with all that can be known of it by then.

    Attributes:
        data: its file; None where the pixels are there, as they were stored.
        is_prepared: whether it is.
        seed: uint64, of what is drawn for it.
        pixels: where its pixels will be; None where the file has to be decoded to know.
        put: makes the image of a batch of these.
    """

    data: memoryview | None
    is_prepared: bool
    seed: int
    pixels: Pixels | None
    put: Put | None


class _Places:
    """The places of a batch's images in its memory, made once for memory that is used again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Sequence[Place]]] = {}

    def of(
        self, memory: torch.Tensor, split: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    ) -> Sequence[Place]:
        """Those of the parts of a tensor, always by the same `split`."""
        number = id(memory)  # known only as long as it lives
        if number not in self._known:
            forget = weakref.ref(memory, lambda _: self._known.pop(number, None))
            # Views keep what they are views of, and that is to go when nobody else has it.
            self._known[number] = forget, [Place.of(part) for part in split(memory.detach())]
        return self._known[number][1]


def _channels_first(levels: torch.Tensor) -> Sequence[torch.Tensor]:
    """[N, H, W, 3] → N views [1, 3, H, W]."""
    return torch.split(levels.permute(0, 3, 1, 2), 1)


class _PlannedImages:
    """Images by a plan, each put straight into its place in the batch."""

    def __init__(
        self,
        transform: PlannedTransform,
        assembly: ImageAssembly,
        places: _Places,
        size: int,
        allocate: Allocate,
    ):
        self._transform, plan = transform, transform.plan
        self._pixels = assembly.pixels
        self._preparation = assembly.preparation
        self._most_pixels = assembly.most_pixels
        self._count = 0
        self._handed: list[torch.Tensor] = []
        self._borrowed = ExitStack()
        if plan.given:
            self._borrowed.enter_context(SeededGenerators())
        if assembly.as_bytes or plan.statistics is None:
            memory = allocate((size, *plan.size, 3), torch.uint8)
            self._batch = memory.permute(0, 3, 1, 2)
            self._places = places.of(memory, _channels_first)
        else:
            self._batch = allocate((size, 3, *plan.size), torch.float32)
            self._places = places.of(self._batch, torch.unbind)

    def look_at(self, data: memoryview, is_prepared: bool, seed: int) -> _Planned:
        """See Images."""
        if self._preparation is not None and not is_prepared:
            return _Planned(data, is_prepared, seed, None, None)
        if is_stored(data):
            pixels = stored_pixels(data, True, self._most_pixels)
            return _Planned(None, is_prepared, seed, pixels, self._put(pixels, seed))
        place = place_in_scratch(data, self._most_pixels)
        put = None if place is None else self._put(place, seed)
        return _Planned(data, is_prepared, seed, place, put)

    def add(self, seen: _Planned) -> None:
        """See Images. Between two images each call costs a microsecond or two: few are left."""
        data, is_prepared, seed, pixels, put = seen
        if data is not None:
            if pixels is None:
                there = self._pixels(data, is_prepared)
            else:
                there = decode_there(data, pixels, self._most_pixels)
            if there is not pixels:
                put = self._put(there, seed)
        assert put is not None  # as there are pixels
        put(out=self._places[self._count])
        self._count += 1

    def last(self) -> torch.Tensor:
        """See Images. Not a view of the batch: torch, which moves what it sends, would move all of it."""
        image = torch.from_numpy(self._batch.numpy()[self._count - 1])
        del self._handed[self._count - 1 :]
        self._handed.append(image)
        return image

    def drop(self) -> None:
        self._count -= 1

    def joined(self, images: list[Any]) -> torch.Tensor | None:
        is_ours = len(images) == len(self._handed) and all(map(operator.is_, images, self._handed))
        return self._batch[: self._count] if is_ours else None

    def _put(self, pixels: Pixels, seed: int) -> Put:
        height, width, _ = pixels.shape
        return self._transform.put(pixels, self._transform.draw(height, width, seed))

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
        return {"image": self._batch[: self._count]}

    def close(self) -> None:
        self._borrowed.close()


class _GivenImages:
    """The user's own transform, run as given."""

    def __init__(self, preprocess: Preprocess, assembly: ImageAssembly, allocate: Allocate):
        processor = image_processor_of(preprocess)
        self._is_processor = processor is not None
        self._transform = UserTransform(
            GivenProcessor(processor) if self._is_processor else preprocess, assembly.most_pixels
        )
        self._prepare = None if assembly.preparation is None else assembly.pixels
        self._as_model_inputs = assembly.as_model_inputs
        self._allocate = allocate
        self._values: list[Any] = []
        self._borrowed = ExitStack()
        self._generators = self._borrowed.enter_context(SeededGenerators())

    def look_at(self, data: memoryview, is_prepared: bool, seed: int) -> tuple[memoryview, bool, int]:
        """Nothing is known of what it does."""
        return data, is_prepared, seed

    def add(self, seen: tuple[memoryview, bool, int]) -> None:
        """See Images."""
        data, is_prepared, seed = seen
        if self._prepare is None:
            value = self._transform(data, self._generators, seed)
        else:
            pixels = self._prepare(data, is_prepared)
            value = self._transform.of_pixels(pixels, self._generators, seed)
        self._values.append(value)

    def last(self) -> Any:
        return self._values[-1]["image"] if self._is_processor else self._values[-1]

    def drop(self) -> None:
        del self._values[-1]

    def joined(self, images: list[Any]) -> torch.Tensor | None:
        return None

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
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
        """The values of all samples by name: of an image processor without those that nobody asked for."""
        if not self._is_processor:
            return {"image": self._values}
        names = self._values[0] if self._as_model_inputs else ("image",)
        return {name: [value[name] for value in self._values] for name in names}

    def close(self) -> None:
        self._borrowed.close()
