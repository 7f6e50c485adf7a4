"""The images of a batch: a compiled plan writes them into the batch's memory, or a function runs as given."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

import torch

from streamload.batches.draws import UserDraws
from streamload.batches.in_progress import Allocate, Room
from streamload.transforms.augment import SeededGenerators
from streamload.transforms.decode import (
    Pixels,
    decode_jpeg_or_image,
    decode_there,
    jpeg_size,
    place_in_scratch,
)
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.plan import ImagePlan, PlannedTransform, Put, Statistics
from streamload.transforms.ppm import PPM_START, ppm_pixels
from streamload.transforms.resize import Place

Preprocess = Callable[[Any], Any]
MakeImages = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes images of the values that a worker left in their place, and returns the batch's values with them."""

_TIMED_OF, _TIMED = 16, 7
"""One image of 16 is timed, the eighth: the first ones of a batch are slower, after other code."""


class BatchImages(Protocol):
    """The images of a batch, added one by one; see BatchInProgress.

    Attributes:
        timed_ns: the time that decoding and transforming took, of those images that were timed.
        decodes: whether adding images decodes them, rather than copying their files.
    """

    timed_ns: tuple[int, int]
    decodes: bool

    def parse(self, data: memoryview, is_prepared: bool, seed: int, room: Room | None = None) -> Any:
        """Do all of an image's work before its pixels: header and random choices."""
        ...

    def add(self, parsed: Any) -> None:
        """Add an image, given the result of `parse`."""
        ...

    def last_image(self) -> Any:
        """The image that was added last, valid until the batch is sent."""
        ...

    def drop_last(self) -> None:
        """Remove the image that was added last."""
        ...

    def as_batch(self, images: list[Any]) -> torch.Tensor | None:
        """The batch's tensor if these are its images in order, each from `last_image`; else None."""
        ...

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values, `image` among them, of the samples with these keys."""
        ...

    def close(self) -> None:
        """Restore the random generators. Idempotent."""
        ...


class ImagesFactory(Protocol):
    """Makes the images of an empty batch."""

    def __call__(self, size: int, allocate: Allocate, seq_len: int = 0) -> BatchImages:
        """Make them.

        Args:
            size: the capacity, in samples.
            allocate: makes their tensors.
            seq_len: the most patches of an image; 0 where images aren't made into patches.
        """
        ...


class Resizing(NamedTuple):
    """Preparation of images that changes their pixels, for those that aren't prepared.

    Attributes:
        name: of all that the pixels depend on beside the image.
        pixels: returns the pixels of an image's prepared form, valid until this thread decodes another one.
    """

    name: str
    pixels: Callable[[bytes | memoryview], Pixels]


class ImageMaker:
    """Another way to make images than a plan to one size, or a function as given. Picklable."""

    __slots__ = ()

    @property
    def statistics(self) -> Statistics | None:
        """The statistics for images that are left as uint8; None: they can't be."""
        raise NotImplementedError

    @property
    def by_workers(self) -> ImagePlan | ImageMaker:
        """The maker of the same images where workers make all of them."""
        return self

    def row_bytes(self, as_bytes: bool) -> int | None:
        """The most bytes of an image in a worker's batch; None: unknown.

        Args:
            as_bytes: whether images are left as uint8.
        """
        return None

    def batch_factory(self, assembly: ImageAssembly) -> ImagesFactory:
        """A function that makes the images of an empty batch."""
        raise NotImplementedError

    def in_rank(self, assembly: ImageAssembly, device: torch.device) -> MakeImages | None:
        """The maker of a batch's images in the rank, on their device; None: the worker has made them."""
        return None


def by_workers(transform: Any) -> Any:
    """A transform as workers run it, where they make all images."""
    return transform.by_workers if isinstance(transform, ImageMaker) else transform


@dataclass(frozen=True, slots=True)
class ImageAssembly:
    """Options of decoding and transforming the images of a batch.

    Attributes:
        preprocess: a plan from pixels to an image of the batch, or a function from PIL image to value; or
            another way.
        as_bytes: leave a plan's images as uint8, to be normalised later.
        resizing: done to images that aren't prepared; None: nothing is.
        most_pixels: the limit of an image that is decoded (transforms/limits.py); a preparation has its own.
        as_model_inputs: keep all values that an image processor returns, and refuse images that aren't
            tensors.
        draws: of a function that runs as given, in this process.
    """

    preprocess: ImagePlan | ImageMaker | Preprocess
    as_bytes: bool = False
    resizing: Resizing | None = None
    most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    as_model_inputs: bool = False
    draws: UserDraws = field(
        default_factory=lambda: UserDraws("preprocess"), init=False, compare=False, repr=False
    )

    @property
    def unnormalised(self) -> Statistics | None:
        """The statistics for images that are left as uint8; None: nothing is left to normalise."""
        if self.as_bytes and isinstance(self.preprocess, ImagePlan | ImageMaker):
            return self.preprocess.statistics
        return None

    def in_rank(self, device: torch.device | None) -> MakeImages | None:
        """The maker of a batch's images in the rank; None: workers make them.

        Args:
            device: of the batches; None: host memory.
        """
        if not isinstance(self.preprocess, ImageMaker):
            return None
        return self.preprocess.in_rank(self, device or torch.device("cpu"))

    @property
    def runs_as_given(self) -> bool:
        """True if the user's own function makes the images."""
        return not isinstance(self.preprocess, ImagePlan | ImageMaker)

    @property
    def resized(self) -> Callable[[memoryview, bool], Pixels] | None:
        """As `pixels`, where images are prepared; None: they aren't."""
        return None if self.resizing is None else self.pixels

    def batch_factory(self) -> ImagesFactory:
        """A function that makes the images of an empty batch."""
        preprocess = self.preprocess
        if isinstance(preprocess, ImagePlan):
            transform, places = PlannedTransform(preprocess, self.as_bytes), Places()
            return lambda size, allocate, seq_len=0: PlannedImages(
                transform, self, ImageMemory(transform.plan, self.as_bytes, places, size, allocate)
            )
        if isinstance(preprocess, ImageMaker):
            return preprocess.batch_factory(self)
        from streamload.batches.given import GivenImages

        return lambda size, allocate, seq_len=0: GivenImages(
            preprocess, self.draws, self.resized, self.most_pixels, self.as_model_inputs, allocate
        )

    def pixels(self, data: memoryview, is_prepared: bool) -> Pixels:
        """The input of the transform, valid until the next call."""
        resizing = self.resizing
        if resizing is None or is_prepared:
            return decode_jpeg_or_image(data, in_scratch=True, most_pixels=self.most_pixels)
        return resizing.pixels(data)


class _Planned(NamedTuple):
    """A parsed image.

    Attributes:
        data: its file; None if it stores raw pixels.
        is_prepared: whether it is a prepared image.
        seed: uint64, of its random choices.
        pixels: where it will be decoded to; None if its size isn't known before.
        put: transforms these pixels into the batch.
    """

    data: memoryview | None
    is_prepared: bool
    seed: int
    pixels: Pixels | None
    put: Put | None


class Places:
    """Places of a batch's images in its memory; computed once for each pooled buffer."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Sequence[Place]]] = {}

    def of(
        self, memory: torch.Tensor, split: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    ) -> Sequence[Place]:
        """The places of a tensor's images; `split` (always the same) divides it into images."""
        number = id(memory)  # forgotten when the tensor dies
        if number not in self._known:
            forget = weakref.ref(memory, lambda _: self._known.pop(number, None))
            # Views keep their base alive: the detached tensor, not the one that is to be forgotten.
            self._known[number] = forget, Place.of_each(split(memory.detach()))
        return self._known[number][1]


def _channels_first(levels: torch.Tensor) -> Sequence[torch.Tensor]:
    """[N, H, W, 3] → N views [1, 3, H, W]."""
    return torch.split(levels.permute(0, 3, 1, 2), 1)


class ImageMemory:
    """The images of a batch, all of one size.

    Args:
        plan: that makes them.
        as_bytes: whether they are left as uint8.
        known: the places in memory that was used before.
        size: its capacity, in images.
        allocate: makes its tensor.

    Attributes:
        batch: uint8 or float32[N, 3, H, W].
        places: of the images.
    """

    def __init__(self, plan: ImagePlan, as_bytes: bool, known: Places, size: int, allocate: Allocate):
        if as_bytes or plan.statistics is None:
            memory = allocate((size, *plan.size, 3), torch.uint8)
            self.batch = memory.permute(0, 3, 1, 2)
            self.places = known.of(memory, _channels_first)
        else:
            self.batch = allocate((size, 3, *plan.size), torch.float32)
            self.places = known.of(self.batch, torch.unbind)

    def values(self, count: int) -> dict[str, Any]:
        """The values of the first `count` images."""
        return {"image": self.batch[:count]}


class Transform(Protocol):
    """A plan that is run on pixels; see PlannedTransform."""

    @property
    def plan(self) -> Any:
        """The plan, which has functions that run as `given`."""
        ...

    def draw(self, height: int, width: int, seed: int) -> Any:
        """Make the random choices for an image."""
        ...

    def put(self, pixels: Pixels, choices: Any) -> Put:
        """Return a function that transforms pixels, which may not be decoded yet, into a place."""
        ...


class Memory(Protocol):
    """The memory of a batch's images."""

    @property
    def places(self) -> Sequence[Any]:
        """The place of each image."""
        ...

    def values(self, count: int) -> dict[str, Any]:
        """The values of the first `count` images."""
        ...


class PlannedImages:
    """Images by a plan, each written straight into its place in the batch."""

    def __init__(
        self,
        transform: Transform,
        assembly: ImageAssembly,
        memory: Memory,
    ):
        self._transform = transform
        self._memory, self._places = memory, memory.places
        self._pixels = assembly.pixels
        self._resizing = assembly.resizing
        self._most_pixels = assembly.most_pixels
        self._count = 0
        self.timed_ns, self.decodes = (0, 0), True
        self._given: list[torch.Tensor] = []  # by last_image
        self._exit = ExitStack()
        if transform.plan.given:
            self._exit.enter_context(SeededGenerators())

    def parse(self, data: memoryview, is_prepared: bool, seed: int, room: Room | None = None) -> Any:
        """Do all of an image's work before its pixels: header and random choices."""
        if self._resizing is not None and not is_prepared:
            return _Planned(data, is_prepared, seed, None, None)
        if data[:2] == PPM_START:
            pixels = ppm_pixels(data, True, self._most_pixels)
            return _Planned(None, is_prepared, seed, pixels, self._put(pixels, seed))
        size = jpeg_size(data, self._most_pixels)
        place = None if size is None else place_in_scratch(*size)
        put = None if place is None else self._put(place, seed)
        return _Planned(data, is_prepared, seed, place, put)

    def add(self, parsed: _Planned) -> None:
        """Decode and transform an image. Of few calls: between two images each costs a microsecond or two."""
        data, is_prepared, seed, pixels, put = parsed
        is_timed = self._count % _TIMED_OF == _TIMED
        start_ns = monotonic_ns() if is_timed else 0
        if data is not None:
            if pixels is None:
                decoded = self._pixels(data, is_prepared)
            else:
                decoded = decode_there(data, pixels, self._most_pixels)
            if decoded is not pixels:
                put = self._put(decoded, seed)
        assert put is not None  # as there are pixels
        done = monotonic_ns() if is_timed else 0
        put(out=self._places[self._count])
        self._count += 1
        if is_timed:
            before = self.timed_ns
            self.timed_ns = before[0] + done - start_ns, before[1] + monotonic_ns() - done

    def last_image(self) -> torch.Tensor:
        """The last image. Not a view of the batch: torch would copy the whole batch to send one."""
        batch: torch.Tensor = self._memory.values(self._count)["image"]
        image = torch.from_numpy(batch.numpy()[-1])
        del self._given[self._count - 1 :]
        self._given.append(image)
        return image

    def drop_last(self) -> None:
        """Remove the last image: its memory is written again."""
        self._count -= 1

    def as_batch(self, images: list[Any]) -> torch.Tensor | None:
        """The batch's memory if these are its images."""
        are_ours = len(images) == len(self._given) and all(map(operator.is_, images, self._given))
        return self._memory.values(self._count)["image"] if are_ours else None

    def _put(self, pixels: Pixels, seed: int) -> Put:
        height, width, _ = pixels.shape
        return self._transform.put(pixels, self._transform.draw(height, width, seed))

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of the images that were added."""
        return self._memory.values(self._count)

    def close(self) -> None:
        """Restore the random generators. Idempotent."""
        self._exit.close()
