"""Samples → examples → the values of a batch (I, J): decode, augment, tokenize, in the batch's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from streamload.batches.captions import read_caption, read_label
from streamload.batches.collate import Allocate, collate, named
from streamload.batches.images import ImageAssembly, Images
from streamload.batches.tokenize import BatchTokenizer
from streamload.derived.preparation import Preparation
from streamload.errors import BlankCaption, add_note
from streamload.transforms.user import SeededGenerators

_KEYS_SHOWN = 16
_OF_MAP_SAMPLE, _OF_COLLATE = 0x9E37_79B9_7F4A_7C15, 0xD1B5_4A32_D192_ED03
"""What seeds are changed by, so that a function doesn't draw the numbers that another one drew."""

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
    """What samples become.

    Attributes:
        image: tells from a sample's extensions which one holds the image.
        images: how images are made; None: they aren't decoded, but are map_sample's.
        text: which extension holds the caption, and in which field of a JSON member; None: no captions.
        tokenizer: captions to ids; None leaves them as strings.
        blank_captions: whether samples with a caption of nothing but white space are used.
        label: as `text`, of a whole number.
        map_sample: in place of captions and labels: the raw sample to a dict of values. With `images` it gets
            the image as "image".
        collate: what `map_sample` returned for the samples of a batch to the batch: a dict of its values, or
            a tuple of them; None: values are stacked.
        as_model_inputs: keep all values that the tokenizer returns (`attention_mask`, say).
    """

    image: Choose
    images: ImageAssembly | None
    text: Choose | None
    tokenizer: BatchTokenizer | None = None
    blank_captions: bool = True
    label: Choose | None = None
    map_sample: MapSample | None = None
    collate: Collate | None = None
    as_model_inputs: bool = False

    @property
    def preparation(self) -> Preparation | None:
        """The preparation of its images."""
        return None if self.images is None else self.images.preparation

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
        """A function that begins batches, one at a time; what they share is made once."""
        images, map_sample = None if self.images is None else self.images.ready(), self.map_sample
        if map_sample is not None:
            return lambda size, allocate: _MappedBatch(
                map_sample, self, None if images is None else images(size, allocate), allocate
            )
        assert images is not None
        return lambda size, allocate: _CaptionedBatch(images(size, allocate), self, allocate)


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

    def __init__(self, images: Images, assembly: BatchAssembly, allocate: Allocate):
        self._images = images
        self._assembly = assembly
        self._allocate = allocate
        self._allows_blank = assembly.blank_captions
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
            layout = self._layouts[extensions] = self._assembly.layout(sample)
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
        assembly, values = self._assembly, self._images.finish(keys)
        if assembly.text is not None:
            values["text"] = captions = [one.caption for one in self._added if one.caption is not None]
            if assembly.tokenizer is not None and captions:
                texts = assembly.tokenizer(captions, [one.seed for one in self._added])
                values["text"] = texts.ids
                if assembly.as_model_inputs:
                    values |= texts.others
        if assembly.label is not None:
            labels = torch.tensor([one.label for one in self._added], dtype=torch.int64, device="cpu")
            values["label"] = self._allocate(labels.shape, torch.int64).copy_(labels)
        return values

    def close(self) -> None:
        self._images.close()


class _Mapped(NamedTuple):
    """A sample before its pixels."""

    sample: Sample
    image: Any
    seed: int


class _MappedBatch:
    """Whatever the user's function makes of samples."""

    def __init__(
        self, map_sample: MapSample, assembly: BatchAssembly, images: Images | None, allocate: Allocate
    ):
        self._map_sample = map_sample
        self._choose_image = assembly.image
        self._collate = assembly.collate
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
