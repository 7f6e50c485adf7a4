"""Batches in which some rows have only an image, or only a text, `Source(modality=…)`: an extension (I, J).

Images and texts then have rows of their own, and the batch says to which of its rows they belong.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from streamload.batches.assembly import BatchAssembly
from streamload.batches.in_progress import Allocate, Choose, Members, RowKinds
from streamload.cache.selection import Modality
from streamload.errors import OptionError
from streamload.extension import Extension
from streamload.order.steps import Split

if TYPE_CHECKING:
    from streamload.extension import LoaderOptions

_TEXTS = ("text", "text_valid")


@dataclass(frozen=True, slots=True)
class RowsOfModalities(Extension):
    """The extension of a loader in which some rows have only an image, or only a text."""

    name = "modalities"

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse what has to have a row for each sample, or an image or a text of each."""
        refused = {
            "train=False": not options.train,
            f"output={options.output!r}": options.output != "dict",
            "text_key=None": options.shards.text_key is None,
            "label_key=": options.shards.label_key is not None,
            "map_sample=": options.workers.map_sample is not None,
            "features=": bool(options.features),
            "prepare=": options.images.prepare is not None,
            "bucketing=": options.batches.bucketing is not None,
            "cost=": options.batches.cost is not None,
            "sources='rank'": options.batches.sources == "rank",
            "microbatch=": options.batches.microbatch is not None,
        }
        if used := [name for name, is_given in refused.items() if is_given]:
            raise OptionError(
                "sources with modality='text' or 'image' are for training with output='dict', where images "
                f"and texts have rows of their own: leave out {', '.join(used)}"
            )

    def assembly(self, assembly: BatchAssembly, options: LoaderOptions, split: Split | None) -> BatchAssembly:
        """Rows of images and of texts, by the source of a shard."""
        modalities = tuple(source.modality for source in options.sources)
        return replace(assembly, kinds=Modalities(tuple(options.first_shards), modalities))


@dataclass(frozen=True, slots=True)
class Modalities(RowKinds):
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
    ) -> Members | None:
        """The members to use of a sample; None if one is missing."""
        modality, image_member, text_member = self.of_shard(shard), None, None
        if modality != "text" and (image_member := image(extensions)) is None:
            return None
        if modality != "image" and (text is None or (text_member := text(extensions)) is None):
            return None
        return Members("" if image_member is None else image_member[0], text_member, None)

    def with_rows(
        self,
        values: Mapping[str, Any],
        images: Collection[str],
        has_image: Sequence[bool],
        has_text: Sequence[bool],
        allocate: Allocate,
    ) -> dict[str, Any]:
        """The values of a batch with `image_rows` and `text_rows`, int64[M]: the row of each image and text.

        Values of images or texts of which there are none are dropped.
        """
        image_rows, text_rows = (
            torch.tensor(has, dtype=torch.bool).nonzero().flatten() for has in (has_image, has_text)
        )
        lacking = {*(images if not len(image_rows) else ()), *(_TEXTS if not len(text_rows) else ())}
        present = {name: value for name, value in values.items() if name not in lacking}
        for name, rows in (("image_rows", image_rows), ("text_rows", text_rows)):
            present[name] = allocate(rows.shape, torch.int64).copy_(rows)
        return present
