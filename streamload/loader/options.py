"""What a loader is asked for: checked once, then frozen."""

from __future__ import annotations

import difflib
import multiprocessing
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from streamload.batches.assembly import Collate, MapSample, Preprocess
from streamload.cache.selection import Keep
from streamload.cache.shared.objects import refuse_url
from streamload.derived.preparation import Preparation
from streamload.errors import OptionError
from streamload.loader.sources import SourceOptions
from streamload.settings import Eviction, Revalidate, Where
from streamload.transforms.compile import compile_transform
from streamload.transforms.plan import NotRecognised
from streamload.urls import UrlList

Output = Literal["tuple", "dict", "hf"]
OnError = Literal["skip", "raise"]
ImageDtype = Literal["float32", "uint8"]

_SENT = (
    "tokenizer", "preprocess", "keep", "map_sample", "collate", "storage_options", "shared_cache_options"
)  # fmt: skip
"""What is the user's own and goes to the workers as it is."""


_OF_DATALOADER = {
    "dataset": "give the shards as urls=",
    "collate_fn": "map_sample= makes examples of any form, and collate= batches of them, in the workers",
    "drop_last": "in training only full batches are given (train=True), in evaluation the last one, too",
    "sampler": "shuffle=, keep=, Source(weight=…) and seed= decide which samples come, and in which order",
    "batch_sampler": "batch_size=, shuffle= and seed= decide how batches are made",
    "pin_memory": "with device= batches are copied from pinned memory, ahead of their use",
    "pin_memory_device": "device= says where batches are put",
    "persistent_workers": "workers stay until close()",
    "generator": "seed= decides all that is drawn",
    "worker_init_fn": "workers have the environment of this process, and seed= decides all that is drawn",
    "timeout": "a batch that waits for long is reported in the log; STREAMLOAD_ORIGIN_WAIT limits outages",
    "in_order": "batches come in the order of the seed, always",
}
"""The arguments of torch's DataLoader that a loader has no use for, and what takes their place."""


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """What make_loader was asked for; its docstring says what each means. What may be secret has no repr."""

    sources: tuple[SourceOptions, ...]
    tokenizer: Any
    preprocess: Preprocess | None
    compile: bool
    image_dtype: ImageDtype
    prepare: str | None
    max_image_pixels: int | None
    batch_size: int
    num_workers: int
    num_samples: int | None
    num_batches: int | None
    endless: bool
    seed: int
    shuffle: int | None
    lanes: int | None
    groups: int | None
    train: bool
    output: Output
    with_keys: bool
    image_key: str
    text_key: str | None
    label_key: str | None
    blank_captions: bool
    keep: Keep | None
    map_sample: MapSample | None
    collate: Collate | None
    on_error: OnError
    max_bad_samples: float | None
    max_bad_shards: float | None
    device: torch.device | None
    rank: int | None
    world_size: int | None
    cache_dir: str | Path | None
    cache_size: str | int | None
    ahead: str | int | None
    revalidate: Revalidate | None
    eviction: Eviction | None
    free_disk: str | int | None
    cache: Where | None
    memory_size: str | int | None
    shared_cache: str | Path | None = field(repr=False)
    shared_cache_options: Mapping[str, Any] | None = field(repr=False)
    write_back: bool | None
    storage_options: Mapping[str, Any] | None = field(repr=False)
    prefetch_factor: int
    multiprocessing_context: str | None

    def __post_init__(self) -> None:
        if isinstance(self.shuffle, bool):
            raise OptionError(
                f"shuffle={self.shuffle}: give the number of samples that one may move from its place, 0 for "
                f"the order as listed, or None for the default"
            )
        self._refuse_keys()
        if self.batch_size is None:
            raise OptionError(
                "batch_size=None: batches are made here; give 1 for batches of one sample, and take it out"
            )
        at_least(1, batch_size=self.batch_size, prefetch_factor=self.prefetch_factor)
        at_least(1, lanes=self.lanes, groups=self.groups)
        at_least(1, num_samples=self.num_samples, num_batches=self.num_batches, world_size=self.world_size)
        at_least(1, max_image_pixels=self.max_image_pixels)
        at_least(0, num_workers=self.num_workers, shuffle=self.shuffle, rank=self.rank)
        _one_of("output", self.output, ("tuple", "dict", "hf"))
        _one_of("on_error", self.on_error, ("skip", "raise"))
        _share("max_bad_samples", self.max_bad_samples)
        _share("max_bad_shards", self.max_bad_shards)
        _one_of("image_dtype", self.image_dtype, ("float32", "uint8"))
        if self.revalidate is not None:
            _one_of("revalidate", self.revalidate, get_args(Revalidate))
        if self.eviction is not None:
            _one_of("eviction", self.eviction, get_args(Eviction))
        if self.cache is not None:
            _one_of("cache", self.cache, get_args(Where))
        if self.multiprocessing_context is not None:
            methods = tuple(multiprocessing.get_all_start_methods())
            _one_of("multiprocessing_context", self.multiprocessing_context, methods)
        if self.tokenizer is not None and not callable(self.tokenizer):
            raise OptionError(
                f"tokenizer is a {type(self.tokenizer).__name__}: it has to be open_clip's, one of "
                f"transformers, or a function from a list of str to ids [N, L]"
            )
        if self.shared_cache:
            refuse_url(str(self.shared_cache))
        if not self.train and self.num_batches is not None:
            raise OptionError(
                "num_batches= is for training: an evaluation gives each sample once (num_samples= may say "
                "how many there are)"
            )
        if self.endless and not (self.train and self.num_batches is None and self.num_samples is None):
            raise OptionError("endless= is for training, without num_samples= and num_batches=")
        if len(self.sources) > 1 and not self.train:
            raise OptionError(
                "sources are mixed in training; an evaluation gives each sample once: join their URLs by '::'"
            )
        if self.groups is not None and not self.train:
            raise OptionError("groups= is for training: in an evaluation each rank has a group of its own")
        if (self.rank is None) != (self.world_size is None):
            raise OptionError(
                f"give rank and world_size together, not rank={self.rank} world_size={self.world_size}"
            )
        if self.prepare is not None:
            Preparation.parse(self.prepare)
            if self.map_sample is not None:
                raise OptionError(
                    "prepare= is for images that are decoded here: map_sample= gets their bytes"
                )
        if self.image_dtype == "uint8":
            self._refuse_floats()

    def refuse_what_cannot_be_sent(self) -> None:
        """Raise OptionError for the first argument that no worker can get, where it is not forked."""
        method = self.multiprocessing_context or multiprocessing.get_start_method()
        if method == "fork":
            return
        for name in _SENT:
            try:
                ForkingPickler.dumps(getattr(self, name))
            except Exception as exc:
                raise OptionError(
                    f"{name}= can't be sent to the workers: {exc}. They are started by {method!r}, for which "
                    f"it has to be picklable: define its functions and classes at the top level of a module, "
                    f'or pass multiprocessing_context="fork"'
                ) from exc

    @property
    def urls(self) -> UrlList:
        """The shards of all sources."""
        first, *others = (source.urls for source in self.sources)
        return sum(others, first)

    def _refuse_floats(self) -> None:
        """Refuse a transform that can't be stopped in front of its floats."""
        is_mapped = self.map_sample is not None and self.preprocess is None
        if is_mapped or (self.preprocess is not None and not self.compile):
            raise OptionError(
                'image_dtype="uint8" is for images that streamload makes, not for functions as given'
            )
        if self.preprocess is not None:
            try:
                compile_transform(self.preprocess)
            except NotRecognised as exc:
                raise OptionError(
                    f'image_dtype="uint8" is for a preprocess= that can be compiled: {exc}'
                ) from exc

    def _refuse_keys(self) -> None:
        """Refuse keys that can't be, and arguments that have no use for what they choose."""
        if not isinstance(self.image_key, str):
            raise OptionError(
                f"image_key={self.image_key!r}: it has to be a string such as 'jpg;png'. For samples "
                f"without images give map_sample=, a function from the raw sample to a dict"
            )
        for name, example in (("text_key", "txt;json:caption"), ("label_key", "cls")):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str)):
                raise OptionError(f"{name}={value!r}: it has to be a string such as {example!r}, or None")
        if self.map_sample is not None:
            for name in ("tokenizer", "label_key"):
                if getattr(self, name) is not None:
                    raise OptionError(
                        f"map_sample= makes the whole example: {name}= has no place beside it (preprocess= "
                        f"has: it decodes the sample's image)"
                    )
        elif self.collate is not None:
            raise OptionError(
                "collate= makes batches of the examples of map_sample=, which is missing; other batches are "
                "made in their memory, image by image"
            )
        elif self.text_key is None and self.tokenizer is not None:
            raise OptionError("text_key=None asks for no captions: tokenizer= has no place beside it")
        elif self.output == "hf" and self.tokenizer is None and self.text_key is not None:
            raise OptionError(
                'output="hf" has input_ids: it needs a tokenizer, or text_key=None if there are no captions'
            )
        if self.collate is not None and not callable(self.collate):
            raise OptionError(
                f"collate is a {type(self.collate).__name__}: it has to be a function from a list of dicts "
                f"to a dict or tuple"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys by which samples are chosen: each has to have a member of every one."""
        if self.map_sample is not None:
            return () if self.preprocess is None else (self.image_key,)
        return tuple(key for key in (self.image_key, self.text_key, self.label_key) if key is not None)

    @property
    def choice(self) -> tuple[str, ...]:
        """Which samples these keys choose, as a state has it."""
        if self.map_sample is not None:
            return ("map_sample", *self.keys)
        label = () if self.label_key is None else (self.label_key,)
        return (self.image_key, self.text_key or "", *label)

    @property
    def goes_on(self) -> bool:
        """Whether an epoch begins where the last one stopped, whatever passes the data has."""
        sized = self.num_batches is not None or self.num_samples is not None
        return self.train and (sized or self.endless or len(self.sources) > 1)


def refuse_arguments(unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse arguments that don't exist.

    Raises:
        OptionError: it says what is meant, or takes the place of an argument of DataLoader.
    """
    for name in unknown:
        instead = _OF_DATALOADER.get(name)
        if instead is None:
            near = difflib.get_close_matches(name, known, 1)
            instead = f"is {near[0]}= meant?" if near else "see help(streamload.make_loader)"
        raise OptionError(f"make_loader has no argument {name}=: {instead}")


def at_least(least: int, **values: int | None) -> None:
    """Refuse numbers below `least`; None passes.

    Raises:
        OptionError: it names the argument.
    """
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise OptionError(f"{name}={value!r}: it has to be a whole number of at least {least}")


def whole_number(name: str, value: Any) -> int:
    """A whole number of any type as an int.

    Raises:
        OptionError: it is something else; it names the argument.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise OptionError(f"{name}={value!r}: it has to be a whole number")


def read_device(device: Any) -> torch.device:
    """The device that is meant.

    Raises:
        OptionError: torch knows no such device, or sees none.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise OptionError(
            f"device={device!r}: it has to be one of torch's, like 'cuda', 'cuda:1', 'mps' or 'cpu'"
        ) from exc
    if found.type == "cuda" and (found.index or 0) >= (there := torch.cuda.device_count()):
        raise OptionError(f"device={device!r}: torch {torch.__version__} sees {there} such devices here")
    return found


def _share(name: str, value: Any) -> None:
    """Refuse what is neither a share nor None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value <= 1):
        raise OptionError(f"{name}={value!r}: it has to be a share from 0 to 1, or None for no limit")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name}={value!r}: it has to be one of {', '.join(map(repr, allowed))}")
