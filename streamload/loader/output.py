"""Output for the training loop: a batch in the form of `output=`, and its parts (step K)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from streamload.batches.collate import unnamed
from streamload.derived.calls.feature_rows import FeatureRows
from streamload.device import memory_of
from streamload.errors import OptionError
from streamload.extension import RankPart
from streamload.loader.batch_info import BatchInfo
from streamload.loader.bounds import AgreedBounds
from streamload.loader.destination import AUTO
from streamload.loader.distributed import gather
from streamload.loader.microbatches import Microbatches, Yielded, YieldedBatches
from streamload.loader.options import LoaderOptions
from streamload.loader.part_size import DeviceMemory, PartSizer
from streamload.loader.schedule import Schedule
from streamload.loader.steering import Steered
from streamload.transforms.patches import NAMES
from streamload.worker import Batch

_MODEL_INPUTS = {"image": "pixel_values", "text": "input_ids", "label": "labels"}
"""The values of a batch by the names that transformers' models use."""
_ORIGINS = ("__key__", "__url__")


class Outputs:
    """The batches of a loader as the training loop gets them.

    Args:
        options: of the loader.
        schedule: of its epochs; its ranks agree on the size of parts.
        extensions: their parts in the rank, by name.

    Attributes:
        last: what is known of the last batch; None before the first.

    Raises:
        OptionError: `microbatch="auto"` on a device whose memory can't be read.
    """

    def __init__(self, options: LoaderOptions, schedule: Schedule, extensions: Mapping[str, RankPart]):
        self._extensions = extensions
        self._options, self._schedule = options, schedule
        self._sources = tuple(source.name for source in options.sources)
        self._known = YieldedBatches[BatchInfo]()
        self._bounds = AgreedBounds(options, schedule)
        self.last: BatchInfo | None = None
        self._device: torch.device | None = None  # of the last batch
        self._sizer: PartSizer | None = None
        if options.batches.microbatch == "auto" and options.device != AUTO:
            self._sizer = PartSizer(_device_memory(options.settled_device), self._least)
        self._parts: Microbatches | None = None  # of the last step

    def form(
        self,
        batch: Batch,
        values: dict[str, Any],
        features: Mapping[str, FeatureRows],
        step: int,
        steered: Steered,
    ) -> Any:
        """Give a batch its form, which `microbatches` knows from then on.

        Args:
            batch: as the worker made it.
            values: its values on the device.
            features: its rows of features, by name.
            step: its number in the epoch.
            steered: its number in the run, and the weights of its rows.
        """
        widths = self._bounds.cut(batch, values)
        keys = values.get("__key__", ())
        extra = {name: values.pop(name) for name in _ORIGINS if name in values}
        about: dict[str, Any] = {}
        for name, part in self._extensions.items():
            about |= part.yielded(batch.extras[name], values)
        names = (*values, *(name for part in self._extensions.values() for name in part.adds), *features)
        if self._options.images.patches is not None and NAMES[0] in values:  # they are one value
            names = ("image", *(name for name in names if name not in NAMES))
        shapes = {
            name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        device = next((value.device for value in values.values() if isinstance(value, torch.Tensor)), None)
        self._device = device
        if widths is not None and self._options.output == "hf":
            widths = widths._replace(texts=tuple(_MODEL_INPUTS.get(name, name) for name in widths.texts))
        yielded = Yielded(step, batch.samples, names, widths, keys)
        self.last = BatchInfo(
            yielded,
            self._sources,
            batch.seats,
            shapes,
            device,
            steered.source_weights,
            run_step=steered.run_step,
            importance=steered.importance,
            **about,
        )
        for part in self._extensions.values():
            values |= part.values(self.last)
        output = self._shaped(values, features, extra if self._options.with_keys else {})
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

    def microbatches(self, batch: Any) -> Microbatches:
        """The parts of a batch that `form` returned.

        Raises:
            OptionError: another batch, or one with tensors that haven't a row for each sample.
        """
        yielded, patches = self.info_of(batch).yielded, self._options.images.patches
        rows, longest = self._options.batches.microbatch, max(patches.seq_lens) if patches else 0
        if rows == "auto" and self._sizer is None:
            self._sizer = PartSizer(_device_memory(self._device), self._least)
        self._parts = Microbatches(
            batch, yielded, self._sizer if rows == "auto" else rows, longest, self._options.batches.max_tokens
        )
        return self._parts

    def explain(self, error: BaseException | None) -> None:
        """Add to an out-of-memory error which part was in use."""
        if self._parts is not None:
            self._parts.explain(error)

    def _least(self, value: float) -> float:
        """The least of the ranks' values, in training; in evaluation they have other numbers of parts."""
        if not self._options.train:
            return value
        return min(gather(value, self._schedule.topology.world_size))

    def _shaped(
        self, values: dict[str, Any], features: Mapping[str, FeatureRows], extra: dict[str, Any]
    ) -> Any:
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
            return {_MODEL_INPUTS.get(name, name): value for name, value in values.items()} | extra
        if options.output == "dict":
            return {**values, **extra}
        return (*values.values(), extra) if extra else tuple(values.values())


def _device_memory(device: torch.device | None) -> DeviceMemory:
    """Reader of the memory of the device.

    Raises:
        OptionError: nothing does.
    """
    memory = memory_of(device)
    if memory is None:
        raise OptionError(
            f"microbatch='auto' reads the memory of a CUDA device, and device={device}: "
            f"give device='cuda', or a number of rows"
        )
    return memory
