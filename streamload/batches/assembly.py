"""Samples → examples → the values of a batch (I, J): decode, augment, tokenize, in the batch's memory."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from streamload.batches.captions import read_caption, read_label
from streamload.batches.collate import Allocate, collate, collate_images, named
from streamload.batches.tokenize import BatchTokenizer
from streamload.derived.preparation import Preparation
from streamload.errors import BlankCaption, add_note
from streamload.transforms.decode import (
    Pixels,
    decode_jpeg_or_image,
    decode_there,
    is_stored,
    place_in_scratch,
    stored_pixels,
)
from streamload.transforms.execute import PlannedTransform, Put
from streamload.transforms.fused import Place
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS
from streamload.transforms.plan import ImagePlan, Statistics
from streamload.transforms.processors import GivenProcessor, image_processor_of
from streamload.transforms.user import SeededGenerators, UserTransform

_KEYS_SHOWN = 16
_OF_MAP_SAMPLE, _OF_COLLATE = 0x9E37_79B9_7F4A_7C15, 0xD1B5_4A32_D192_ED03
"""What seeds are changed by, so that a function doesn't draw the numbers that another one drew."""

Preprocess = Callable[[Any], Any]
MapSample = Callable[[dict[str, Any]], Mapping[str, Any]]
Collate = Callable[[list[Mapping[str, Any]]], Any]
Choose = Callable[[Collection[str]], "tuple[str, str | None] | None"]


class Sample(NamedTuple):
    """The bytes of a sample's members by their extension, as they lie in the shard."""

    key: str
    url: str
    members: dict[str, memoryview]
    prepared: str = ""
    """The extension of the member that is prepared; empty: none is."""


class Layout(NamedTuple):
    """Which member holds the image; which ones caption and label, if asked for, in which field if JSON."""

    image: str
    text: tuple[str, str | None] | None
    label: tuple[str, str | None] | None


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
class BatchAssembly:
    """What is made of samples.

    Attributes:
        image: tells from a sample's extensions which one holds the image.
        text: which one holds the caption, and in which field of a JSON member; None: there are no captions.
        tokenizer: captions to ids; None leaves them as strings.
        preprocess: pixels to an image of the batch by a plan, or PIL image to value by a function as given;
            None: images aren't decoded, but are map_sample's.
        preparation: what is done to each image that isn't prepared yet, before anything else; None: nothing.
        blank_captions: whether samples with a caption of nothing but white space are used.
        map_sample: in place of captions and labels: the raw sample to a dict of values. With `preprocess`,
            it gets the image that this makes, as "image".
        as_bytes: leave a plan's images as uint8, to be normalised where they are used.
        as_model_inputs: give whatever else the tokenizer and an image processor give, too (`attention_mask`,
            say), and refuse images that aren't tensors.
        most_pixels: of an image that is decoded (limits.py); a preparation has its own.
        label: as `text`, of a whole number.
        collate: what `map_sample` returned for the samples of a batch to the batch: a dict of its values, or
            a tuple of them; None: values are stacked.
    """

    image: Choose
    text: Choose | None
    tokenizer: BatchTokenizer | None
    preprocess: ImagePlan | Preprocess | None
    map_sample: MapSample | None
    as_bytes: bool
    preparation: Preparation | None = None
    as_model_inputs: bool = False
    blank_captions: bool = True
    most_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    label: Choose | None = None
    collate: Collate | None = None

    @property
    def unnormalised(self) -> Statistics | None:
        """What images that are left as uint8 have still to be normalised by; None: nothing."""
        return (
            self.preprocess.statistics if self.as_bytes and isinstance(self.preprocess, ImagePlan) else None
        )

    def layout(self, sample: Sample) -> Layout:
        """The members that are meant; the index has promised that there are such."""
        image = self.image(sample.members)
        text, label = (
            None if choose is None else choose(sample.members) for choose in (self.text, self.label)
        )
        if image is None or (text is None) != (self.text is None) or (label is None) != (self.label is None):
            raise KeyError(f"{sample.key} has only {', '.join(sample.members)}")
        return Layout(image[0], text, label)

    def ready(self) -> Begin:
        """What begins batches, one at a time: what they have in common is made once."""
        images, map_sample = self._images(), self.map_sample
        if map_sample is not None:
            return lambda size, allocate: _MappedBatch(
                map_sample, self, None if images is None else images(size, allocate), allocate
            )
        assert images is not None
        return lambda size, allocate: _CaptionedBatch(images(size, allocate), self, allocate)

    def _images(self) -> Callable[[int, Allocate], _Images] | None:
        """What begins the images of batches; None: nobody asked for images."""
        preprocess = self.preprocess
        if preprocess is None:
            return None
        if isinstance(preprocess, ImagePlan):
            transform, places = PlannedTransform(preprocess, self.as_bytes), _Places()
            return lambda size, allocate: _PlannedImages(transform, self, places, size, allocate)
        return lambda size, allocate: _GivenImages(preprocess, self, allocate)

    def pixels(self, data: memoryview, is_prepared: bool) -> Pixels:
        """The pixels that the transform gets, needed only until the next image."""
        if self.preparation is None or is_prepared:
            return decode_jpeg_or_image(data, in_scratch=True, most_pixels=self.most_pixels)
        return self.preparation.pixels(data)


class _Images(Protocol):
    """The images of a batch; see BatchInProgress."""

    def look_at(self, data: memoryview, is_prepared: bool, seed: int) -> Any: ...

    def add(self, seen: Any) -> None: ...

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

    def close(self) -> None: ...


class _Captioned(NamedTuple):
    """A sample before its pixels."""

    key: str
    url: str
    caption: str | None
    label: int | None
    image: Any
    seed: int


class _CaptionedBatch:
    """Images with captions and labels: `image`, `text`, `label`, and what else is asked for."""

    def __init__(self, images: _Images, examples: BatchAssembly, allocate: Allocate):
        self._images = images
        self._examples = examples
        self._allocate = allocate
        self._allows_blank = examples.blank_captions
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._added: list[_Captioned] = []

    def look_at(self, sample: Sample, seed: int) -> _Captioned:
        """The caption first: it is cheaper to find out that it can't be read."""
        layout = self._layout(sample)
        caption = label = None
        if layout.text is not None:
            member, field = layout.text
            caption = read_caption(sample.members[member], field)
            if not (self._allows_blank or caption.strip()):
                raise BlankCaption("the caption is blank")
        if layout.label is not None:
            member, field = layout.label
            label = read_label(sample.members[member], field)
        is_prepared = sample.prepared == layout.image
        image = self._images.look_at(sample.members[layout.image], is_prepared, seed)
        return _Captioned(sample.key, sample.url, caption, label, image, seed)

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
        examples, values = self._examples, self._images.finish(keys)
        if examples.text is not None:
            values["text"] = captions = [one.caption for one in self._added if one.caption is not None]
            if examples.tokenizer is not None and captions:
                texts = examples.tokenizer(captions, [one.seed for one in self._added])
                values["text"] = texts.ids
                if examples.as_model_inputs:
                    values |= texts.others
        if examples.label is not None:
            labels = torch.tensor([one.label for one in self._added], dtype=torch.int64, device="cpu")
            values["label"] = self._allocate(labels.shape, torch.int64).copy_(labels)
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
        examples: BatchAssembly,
        places: _Places,
        size: int,
        allocate: Allocate,
    ):
        self._transform, plan = transform, transform.plan
        self._pixels = examples.pixels
        self._preparation = examples.preparation
        self._most_pixels = examples.most_pixels
        self._count = 0
        self._handed: list[torch.Tensor] = []
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

    def last(self) -> torch.Tensor:
        """See _Images. Not a view of the batch: torch, which moves what it sends, would move all of it."""
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

    def __init__(self, preprocess: Preprocess, examples: BatchAssembly, allocate: Allocate):
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


class _Mapped(NamedTuple):
    """A sample before its pixels."""

    sample: Sample
    image: Any
    seed: int


class _MappedBatch:
    """Whatever the user's function makes of samples."""

    def __init__(
        self, map_sample: MapSample, examples: BatchAssembly, images: _Images | None, allocate: Allocate
    ):
        self._map_sample = map_sample
        self._choose_image = examples.image
        self._collate = examples.collate
        self._images = images
        self._allocate = allocate
        self._values: list[Mapping[str, Any]] = []
        self._keys: list[str] = []
        self._urls: list[str] = []
        self._seed = 0
        self._borrowed = ExitStack()
        if images is not None:
            self._borrowed.callback(images.close)
        self._generators = self._borrowed.enter_context(SeededGenerators())

    def look_at(self, sample: Sample, seed: int) -> _Mapped:
        """See BatchInProgress; all but the image is the function's."""
        if self._images is None:
            return _Mapped(sample, None, seed)
        choice = self._choose_image(sample.members)
        if choice is None:
            raise KeyError(f"{sample.key} has only {', '.join(sample.members)}")
        is_prepared = sample.prepared == choice[0]
        return _Mapped(sample, self._images.look_at(sample.members[choice[0]], is_prepared, seed), seed)

    def add(self, seen: _Mapped) -> None:
        """See BatchInProgress."""
        sample, image, seed = seen
        raw: dict[str, Any] = {"__key__": sample.key, "__url__": sample.url}
        raw.update((extension, bytes(data)) for extension, data in sample.members.items())
        if self._images is None:
            value = self._mapped(raw, seed)
        else:
            self._images.add(image)
            try:
                value = self._mapped({**raw, "image": self._images.last()}, seed ^ _OF_MAP_SAMPLE)
            except BaseException:
                self._images.drop()
                raise
        self._values.append(value)
        self._keys.append(sample.key)
        self._urls.append(sample.url)
        self._seed ^= seed

    def _mapped(self, raw: dict[str, Any], seed: int) -> Mapping[str, Any]:
        self._generators.seed(seed)
        value = self._map_sample(raw)
        if not isinstance(value, Mapping):
            raise TypeError(
                f"map_sample returned a {type(value).__name__} for {raw['__key__']}; expected a dict"
            )
        return value

    def finish(self) -> dict[str, Any]:
        try:
            values = self._joined() if self._values else {}
        except Exception as exc:
            add_note(exc, _batch_of(self._keys))
            raise
        return {**values, "__key__": self._keys, "__url__": self._urls}

    def _joined(self) -> dict[str, Any]:
        if self._collate is not None:
            self._generators.seed(self._seed ^ _OF_COLLATE)
            return named(self._collate(self._values))
        ready = {}
        if self._images is not None:
            for name in self._values[0]:
                joined = self._images.joined([value.get(name) for value in self._values])
                if joined is not None:
                    ready[name] = joined
        rest = [{k: v for k, v in value.items() if k not in ready} for value in self._values]
        return {**ready, **collate(rest, self._allocate)} if ready else collate(self._values, self._allocate)

    def close(self) -> None:
        self._borrowed.close()


def _batch_of(keys: Sequence[str]) -> str:
    shown = ", ".join(map(repr, keys[:_KEYS_SHOWN]))
    return f"in the batch of samples {shown}{', …' if len(keys) > _KEYS_SHOWN else ''}"
