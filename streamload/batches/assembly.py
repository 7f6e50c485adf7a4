"""Samples → the values of a batch (steps I, J): decode, augment and tokenize, in the batch's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from streamload.batches.captions import read_caption
from streamload.batches.draws import UserDraws
from streamload.batches.images import BatchImages, ImageAssembly
from streamload.batches.in_progress import (
    Allocate,
    BatchFactory,
    Bounds,
    Choose,
    Collate,
    MakeColumns,
    MakingCosts,
    MapSample,
    Members,
    Room,
    RowKinds,
    Trim,
    in_batch,
)
from streamload.batches.tokenize import BatchTokenizer, Texts
from streamload.errors import BlankCaption, add_note
from streamload.extension import BatchColumn
from streamload.origins.origin import Recipe
from streamload.shards.samples import Sample

if TYPE_CHECKING:
    from streamload.batches.caption_choice import CaptionChoice

_LAYOUTS_KEPT = 256
"""Lists of extensions whose choice of members is remembered."""


@dataclass(frozen=True, slots=True)
class BatchAssembly:
    """Options of making batches of samples.

    Attributes:
        image: chooses the image from a sample's extensions.
        images: decodes and transforms images; None: map_sample gets their bytes, or features come instead.
        text: chooses the caption's member; None: no captions.
        captions: reads captions that lie in JSON or at several places; None: they are the members that `text`
            chooses.
        tokenizer: captions to ids; None leaves them as strings.
        blank_captions: whether samples are used whose caption is only white space.
        label: as `text`, for a whole number.
        label_dtype: of labels; a floating-point one allows other numbers.
        map_sample: in place of captions and labels: the raw sample to a dict of values. With `images` it gets
            the image as "image", if the sample has one.
        collate: the results of `map_sample` for a batch to the batch: a dict or a tuple of values; None:
            values are stacked.
        as_model_inputs: keep all values that the tokenizer returns (such as an `attention_mask`).
        trim: cuts rows of several lengths, and measures them; None: all have one length.
        preparation: of its images, and of what columns decode; None: there is none.
        kinds: of rows, if not all have an image and a text; None: they have.
        add_members: adds members that aren't in its shard to a sample; None: there are none.
        draws: of `map_sample` and `collate`, in this process.
    """

    image: Choose
    images: ImageAssembly | None
    text: Choose | None
    captions: CaptionChoice | None = None
    tokenizer: BatchTokenizer | None = None
    blank_captions: bool = True
    label: Choose | None = None
    label_dtype: torch.dtype = torch.int64
    map_sample: MapSample | None = None
    collate: Collate | None = None
    as_model_inputs: bool = False
    trim: Trim | None = None
    preparation: Recipe | None = None
    kinds: RowKinds | None = None
    add_members: Callable[[Sample], Sample] | None = None
    draws: UserDraws = field(
        default_factory=lambda: UserDraws("map_sample"), init=False, compare=False, repr=False
    )

    def members_of(self, extensions: Collection[str]) -> Members | None:
        """The members to use of a sample that has these, without `kinds`; None if one is missing."""
        image = self.image(extensions)
        text = None if self.text is None else self.text(extensions)
        label = None if self.label is None else self.label(extensions)
        if image is None or (text is None) != (self.text is None) or (label is None) != (self.label is None):
            return None
        return Members(image[0], text, label)

    @property
    def uses_members(self) -> bool:
        """True if batches have values of samples' members, beside columns."""
        return any((self.images, self.text, self.label, self.map_sample))

    def batch_factory(self, columns: MakeColumns | None = None) -> BatchFactory:
        """A function that makes empty batches, one at a time; what they share is set up once.

        Args:
            columns: makes those of a batch; None: it has none.
        """
        images, map_sample = None if self.images is None else self.images.batch_factory(), self.map_sample
        if map_sample is not None:
            from streamload.batches.mapped import MappedBatch

            return lambda size, allocate, seq_len=0: MappedBatch(
                map_sample,
                self.collate,
                self.draws,
                self.image,
                None if images is None else images(size, allocate),
                allocate,
                self.add_members,
            )
        members_of = functools.lru_cache(_LAYOUTS_KEPT)(self.members_of)
        return lambda size, allocate, seq_len=0: _CaptionedBatch(
            None if images is None else images(size, allocate, seq_len),
            () if columns is None else columns(size, allocate),
            self,
            members_of,
            allocate,
        )


class _Captioned(NamedTuple):
    """A parsed sample."""

    key: str
    url: str
    caption: str | None
    label: float | None
    image: Any
    seed: int
    columns: list[Any]


class _CaptionedBatch:
    """Images with captions and labels: `image`, `text`, `label`, the tokenizer's other values, columns."""

    def __init__(
        self,
        images: BatchImages | None,
        columns: Sequence[BatchColumn],
        assembly: BatchAssembly,
        members_of: Callable[[tuple[str, ...]], Members | None],
        allocate: Allocate,
    ):
        self._images = images
        self.decodes = bool(columns) or images is None or images.decodes
        self._columns = columns
        self._assembly = assembly
        self._allocate = allocate
        self._allows_blank, self._captions = assembly.blank_captions, assembly.captions
        self._members_of = members_of
        if assembly.label is not None:
            from streamload.batches.fields import read_label, read_score

            self._read_label = read_score if assembly.label_dtype.is_floating_point else read_label
        self._kinds = assembly.kinds
        self._added: list[_Captioned] = []
        self._tokenize_ns = 0
        self._ids = 0, 0  # real and padding
        self._is_to_be_prepared = assembly.preparation is not None
        self._unprepared = 0
        self._image_names: tuple[str, ...] = ()

    def parse(self, sample: Sample, seed: int, room: Room | None = None) -> _Captioned:
        """The caption first: if it is bad, that is cheaper to find out."""
        stored = sample
        if self._assembly.add_members is not None:
            sample = self._assembly.add_members(stored)
        extensions = tuple(sample.members)
        if self._kinds is None:
            members = self._members_of(extensions)
        else:
            members = self._kinds.chosen(sample.shard, extensions, self._assembly.image, self._assembly.text)
        if members is None:  # such a sample isn't usable by its index entry, and doesn't get here
            raise KeyError(f"{sample.key} has only {', '.join(extensions)}")
        caption = label = None
        if members.text is not None:
            if self._captions is None:
                caption = read_caption(sample.members[members.text[0]])
            else:
                caption = self._captions.read(sample.members, seed)
            if not (self._allows_blank or caption.strip()):
                raise BlankCaption("the caption is blank")
        if members.label is not None:
            member, field = members.label
            label = self._read_label(sample.members[member], field)
        is_prepared = sample.prepared == members.image
        image = None
        if self._images is not None and members.image:
            image = self._images.parse(sample.members[members.image], is_prepared, seed, room)
            self._unprepared += self._is_to_be_prepared and not is_prepared
        columns = [column.parse(stored, members.image, is_prepared, seed) for column in self._columns]
        return _Captioned(sample.key, sample.url, caption, label, image, seed, columns)

    def add(self, parsed: _Captioned) -> None:
        """Add a sample, given the result of `parse`."""
        if self._images is not None and parsed.image is not None:
            self._images.add(parsed.image)
        if self._columns:
            self._add_to_columns(parsed.columns)
        self._added.append(parsed)

    def _add_to_columns(self, parsed: Sequence[Any]) -> None:
        added: list[BatchColumn] = []
        try:
            for column, value in zip(self._columns, parsed, strict=True):
                column.add(value)
                added.append(column)
        except BaseException:
            for column in added:
                column.drop_last()
            if self._images is not None:
                self._images.drop_last()
            raise

    def finish(self, bounds: Bounds | None = None, parts: Sequence[int] | None = None) -> dict[str, Any]:
        keys, urls = [row.key for row in self._added], [row.url for row in self._added]
        try:
            values = self._values(keys, bounds)
        except Exception as exc:
            add_note(exc, in_batch(keys))
            raise
        if self._kinds is not None:
            images, texts = zip(
                *((row.image is not None, row.caption is not None) for row in self._added), strict=True
            )
            values = self._kinds.with_rows(values, self._image_names, images, texts, self._allocate)
        return {**values, "__key__": keys, "__url__": urls}

    def _values(self, keys: Sequence[str], bounds: Bounds | None) -> dict[str, Any]:
        assembly = self._assembly
        values: dict[str, Any] = {}
        if self._images is not None:
            if self._kinds is not None:
                keys = [row.key for row in self._added if row.image is not None]
            values = self._images.finish(keys)
            if not isinstance(values.get("image"), torch.Tensor):
                from streamload.batches.collate import in_parts

                values = in_parts(values)
            self._image_names = tuple(values)
        whole: Any = None  # texts before they are cut: rows of columns are found by them
        trim = assembly.trim
        texts: Texts | None = None
        if assembly.text is not None:
            values["text"] = whole = [row.caption for row in self._added if row.caption is not None]
        if assembly.tokenizer is not None and whole:
            start_ns = monotonic_ns()
            seeds = [row.seed for row in self._added if row.caption is not None]
            texts = assembly.tokenizer(whole, seeds)
            whole = texts.ids
            if trim is not None:
                texts = trim.cut(texts, bounds)
            values["text"] = texts.ids
            self._tokenize_ns, self._ids = (
                monotonic_ns() - start_ns,
                assembly.tokenizer.real_and_padding(texts),
            )
            if assembly.as_model_inputs:
                values |= texts.others
            if trim is not None:
                values |= trim.beside(texts)
        if assembly.label is not None:
            labels = torch.tensor(
                [row.label for row in self._added], dtype=assembly.label_dtype, device="cpu"
            )
            values["label"] = self._allocate(labels.shape, assembly.label_dtype).copy_(labels)
        for column in self._columns:
            values |= column.finish(whole)
        if trim is not None and self._kinds is None:  # else no part of the batch has the same rows of both
            values |= trim.measured(values, texts, 0 if texts is None else whole.shape[1], bounds)
        return values

    def measured(self) -> MakingCosts:
        timed = (0, 0) if self._images is None else self._images.timed_ns
        return MakingCosts(*timed, self._tokenize_ns, *self._ids, self._unprepared)

    def close(self) -> None:
        for column in self._columns:
            column.close()
        if self._images is not None:
            self._images.close()
