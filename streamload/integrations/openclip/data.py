"""The objects that OpenCLIP's training code expects of a data set, made from its arguments."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from streamload import Order
from streamload.errors import OptionError
from streamload.integrations.openclip.arguments import (
    factors_of,
    listed_size,
    rank_of,
    rounded,
    told_by_flags,
)
from streamload.integrations.openclip.naflex import evaluation_patches, training_patches, training_steps
from streamload.integrations.openclip.resume import Saver, run_folder, saver_for, take_up
from streamload.loader import Loader, make_loader
from streamload.mixing import Policy

logger = logging.getLogger("streamload")

_DECISIONS = "decisions.jsonl"
_JOURNAL = "journal"


class SharedEpoch:
    """The epoch of a loader's next iteration, with the interface of OpenCLIP's class."""

    def __init__(self, loader: Loader, epoch: int):
        self._loader = loader
        self._epoch = epoch

    def set_value(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch
        self._loader.set_epoch(epoch)

    def get_value(self) -> int:
        """The epoch set last."""
        return self._epoch


class Data:
    """A data set as OpenCLIP expects it, like its DataInfo.

    Attributes:
        dataloader: re-iterable, with num_batches (of a rank) and num_samples (of all ranks). OpenCLIP may
            replace it with a wrapper.
        sampler: None, as for OpenCLIP's own WebDataset data.
        shared_epoch: the epoch of the next iteration.
    """

    sampler = None

    def __init__(self, dataloader: EpochBatches, epoch: int = 0):
        self.dataloader: Any = dataloader
        self.shared_epoch = SharedEpoch(dataloader.loader, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.shared_epoch.set_value(epoch)


class EpochBatches:
    """A loader with the two numbers that OpenCLIP reads beforehand.

    Args:
        saver: saves the loader's state at the end of each epoch; None: it isn't saved.

    Attributes:
        loader: the streamload loader, for its stats(), state_dict() and close().
    """

    def __init__(
        self, loader: Loader, args: Any, num_batches: int, num_samples: int, saver: Saver | None = None
    ):
        self.loader = loader
        self.num_batches = num_batches
        self.num_samples = num_samples
        self._args = args
        self._saver = saver

    def __iter__(self) -> Iterator[Any]:
        with told_by_flags(self._args):
            yield from self.loader if self._saver is None else self._saver.follow(self.loader)


def device_of(args: Any) -> str | None:
    """OpenCLIP's device; the CPU where there is no GPU, to which OpenCLIP falls back as well."""
    device: str | None = getattr(args, "device", None)
    is_missing = device is not None and device.startswith("cuda") and not torch.cuda.device_count()
    return "cpu" if is_missing else device


def training(
    args: Any,
    common: dict[str, Any],
    epoch: int,
    floor: bool,
    moved: Sequence[tuple[str, str]],
    naflex: Any = None,
    mixing: Policy | None = None,
    *,
    has_journal: bool = True,
) -> Data:
    """The training data of a rank; epochs have OpenCLIP's length.

    Args:
        args: OpenCLIP's.
        common: further arguments of make_loader.
        epoch: the first epoch.
        floor: whether an epoch's length is rounded down.
        moved: old and new URL prefixes of shards that have moved since the state was saved.
        naflex: OpenCLIP's NaFlex configuration, by which epochs have a length and steps are of several sizes.
        mixing: the policy of the sources' weights.
        has_journal: whether the run keeps a journal beside its checkpoints.
    """
    if not args.train_data:
        raise OptionError("OpenCLIP was given no --train-data")
    rank = rank_of(args)
    has_tokens = naflex is not None and naflex.train_num_image_tokens is not None
    if has_tokens and args.train_num_samples:
        raise OptionError("give --train-num-samples or --naflex-num-train-image-tokens")
    size = 0 if has_tokens else _size(args)
    if args.dataset_resampled and rank == 0:
        logger.info("--dataset-resampled: shards are not drawn; each pass yields each sample once")
    if naflex is None:
        num_batches = rounded(size, args.batch_size * args.world_size, args.workers, floor=floor)
    else:
        steps = training_steps(args, naflex, size, common["tokenizer"])
        num_batches = rounded(len(steps), 1, args.workers, floor=False)
        common["images"] = replace(common["images"], patches=training_patches(naflex, steps))
    folder = run_folder(args)
    loader = make_loader(
        args.train_data,
        batch_size=args.batch_size,
        num_workers=args.workers,
        seed=args.seed,
        order=Order(
            num_batches=num_batches,
            mixing=mixing,
            upsampling_factors=factors_of(args, mixed=mixing is not None),
            rank=rank,
            world_size=args.world_size,
            decisions=None if folder is None or mixing is None else folder / _DECISIONS,
            journal=None if folder is None or not has_journal else folder / _JOURNAL,
        ),
        **common,
    )
    loader.set_epoch(epoch)
    if getattr(args, "resume", None):
        take_up(loader, args, epoch, moved)
    return Data(EpochBatches(loader, args, num_batches, loader.num_samples or 0, saver_for(args)), epoch)


def _size(args: Any) -> int:
    """The samples of an epoch."""
    size = args.train_num_samples or listed_size(args.train_data)
    if not size:
        raise OptionError(
            "OpenCLIP plans its learning rate by the number of samples: give --train-num-samples, "
            "or put a sizes.json ({shard name: samples}) beside the shards"
        )
    return size


def validation(args: Any, common: dict[str, Any], naflex: Any = None) -> Data:
    """The validation data: every rank has a loader of the whole set, only rank 0 iterates it."""
    if not args.val_data:
        raise OptionError("OpenCLIP was given no --val-data")
    if naflex is not None:
        common["images"] = replace(common["images"], patches=evaluation_patches(naflex))
    size = args.val_num_samples or 0  # only for its log: the set ends with its data
    loader = make_loader(
        args.val_data, batch_size=args.batch_size, num_workers=args.workers, train=False, **common
    )
    return Data(EpochBatches(loader, args, math.ceil(size / args.batch_size), size))
