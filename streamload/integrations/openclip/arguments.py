"""What OpenCLIP's arguments ask of a loader, and the flags that are ours."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from streamload import urls
from streamload.cache.shared.objects import refuse_url
from streamload.errors import OptionError
from streamload.loader import make_loader
from streamload.shards.samples import Entry
from streamload.transforms.prepare import Preparation

_SAVE_STEPS = "--streamload-save-steps"
_AS_GIVEN = "--streamload-as-given"
_SHARED_CACHE = "--streamload-shared-cache"
_PREPARE = "--streamload-prepare"

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


class OwnArguments(NamedTuple):
    """The flags that OpenCLIP's parser doesn't know: what `install` takes."""

    save_steps: int
    compile: bool
    shared_cache: str | None = None
    prepare: str | None = None


def take_own(arguments: Iterable[str]) -> tuple[OwnArguments, list[str]]:
    """Take the flags that begin with --streamload- out of a command line, those that OwnArguments names.

    Returns:
        What they say, and the other words.

    Raises:
        OptionError: N is no whole number from 0, URL no folder, or RECIPE none.
    """
    given, as_given, shared, recipe, others, words = "0", False, None, None, [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == _SAVE_STEPS:
            given = value if equals else next(words, "")
        elif name == _PREPARE:
            recipe = str(Preparation.parse(value if equals else next(words, "")))
        elif word == _AS_GIVEN:
            as_given = True
        elif name == _SHARED_CACHE:
            shared = value if equals else next(words, "")
            refuse_url(shared, _SHARED_CACHE)
        else:
            others.append(word)
    if not given.isdecimal():
        raise OptionError(f"{_SAVE_STEPS} {given!r}: it has to be a whole number from 0")
    return OwnArguments(int(given), not as_given, shared, recipe), others


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


def selected(args: Any) -> dict[str, Any]:
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
