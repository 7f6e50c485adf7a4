"""A loader's options: checked once, then frozen."""

from __future__ import annotations

import difflib
import multiprocessing
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from streamload.batches.images import Preprocess
from streamload.batches.sample_weights import SampleWeight, read_sample_weight
from streamload.batches.tokenize import adapt_tokenizer
from streamload.cache.selection import Repeat
from streamload.derived.features import Features
from streamload.errors import OptionError
from streamload.loader.groups import GROUPS, Batches, Cache, Images, Order, Shards, Workers
from streamload.loader.sources import SourceOptions
from streamload.options import Settings, options, read_settings
from streamload.options.values import at_least, parse_choice
from streamload.order.steps import StepTable
from streamload.shards.facts import BUILT_IN, TOKENS, Column
from streamload.steering import Policy
from streamload.steering.replay import Replay
from streamload.transforms.compile import compile_transform, patch_plan_or_given
from streamload.transforms.patches import GivenPatches
from streamload.transforms.plan import NotRecognised, PatchPlan, clip_patch_plan
from streamload.urls import UrlList

Output = Literal["tuple", "dict", "hf"]
OnError = Literal["skip", "raise"]

_PICKLED = (
    "tokenizer", "preprocess", "shards.keep", "shards.facts", "repeat", "shards.storage_options",
    "batches.sample_weight", "workers.map_sample", "workers.collate", "cache.shared_options",
)  # fmt: skip
"""The user's own objects, which are sent to the workers."""

_RENAMED = {
    "image_dtype": "images=Images(dtype=…)",
    "max_image_pixels": "images=Images(max_pixels=…)",
    "shared_cache": "cache=Cache(shared=…)",
    "shared_cache_options": "cache=Cache(shared_options=…)",
    "collate_fn": "Workers(map_sample=…) makes examples of any form, Workers(collate=…) batches of them",
}
"""Arguments that a group has under another name."""

_OF_DATALOADER = {
    "dataset": "give the shards as urls=",
    "drop_last": "training has only full batches (train=True), evaluation has the last one, too",
    "sampler": "shuffle=, seed=, Shards(keep=…), Source(weight=…) decide which samples come, in which order",
    "batch_sampler": "batch_size=, shuffle= and seed= decide how batches are made",
    "pin_memory": "with device= batches are copied from pinned memory, ahead of their use",
    "pin_memory_device": "device= says where batches are put",
    "persistent_workers": "workers stay until close()",
    "generator": "seed= seeds all random choices",
    "worker_init_fn": "workers have the environment of this process, and seed= seeds all random choices",
    "timeout": "long waits for a batch are logged; Cache(origin_wait=…) limits outages",
    "in_order": "batches always come in the order of the seed",
}
"""The arguments of torch's DataLoader that a loader doesn't have, and what to use instead."""


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The arguments of make_loader; see its docstring."""

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
    batches: Batches
    cache: Cache
    workers: Workers
    features: Mapping[str, Features]
    columns: Mapping[str, Column]
    mixing: Policy | Replay | None
    repeat: Repeat | None

    def __post_init__(self) -> None:
        if isinstance(self.shuffle, bool):
            raise OptionError(
                f"shuffle={self.shuffle}: give the number of positions that a sample may move, 0 for the "
                f"order as listed, or None for the default"
            )
        if self.batch_size is None:
            raise OptionError(
                "batch_size=None: batches are made here; give 1, and index the single sample of each batch"
            )
        at_least(1, batch_size=self.batch_size, num_samples=self.num_samples, num_batches=self.num_batches)
        at_least(0, num_workers=self.num_workers, shuffle=self.shuffle)
        parse_choice(self.output, get_args(Output), "output")
        parse_choice(self.on_error, get_args(OnError), "on_error")
        if self.tokenizer is not None and not callable(self.tokenizer):
            raise OptionError(
                f"tokenizer is a {type(self.tokenizer).__name__}; expected open_clip's, one of "
                f"transformers, or a function from a list of str to ids [N, L]"
            )
        self._refuse_unused_keys()
        self._refuse_training_options()
        if self.images.prepare is not None and self.workers.map_sample is not None:
            raise OptionError("prepare= is for images that streamload decodes: map_sample= gets their bytes")
        if self.images.dtype == "uint8":
            self._refuse_uint8_of_given()
        self._refuse_unusable_features()
        self._refuse_unknown_padding()
        self._refuse_bucketing()
        self._refuse_unusable_weight()
        if self.has_modalities:
            self._refuse_modalities()
        if self.images.patches is not None:
            self._refuse_unusable_patches()

    def settings(self) -> Settings:
        """The options that variables can set, too, resolved now.

        Raises:
            OptionError: a variable's value can't be read.
        """
        arguments = {row.name: row.argument for row in options() if row.argument}
        return read_settings(**{name: operator.attrgetter(place)(self) for name, place in arguments.items()})

    @property
    def sample_weight(self) -> SampleWeight | None:
        """How rows are weighed in the loss; None: they aren't."""
        return read_sample_weight(self.batches.sample_weight)

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """Of fsspec; None if there are none."""
        return dict(self.shards.storage_options) if self.shards.storage_options else None

    def refuse_unpicklable(self) -> None:
        """Refuse the first argument that can't be pickled, if workers aren't forked.

        Raises:
            OptionError: it names the argument.
        """
        method = self.workers.multiprocessing_context or multiprocessing.get_start_method()
        if method == "fork":
            return
        for name in _PICKLED:
            try:
                ForkingPickler.dumps(operator.attrgetter(name)(self))
            except Exception as exc:
                raise OptionError(
                    f"{name.rpartition('.')[2]}= can't be sent to the workers: {exc}. They are started by "
                    f"{method!r}, so it must be picklable: define its functions and classes at the top level "
                    f'of a module, or pass workers=Workers(multiprocessing_context="fork")'
                ) from exc

    @property
    def urls(self) -> UrlList:
        """The shards of all sources."""
        first, *others = (source.urls for source in self.sources)
        return sum(others, first)

    def _refuse_training_options(self) -> None:
        """Refuse options of training in an evaluation, and endless= with a length."""
        sized = self.num_batches is not None or self.num_samples is not None
        if not self.train and self.num_batches is not None:
            raise OptionError(
                "num_batches= is for training: an evaluation yields each sample once (num_samples= may say "
                "how many there are)"
            )
        if self.step_table is not None and (self.num_samples is not None or self.order.endless):
            raise OptionError("Patches(steps=…) says what an epoch has: leave out num_samples= and endless=")
        self._refuse_unusable_mixing()
        if self.order.endless and (sized or not self.train):
            raise OptionError("endless= is for training, without num_samples= and num_batches=")
        if self.repeat is not None and not self.train:
            raise OptionError("repeat= is for training: an evaluation yields each sample once")
        if len(self.sources) > 1 and not self.train:
            raise OptionError(
                "sources are mixed in training; an evaluation yields each sample once: join URLs by '::'"
            )
        if self.order.groups is not None and not self.train:
            raise OptionError("groups= is for training: in an evaluation each rank has a group of its own")

    def _refuse_unusable_mixing(self) -> None:
        """Refuse what changes or weighs sources where there is no training, or nothing to write."""
        order = self.order
        for name, value in {
            "mixing": self.mixing,
            "batch_policy": self.batches.batch_policy,
            "decisions": order.decisions,
            "objective": order.objective,
        }.items():
            if value is not None and not self.train:
                raise OptionError(f"{name}= is for training: an evaluation yields each sample once")
        for name, value in {"decisions": order.decisions, "batch_policy": self.batches.batch_policy}.items():
            if isinstance(self.mixing, Replay) and value is not None:
                raise OptionError(f"leave out {name}=: {self.mixing!r} has all decisions")
        if self.batches.batch_policy is not None and self.step_table is not None:
            raise OptionError("batch_policy= is for steps of one size: Patches(steps=…) says each step's")

    def _refuse_unusable_features(self) -> None:
        """Refuse features of what batches don't have, or in batches without names."""
        if not self.features:
            return
        if self.output == "tuple":
            raise OptionError('features= is for output="dict" or "hf", whose values have names')
        if self.workers.map_sample is not None:
            raise OptionError("features= is for images and texts, and map_sample= makes the whole example")
        for name, one in self.features.items():
            if one.inputs != "image" and self.shards.text_key is None:
                raise OptionError(f"text_key=None selects no captions for the feature {name!r}")

    def _refuse_unknown_padding(self) -> None:
        """Refuse what goes by padding without ids, or where it isn't certain which are padding."""
        columns = self.batches.text_columns
        if self.batches.text_padding == "max" and not columns:
            return
        if columns and self.output != "hf":
            raise OptionError(f'text_columns={columns!r} is for output="hf"')
        if "labels" in columns and self.shards.label_key is not None:
            raise OptionError(
                "label_key= makes labels, too: leave it out, or leave 'labels' out of text_columns="
            )
        tokenizer = adapt_tokenizer(self.tokenizer, finds_padding=True, columns=columns)
        if tokenizer is None:
            what = f"text_columns={columns!r}" if columns else 'text_padding="longest"'
            raise OptionError(f"{what} is for ids: give a tokenizer")
        tokenizer(["a photo of a dog", ""], [0, 0])

    def _refuse_bucketing(self) -> None:
        """Refuse bucketing= where nothing varies that it could go by, or where the order is fixed."""
        if self.batches.bucketing is None:
            return
        if not self.train:
            raise OptionError("bucketing= is for training: evaluation has the samples in the order as listed")
        if self.step_table is not None:
            raise OptionError("bucketing= is for steps of one size, not for those of Patches(steps=…)")
        patches = self.images.patches
        if self.batches.text_padding == "max" and (patches is None or patches.max_ratio is None):
            raise OptionError(
                'bucketing= goes by lengths that vary: give text_padding="longest", or patches=Patches(…, '
                "max_ratio=1.0) (captions of one length and images that fill theirs have nothing to gain)"
            )

    def _refuse_unusable_weight(self) -> None:
        """Refuse weights of rows in an evaluation, and those by tokens without captions or a tokenizer."""
        weight = self.sample_weight
        if weight is None:
            return
        if not self.train:
            raise OptionError("sample_weight= is for training: leave it out in an evaluation")
        if TOKENS in weight.facts(()) and (self.tokenizer is None or self.shards.text_key is None):
            raise OptionError(
                "complexity(…) counts the tokens of captions: give a tokenizer, or complexity(1, 0), which "
                "goes by images alone"
            )

    @property
    def has_modalities(self) -> bool:
        """Whether there are rows without an image or without a text."""
        return any(source.modality != "image-text" for source in self.sources)

    def _refuse_modalities(self) -> None:
        """Refuse what has to have a row for each sample, or an image or a text of each."""
        refused = {
            "train=False": not self.train,
            f"output={self.output!r}": self.output != "dict",
            "text_key=None": self.shards.text_key is None,
            "label_key=": self.shards.label_key is not None,
            "map_sample=": self.workers.map_sample is not None,
            "features=": bool(self.features),
            "prepare=": self.images.prepare is not None,
            "bucketing=": self.batches.bucketing is not None,
            "microbatch=": self.batches.microbatch is not None,
        }
        if given := [name for name, is_given in refused.items() if is_given]:
            raise OptionError(
                "sources with modality='text' or 'image' are for training with output='dict', where images "
                f"and texts have rows of their own: leave out {', '.join(given)}"
            )

    @property
    def goes_by_tokens(self) -> bool:
        """Whether bucketing goes by the lengths of captions."""
        return self.batches.bucketing is not None and self.batches.text_padding == "longest"

    def _refuse_unusable_patches(self) -> None:
        """Refuse what needs images of one size, and a transform that isn't made for a number of patches."""
        if self.output == "hf":
            raise OptionError('patches= is for output="dict" or "tuple": "hf" has images of one size')
        for name, given in (("map_sample", self.workers.map_sample), ("features", self.features)):
            if given:
                raise OptionError(f"{name}= is for images of one size, and patches= makes images of several")
        self.patch_transform(is_compiled=False)

    def patch_transform(self, is_compiled: bool) -> PatchPlan | GivenPatches:
        """What makes images into patches.

        Args:
            is_compiled: whether to compile it, if that is possible.

        Raises:
            OptionError: preprocess= doesn't make a transform for a number of patches.
        """
        patches = self.images.patches
        assert patches is not None
        if self.preprocess is None:
            return replace(clip_patch_plan(self.train, patches.sides), max_ratio=patches.max_ratio)
        lengths = patches.lengths(self.train, self.seed).lengths
        try:
            found = patch_plan_or_given(self.preprocess, lengths, patches.sides, is_compiled)
        except TypeError as exc:
            raise OptionError(
                f"with patches=, preprocess= is a function that returns the transform for a number of "
                f"patches: preprocess(max_seq_len=…, patch_size=…), as in open_clip's main branch, or "
                f"functools.partial(timm.data.create_transform, naflex=True, …); it failed: {exc}"
            ) from exc
        if patches.max_ratio is None:
            return found
        if isinstance(found, PatchPlan):
            return replace(found, max_ratio=patches.max_ratio)
        raise OptionError(
            "max_ratio= is for a compiled transform: this one runs as given, and resizes by itself"
        )

    def _refuse_uint8_of_given(self) -> None:
        """Refuse a transform whose images can't be had as uint8: one that isn't compiled."""
        is_mapped = self.workers.map_sample is not None and self.preprocess is None
        if is_mapped or (self.preprocess is not None and not self.images.compile):
            raise OptionError(
                'Images(dtype="uint8") is for a compiled preprocess=, not for functions that run as given'
            )
        if self.images.patches is not None:
            if isinstance(self.patch_transform(self.images.compile), GivenPatches):
                raise OptionError('Images(dtype="uint8") is for a preprocess= that can be compiled')
        elif self.preprocess is not None:
            try:
                compile_transform(self.preprocess)
            except NotRecognised as exc:
                raise OptionError(
                    f'Images(dtype="uint8") is for a preprocess= that can be compiled: {exc}'
                ) from exc

    def _refuse_unused_keys(self) -> None:
        """Refuse arguments for members that the keys don't select."""
        if self.workers.map_sample is not None:
            for name, value in (("tokenizer", self.tokenizer), ("label_key", self.shards.label_key)):
                if value is not None:
                    raise OptionError(
                        f"map_sample= makes the whole example: {name}= can't be combined with it "
                        f"(preprocess= can: it decodes the sample's image)"
                    )
        elif self.shards.text_key is None and self.tokenizer is not None:
            raise OptionError("text_key=None selects no captions: tokenizer= can't be combined with it")
        elif self.output == "hf" and self.tokenizer is None and self.shards.text_key is not None:
            raise OptionError(
                'output="hf" has input_ids: give a tokenizer, or text_key=None if there are no captions'
            )

    @property
    def step_table(self) -> StepTable | None:
        """The steps of an epoch of training, where Patches(steps=…) gives them."""
        patches = self.images.patches
        if patches is None or patches.steps is None or not self.train:
            return None
        return StepTable(tuple(patches.steps), self.num_batches or len(patches.steps), self.seed)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that select samples: a usable sample has a member for every key."""
        shards = self.shards
        if self.workers.map_sample is not None:
            return () if self.preprocess is None else (shards.image_key,)
        return tuple(key for key in (shards.image_key, shards.text_key, shards.label_key) if key is not None)

    @property
    def choice(self) -> tuple[str, ...]:
        """The keys, facts and repeats as a state records them."""
        shards = self.shards
        facts = [f"{name}={one.digest}" for name, one in self.columns.items() if name not in BUILT_IN]
        if self.has_modalities:
            facts += [f"{source.name}: {source.modality}" for source in self.sources]
        if self.repeat is not None:
            facts.append(f"repeat={self.repeat.digest}")
        if self.workers.map_sample is not None:
            return ("map_sample", *self.keys, *facts)
        label = () if shards.label_key is None else (shards.label_key,)
        return (shards.image_key, shards.text_key or "", *label, *facts)

    @property
    def epochs_continue(self) -> bool:
        """Whether an epoch starts where the last one stopped, in the middle of a pass."""
        sized = self.num_batches is not None or self.num_samples is not None
        return self.train and (sized or self.order.endless or len(self.sources) > 1)


def sized_by_steps(given: Mapping[str, Any]) -> dict[str, Any]:
    """The batch_size and num_batches of a training whose steps are listed: the most rows, and all steps."""
    patches = given["images"].patches
    if patches is None or patches.steps is None or not given["train"]:
        return {}
    batches = len(patches.steps) if given["num_batches"] is None else given["num_batches"]
    return {"batch_size": max(rows for _, rows in patches.steps), "num_batches": batches}


def refuse_arguments(unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse arguments that make_loader doesn't have.

    Raises:
        OptionError: it names the group that has the argument, a similar name, or what to use instead of an
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
    """Refuse a value of another type as a group.

    Raises:
        OptionError: it names the group's class.
    """
    for name, group in GROUPS.items():
        if not isinstance(given[name], group):
            raise OptionError(f"{name}={given[name]!r:.100}; expected a streamload.{group.__name__}(…)")


def whole_number(name: str, value: Any) -> int:
    """A whole number of any integer type as an int.

    Raises:
        OptionError: another type; it names the argument.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise OptionError(f"{name}={value!r}; expected a whole number")


def read_device(device: Any) -> torch.device:
    """A torch.device from `device=`.

    Raises:
        OptionError: torch doesn't know such a device, or finds none.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise OptionError(
            f"device={device!r}; expected one of torch's, like 'cuda', 'cuda:1', 'mps' or 'cpu'"
        ) from exc
    if found.type == "cuda" and (found.index or 0) >= (there := torch.cuda.device_count()):
        raise OptionError(f"device={device!r}: torch {torch.__version__} finds {there} such devices here")
    return found
