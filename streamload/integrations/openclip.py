"""OpenCLIP's own training, with streamload under it.

    python -m streamload.integrations.openclip --dataset-type webdataset --train-data URLS … (its arguments)

or, in a script of one's own, `install()` before `open_clip_train.main.main(arguments)`. The one function that
OpenCLIP looks up to open WebDataset shards is replaced; its sizes and its rounding are kept, so that learning
rates fall as before. Known to it: open_clip 3.3.0, and the development version, whose batches are dicts.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from streamload import urls
from streamload.errors import OptionError
from streamload.loader import Loader, make_loader

logger = logging.getLogger("streamload")

_KNOWN = {
    "dataset_resampled",
    "dataset_type",
    "train_data",
    "train_data_upsampling_factors",
    "train_num_samples",
    "val_data",
    "val_num_samples",
}
_ABOUT_DATA = ("data_", "dataset_", "train_data", "train_num", "val_data", "val_num")


def install(module: ModuleType | None = None) -> Callable[[], None]:
    """Make OpenCLIP read WebDataset shards through streamload.

    Args:
        module: its data module; None finds `open_clip_train.data` (`training.data` up to 2.24).

    Returns:
        A function that puts the original back.

    Raises:
        ImportError: open_clip's training code isn't installed.
    """
    module = module or _data_module()
    original = module.get_wds_dataset
    as_dict = "naflex_data_config" in inspect.signature(original).parameters

    def get_wds_dataset(
        args: Any,
        preprocess_img: Callable[[Any], Any],
        is_train: bool,
        epoch: int = 0,
        floor: bool = False,
        tokenizer: Any = None,
        **more: Any,
    ) -> Data:
        unknown = sorted(name for name, value in more.items() if value is not None)
        if unknown:
            raise OptionError(
                f"streamload doesn't know what OpenCLIP's {', '.join(unknown)} asks of a loader"
            )
        return Data(args, preprocess_img, tokenizer, is_train, epoch, floor, "dict" if as_dict else "tuple")

    def uninstall() -> None:
        module.get_wds_dataset = original  # type: ignore[attr-defined]

    module.get_wds_dataset = get_wds_dataset  # type: ignore[attr-defined]
    return uninstall


class Data:
    """What OpenCLIP holds of a data set: `dataloader`, with its two numbers, and `set_epoch`."""

    def __init__(
        self,
        args: Any,
        preprocess: Callable[[Any], Any],
        tokenizer: Any,
        train: bool,
        epoch: int,
        floor: bool,
        output: str,
    ):
        _refuse_unknown(args)
        shards = args.train_data if train else args.val_data
        if not shards:
            raise OptionError(f"OpenCLIP was given no {'--train-data' if train else '--val-data'}")
        size = (args.train_num_samples if train else args.val_num_samples) or listed_size(shards) or 0
        if train and not size:
            raise OptionError(
                "OpenCLIP plans its learning rate by the number of samples: give --train-num-samples, "
                "or put a sizes.json beside the shards"
            )
        if train and args.dataset_resampled:
            logger.info(
                "--dataset-resampled: the shards go on from epoch to epoch, each sample once in a pass"
            )
        world = args.world_size if train else 1
        batches = _rounded(size, args.batch_size * world, args.workers if train else 1, floor=floor and train)
        place = {"rank": args.rank, "world_size": args.world_size} if train else {}
        self._loader = make_loader(
            shards,
            tokenizer,
            preprocess=preprocess,
            batch_size=args.batch_size,
            num_workers=args.workers,
            num_batches=batches if train else None,
            seed=args.seed,
            train=train,
            output=output,  # type: ignore[arg-type]
            **place,
        )
        self._loader.set_epoch(epoch)
        self.dataloader = Batches(self._loader, batches, batches * args.batch_size * world if train else size)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration is."""
        self._loader.set_epoch(epoch)


class Batches:
    """A loader as OpenCLIP's training sees it: iterable again and again, its size known before."""

    def __init__(self, loader: Loader, num_batches: int, num_samples: int):
        self.loader = loader
        self.num_batches = num_batches
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return self.num_batches


def listed_size(shards: str) -> int | None:
    """The number of samples by the sizes.json (or __len__) in the first shard's folder, as OpenCLIP counts.

    Args:
        shards: as given to --train-data.
    """
    listed = urls.expand_urls(shards)
    if not urls.is_local(listed[0]):
        return None
    folder = urls.local_path(listed[0]).parent
    sizes, length = folder / "sizes.json", folder / "__len__"
    if sizes.exists():
        known = json.loads(sizes.read_text())
        return sum(int(known[Path(urls.local_path(shard)).name]) for shard in listed)
    return int(length.read_text()) if length.exists() else None


def _rounded(size: int, in_a_step: int, workers: int, *, floor: bool) -> int:
    """OpenCLIP's number of batches: whole steps, and as many for each worker."""
    rounded = math.floor if floor else math.ceil
    return rounded(rounded(size / in_a_step) / max(1, workers)) * max(1, workers)


def _refuse_unknown(args: Any) -> None:
    """Data flags change what is trained on: one that isn't known must not be ignored."""
    given = {
        name
        for name, value in vars(args).items()
        if value not in (None, False) and name.startswith(_ABOUT_DATA)
    }
    unknown = sorted(given - _KNOWN)
    if unknown:
        raise OptionError(
            f"streamload doesn't know OpenCLIP's {', '.join('--' + n.replace('_', '-') for n in unknown)}"
        )
    if getattr(args, "train_data_upsampling_factors", None):
        raise OptionError("--train-data-upsampling-factors isn't supported: list the shards of one source")


def _data_module() -> ModuleType:
    for name in ("open_clip_train.data", "training.data"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("open_clip's training code isn't installed: pip install 'open_clip_torch[training]'")


def main(arguments: list[str]) -> None:
    """Run OpenCLIP's training on streamload."""
    install()
    importlib.import_module("open_clip_train.main").main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
