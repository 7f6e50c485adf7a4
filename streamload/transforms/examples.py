"""Samples → examples → the values of a batch (I, J): decode, augment, tokenize, in the batch's memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from streamload.errors import BlankCaption, add_note
from streamload.transforms.captions import read_caption
from streamload.transforms.collate import Allocate, collate, collate_images
from streamload.transforms.decode import (
    Pixels,
    decode_jpeg_or_image,
    decode_there,
    is_stored,
    place_in_scratch,
    stored_pixels,
)
from streamload.transforms.fused import Place
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.plan import ImagePlan, Statistics
from streamload.transforms.planned import PlannedTransform, Put
from streamload.transforms.prepare import Preparation
from streamload.transforms.processors import GivenProcessor, image_processor_of
from streamload.transforms.tokenize import BatchTokenizer
from streamload.transforms.user import SeededGenerators, UserTransform

_KEYS_SHOWN = 16

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


class Layout(NamedTuple):
    """Which member holds the caption, in which field if it is JSON, and which one the image."""

    text: str
    field: str | None
    image: str


class BatchInProgress(Protocol):
    """A batch to which samples are added one after the other."""

    def look_at(self, sample: Sample, seed: int) -> Any:
        """Do what can be done of a sample before its pixels, so that it can be done for some in a row.

        Args:
            sample: it has to be there until it has been added.
            seed: uint64, of its random choices.

        Raises:
            SampleError: it can't be used.
        """
        ...

    def add(self, seen: Any) -> None:
        """Make a sample the next example, by what `look_at` gave for it.

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


Begin = Callable[[int, Allocate], BatchInProgress]
"""Gives an empty batch, for so many examples at most, and for memory for its tensors."""


@dataclass(frozen=True, slots=True)
class Examples:
    """What is made of samples.

    Attributes:
        image: tells from a sample's extensions which one holds the image.
        text: which one holds the caption, and in which field of a JSON member.
        tokenizer: captions to ids; None leaves them as strings.
        preprocess: pixels to an image of the batch by a plan, or PIL image to value by a function as given.
        preparation: what is done to each image that isn't prepared yet, before anything else; None: nothing.
        blank_captions: whether samples with a caption of nothing but white space are used.
        map_sample: in place of all of the above: the raw sample to a dict of values.
        as_bytes: leave a plan's images as uint8, to be normalised where they are used.
        as_model_inputs: give whatever else the tokenizer and an image processor give, too (`attention_mask`,
            say), and refuse images that aren't tensors.
        most_pixels: of an image that is decoded (limits.py); a preparation has its own.
    """

    image: Choose
    text: Choose
    tokenizer: BatchTokenizer | None
    preprocess: ImagePlan | Preprocess
    map_sample: MapSample | None
    as_bytes: bool
    preparation: Preparation | None = None
    as_model_inputs: bool = False
    blank_captions: bool = True
    most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS

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

    def ready(self) -> Begin:
        """What begins batches, one at a time: what they have in common is made once."""
        preprocess, map_sample = self.preprocess, self.map_sample
        if map_sample is not None:
            return lambda size, allocate: _MappedBatch(map_sample, allocate)
        if isinstance(preprocess, ImagePlan):
            transform, places = PlannedTransform(preprocess, self.as_bytes), _Places()
            return lambda size, allocate: _CaptionedBatch(
                _PlannedImages(transform, self, places, size, allocate), self
            )
        return lambda size, allocate: _CaptionedBatch(_GivenImages(preprocess, self, allocate), self)

    def pixels(self, data: memoryview, is_prepared: bool) -> Pixels:
        """The pixels that the transform gets, needed only until the next image."""
        if self.preparation is None or is_prepared:
            return decode_jpeg_or_image(data, in_scratch=True, most_pixels=self.most_pixels)
        return self.preparation.pixels(data)


class _Images(Protocol):
    """The images of a batch; see BatchInProgress."""

    def look_at(self, data: memoryview, is_prepared: bool, seed: int) -> Any: ...

    def add(self, seen: Any) -> None: ...

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values, `image` among them, of the samples with these keys."""
        ...

    def close(self) -> None: ...


class _Captioned(NamedTuple):
    """A sample before its pixels."""

    key: str
    url: str
    caption: str
    image: Any
    seed: int


class _CaptionedBatch:
    """Images and captions; the values are `image`, `text`, and what else of the tokenizer's is asked for."""

    def __init__(self, images: _Images, examples: Examples):
        self._images = images
        self._examples = examples
        self._allows_blank = examples.blank_captions
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._added: list[_Captioned] = []

    def look_at(self, sample: Sample, seed: int) -> _Captioned:
        """The caption first: it is cheaper to find out that it can't be read."""
        layout = self._layout(sample)
        caption = read_caption(sample.members[layout.text], layout.field)
        if not (self._allows_blank or caption.strip()):
            raise BlankCaption("the caption is blank")
        is_prepared = sample.prepared == layout.image
        image = self._images.look_at(sample.members[layout.image], is_prepared, seed)
        return _Captioned(sample.key, sample.url, caption, image, seed)

    def add(self, seen: _Captioned) -> None:
        """See BatchInProgress."""
        self._images.add(seen.image)
        self._added.append(seen)

    def _layout(self, sample: Sample) -> Layout:
        extensions = tuple(sample.members)
        layout = self._layouts.get(extensions)
        if layout is None:
            layout = self._layouts[extensions] = self._examples.layout(sample)
        return layout

    def finish(self) -> dict[str, Any]:
        keys, urls = [one.key for one in self._added], [one.url for one in self._added]
        try:
            values = self._values(keys)
        except Exception as exc:
            add_note(exc, _batch_of(keys))
            raise
        return {**values, "__key__": keys, "__url__": urls}

    def _values(self, keys: Sequence[str]) -> dict[str, Any]:
        captions = [one.caption for one in self._added]
        values = {**self._images.finish(keys), "text": captions}
        if self._examples.tokenizer is not None and captions:
            texts = self._examples.tokenizer(captions, [one.seed for one in self._added])
            values["text"] = texts.ids
            if self._examples.as_model_inputs:
                values |= texts.others
        return values

    def close(self) -> None:
        self._images.close()


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
        examples: Examples,
        places: _Places,
        size: int,
        allocate: Allocate,
    ):
        self._transform, plan = transform, transform.plan
        self._pixels = examples.pixels
        self._preparation = examples.preparation
        self._most_pixels = examples.most_pixels
        self._count = 0
        self._borrowed = ExitStack()
        if plan.given:
            self._borrowed.enter_context(SeededGenerators())
        if examples.as_bytes or plan.statistics is None:
            memory = allocate((size, *plan.size, 3), torch.uint8)
            self._batch = memory.permute(0, 3, 1, 2)
            self._places = places.of(memory, _channels_first)
        else:
            self._batch = allocate((size, 3, *plan.size), torch.float32)
            self._places = places.of(self._batch, torch.unbind)

    def look_at(self, data: memoryview, is_prepared: bool, seed: int) -> _Planned:
        """See BatchInProgress."""
        if self._preparation is not None and not is_prepared:
            return _Planned(data, is_prepared, seed, None, None)
        if is_stored(data):
            pixels = stored_pixels(data, True, self._most_pixels)
            return _Planned(None, is_prepared, seed, pixels, self._put(pixels, seed))
        place = place_in_scratch(data, self._most_pixels)
        put = None if place is None else self._put(place, seed)
        return _Planned(data, is_prepared, seed, place, put)

    def add(self, seen: _Planned) -> None:
        """See BatchInProgress. Between two images each call costs a microsecond or two: few are left."""
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

    def _put(self, pixels: Pixels, seed: int) -> Put:
        height, width, _ = pixels.shape
        return self._transform.put(pixels, self._transform.draw(height, width, seed))

    def finish(self, keys: Sequence[str]) -> dict[str, Any]:
        return {"image": self._batch[: self._count]}

    def close(self) -> None:
        self._borrowed.close()


class _GivenImages:
    """The user's own transform, run as given."""

    def __init__(self, preprocess: Preprocess, examples: Examples, allocate: Allocate):
        processor = image_processor_of(preprocess)
        self._is_processor = processor is not None
        self._transform = UserTransform(
            GivenProcessor(processor) if self._is_processor else preprocess, examples.most_pixels
        )
        self._prepare = None if examples.preparation is None else examples.pixels
        self._as_model_inputs = examples.as_model_inputs
        self._allocate = allocate
        self._values: list[Any] = []
        self._borrowed = ExitStack()
        self._generators = self._borrowed.enter_context(SeededGenerators())

    def look_at(self, data: memoryview, is_prepared: bool, seed: int) -> tuple[memoryview, bool, int]:
        """Nothing is known of what it does."""
        return data, is_prepared, seed

    def add(self, seen: tuple[memoryview, bool, int]) -> None:
        """See BatchInProgress."""
        data, is_prepared, seed = seen
        if self._prepare is None:
            value = self._transform(data, self._generators, seed)
        else:
            pixels = self._prepare(data, is_prepared)
            value = self._transform.of_pixels(pixels, self._generators, seed)
        self._values.append(value)

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

    def look_at(self, sample: Sample, seed: int) -> tuple[Sample, int]:
        """See BatchInProgress; all is the function's."""
        return sample, seed

    def add(self, seen: tuple[Sample, int]) -> None:
        """See BatchInProgress."""
        sample, seed = seen
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
        try:
            values = collate(self._values, self._allocate) if self._values else {}
        except Exception as exc:
            add_note(exc, _batch_of(self._keys))
            raise
        return {**values, "__key__": self._keys, "__url__": self._urls}

    def close(self) -> None:
        self._borrowed.close()


def _batch_of(keys: Sequence[str]) -> str:
    shown = ", ".join(map(repr, keys[:_KEYS_SHOWN]))
    return f"in the batch of samples {shown}{', …' if len(keys) > _KEYS_SHOWN else ''}"
