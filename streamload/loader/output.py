"""Output for the training loop: a batch in the form of `output=`, and its parts (step K)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from streamload.batches.collate import unnamed
from streamload.errors import OptionError
from streamload.loader.batch_info import BatchInfo, Widths, Yielded, YieldedBatches
from streamload.loader.options import LoaderOptions
from streamload.loader.rank_run import RankParts
from streamload.transforms.patches import NAMES
from streamload.worker import Batch

Cut = Callable[[Batch, dict[str, Any]], Widths | None]
"""Cuts the values of a batch to the widths that its rows have on any rank, and returns these."""
MODEL_INPUTS = {"image": "pixel_values", "text": "input_ids", "label": "labels"}
"""The values of a batch by the names that transformers' models use."""
_ORIGINS = ("__key__", "__url__")


class Outputs:
    """The batches of a loader as the training loop gets them.

    Args:
        options: of the loader.
        parts: of its extensions.
        cut: by what ranks agree on; None: batches stay as workers made them.

    Attributes:
        last: what is known of the last batch; None before the first.
    """

    def __init__(self, options: LoaderOptions, parts: RankParts, cut: Cut | None):
        self._options, self._parts, self._cut = options, parts, cut
        self._sources = tuple(source.name for source in options.sources)
        self._known = YieldedBatches()
        self.last: BatchInfo | None = None

    def form(self, batch: Batch, values: dict[str, Any], features: Mapping[str, Any], step: int) -> Any:
        """Give a batch its form, which `microbatches` knows from then on.

        Args:
            batch: as the worker made it.
            values: its values on the device.
            features: its rows of features, by name.
            step: its number in the epoch.
        """
        widths = batch.widths if self._cut is None else self._cut(batch, values)
        keys = values.get("__key__", ())
        extra = {name: values.pop(name) for name in _ORIGINS if name in values}
        fields = self._parts.yielded(batch.extras, values)
        names = (*values, *self._parts.adds, *features)
        if self._options.images.patches is not None and NAMES[0] in values:  # they are one value
            names = ("image", *(name for name in names if name not in NAMES))
        shapes = {
            name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        device = next((value.device for value in values.values() if isinstance(value, torch.Tensor)), None)
        yielded = Yielded(step, batch.samples, names, widths, keys)
        self.last = BatchInfo(yielded, self._sources, batch.seats, shapes, device, **fields)
        values |= self._parts.values(self.last)
        output = self._shaped(values, features, extra if self._options.batches.with_keys else {})
        self._known.add(output, self.last)
        return output

    def info_of(self, batch: Any) -> BatchInfo:
        """Record of a batch that `form` returned.

        Raises:
            OptionError: it is another one, or one without tensors.
        """
        info = self._known.find(batch)
        if info is None:
            raise OptionError(
                "expected a batch as this loader yielded it, with tensors: to have it on a device, give "
                "make_loader device=, or copy each part there"
            )
        return info

    def _shaped(self, values: dict[str, Any], features: Mapping[str, Any], extra: dict[str, Any]) -> Any:
        """A batch's values in the form of `output`."""
        options = self._options
        if options.images.patches is not None and NAMES[0] in values:
            patches = {name: values.pop(name) for name in NAMES}
            patches["seq_len"] = patches["patches"].shape[1]
            values = {"image": patches, **values}
        values |= features
        if options.workers.map_sample is not None:
            return unnamed(values, extra)
        if options.output == "hf":
            return {MODEL_INPUTS.get(name, name): value for name, value in values.items()} | extra
        if options.output == "dict":
            return {**values, **extra}
        return (*values.values(), extra) if extra else tuple(values.values())
