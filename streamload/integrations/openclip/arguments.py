"""What OpenCLIP's arguments ask of a loader, and the flags that are ours."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from streamload import urls
from streamload.cache.shared.objects import refuse_url
from streamload.derived.preparation import Preparation
from streamload.errors import OptionError, StreamloadError
from streamload.loader import Shards, make_loader
from streamload.options import read_settings
from streamload.shards.keys import KeySpec
from streamload.shards.samples import Entry
from streamload.topology import read_topology

_OURS = "--streamload-"
_GONE = {
    "--streamload-save-steps": "OpenCLIP saves no weights within an epoch, and with a state newer than the "
    "weights samples are lost. Make epochs shorter instead: a smaller --train-num-samples and more --epochs"
}

# Arguments that say what is trained on. What isn't known must not be ignored: these are heeded here …
_HEEDED = {
    "dataset_resampled",
    "dataset_type",
    "image_key",
    "json_text_key",
    "max_image_pixels",
    "text_key",
    "train_data",
    "train_data_upsampling_factors",
    "train_num_samples",
    "val_data",
    "val_num_samples",
}
# … these change samples or batches in ways of the development version's own …
_REFUSED = {"genlap", "genlip", "length_bucketing", "use_naflex", "variable_text"}
# … and whatever else is called so.
_ABOUT_DATA = ("data_", "dataset_", "image_key", "json_", "max_image_", "text_key", "train_data", "train_num")
_ABOUT_VALIDATION = ("val_data", "val_num")

# make_loader's arguments by the flags that they come from.
_FLAGS = {
    "batch_size": "--batch-size",
    "num_workers": "--workers",
    "num_samples": "--train-num-samples",
    "num_batches": "--train-num-samples",
    "upsampling_factors": "--train-data-upsampling-factors",
    "seed": "--seed",
    "prepare": "--streamload-prepare",
    "shared_cache": "--streamload-shared-cache",
    "shared": "--streamload-shared-cache",
    "moved": "--streamload-moved",
    "cache_dir": "STREAMLOAD_CACHE_DIR",
    "cache_size": "STREAMLOAD_CACHE_SIZE",
    "free_disk": "STREAMLOAD_FREE_DISK",
}
_KEYS_OF_DEVELOPMENT = {
    "image_key": "--image-key",
    "text_key": "--text-key",
    "max_pixels": "--max-image-pixels",
}
_KEYS_OF_RELEASE = {"image_key": "the images (jpg, png, jpeg or webp)", "text_key": "the captions (txt)"}


def parser() -> argparse.ArgumentParser:
    """The parser of the flags that OpenCLIP doesn't know: what `install` takes, and what to run."""
    made = argparse.ArgumentParser(
        prog="python -m streamload.integrations.openclip", add_help=False, allow_abbrev=False
    )
    add = made.add_argument_group("streamload's own (the others are OpenCLIP's)").add_argument
    add(
        f"{_OURS}as-given",
        dest="compile",
        action="store_false",
        help="run OpenCLIP's image transforms as given instead of compiled",
    )
    add(
        f"{_OURS}shared-cache",
        dest="shared_cache",
        metavar="URL",
        type=_told(_shared_cache),
        help="a folder that many nodes share, asked before the origins",
    )
    add(
        f"{_OURS}prepare",
        dest="prepare",
        metavar="RECIPE",
        type=_told(lambda recipe: str(Preparation.parse(recipe))),
        help="train on prepared images: raw-256, jpeg-256-q90",
    )
    add(
        f"{_OURS}moved",
        dest="moved",
        nargs=2,
        metavar=("OLD", "NEW"),
        action="append",
        help="with --resume: URLs that began with OLD begin with NEW now; may be repeated",
    )
    add(
        f"{_OURS}legacy-main",
        dest="legacy_main",
        action="store_true",
        help="run open_clip_train.legacy_main of OpenCLIP's development version",
    )
    return made


def take_own(arguments: Iterable[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take the flags that begin with --streamload- out of a command line.

    Returns:
        What they say, and the other words.

    Raises:
        SystemExit: one of them isn't known, or its value can't be used; it has been said which.
    """
    parse = parser()
    values = {f"{_OURS}shared-cache": 1, f"{_OURS}prepare": 1, f"{_OURS}moved": 2}
    own: list[str] = []
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        if not word.startswith(_OURS):
            others.append(word)
            continue
        name, equals, _ = word.partition("=")
        if name in _GONE:
            parse.error(f"{name} is gone: {_GONE[name]}")
        own.append(word)
        own += itertools.islice(words, 0 if equals else values.get(name, 0))
    return parse.parse_args(own), others


def _told(read: Callable[[str], str]) -> Callable[[str], str]:
    """A reader of a flag's value whose OptionError argparse shows."""

    def reading(value: str) -> str:
        try:
            return read(value)
        except OptionError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return reading


def _shared_cache(url: str) -> str:
    refuse_url(url, f"{_OURS}shared-cache")
    return url


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


def rounded(size: int, in_a_step: int, workers: int, *, floor: bool) -> int:
    """OpenCLIP's number of batches: whole steps, and as many for each worker."""
    rounds = math.floor if floor else math.ceil
    return rounds(rounds(size / in_a_step) / max(1, workers)) * max(1, workers)


def rank_of(args: Any) -> int:
    """This process's rank: as OpenCLIP's arguments say, else torch.distributed or the launcher.

    Raises:
        OptionError: these know of another number of ranks than the arguments.
    """
    rank: int | None = getattr(args, "rank", None)
    if rank is not None:
        return rank
    if args.world_size == 1:
        return 0
    here = read_topology(None, None)
    if here.world_size != args.world_size:
        raise OptionError(
            f"OpenCLIP's arguments have world_size={args.world_size} and no rank, and this process knows of "
            f"{here.world_size} ranks: set args.rank"
        )
    return here.rank


def refuse_unknown(args: Any) -> None:
    """Data flags change what is trained on: one that isn't known must not be ignored.

    Raises:
        OptionError: it names them.
    """
    given = {
        name
        for name, value in vars(args).items()
        if value not in (None, False, 0, "")
        and (name in _REFUSED or name.startswith(_ABOUT_DATA + _ABOUT_VALIDATION))
    }
    unknown = ", ".join("--" + name.replace("_", "-") for name in sorted(given - _HEEDED))
    if unknown:
        raise OptionError(f"streamload doesn't know what OpenCLIP's {unknown} asks of a loader")


def selected(args: Any, *, legacy: bool) -> tuple[Shards, int | None]:
    """Which members are image and caption and which samples are left out; the most pixels of an image.

    Only the development version has them; it also leaves out empty and blank captions, 3.3.0 doesn't. Larger
    images than streamload decodes by default are decoded where it takes them.

    Args:
        args: OpenCLIP's.
        legacy: whether they are of its second entry point, which doesn't heed --max-image-pixels.
    """
    if not hasattr(args, "text_key"):
        return Shards(max_bad_samples=None, max_bad_shards=None), None
    text_key = args.text_key or "txt"
    if args.json_text_key:
        if ";" in args.json_text_key:
            raise OptionError(
                f"--json-text-key {args.json_text_key}: several fields aren't supported, name one"
            )
        text_key = f"json:{args.json_text_key}"
    most_pixels = 0 if legacy else args.max_image_pixels or 0
    keep = functools.partial(_is_kept, most_pixels or math.inf, KeySpec.parse(text_key))
    shards = Shards(
        text_key=text_key, keep=keep, blank_captions=False, max_bad_samples=None, max_bad_shards=None
    )
    if args.image_key:
        shards = replace(shards, image_key=args.image_key)
    return shards, max(read_settings().max_image_pixels, most_pixels)


def _is_kept(most_pixels: float, text: KeySpec, entry: Entry) -> bool:
    """Whether the index alone lets a sample pass; what a caption says is known when it is read."""
    if entry.width * entry.height > most_pixels:
        return False
    sizes = entry.sizes
    chosen = text.choose(sizes)
    return chosen is not None and sizes[chosen[0]] > 0


@contextlib.contextmanager
def told_by_flags(args: Any) -> Iterator[None]:
    """Let errors name OpenCLIP's flags in place of make_loader's arguments.

    Raises:
        StreamloadError: the same, in other words.
    """
    try:
        yield
    except StreamloadError as exc:
        keys = _KEYS_OF_DEVELOPMENT if hasattr(args, "text_key") else _KEYS_OF_RELEASE
        names = {**_FLAGS, **keys}
        # Before the last error's own words there may be a worker's traceback.
        head, mark, message = str(exc).rpartition("\nstreamload.errors.")

        def named(found: re.Match[str]) -> str:
            name, equals, space = found.groups()
            is_word = not equals and "_" not in name  # "seed" may be one of a sentence
            return found[0] if is_word else names[name] + (" " if equals or space else "")

        message = message.replace("moved={old: new}", f"{_OURS}moved OLD NEW")
        renamed = head + mark + re.sub(rf"\b({'|'.join(names)})\b(=?)( ?)", named, message)
        if renamed == str(exc):
            raise
        raise type(exc)(renamed) from exc
