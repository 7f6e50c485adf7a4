"""Samples → examples → the values of a batch (I, J): decode, augment, tokenize, in the batch's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from streamload.errors import CaptionError, SampleError
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


class Visited(NamedTuple):
    """A sample of one visit, and the seed that its random choices are drawn from: uint64."""

    sample: Sample
    seed: int


class ImageFile(NamedTuple):
    """The bytes of an image."""

    data: memoryview
    is_prepared: bool


class Layout(NamedTuple):
    """Which member holds the caption, in which field if it is JSON, and which one the image."""

    text: str
    field: str | None
    image: str


class Looked(NamedTuple):
    """What can be known of a sample without its pixels."""

    text: str = ""
    image: ImageFile | None = None
    drawn: Any = None
    """What the images of its batch know of this one."""


class BatchInProgress(Protocol):
    """A batch to which samples are added one after the other."""

    def look(self, row: Sequence[Visited]) -> list[Looked | SampleError]:
        """What can be known of some samples without their pixels: captions, sizes, what is drawn for them.

        Cheap beside `add`, and cheapest for several at a time. They may be looked at in advance, and not be
        added.

        Args:
            row: the bytes of the samples have to stay until they are added.

        Returns:
            What is known of each, or why it can't be used.
        """
        ...

    def add(self, visited: Visited, looked: Looked) -> None:
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

    def layout(self, sample: Sample) -> Layout:
        """The members that are meant; the index has promised that there are such."""
        text, image = self.text(sample.members), self.image(sample.members)
        if text is None or image is None:
            raise KeyError(f"{sample.key} has only {', '.join(sample.members)}")
        return Layout(*text, image[0])

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
    """The images of a batch; each `seed` is that of the sample."""

    def look(self, images: Sequence[ImageFile], seeds: Sequence[int]) -> Sequence[Any]:
        """What is known of each without its pixels; a SampleError if it can't be used."""
        ...

    def add(self, image: ImageFile, seed: int, drawn: Any) -> None: ...

    def finish(self) -> Any: ...

    def close(self) -> None: ...


class _CaptionedBatch:
    """Images and captions; the values are `image`, `text`, and `attention_mask` where there are ids."""

    def __init__(self, images: _Images, examples: Examples):
        self._images = images
        self._examples = examples
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._captions: list[str] = []
        self._keys: list[str] = []
        self._urls: list[str] = []

    def look(self, row: Sequence[Visited]) -> list[Looked | SampleError]:
        """See BatchInProgress; each step for all of the row, so that its code stays in the first cache."""
        layouts = [self._layout(sample) for sample, _ in row]
        texts = [
            _text(sample.members[layout.text], layout.field)
            for (sample, _), layout in zip(row, layouts, strict=True)
        ]
        images = [
            ImageFile(sample.members[layout.image], sample.prepared == layout.image)
            for (sample, _), layout in zip(row, layouts, strict=True)
        ]
        known = self._images.look(images, [seed for _, seed in row])
        return [
            text
            if isinstance(text, SampleError)  # a caption's error is found first
            else drawn
            if isinstance(drawn, SampleError)
            else Looked(text, image, drawn)
            for text, image, drawn in zip(texts, images, known, strict=True)
        ]

    def _layout(self, sample: Sample) -> Layout:
        extensions = tuple(sample.members)
        layout = self._layouts.get(extensions)
        if layout is None:
            layout = self._layouts[extensions] = self._examples.layout(sample)
        return layout

    def add(self, visited: Visited, looked: Looked) -> None:
        """See BatchInProgress."""
        (sample, seed), (text, image, drawn) = visited, looked
        assert image is not None
        self._images.add(image, seed, drawn)
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


class _Drawn(NamedTuple):
    """The size of an image by its header and what is drawn for that size; None where it isn't known yet."""

    size: Size | None
    choices: Choices | None


_UNKNOWN = _Drawn(None, None)


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

    def look(self, images: Sequence[ImageFile], seeds: Sequence[int]) -> Sequence[_Drawn | SampleError]:
        """The sizes of JPEGs and what is drawn for them; None where the pixels have to show the size."""
        sizes = [self._size(image) for image in images]
        return [
            _Drawn(size, self._transform.draw(*size, seed)) if isinstance(size, tuple) else size or _UNKNOWN
            for size, seed in zip(sizes, seeds, strict=True)
        ]

    def _size(self, image: ImageFile) -> Size | SampleError | None:
        if self._prepares and not image.is_prepared:
            return None
        try:
            return jpeg_size(image.data)
        except SampleError as exc:
            return exc

    def add(self, image: ImageFile, seed: int, drawn: _Drawn) -> None:
        size, choices = drawn
        pixels = self._pixels(*image, size)
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

    def look(self, images: Sequence[ImageFile], seeds: Sequence[int]) -> Sequence[None]:
        """Nothing is known of what it draws."""
        return [None] * len(images)

    def add(self, image: ImageFile, seed: int, drawn: None) -> None:
        if self._prepare is None:
            value = self._transform(image.data, self._generators, seed)
        else:
            pixels = self._prepare(*image, None)
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

    def look(self, row: Sequence[Visited]) -> list[Looked | SampleError]:
        """See BatchInProgress; all is the function's."""
        return [Looked()] * len(row)

    def add(self, visited: Visited, looked: Looked) -> None:
        """See BatchInProgress."""
        sample, seed = visited
        raw: dict[str, Any] = {"__key__": sample.key, "__url__": sample.url}
        raw.update((extension, bytes(data)) for extension, data in sample.members.items())
        self._generators.seed(seed)
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


def _text(data: memoryview, field: str | None) -> str | CaptionError:
    try:
        return read_caption(data, field)
    except CaptionError as exc:
        return exc
