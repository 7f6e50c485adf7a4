"""What a loader is asked for: checked once, then frozen."""

from __future__ import annotations

import difflib
import multiprocessing
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from streamload.batches.images import Preprocess
from streamload.errors import OptionError
from streamload.loader.groups import GROUPS, Cache, Images, Order, Shards, Workers, at_least, one_of
from streamload.loader.sources import SourceOptions
from streamload.options import Settings, options, read_settings
from streamload.transforms.compile import compile_transform
from streamload.transforms.plan import NotRecognised
from streamload.urls import UrlList

Output = Literal["tuple", "dict", "hf"]
OnError = Literal["skip", "raise"]

_SENT = (
    "tokenizer", "preprocess", "shards.keep", "shards.storage_options", "workers.map_sample",
    "workers.collate", "cache.shared_options",
)  # fmt: skip
"""What is the user's own and goes to the workers as it is."""

_RENAMED = {
    "image_dtype": "images=Images(dtype=…)",
    "max_image_pixels": "images=Images(max_pixels=…)",
    "shared_cache": "cache=Cache(shared=…)",
    "shared_cache_options": "cache=Cache(shared_options=…)",
    "collate_fn": "Workers(map_sample=…) makes examples of any form, Workers(collate=…) batches of them",
}
"""Arguments that are in a group under another name."""

_OF_DATALOADER = {
    "dataset": "give the shards as urls=",
    "drop_last": "in training only full batches are given (train=True), in evaluation the last one, too",
    "sampler": "shuffle=, seed=, Shards(keep=…), Source(weight=…) decide which samples come, in which order",
    "batch_sampler": "batch_size=, shuffle= and seed= decide how batches are made",
    "pin_memory": "with device= batches are copied from pinned memory, ahead of their use",
    "pin_memory_device": "device= says where batches are put",
    "persistent_workers": "workers stay until close()",
    "generator": "seed= decides all that is drawn",
    "worker_init_fn": "workers have the environment of this process, and seed= decides all that is drawn",
    "timeout": "a batch that waits for long is reported in the log; Cache(origin_wait=…) limits outages",
    "in_order": "batches come in the order of the seed, always",
}
"""The arguments of torch's DataLoader that a loader has no use for, and what takes their place."""


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """What make_loader was asked for; its docstring says what each means."""

    sources: tuple[SourceOptions, ...]
    tokenizer: Any
    preprocess: Preprocess | None
    batch_size: int
    num_workers: int
    num_samples: int | None
    num_batches: int | None
    seed: int
    shuffle: int | None
    train: bool
    output: Output
    with_keys: bool
    on_error: OnError
    device: torch.device | None
    cache_dir: str | Path | None
    cache_size: str | int | None
    shards: Shards
    images: Images
    order: Order
    cache: Cache
    workers: Workers

    def __post_init__(self) -> None:
        if isinstance(self.shuffle, bool):
            raise OptionError(
                f"shuffle={self.shuffle}: give the number of samples that one may move from its place, 0 for "
                f"the order as listed, or None for the default"
            )
        if self.batch_size is None:
            raise OptionError(
                "batch_size=None: batches are made here; give 1 for batches of one sample, and take it out"
            )
        at_least(1, batch_size=self.batch_size, num_samples=self.num_samples, num_batches=self.num_batches)
        at_least(0, num_workers=self.num_workers, shuffle=self.shuffle)
        one_of("output", self.output, get_args(Output))
        one_of("on_error", self.on_error, get_args(OnError))
        if self.tokenizer is not None and not callable(self.tokenizer):
            raise OptionError(
                f"tokenizer is a {type(self.tokenizer).__name__}: it has to be open_clip's, one of "
                f"transformers, or a function from a list of str to ids [N, L]"
            )
        self._refuse_keys()
        self._refuse_of_training()
        if self.images.prepare is not None and self.workers.map_sample is not None:
            raise OptionError("prepare= is for images that are decoded here: map_sample= gets their bytes")
        if self.images.dtype == "uint8":
            self._refuse_floats()

    def settings(self) -> Settings:
        """The options that can also be set by variables, resolved now.

        Raises:
            OptionError: a variable's value can't be read.
        """
        return read_settings(**{row.name: operator.attrgetter(row.argument)(self) for row in options()})

    def refuse_what_cannot_be_sent(self) -> None:
        """Raise OptionError for the first argument that no worker can get, where it is not forked."""
        method = self.workers.multiprocessing_context or multiprocessing.get_start_method()
        if method == "fork":
            return
        for name in _SENT:
            try:
                ForkingPickler.dumps(operator.attrgetter(name)(self))
            except Exception as exc:
                raise OptionError(
                    f"{name.rpartition('.')[2]}= can't be sent to the workers: {exc}. They are "
                    f"started by {method!r}, for which it has to be picklable: define its functions and "
                    f"classes at the top level of a module, "
                    f'or pass workers=Workers(multiprocessing_context="fork")'
                ) from exc

    @property
    def urls(self) -> UrlList:
        """The shards of all sources."""
        first, *others = (source.urls for source in self.sources)
        return sum(others, first)

    def _refuse_of_training(self) -> None:
        """Refuse what only a training can have, in an evaluation."""
        sized = self.num_batches is not None or self.num_samples is not None
        if not self.train and self.num_batches is not None:
            raise OptionError(
                "num_batches= is for training: an evaluation gives each sample once (num_samples= may say "
                "how many there are)"
            )
        if self.order.endless and (sized or not self.train):
            raise OptionError("endless= is for training, without num_samples= and num_batches=")
        if len(self.sources) > 1 and not self.train:
            raise OptionError(
                "sources are mixed in training; an evaluation gives each sample once: join their URLs by '::'"
            )
        if self.order.groups is not None and not self.train:
            raise OptionError("groups= is for training: in an evaluation each rank has a group of its own")

    def _refuse_floats(self) -> None:
        """Refuse a transform that can't be stopped in front of its floats."""
        is_mapped = self.workers.map_sample is not None and self.preprocess is None
        if is_mapped or (self.preprocess is not None and not self.images.compile):
            raise OptionError(
                'Images(dtype="uint8") is for images that streamload makes, not for functions as given'
            )
        if self.preprocess is not None:
            try:
                compile_transform(self.preprocess)
            except NotRecognised as exc:
                raise OptionError(
                    f'Images(dtype="uint8") is for a preprocess= that can be compiled: {exc}'
                ) from exc

    def _refuse_keys(self) -> None:
        """Refuse arguments that have no use for what the keys choose."""
        if self.workers.map_sample is not None:
            for name, value in (("tokenizer", self.tokenizer), ("label_key", self.shards.label_key)):
                if value is not None:
                    raise OptionError(
                        f"map_sample= makes the whole example: {name}= has no place beside it (preprocess= "
                        f"has: it decodes the sample's image)"
                    )
        elif self.shards.text_key is None and self.tokenizer is not None:
            raise OptionError("text_key=None asks for no captions: tokenizer= has no place beside it")
        elif self.output == "hf" and self.tokenizer is None and self.shards.text_key is not None:
            raise OptionError(
                'output="hf" has input_ids: it needs a tokenizer, or text_key=None if there are no captions'
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys by which samples are chosen: each has to have a member of every one."""
        shards = self.shards
        if self.workers.map_sample is not None:
            return () if self.preprocess is None else (shards.image_key,)
        return tuple(key for key in (shards.image_key, shards.text_key, shards.label_key) if key is not None)

    @property
    def choice(self) -> tuple[str, ...]:
        """Which samples these keys choose, as a state has it."""
        shards = self.shards
        if self.workers.map_sample is not None:
            return ("map_sample", *self.keys)
        label = () if shards.label_key is None else (shards.label_key,)
        return (shards.image_key, shards.text_key or "", *label)

    @property
    def goes_on(self) -> bool:
        """Whether an epoch begins where the last one stopped, whatever passes the data has."""
        sized = self.num_batches is not None or self.num_samples is not None
        return self.train and (sized or self.order.endless or len(self.sources) > 1)


def refuse_arguments(unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse arguments that make_loader doesn't have.

    Raises:
        OptionError: it says which group has the argument, which name is meant, or what takes the place of an
            argument of torch's DataLoader.
    """
    in_groups = {
        entry.name: f"{name}={group.__name__}({entry.name}=…)"
        for name, group in GROUPS.items()
        for entry in fields(group)
    } | _RENAMED
    for name in unknown:
        if name in in_groups:
            instead = f"it is {in_groups[name]}" if name not in _OF_DATALOADER else _OF_DATALOADER[name]
        elif name in _OF_DATALOADER:
            instead = _OF_DATALOADER[name]
        else:
            near = difflib.get_close_matches(name, [*known, *in_groups], 1)
            instead = "see help(streamload.make_loader)"
            if near:
                instead = f"is {in_groups.get(near[0], near[0] + '=')} meant?"
        raise OptionError(f"make_loader has no argument {name}=: {instead}")


def refuse_other_groups(given: Mapping[str, Any]) -> None:
    """Refuse a value in place of a group.

    Raises:
        OptionError: it names the group's class.
    """
    for name, group in GROUPS.items():
        if not isinstance(given[name], group):
            raise OptionError(f"{name}={given[name]!r:.100}: it has to be a streamload.{group.__name__}(…)")


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
