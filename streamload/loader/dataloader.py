"""The interface of torch's DataLoader, for frameworks that accept nothing else.

Accelerate and Lightning Fabric require a DataLoader and wrap its dataset in one of their own, with their own
workers and split. A streamload loader is a DataLoader by type: it has the attributes that they read, and
refuses to have its dataset wrapped.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from streamload.errors import OptionError

if TYPE_CHECKING:
    from streamload.loader.options import LoaderOptions


class DataLoaderInterface(DataLoader[Any]):
    """The attributes of a DataLoader, from a loader's options. DataLoader's constructor isn't called.

    Attributes:
        end_of_dataloader: for Accelerate: whether the batch yielded last is the epoch's last one.
        remainder: for Accelerate: how many samples of the last batch are repetitions (none).
    """

    options: LoaderOptions

    sampler = None  # type: ignore[assignment]
    batch_sampler = None
    collate_fn = None  # type: ignore[assignment]
    worker_init_fn = None
    generator = None
    timeout = 0.0
    pin_memory = False
    pin_memory_device = ""
    in_order = True
    use_stateful_dataloader = True  # Accelerate's save_state() and load_state() keep state_dict()
    end_of_dataloader = False
    remainder = 0

    @property
    def dataset(self) -> IterableDataset[Any]:  # type: ignore[override]
        """A placeholder that can't be iterated; see `as_dataset`."""
        return _Placeholder()

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Samples in a batch of this rank."""
        return self.options.batch_size

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        """Worker processes of this rank."""
        return self.options.num_workers

    @property
    def prefetch_factor(self) -> int | None:  # type: ignore[override]
        """Batches that each worker prefetches."""
        return self.options.workers.prefetch_factor if self.options.num_workers else None

    @property
    def persistent_workers(self) -> bool:  # type: ignore[override]
        """True if workers stay from epoch to epoch."""
        return self.options.num_workers > 0

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """True if an epoch has only full batches."""
        return self.options.train

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> str | None:
        """Start method of workers."""
        return self.options.workers.multiprocessing_context

    def as_dataset(self) -> IterableDataset[Any]:
        """This loader's batches as a dataset, for a DataLoader of your own around it.

        `DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)`: the batches are ready, and this
        loader has workers of its own. Each iteration is the next epoch.
        """
        return _LoaderDataset(self)

    def __getitem__(self, index: object) -> Any:
        raise TypeError(
            "a streamload loader isn't a dataset of samples: iterate it in place of a DataLoader, or wrap "
            "loader.as_dataset() in a DataLoader with batch_size=None and num_workers=0; for transformers "
            "there is streamload.integrations.transformers.Trainer"
        )


class _Placeholder(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "a DataLoader around the dataset of a streamload loader would split and batch its batches again: "
            "iterate the loader itself, or use loader.as_dataset(). To skip batches (skip_first_batches), "
            "give loader.load_state_dict() what loader.state_dict() returned after them"
        )


class _LoaderDataset(IterableDataset[Any]):
    def __init__(self, loader: DataLoaderInterface):
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise OptionError(
                "loader.as_dataset() was sent to a DataLoader's worker, but the loader has its own workers: "
                "give that DataLoader num_workers=0 and batch_size=None, and make_loader() the num_workers"
            )
        return iter(self._loader)

    def __reduce__(self) -> Any:
        raise OptionError(
            "loader.as_dataset() can't be sent to another process: "
            "give the DataLoader around it num_workers=0"
        )


class AccelerateEpoch:
    """Reports an epoch to Accelerate's GradientState, which must know the last batch before its step.

    Args:
        loader: the loader; it is the "active dataloader" from the first batch to the end of the epoch.
    """

    def __init__(self, loader: DataLoaderInterface):
        from accelerate.state import GradientState

        self._loader = loader
        self._state = GradientState()

    def start(self) -> None:
        """The first batch was requested."""
        self._loader.end_of_dataloader = False
        self._state._add_dataloader(self._loader)

    def mark_last(self) -> None:
        """The last batch is about to be yielded."""
        self._loader.end_of_dataloader = True

    def end(self) -> None:
        """The epoch is over."""
        self._state._remove_dataloader(self._loader)


def silence_doubts_of_length() -> None:
    """Leave out Lightning's warning that a loader with workers may have another length than it says.

    Lightning warns right after it has called `len()`, of any loader whose dataset isn't one of samples: which
    this one's must not be, as it would get another sampler. A loader's length counts all of its workers.
    """
    if not sys.modules.keys().isdisjoint(("lightning", "pytorch_lightning")):
        warnings.filterwarnings("ignore", r"Your `IterableDataset` has `__len__` defined")


def accelerate_device() -> torch.device:
    """The device of the process's Accelerator."""
    from accelerate import PartialState

    device: torch.device = PartialState().device
    return device
