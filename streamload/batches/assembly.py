"""Samples → the values of a batch (steps I, J): decode, augment and tokenize, in the batch's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic_ns
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from streamload.batches.captions import read_caption, read_label
from streamload.batches.collate import Allocate, collate, named
from streamload.batches.features import DerivedRows, FeatureAssembly, FeatureInProgress, ParsedFeature
from streamload.batches.images import ImageAssembly, Images
from streamload.batches.in_progress import BatchFactory, Measured, Members, Sample
from streamload.batches.modalities import Choose, Modalities, with_rows
from streamload.batches.padding import Bounds, TextPadding, widths_of
from streamload.batches.tokenize import BatchTokenizer
from streamload.derived.calls.feature_rows import FeatureStart
from streamload.derived.prepare.preparation import Preparation
from streamload.errors import BlankCaption, add_note
from streamload.transforms.user import SeededGenerators

WIDTHS = "__widths__"
"""The RowWidths among the values of a batch."""
_KEYS_SHOWN = 16
_MAP_SAMPLE_SEED, _COLLATE_SEED = 0x9E37_79B9_7F4A_7C15, 0xD1B5_4A32_D192_ED03
"""XORed into seeds, so that each function draws its own random numbers."""

MapSample = Callable[[dict[str, Any]], Mapping[str, Any]]
Collate = Callable[[list[Mapping[str, Any]]], Any]


@dataclass(frozen=True, slots=True)
class BatchAssembly:
    """Options of making batches of samples.

    Attributes:
        image: chooses the image from a sample's extensions.
        images: decodes and transforms images; None: map_sample gets their bytes, or features come instead.
        text: chooses the caption, and its field in a JSON member; None: no captions.
        tokenizer: captions to ids; None leaves them as strings.
        blank_captions: whether samples are used whose caption is only white space.
        label: as `text`, for a whole number.
        map_sample: in place of captions and labels: the raw sample to a dict of values. With `images` it gets
            the image as "image".
        collate: the results of `map_sample` for a batch to the batch: a dict or a tuple of values; None:
            values are stacked.
        as_model_inputs: keep all values that the tokenizer returns (such as an `attention_mask`).
        text_padding: how captions are cut to the longest of the batch; None: they all have one length.
        features: what comes from stored rows.
        modalities: of the shards' sources, if not all rows have an image and a text; None: they have.
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
    text_padding: TextPadding | None = None
    features: tuple[FeatureAssembly, ...] = ()
    modalities: Modalities | None = None

    @property
    def preparation(self) -> Preparation | None:
        """The preparation of the images; None: there is none."""
        for images in (self.images, *(feature.images for feature in self.features)):
            if images is not None:
                return images.preparation
        return None

    def members_of(self, sample: Sample) -> Members:
        """The members to use; a sample without them isn't usable by its index entry, and doesn't get here."""
        if self.modalities is not None:
            chosen = self.modalities.chosen(sample.shard, sample.members, self.image, self.text)
            if chosen is None:
                raise KeyError(f"{sample.key} has only {', '.join(sample.members)}")
            return Members(*chosen, None)
        image = self.image(sample.members)
        text, label = (
            None if choose is None else choose(sample.members) for choose in (self.text, self.label)
        )
        if image is None or (text is None) != (self.text is None) or (label is None) != (self.label is None):
            raise KeyError(f"{sample.key} has only {', '.join(sample.members)}")
        return Members(image[0], text, label)

    @property
    def reads_only_features(self) -> bool:
        """True if batches have nothing of samples but features, of which derived shards may have all."""
        values = self.images, self.text, self.label, self.map_sample
        return (
            bool(self.features)
            and not any(values)
            and all(feature.has_derived_shards for feature in self.features)
        )

    def batch_factory(
        self,
        features: Mapping[str, FeatureStart] = MappingProxyType({}),
        derived: DerivedRows | None = None,
    ) -> BatchFactory:
        """A function that makes empty batches, one at a time; what they share is set up once.

        Args:
            features: what is known of the features in this epoch, by name.
            derived: rows in derived shards; None: there are none.
        """
        images, map_sample = None if self.images is None else self.images.batch_factory(), self.map_sample
        if map_sample is not None:
            return lambda size, allocate, seq_len=0: _MappedBatch(
                map_sample, self, None if images is None else images(size, allocate), allocate
            )
        factories = [feature.batch_factory(features[feature.name], derived) for feature in self.features]
        return lambda size, allocate, seq_len=0: _CaptionedBatch(
            None if images is None else images(size, allocate, seq_len),
            [feature(size, allocate) for feature in factories],
            self,
            allocate,
        )


class _Captioned(NamedTuple):
    """A parsed sample."""

    key: str
    url: str
    caption: str | None
    label: int | None
    image: Any
    seed: int
    features: list[ParsedFeature | None]


class _CaptionedBatch:
    """Images with captions and labels: `image`, `text`, `label`, the tokenizer's other values, features."""

    def __init__(
        self,
        images: Images | None,
        features: Sequence[FeatureInProgress],
        assembly: BatchAssembly,
        allocate: Allocate,
    ):
        self._images = images
        self._features = features
        self._assembly = assembly
        self._allocate = allocate
        self._allows_blank = assembly.blank_captions
        self._members: dict[tuple[str, ...], Members] = {}  # by the sample's extensions
        self._modalities = assembly.modalities
        self._added: list[_Captioned] = []
        self._tokenize_ns = 0
        self._ids = 0, 0  # real and padding
        self._is_to_be_prepared = assembly.preparation is not None
        self._unprepared = 0

    def parse(self, sample: Sample, seed: int) -> _Captioned:
        """The caption first: if it is bad, that is cheaper to find out."""
        members = self._members_of(sample)
        caption = label = None
        if members.text is not None:
            member, field = members.text
            caption = read_caption(sample.members[member], field)
            if not (self._allows_blank or caption.strip()):
                raise BlankCaption("the caption is blank")
        if members.label is not None:
            member, field = members.label
            label = read_label(sample.members[member], field)
        is_prepared = sample.prepared == members.image
        image = None
        if self._images is not None and members.image:
            image = self._images.parse(sample.members[members.image], is_prepared, seed)
            self._unprepared += self._is_to_be_prepared and not is_prepared
        features = [
            feature.parse(
                *(sample.key, sample.checksum, sample.members, members.image, is_prepared, seed, sample.shard)
            )
            for feature in self._features
        ]
        return _Captioned(sample.key, sample.url, caption, label, image, seed, features)

    def add(self, parsed: _Captioned) -> None:
        """See BatchInProgress."""
        if self._images is not None and parsed.image is not None:
            self._images.add(parsed.image)
        if self._features:
            self._add_features(parsed.features)
        self._added.append(parsed)

    def _add_features(self, parsed: Sequence[ParsedFeature | None]) -> None:
        added: list[FeatureInProgress] = []
        try:
            for feature, parsed_row in zip(self._features, parsed, strict=True):
                feature.add(parsed_row)
                added.append(feature)
        except BaseException:
            for feature in added:
                feature.drop_last()
            if self._images is not None:
                self._images.drop_last()
            raise

    def _members_of(self, sample: Sample) -> Members:
        extensions = tuple(sample.members)
        if self._modalities is not None:
            return self._assembly.members_of(sample)
        members = self._members.get(extensions)
        if members is None:
            members = self._members[extensions] = self._assembly.members_of(sample)
        return members

    def finish(self, bounds: Bounds | None = None) -> dict[str, Any]:
        keys, urls = [row.key for row in self._added], [one.url for one in self._added]
        try:
            values = self._values(keys, bounds)
        except Exception as exc:
            add_note(exc, _in_batch(keys))
            raise
        if self._modalities is not None:
            images, texts = zip(
                *((row.image is not None, row.caption is not None) for row in self._added), strict=True
            )
            values = with_rows(values, images, texts, self._allocate)
        return {**values, "__key__": keys, "__url__": urls}

    def _values(self, keys: Sequence[str], bounds: Bounds | None) -> dict[str, Any]:
        assembly = self._assembly
        values: dict[str, Any] = {}
        if self._images is not None:
            if self._modalities is not None:
                keys = [row.key for row in self._added if row.image is not None]
            values = self._images.finish(keys)
        whole: Any = None  # texts before they are cut: features are found by them
        widths = widths_of(values, None) if self._modalities is None else None
        if assembly.text is not None:
            values["text"] = whole = [row.caption for row in self._added if row.caption is not None]
        if assembly.tokenizer is not None and whole:
            start_ns = monotonic_ns()
            seeds = [row.seed for row in self._added if row.caption is not None]
            texts = assembly.tokenizer(whole, seeds)
            whole, padding = texts.ids, assembly.text_padding
            if padding is not None:
                texts = texts.cut_to_longest(padding.multiple, bounds)
            values["text"] = texts.ids
            self._tokenize_ns, self._ids = (
                monotonic_ns() - start_ns,
                assembly.tokenizer.real_and_padding(texts),
            )
            if assembly.as_model_inputs:
                values |= texts.others
            if padding is not None and padding.with_valid:
                values["text_valid"] = texts.valid
            if self._modalities is None:  # else no part of the batch has the same rows of both
                valid = None if padding is None else texts.valid
                widths = widths_of(values, valid, whole.shape[1], texts.columns())
        if assembly.label is not None:
            labels = torch.tensor([row.label for row in self._added], dtype=torch.int64, device="cpu")
            values["label"] = self._allocate(labels.shape, torch.int64).copy_(labels)
        for feature in self._features:
            values |= feature.finish(whole)
        return values if widths is None else {**values, WIDTHS: widths.with_room(bounds)}

    def measured(self) -> Measured:
        timed = (0, 0) if self._images is None else self._images.timed_ns
        return Measured(*timed, self._tokenize_ns, *self._ids, self._unprepared)

    def close(self) -> None:
        for feature in self._features:
            feature.close()
        if self._images is not None:
            self._images.close()


class _Mapped(NamedTuple):
    """A parsed sample."""

    sample: Sample
    image: Any
    seed: int


class _MappedBatch:
    """The results of the user's map_sample."""

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
        self._exit = ExitStack()
        if images is not None:
            self._exit.callback(images.close)
        self._generators = self._exit.enter_context(SeededGenerators())

    def parse(self, sample: Sample, seed: int) -> _Mapped:
        """See BatchInProgress; the function itself parses all but the image."""
        if self._images is None:
            return _Mapped(sample, None, seed)
        choice = self._choose_image(sample.members)
        if choice is None:
            raise KeyError(f"{sample.key} has only {', '.join(sample.members)}")
        is_prepared = sample.prepared == choice[0]
        return _Mapped(sample, self._images.parse(sample.members[choice[0]], is_prepared, seed), seed)

    def add(self, parsed: _Mapped) -> None:
        """See BatchInProgress."""
        sample, image, seed = parsed
        raw: dict[str, Any] = {"__key__": sample.key, "__url__": sample.url}
        raw.update((extension, bytes(data)) for extension, data in sample.members.items())
        if self._images is None:
            value = self._map(raw, seed)
        else:
            self._images.add(image)
            try:
                value = self._map({**raw, "image": self._images.last_image()}, seed ^ _MAP_SAMPLE_SEED)
            except BaseException:
                self._images.drop_last()
                raise
        self._values.append(value)
        self._keys.append(sample.key)
        self._urls.append(sample.url)
        self._seed ^= seed

    def _map(self, raw: dict[str, Any], seed: int) -> Mapping[str, Any]:
        self._generators.seed(seed)
        value = self._map_sample(raw)
        if not isinstance(value, Mapping):
            raise TypeError(
                f"map_sample returned a {type(value).__name__} for {raw['__key__']}; expected a dict"
            )
        return value

    def finish(self, bounds: Bounds | None = None) -> dict[str, Any]:
        try:
            values = self._collated() if self._values else {}
        except Exception as exc:
            add_note(exc, _in_batch(self._keys))
            raise
        return {**values, "__key__": self._keys, "__url__": self._urls}

    def _collated(self) -> dict[str, Any]:
        if self._collate is not None:
            self._generators.seed(self._seed ^ _COLLATE_SEED)
            return named(self._collate(self._values))
        stacked = {}
        if self._images is not None:
            for name in self._values[0]:
                images = self._images.as_batch([value.get(name) for value in self._values])
                if images is not None:
                    stacked[name] = images
        if not stacked:
            return collate(self._values, self._allocate)
        unstacked = [{k: v for k, v in value.items() if k not in stacked} for value in self._values]
        return {**stacked, **collate(unstacked, self._allocate)}

    def measured(self) -> Measured:
        return Measured(*((0, 0) if self._images is None else self._images.timed_ns))

    def close(self) -> None:
        self._exit.close()


def _in_batch(keys: Sequence[str]) -> str:
    shown = ", ".join(map(repr, keys[:_KEYS_SHOWN]))
    return f"in the batch of samples {shown}{', …' if len(keys) > _KEYS_SHOWN else ''}"
