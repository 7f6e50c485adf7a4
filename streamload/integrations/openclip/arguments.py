"""OpenCLIP's arguments as arguments of make_loader, and our own --streamload- flags."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from streamload import urls
from streamload.cache.selection import KeySpec
from streamload.cache.shared.objects import refuse_url
from streamload.derived.prepare.preparation import AUTO, Preparation
from streamload.errors import OptionError, StreamloadError
from streamload.loader import Shards, make_loader
from streamload.options import read_settings
from streamload.shards.samples import Entry
from streamload.steering.progress import Progress
from streamload.steering.schedule import Schedule
from streamload.topology import read_rank

_OURS = "--streamload-"
_Value = TypeVar("_Value")
_GONE = {
    "--streamload-save-steps": "OpenCLIP saves no weights within an epoch, and a state newer than them "
    "loses samples. Use shorter epochs instead: a smaller --train-num-samples and more --epochs"
}

# Arguments that select the training data. Unknown ones must not be ignored: these are supported …
_SUPPORTED = """
    bucket_chunk bucket_pool bucket_prefetch_pools dataset_resampled dataset_type image_key
    json_text_key json_text_key_probs max_image_pixels naflex_batch_divisor naflex_loss_scale
    naflex_max_text_tokens
    naflex_max_tokens_per_batch naflex_num_train_image_tokens naflex_pad_multiple
    naflex_patch_size_probs naflex_patch_sizes naflex_seq_len_probs naflex_seq_lens text_key
    text_pad_multiple train_data train_data_upsampling_factors train_num_samples val_data
    val_num_samples
"""
# … these change samples or batches in ways that we don't support …
_REFUSED = {"genlap", "naflexclap"}
# … and any other with such a prefix is refused.
_ABOUT_DATA = (
    "bucket_", "data_", "dataset_", "image_key", "json_", "max_image_", "naflex_", "text_key", "text_pad",
    "train_data", "train_num",
)  # fmt: skip
_ABOUT_VALIDATION = ("val_data", "val_num")

# Names of make_loader's arguments in error messages → the flags that set them.
_FLAGS = {
    "batch_size": "--batch-size",
    "num_workers": "--workers",
    "num_samples": "--train-num-samples",
    "seq_lens": "--naflex-seq-lens",
    "seq_len_probs": "--naflex-seq-len-probs",
    "patch_size": "--naflex-patch-sizes",
    "text_pad_multiple": "--text-pad-multiple",
    "num_batches": "--train-num-samples",
    "upsampling_factors": "--train-data-upsampling-factors",
    "seed": "--seed",
    "device": "--device",
    "prepare": "--streamload-prepare",
    "decode": "--streamload-decode",
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
    "text_key_probs": "--json-text-key-probs",
    "max_pixels": "--max-image-pixels",
}
_KEYS_OF_RELEASE = {"image_key": "the images (jpg, png, jpeg or webp)", "text_key": "the captions (txt)"}


def parser() -> argparse.ArgumentParser:
    """The parser of our flags: the arguments of `install`, and which entry point to run."""
    parser = argparse.ArgumentParser(
        prog="python -m streamload.integrations.openclip", add_help=False, allow_abbrev=False
    )
    add = parser.add_argument_group("streamload's own (the others are OpenCLIP's)").add_argument
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
        help="a folder shared by many nodes, read before the origins",
    )
    add(
        f"{_OURS}prepare",
        dest="prepare",
        metavar="RECIPE",
        type=_told(lambda recipe: recipe if recipe == AUTO else str(Preparation.parse(recipe))),
        help="train on prepared images: raw, raw-256, jpeg-256-q90; auto: as pays, with the same pixels",
    )
    add(
        f"{_OURS}decode",
        dest="decode",
        choices=["host", "device", "auto"],
        default="host",
        help="device: decode the training's JPEGs on the GPU, by its engine; needs streamload[gpu]. auto: if "
        "workers can't keep up",
    )
    add(
        f"{_OURS}moved",
        dest="moved",
        nargs=2,
        metavar=("OLD", "NEW"),
        action="append",
        help="with --resume: shards whose URL started with OLD are now at NEW; repeatable",
    )
    add(
        f"{_OURS}mixing",
        dest="mixing",
        metavar="POLICY",
        type=_told(_mixing),
        help="weights of the sources of --train-data a::b that change: by step with schedule=FILE, JSON, "
        '{"1000": {"0": 1, "1": 3}}; by the trend of their losses with progress, decided every 200 steps, '
        "or with progress=STEPS",
    )
    add(
        f"{_OURS}no-journal",
        dest="journal",
        action="store_false",
        help="keep no journal of the run beside its checkpoints, by which `streamload replay` makes a batch "
        "again, and `streamload runs spikes` finds the rows of a loss spike",
    )
    add(
        f"{_OURS}device",
        dest="device",
        choices=["none"],
        help="none: batches stay in host memory, and OpenCLIP copies them to its --device in each step",
    )
    add(
        f"{_OURS}legacy-main",
        dest="legacy_main",
        action="store_true",
        help="run open_clip_train.legacy_main of OpenCLIP's development version",
    )
    return parser


def take_own(arguments: Iterable[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the flags that start with --streamload- from a command line.

    Returns:
        Their values, and the other arguments.

    Raises:
        SystemExit: a flag is unknown or its value invalid; the error was printed.
    """
    parse = parser()
    values, others = parse.parse_known_args(list(arguments))
    for word in others:
        name = word.partition("=")[0]
        if name in _GONE:
            parse.error(f"{name} is gone: {_GONE[name]}")
        if name.startswith(_OURS):
            parse.error(f"unrecognized arguments: {word}")
    return values, others


def _told(read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """An argparse type that shows the OptionErrors of `read`."""

    def reading(value: str) -> _Value:
        try:
            return read(value)
        except OptionError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return reading


def _mixing(text: str) -> Schedule | Progress:
    kind, equals, value = text.partition("=")
    if kind == "schedule" and value:
        return Schedule.read(value)
    if kind == "progress" and (not equals or value.isdecimal()):
        return Progress(every=int(value)) if equals else Progress()
    raise OptionError(f"{text!r}; expected schedule=FILE, progress or progress=STEPS")


def factors_of(args: Any, *, mixed: bool) -> str | None:
    """OpenCLIP's upsampling factors; 1 for each source of `a::b` if their weights are to change, without any.

    Raises:
        OptionError: there is one source only, and weights are to change.
    """
    factors: str | None = getattr(args, "train_data_upsampling_factors", None)
    if not mixed or factors is not None:
        return factors
    many = len(urls.split_sources(args.train_data))
    if many < 2:
        raise OptionError(f"{_OURS}mixing is for several sources: --train-data a::b, and there is one")
    return "::".join(["1"] * many)


def _shared_cache(url: str) -> str:
    refuse_url(url, f"{_OURS}shared-cache")
    return url


def listed_size(shards: str) -> int | None:
    """The number of samples, from the sizes.json beside the shards or the __len__ in the first one's folder.

    Args:
        shards: as given to --train-data.
    """
    samples = make_loader(shards, train=False).num_samples
    first = urls.expand_urls(shards)[0]
    if samples is not None or not urls.is_local(first):
        return samples
    length = urls.local_path(first).parent / "__len__"
    return int(length.read_text()) if length.exists() else None


def rounded(size: int, in_a_step: int, workers: int, *, floor: bool) -> int:
    """OpenCLIP's number of batches: whole steps, a multiple of the workers."""
    rounds = math.floor if floor else math.ceil
    return rounds(rounds(size / in_a_step) / max(1, workers)) * max(1, workers)


def rank_of(args: Any) -> int:
    """This process's rank, from OpenCLIP's arguments, torch.distributed or the launcher.

    Raises:
        OptionError: the latter have another number of ranks than the arguments.
    """
    rank: int | None = getattr(args, "rank", None)
    if rank is not None:
        return rank
    if args.world_size == 1:
        return 0
    rank, world_size, _ = read_rank()
    if world_size != args.world_size:
        raise OptionError(
            f"OpenCLIP's arguments have world_size={args.world_size} and no rank, but torch.distributed or "
            f"the launcher has {world_size} ranks: set args.rank"
        )
    return rank


def refuse_unknown(args: Any) -> None:
    """Raise on data flags that aren't supported: they would change the training data.

    Raises:
        OptionError: it lists them.
    """
    used = {
        name
        for name, value in vars(args).items()
        if value not in (None, False, 0, "")
        and (name in _REFUSED or name.startswith(_ABOUT_DATA + _ABOUT_VALIDATION))
    }
    unknown = ", ".join("--" + name.replace("_", "-") for name in sorted(used.difference(_SUPPORTED.split())))
    if unknown:
        raise OptionError(f"streamload doesn't support OpenCLIP's {unknown}")


def selected(args: Any, *, legacy: bool) -> tuple[Shards, int | None]:
    """The members and samples that the development version's flags select, and the maximum pixels.

    It also drops empty and blank captions, unlike 3.3.0, and may accept larger images than streamload does by
    default.

    Args:
        args: OpenCLIP's.
        legacy: whether they are of its second entry point, which ignores --max-image-pixels.
    """
    if not hasattr(args, "text_key"):
        return Shards(max_bad_samples=None, max_bad_shards=None), None
    text_key, probs = args.text_key or "txt", None
    if args.json_text_key:
        fields = [field.strip() for field in args.json_text_key.split(";")]
        text_key = ";".join(f"json:{field}" for field in fields if field)
        if getattr(args, "json_text_key_probs", None):
            probs = [max(0.0, prob) for prob in args.json_text_key_probs]
    most_pixels = 0 if legacy else args.max_image_pixels or 0
    keep = functools.partial(_is_kept, most_pixels or math.inf, KeySpec.parse(text_key))
    shards = Shards(
        text_key=text_key,
        text_key_probs=probs,
        keep=keep,
        blank_captions=False,
        max_bad_samples=None,
        max_bad_shards=None,
    )
    if args.image_key:
        shards = replace(shards, image_key=args.image_key)
    return shards, max(read_settings().max_image_pixels, most_pixels)


def _is_kept(most_pixels: float, text: KeySpec, entry: Entry) -> bool:
    """True if a sample passes by its index entry; the caption's text is checked when it is read."""
    if entry.width * entry.height > most_pixels:
        return False
    sizes = entry.sizes
    chosen = text.choose(sizes)
    return chosen is not None and sizes[chosen[0]] > 0


@contextlib.contextmanager
def told_by_flags(args: Any) -> Iterator[None]:
    """Make errors name OpenCLIP's flags instead of make_loader's arguments.

    Raises:
        StreamloadError: the same, with another message.
    """
    try:
        yield
    except StreamloadError as exc:
        keys = _KEYS_OF_DEVELOPMENT if hasattr(args, "text_key") else _KEYS_OF_RELEASE
        names = {**_FLAGS, **keys}
        # A worker's traceback may precede the message.
        head, mark, message = str(exc).rpartition("\nstreamload.errors.")

        def named(match: re.Match[str]) -> str:
            name, equals, space = match.groups()
            is_word = not equals and "_" not in name  # "seed" may be an ordinary word of the message
            return match[0] if is_word else names[name] + (" " if equals or space else "")

        message = message.replace("moved={old: new}", f"{_OURS}moved OLD NEW")
        renamed = head + mark + re.sub(rf"\b({'|'.join(names)})\b(=?)( ?)", named, message)
        if renamed == str(exc):
            raise
        raise type(exc)(renamed) from exc
