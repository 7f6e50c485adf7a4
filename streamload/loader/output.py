"""Output for the training loop: a batch in the form of `output=`, and its record (step K)."""

from __future__ import annotations

from typing import Any

import torch

from streamload.batches.collate import unnamed
from streamload.errors import OptionError
from streamload.extension import Yielded
from streamload.loader.batch_info import BatchInfo, YieldedBatches
from streamload.loader.options import LoaderOptions
from streamload.loader.rank_run import RankParts
from streamload.worker import Batch

MODEL_INPUTS = {"image": "pixel_values", "text": "input_ids", "label": "labels"}
"""The values of a batch by the names that transformers' models use."""
_ORIGINS = ("__key__", "__url__")


class Outputs:
    """The batches of a loader as the training loop gets them.

    Args:
        options: of the loader.
        parts: of its extensions.

    Attributes:
        last: what is known of the last batch; None before the first.
    """

    def __init__(self, options: LoaderOptions, parts: RankParts):
        self._options, self._parts = options, parts
        self._sources = tuple(source.name for source in options.sources)
        self._known = YieldedBatches()
        self.last: BatchInfo | None = None

    def form(self, batch: Batch, values: dict[str, Any], step: int) -> Any:
        """Give a batch its form, which `microbatches` knows from then on.

        Args:
            batch: as the worker made it.
            values: its values on the device.
            step: its number in the epoch.
        """
        keys = values.get("__key__", ())
        extra = {name: values.pop(name) for name in _ORIGINS if name in values}
        has_parts = bool(self._parts.by_name)
        fields = self._parts.yielded(batch.extras, values) if has_parts else {}
        widths = fields.pop("widths", None)
        shapes = {
            name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        device = next((value.device for value in values.values() if isinstance(value, torch.Tensor)), None)
        yielded = Yielded(step, batch.samples, (), widths, keys)
        self.last = BatchInfo(yielded, self._sources, batch.rows.seats, shapes, device, **fields)
        if has_parts:
            values = self._parts.shaped(values | self._parts.values(self.last))
        yielded.names = tuple(values)
        output = self._shaped(values, extra if self._options.batches.with_keys else {})
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

    def _shaped(self, values: dict[str, Any], extra: dict[str, Any]) -> Any:
        """A batch's values in the form of `output`."""
        options = self._options
        if options.workers.map_sample is not None:
            return unnamed(values, extra)
        if options.output == "hf":
            return {MODEL_INPUTS.get(name, name): value for name, value in values.items()} | extra
        if options.output == "dict":
            return {**values, **extra}
        return (*values.values(), extra) if extra else tuple(values.values())
