"""A sample on its way into a batch, and a batch that is being made: what all makers of batches share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from streamload.batches.tokenize import Texts
from streamload.extension import BatchColumn
from streamload.shards.samples import Sample

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes memory for a tensor of a shape and dtype."""
Bounds = npt.NDArray[np.int32]
"""int32[N, 2]: the most tokens and the most patches of each row of a batch."""
Room = tuple[int, int]
"""The most tokens and patches of one row; where images have sizes, the second is the number of the row's."""


MapSample = Callable[[dict[str, Any]], Mapping[str, Any]]
Collate = Callable[[list[Mapping[str, Any]]], Any]
_KEYS_SHOWN = 16

Choose = Callable[[Collection[str]], "tuple[str, str | None] | None"]
"""Chooses a member of a sample by its extension, and its field if it is JSON; None: the sample has none."""


class Unread(Mapping[str, memoryview]):
    """The members of a sample, whose bytes are read when the first of them is used.

    Args:
        names: their extensions.
        read: reads them all.
    """

    def __init__(self, names: Sequence[str], read: Callable[[], Mapping[str, memoryview]]):
        self._names, self._read = names, read
        self._members: Mapping[str, memoryview] | None = None

    def __getitem__(self, name: str) -> memoryview:
        if self._members is None:
            self._members = self._read()
        return self._members[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Members(NamedTuple):
    """The members that hold image, caption and label; for the last two with the field, if JSON.

    Where sources differ in modality, the image's is "" for rows without one.
    """

    image: str
    text: tuple[str, str | None] | None
    label: tuple[str, str | None] | None


class MakingCosts(NamedTuple):
    """Record of a batch's making.

    Attributes:
        decode_ns, resize_ns: of the images that were timed, one of 16 (images.py).
        tokenize_ns: of all captions.
        text_real, text_padding: ids of captions; 0 where nothing says which are padding.
        unprepared: samples whose images weren't prepared, where the run prepares.
    """

    decode_ns: int = 0
    resize_ns: int = 0
    tokenize_ns: int = 0
    text_real: int = 0
    text_padding: int = 0
    unprepared: int = 0


MakeColumns = Callable[[int, Allocate], Sequence[BatchColumn]]
"""Makes the columns of an empty batch, by its capacity."""


class Trim:
    """Cuts the columns of a batch to what its rows need, and measures these; here rows have one length.

    Subclass it, and give it to a batch in `Extension.assembly`: `return replace(assembly, trim=Half())`.

        class Half(Trim):
            def cut(self, texts, bounds):
                return Texts(texts.ids[:, : texts.ids.shape[1] // 2], texts.others, texts.valid)
    """

    __slots__ = ()

    def cut(self, texts: Texts, bounds: Bounds | None) -> Texts:
        """Leave out columns that no row needs, here or elsewhere."""
        return texts

    def beside(self, texts: Texts) -> dict[str, torch.Tensor]:
        """More values of a batch, beside its ids."""
        return {}

    def measured(
        self, values: Mapping[str, Any], texts: Texts | None, length: int, bounds: Bounds | None
    ) -> dict[str, Any]:
        """More values of a batch, by the lengths of its rows.

        Args:
            values: of the batch.
            texts: as `cut` returned them; None: there are no ids.
            length: of texts that aren't cut.
            bounds: as for BatchInProgress.
        """
        return {}


class RowKinds:
    """Rows of a batch of which some have only an image, or only a text: subclass it.

    `Extension.assembly` gives it to batches: `return replace(assembly, kinds=MyKinds(options.sources))`.
    """

    __slots__ = ()

    def chosen(
        self, shard: int, extensions: Collection[str], image: Choose, text: Choose | None
    ) -> Members | None:
        """The members to use of a sample; None if one is missing."""
        raise NotImplementedError

    def with_rows(
        self,
        values: Mapping[str, Any],
        images: Collection[str],
        has_image: Sequence[bool],
        has_text: Sequence[bool],
        allocate: Allocate,
    ) -> dict[str, Any]:
        """The values of a batch, with the rows that they belong to.

        Args:
            values: of the images and texts that there are.
            images: the names of those of images.
            has_image, has_text: of each row of the batch.
            allocate: makes tensors.
        """
        raise NotImplementedError


class BatchInProgress(Protocol):
    """A batch to which samples are added one by one, each parsed first."""

    @property
    def decodes(self) -> bool:
        """False if adding a sample only copies its image's file, so that its bytes are best added at once."""
        ...

    def parse(self, sample: Sample, seed: int, room: Room | None = None) -> Any:
        """Do all of a sample's work before its pixels: caption, label, image header, random choices.

        Args:
            sample: its bytes have to stay valid until it has been added.
            seed: uint64, of its random choices.
            room: of its place; None: any.

        Raises:
            SampleError: it can't be used.
        """
        ...

    def add(self, parsed: Any) -> None:
        """Add a sample, given the result of `parse`.

        Raises:
            SampleError: it can't be used; the batch is unchanged.
        """
        ...

    def finish(self, bounds: Bounds | None = None, parts: Sequence[int] | None = None) -> dict[str, Any]:
        """The values of the samples that were added, with the lists `__key__` and `__url__`.

        Args:
            bounds: int32[N, 2], room for the tokens and patches of each row, on other ranks as here.
            parts: the rows of each part that `collate=` gets by itself; None: it gets all at once.
        """
        ...

    def measured(self) -> MakingCosts:
        """Record of its making, after `finish`."""
        ...

    def close(self) -> None:
        """Restore the random generators. Idempotent."""
        ...


class BatchFactory(Protocol):
    """Makes an empty batch."""

    def __call__(self, size: int, allocate: Allocate, seq_len: int = 0) -> BatchInProgress:
        """Make it.

        Args:
            size: its capacity, in samples.
            allocate: makes its tensors.
            seq_len: the most patches of an image; 0 where images aren't made into patches.
        """
        ...


def in_batch(keys: Sequence[str]) -> str:
    """The samples of a batch, for an error."""
    shown = ", ".join(map(repr, keys[:_KEYS_SHOWN]))
    return f"in the batch of samples {shown}{', …' if len(keys) > _KEYS_SHOWN else ''}"
