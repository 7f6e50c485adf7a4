"""What OpenCLIP holds of a data set, and how it is made from its arguments."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

from streamload import Order
from streamload.errors import OptionError
from streamload.integrations.openclip.arguments import listed_size, rank_of, rounded, told_by_flags
from streamload.integrations.openclip.resume import Saver, saver_for, take_up
from streamload.loader import Loader, make_loader

logger = logging.getLogger("streamload")


class SharedEpoch:
    """The epoch that the next iteration of a loader is, as OpenCLIP's class of this name."""

    def __init__(self, loader: Loader, epoch: int):
        self._loader = loader
        self._epoch = epoch

    def set_value(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self._epoch = epoch
        self._loader.set_epoch(epoch)

    def get_value(self) -> int:
        """The epoch that was set last."""
        return self._epoch


class Data:
    """What OpenCLIP holds of a data set.

    Attributes:
        dataloader: iterable again and again, with num_batches (of a rank) and num_samples (of all). It may be
            replaced by something around it.
        sampler: None, as of its own WebDataset data.
        shared_epoch: the epoch that the next iteration is.
    """

    sampler = None

    def __init__(self, dataloader: Batches, epoch: int = 0):
        self.dataloader: Any = dataloader
        self.shared_epoch = SharedEpoch(dataloader.loader, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self.shared_epoch.set_value(epoch)


class Batches:
    """A loader and the two numbers that OpenCLIP wants to know beforehand.

    Attributes:
        loader: streamload's own, for its stats(), state_dict() and close().
    """

    def __init__(self, loader: Loader, args: Any, num_batches: int, num_samples: int):
        self.loader = loader
        self.num_batches = num_batches
        self.num_samples = num_samples
        self._args = args
        self._saver: Saver | None = None

    def saved_by(self, saver: Saver | None) -> Batches:
        """Let the state of each epoch's end be saved."""
        self._saver = saver
        return self

    def __iter__(self) -> Iterator[Any]:
        with told_by_flags(self._args):
            yield from self.loader if self._saver is None else self._saver.follow(self.loader)


def training(
    args: Any, common: dict[str, Any], epoch: int, floor: bool, moved: Sequence[tuple[str, str]]
) -> Data:
    """The loader of a rank's share; its epochs have the length that OpenCLIP gives them.

    Args:
        args: OpenCLIP's.
        common: what make_loader is given beyond them.
        epoch: at which the training begins.
        floor: whether its length is rounded down.
        moved: where shards were when the state was saved, and where they are now.
    """
    if not args.train_data:
        raise OptionError("OpenCLIP was given no --train-data")
    rank = rank_of(args)
    size = args.train_num_samples or listed_size(args.train_data)
    if not size:
        raise OptionError(
            "OpenCLIP plans its learning rate by the number of samples: give --train-num-samples, "
            "or put a sizes.json ({shard name: samples}) beside the shards"
        )
    if args.dataset_resampled and rank == 0:
        logger.info("--dataset-resampled: nothing is drawn; each pass gives each sample once, in a new order")
    in_a_step = args.batch_size * args.world_size
    num_batches = rounded(size, in_a_step, args.workers, floor=floor)
    loader = make_loader(
        args.train_data,
        batch_size=args.batch_size,
        num_workers=args.workers,
        num_batches=num_batches,
        seed=args.seed,
        order=Order(
            upsampling_factors=getattr(args, "train_data_upsampling_factors", None),
            rank=rank,
            world_size=args.world_size,
        ),
        **common,
    )
    loader.set_epoch(epoch)
    if getattr(args, "resume", None):
        take_up(loader, args, epoch, moved)
    batches = Batches(loader, args, num_batches, num_batches * in_a_step)
    return Data(batches.saved_by(saver_for(args)), epoch)


def validation(args: Any, common: dict[str, Any]) -> Data:
    """The loader of the whole set: every rank has one, rank 0 alone iterates it."""
    if not args.val_data:
        raise OptionError("OpenCLIP was given no --val-data")
    size = args.val_num_samples or 0  # shown in its log; the data alone says where the set ends
    loader = make_loader(
        args.val_data, batch_size=args.batch_size, num_workers=args.workers, train=False, **common
    )
    return Data(Batches(loader, args, math.ceil(size / args.batch_size), size))
