"""OpenCLIP's own training, with streamload under it.

    python -m streamload.integrations.openclip --dataset-type webdataset --train-data URLS … (its arguments)

or, in a script of one's own, `install()` before `open_clip_train.main.main(arguments)`. The one function that
OpenCLIP looks up to open WebDataset shards is replaced; its sizes and its rounding are kept, so that learning
rates fall as before. Known to it: open_clip 3.3.0, and the development version, whose batches are dicts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal

from streamload import urls
from streamload.errors import OptionError
from streamload.loader import Loader, make_loader
from streamload.shards.samples import Entry

logger = logging.getLogger("streamload")

# Arguments that say what is trained on. What isn't known must not be ignored: these are heeded here …
_HEEDED = {
    "dataset_resampled",
    "dataset_type",
    "image_key",
    "json_text_key",
    "max_image_pixels",
    "text_key",
    "train_data",
    "train_num_samples",
    "val_data",
    "val_num_samples",
}
# … these change samples or batches in ways of the development version's own …
_REFUSED = {"genlap", "genlip", "length_bucketing", "use_naflex", "variable_text"}
# … and whatever else is called so.
_ABOUT_DATA = ("data_", "dataset_", "image_key", "json_", "max_image_", "text_key", "train_data", "train_num")
_ABOUT_VALIDATION = ("val_data", "val_num")


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
        _refuse_unknown(args)
        output: Literal["dict", "tuple"] = "dict" if as_dict else "tuple"
        common = {"tokenizer": tokenizer, "preprocess": preprocess_img, "output": output, **_selected(args)}
        return _training(args, common, epoch, floor) if is_train else _validation(args, common)

    def uninstall() -> None:
        module.get_wds_dataset = original  # type: ignore[attr-defined]

    module.get_wds_dataset = get_wds_dataset  # type: ignore[attr-defined]
    return uninstall


class Data:
    """What OpenCLIP holds of a data set.

    Attributes:
        dataloader: iterable again and again, with num_batches (of a rank) and num_samples (of all).
    """

    def __init__(self, loader: Loader, num_batches: int, num_samples: int):
        self.dataloader = Batches(loader, num_batches, num_samples)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self.dataloader.loader.set_epoch(epoch)


class Batches:
    """A loader and the two numbers that OpenCLIP wants to know beforehand.

    Attributes:
        loader: streamload's own, for its stats() and close().
    """

    def __init__(self, loader: Loader, num_batches: int, num_samples: int):
        self.loader = loader
        self.num_batches = num_batches
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def listed_size(shards: str) -> int | None:
    """The number of samples by the sizes.json beside the shards, or the __len__ in the first one's folder.

    Args:
        shards: as given to --train-data.
    """
    known = make_loader(shards, train=False).num_samples
    first = urls.expand_urls(shards)[0]
    if known is not None or not urls.is_local(first):
        return known
    length = urls.local_path(first).parent / "__len__"
    return int(length.read_text()) if length.exists() else None


def _training(args: Any, common: dict[str, Any], epoch: int, floor: bool) -> Data:
    """The loader of a rank's share; its epochs have the length that OpenCLIP gives them."""
    if not args.train_data:
        raise OptionError("OpenCLIP was given no --train-data")
    size = args.train_num_samples or listed_size(args.train_data)
    if not size:
        raise OptionError(
            "OpenCLIP plans its learning rate by the number of samples: give --train-num-samples, "
            "or put a sizes.json ({shard name: samples}) beside the shards"
        )
    if args.dataset_resampled and args.rank == 0:
        logger.info("--dataset-resampled: nothing is drawn; each pass gives each sample once, in a new order")
    in_a_step = args.batch_size * args.world_size
    num_batches = _rounded(size, in_a_step, args.workers, floor=floor)
    loader = make_loader(
        args.train_data,
        batch_size=args.batch_size,
        num_workers=args.workers,
        num_batches=num_batches,
        seed=args.seed,
        rank=args.rank,
        world_size=args.world_size,
        **common,
    )
    loader.set_epoch(epoch)
    return Data(loader, num_batches, num_batches * in_a_step)


def _validation(args: Any, common: dict[str, Any]) -> Data:
    """The loader of the whole set: every rank has one, rank 0 alone iterates it."""
    if not args.val_data:
        raise OptionError("OpenCLIP was given no --val-data")
    size = args.val_num_samples or 0  # shown in its log; the data alone says where the set ends
    loader = make_loader(
        args.val_data, batch_size=args.batch_size, num_workers=args.workers, train=False, **common
    )
    return Data(loader, math.ceil(size / args.batch_size), size)


def _rounded(size: int, in_a_step: int, workers: int, *, floor: bool) -> int:
    """OpenCLIP's number of batches: whole steps, and as many for each worker."""
    rounded = math.floor if floor else math.ceil
    return rounded(rounded(size / in_a_step) / max(1, workers)) * max(1, workers)


def _refuse_unknown(args: Any) -> None:
    """Data flags change what is trained on: one that isn't known must not be ignored."""
    given = {
        name
        for name, value in vars(args).items()
        if value not in (None, False, 0, "")
        and (name in _REFUSED or name.startswith(_ABOUT_DATA + _ABOUT_VALIDATION))
    }
    if "train_data_upsampling_factors" in given:
        raise OptionError("--train-data-upsampling-factors isn't supported: list the shards of one source")
    unknown = ", ".join("--" + name.replace("_", "-") for name in sorted(given - _HEEDED))
    if unknown:
        raise OptionError(f"streamload doesn't know what OpenCLIP's {unknown} asks of a loader")


def _selected(args: Any) -> dict[str, Any]:
    """Which members are image and caption and which samples are left out, where flags say so.

    Only the development version has them; it also leaves out empty captions, 3.3.0 doesn't.
    """
    if not hasattr(args, "text_key"):
        return {}
    text_key = args.text_key
    if args.json_text_key:
        if ";" in args.json_text_key:
            raise OptionError(
                f"--json-text-key {args.json_text_key}: several fields aren't supported, name one"
            )
        text_key = f"json:{args.json_text_key}"
    keep = functools.partial(_is_kept, args.max_image_pixels or math.inf, text_key == "txt")
    return {"image_key": args.image_key, "text_key": text_key, "keep": keep}


def _is_kept(most_pixels: float, captioned: bool, entry: Entry) -> bool:
    return entry.width * entry.height <= most_pixels and (entry.caption_bytes > 0 or not captioned)


def _data_module() -> ModuleType:
    for name in ("open_clip_train.data", "training.data"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("open_clip's training code isn't installed: pip install 'open_clip_torch[training]'")


def main(arguments: list[str]) -> None:
    """Run OpenCLIP's training on streamload.

    Args:
        arguments: open_clip_train's. A leading "--" is passed over: `torchrun -m
            streamload.integrations.openclip -- --logs DIR` needs it to leave --logs alone.
    """
    data = _data_module()
    install(data)
    training = importlib.import_module(data.__name__.replace(".data", ".main"))
    training.main(arguments[1:] if arguments[:1] == ["--"] else arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
