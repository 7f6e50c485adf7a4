"""Batches in which some rows have only an image, or only a text (`Source(modality=…)`; steps I, J).

Images and texts then have rows of their own, and the batch says to which of its rows they belong.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamload.batches.collate import Allocate
from streamload.shards.keys import Modality
from streamload.transforms.patches import NAMES

Choose = Callable[[Collection[str]], "tuple[str, str | None] | None"]

_TEXTS = ("text", "text_valid")


@dataclass(frozen=True, slots=True)
class Modalities:
    """Modalities of rows, by the source of their shard.

    Attributes:
        firsts: the index of each source's first shard among those of the run.
        modalities: of each source.
    """

    firsts: tuple[int, ...]
    modalities: tuple[Modality, ...]

    def of_shard(self, shard: int) -> Modality:
        """The modality of a shard's source."""
        return self.modalities[bisect.bisect_right(self.firsts, shard) - 1]

    def chosen(
        self, shard: int, extensions: Collection[str], image: Choose, text: Choose | None
    ) -> tuple[str, tuple[str, str | None] | None] | None:
        """The members to use of a sample: its image or "", and its text or None; None if one is missing."""
        modality, image_member, text_member = self.of_shard(shard), None, None
        if modality != "text" and (image_member := image(extensions)) is None:
            return None
        if modality != "image" and (text is None or (text_member := text(extensions)) is None):
            return None
        return ("" if image_member is None else image_member[0]), text_member


def with_rows(
    values: Mapping[str, Any], has_image: Sequence[bool], has_text: Sequence[bool], allocate: Allocate
) -> dict[str, Any]:
    """The values of a batch with `image_rows` and `text_rows`, int64[M]: the row of each image and text.

    Args:
        values: of the images and texts that there are. Without any, the value is dropped.
        has_image, has_text: of each row of the batch.
        allocate: makes tensors.
    """
    images, texts = (torch.tensor(has, dtype=torch.bool).nonzero().flatten() for has in (has_image, has_text))
    lacking = (*(("image", *NAMES) if not len(images) else ()), *(_TEXTS if not len(texts) else ()))
    present = {name: value for name, value in values.items() if name not in lacking}
    for name, rows in (("image_rows", images), ("text_rows", texts)):
        present[name] = allocate(rows.shape, torch.int64).copy_(rows)
    return present
