"""Samples → examples → the values of a batch (I, J): decode, augment, tokenize, in the batch's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from streamload.transforms.captions import read_caption
from streamload.transforms.collate import Allocate, collate
from streamload.transforms.decode import Pixels, decode_jpeg_or_image, jpeg_size
from streamload.transforms.normalise import normalise_into
from streamload.transforms.plan import ImagePlan, Size, Statistics
from streamload.transforms.planned import Choices, PlannedTransform
from streamload.transforms.prepare import Preparation
from streamload.transforms.tokenize import BatchTokenizer
from streamload.transforms.user import SeededGenerators, UserTransform

Preprocess = Callable[[Any], Any]
MapSample = Callable[[dict[str, Any]], Mapping[str, Any]]
Choose = Callable[[Collection[str]], "tuple[str, str | None] | None"]


class Sample(NamedTuple):
    """The bytes of a sample's members by their extension, as they lie in the shard."""

    key: str
    url: str
    members: dict[str, memoryview]
    prepared: str = ""
    """The extension of the member that is prepared; empty: none is."""


class Looked(NamedTuple):
    """A sample that was looked at: its caption, its image, and what the images of its batch know of that."""

    sample: Sample
    seed: int
    text: str = ""
    data: memoryview = memoryview(b"")
    is_prepared: bool = False
    image: Any = None


class BatchInProgress(Protocol):
    """A batch to which samples are added one after the other."""

    def look(self, sample: Sample, seed: int) -> Looked:
        """What can be known of a sample without its pixels: the caption, the size, what is drawn for it.

        Cheap beside `add`. Samples may be looked at in advance, and not be added.

        Args:
            sample: its bytes have to stay until it is added.
            seed: uint64, what its random choices are drawn from.

        Raises:
            SampleError: it can't be used.
        """
        ...

    def add(self, looked: Looked) -> None:
        """Make a sample the next example.

        Raises:
            SampleError: it can't be used; the batch is as before.
        """
        ...

    def finish(self) -> dict[str, Any]:
        """The values, of as many examples as were added, with the lists `__key__` and `__url__`."""
        ...

    def close(self) -> None:
        """Put back what the batch has borrowed; once is enough."""
        ...


@dataclass(frozen=True, slots=True)
class Examples:
    """What is made of samples.

    Attributes:
        image: tells from a sample's extensions which one holds the image.
        text: which one holds the caption, and in which field of a JSON member.
        tokenizer: captions to ids; None leaves them as strings.
        preprocess: pixels to an image of the batch by a plan, or PIL image to value by a function as given.
        preparation: what is done to each image that isn't prepared yet, before anything else; None: nothing.
        map_sample: in place of all of the above: the raw sample to a dict of values.
        as_bytes: leave a plan's images as uint8, to be normalised where they are used.
    """

    image: Choose
    text: Choose
    tokenizer: BatchTokenizer | None
    preprocess: ImagePlan | Preprocess
    map_sample: MapSample | None
    as_bytes: bool
    preparation: Preparation | None = None

    @property
    def unnormalised(self) -> Statistics | None:
        """What images that are left as uint8 have still to be normalised by; None: nothing."""
        return (
            self.preprocess.statistics if self.as_bytes and isinstance(self.preprocess, ImagePlan) else None
        )

    def begin(self, size: int, allocate: Allocate) -> BatchInProgress:
        """An empty batch of at most `size` examples; `allocate` gives the memory of its tensors."""
        if self.map_sample is not None:
            return _MappedBatch(self.map_sample, allocate)
        if isinstance(self.preprocess, ImagePlan):
            images: _Images = _PlannedImages(self.preprocess, self, size, allocate)
        else:
            prepare = None if self.preparation is None else self.pixels
            images = _GivenImages(self.preprocess, prepare, allocate)
        return _CaptionedBatch(images, self)

    def pixels(self, data: memoryview, is_prepared: bool, size: Size | None) -> Pixels:
        """The pixels that the transform gets, needed only until the next image."""
        if self.preparation is None or is_prepared:
            return decode_jpeg_or_image(data, in_scratch=True, size=size)
        return self.preparation.pixels(data)


_ToPixels = Callable[[memoryview, bool, Size | None], Pixels]
"""Image file, whether it is prepared, and its size if that is known → pixels."""


class _Images(Protocol):
    """The images of a batch."""

    def look(self, data: memoryview, is_prepared: bool, seed: int) -> Any: ...

    def add(self, data: memoryview, is_prepared: bool, seed: int, looked: Any) -> None: ...

    def finish(self) -> Any: ...

    def close(self) -> None: ...


class _CaptionedBatch:
    """Images and captions; the values are `image`, `text`, and `attention_mask` where there are ids."""

    def __init__(self, images: _Images, examples: Examples):
        self._images = images
        self._examples = examples
        self._captions: list[str] = []
        self._keys: list[str] = []
        self._urls: list[str] = []

    def look(self, sample: Sample, seed: int) -> Looked:
        """The caption first: it is cheaper to find out that it can't be read."""
        caption, field = _chosen(self._examples.text, sample)
        text = read_caption(sample.members[caption], field)
        image, _ = _chosen(self._examples.image, sample)
        data, is_prepared = sample.members[image], sample.prepared == image
        looked = self._images.look(data, is_prepared, seed)
        return Looked(sample, seed, text, data, is_prepared, looked)

    def add(self, looked: Looked) -> None:
        """See BatchInProgress."""
        sample, seed, text, data, is_prepared, image = looked
        self._images.add(data, is_prepared, seed, image)
        self._captions.append(text)
        self._keys.append(sample.key)
        self._urls.append(sample.url)

    def finish(self) -> dict[str, Any]:
        values: dict[str, Any] = {"image": self._images.finish(), "text": self._captions}
        if self._examples.tokenizer is not None and self._captions:
            texts = self._examples.tokenizer(self._captions)
            values |= {"text": texts.ids, "attention_mask": texts.mask()}
        return {**values, "__key__": self._keys, "__url__": self._urls}

    def close(self) -> None:
        self._images.close()


class _PlannedImages:
    """Images by a plan, each normalised while it is in the processor's cache."""

    def __init__(self, plan: ImagePlan, examples: Examples, size: int, allocate: Allocate):
        self._transform = PlannedTransform(plan)
        self._pixels = examples.pixels
        self._prepares = examples.preparation is not None
        self._statistics = None if examples.as_bytes else plan.statistics
        self._count = 0
        # The transform writes channels last: into the batch itself, or beside it for the normalising.
        if self._statistics is None:
            levels = allocate((size, *plan.size, 3), torch.uint8)
        else:
            levels = torch.empty((1, *plan.size, 3), dtype=torch.uint8)
            self._batch = allocate((size, 3, *plan.size), torch.float32)
        self._levels = levels.permute(0, 3, 1, 2)
        self._places = self._levels.unbind()

    def look(self, data: memoryview, is_prepared: bool, seed: int) -> tuple[Size, Choices] | None:
        """The size of a JPEG and what is drawn for it; None where its pixels have to show the size."""
        size = jpeg_size(data) if is_prepared or not self._prepares else None
        return None if size is None else (size, self._transform.draw(*size, seed))

    def add(
        self, data: memoryview, is_prepared: bool, seed: int, looked: tuple[Size, Choices] | None
    ) -> None:
        size, choices = looked or (None, None)
        pixels = self._pixels(data, is_prepared, size)
        height, width, _ = pixels.shape
        if choices is None or size != (height, width):
            choices = self._transform.draw(height, width, seed)
        place = self._places[self._count if self._statistics is None else 0]
        self._transform(pixels, place, choices)
        if self._statistics is not None:
            normalise_into(place, self._batch[self._count], *self._statistics)
        self._count += 1

    def finish(self) -> torch.Tensor:
        return (self._levels if self._statistics is None else self._batch)[: self._count]

    def close(self) -> None:
        """Nothing is borrowed."""


class _GivenImages:
    """The user's own transform, run as given."""

    def __init__(self, preprocess: Preprocess, prepare: _ToPixels | None, allocate: Allocate):
        self._transform = UserTransform(preprocess)
        self._prepare = prepare
        self._allocate = allocate
        self._values: list[Any] = []
        self._borrowed = ExitStack()
        self._generators = self._borrowed.enter_context(SeededGenerators())

    def look(self, data: memoryview, is_prepared: bool, seed: int) -> None:
        """Nothing is known of what it draws."""

    def add(self, data: memoryview, is_prepared: bool, seed: int, looked: None) -> None:
        if self._prepare is None:
            value = self._transform(data, self._generators, seed)
        else:
            pixels = self._prepare(data, is_prepared, None)
            value = self._transform.of_pixels(pixels, self._generators, seed)
        self._values.append(value)

    def finish(self) -> Any:
        return collate([{"": value} for value in self._values], self._allocate)[""] if self._values else []

    def close(self) -> None:
        self._borrowed.close()


class _MappedBatch:
    """Whatever the user's function makes of samples."""

    def __init__(self, map_sample: MapSample, allocate: Allocate):
        self._map_sample = map_sample
        self._allocate = allocate
        self._values: list[Mapping[str, Any]] = []
        self._keys: list[str] = []
        self._urls: list[str] = []
        self._borrowed = ExitStack()
        self._generators = self._borrowed.enter_context(SeededGenerators())

    def look(self, sample: Sample, seed: int) -> Looked:
        """See BatchInProgress; all is the function's."""
        return Looked(sample, seed)

    def add(self, looked: Looked) -> None:
        """See BatchInProgress."""
        sample = looked.sample
        raw: dict[str, Any] = {"__key__": sample.key, "__url__": sample.url}
        raw.update((extension, bytes(data)) for extension, data in sample.members.items())
        self._generators.seed(looked.seed)
        value = self._map_sample(raw)
        if not isinstance(value, Mapping):
            raise TypeError(f"map_sample returned a {type(value).__name__} for {sample.key}; expected a dict")
        self._values.append(value)
        self._keys.append(sample.key)
        self._urls.append(sample.url)

    def finish(self) -> dict[str, Any]:
        values = collate(self._values, self._allocate) if self._values else {}
        return {**values, "__key__": self._keys, "__url__": self._urls}

    def close(self) -> None:
        self._borrowed.close()


def _chosen(choose: Choose, sample: Sample) -> tuple[str, str | None]:
    """The member that is meant; the index has promised that there is one."""
    choice = choose(sample.members)
    if choice is None:
        raise KeyError(f"{sample.key} has only {', '.join(sample.members)}")
    return choice
