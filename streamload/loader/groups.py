"""The groups of make_loader's arguments: frozen values, checked when they are made."""

from __future__ import annotations

import multiprocessing
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
import torch

from streamload.batches.tokenize import TEXT_COLUMNS
from streamload.cache.selection import Keep, RateFunction
from streamload.errors import OptionError
from streamload.extension import Extension
from streamload.loader.sources import Factors
from streamload.options import Copy, Option, Revalidate, Where, options
from streamload.options.values import at_least, parse_choice, parse_size
from streamload.order.steps import SourcesName
from streamload.shards.columns import Facts

if TYPE_CHECKING:
    from streamload.batches.in_progress import Collate, MapSample
    from streamload.derived.calls.features import Features
    from streamload.join.options import Join
    from streamload.patches.options import Patches
    from streamload.steering import Policy
    from streamload.steering.policy import PlainFunction
    from streamload.steering.replay import Replay
    from streamload.weights.sample import Complexity

ImageDtype = Literal["float32", "uint8"]
Decode = Literal["host", "device", "auto"]
SizesBy = Literal["cell", "step"]
OnError = Literal["skip", "raise"]
LabelType = Literal["int", "float"]
_MODALITIES = ("image", "text")
TextPaddingName = Literal["max", "longest"]

LARGEST_BLOCK = 65_536
_Self = TypeVar("_Self", bound="Group")


class Group:
    """The base of make_loader's groups: an argument that a group doesn't have is told what to use instead."""

    __slots__ = ()

    def __new__(cls: type[_Self], *_: Any, **values: Any) -> _Self:
        """Refuse unknown arguments.

        Raises:
            OptionError: it says what to give instead.
        """
        arguments = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]  # a subclass is a dataclass
        for name in values:
            if name not in arguments:
                from streamload.loader.words import instead_of

                instead = instead_of(name, arguments, GROUPS)
                raise OptionError(f"{cls.__name__} has no argument {name}=: {instead}")
        return super().__new__(cls)


def check_flag(value: object, name: str) -> None:
    """Refuse a value that isn't true or false, whatever its type is.

    Raises:
        OptionError: it names the argument.
    """
    if not isinstance(value, bool | int | np.bool_) or value not in (0, 1):
        raise OptionError(f"{name}={value!r}; expected True or False")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards(Group):
    """Which members of a sample are used, which samples, and how shards are reached.

    Args:
        image_key: extensions that hold the image, in order of preference. Samples without one are left out;
            beside `map_sample=` they come without `image`. None, beside `map_sample=`: no image is decoded.
        text_key: the same for the caption; the first one that is there and isn't blank is used.
            `json:caption` is a field of a JSON member, `json:meta.caption` a field of a field,
            `json:captions[0]` an entry of a list, `json:captions[*]` one entry of it, drawn anew in each pass
            (docs/guides/samples.md). None: there are no captions, and batches have none.
        text_key_probs: how likely each choice of `text_key` comes first, in the order of `text_key`; those
            left out, and 0: after all others. Drawn by the seed for each sample, anew in each pass. None: as
            listed.
        label_key: the same for a label, a whole number: `cls`, `json:label`. None: there are no labels.
        label_type: "int": labels are whole numbers, int64; "float": any finite numbers, float32.
        blank_captions: False leaves out samples whose caption is empty or only white space, like those
            without one.
        keep: takes the index entry of a sample (key, sizes, images, width, height, caption_bytes, and facts
            by name); False leaves the sample out. Or the path of a .npy file with the uids of the samples to
            keep, ascending: two uint64 each, as in DataComp's subset files, or 32 hex digits
            (docs/guides/samples.md).
        keep_key: the field with a sample's uid, for such a file.
        facts: numbers that are known of each sample before it is decoded, by names of your own. "tokens": of
            the caption by `tokenizer`; "json:score": a field of a JSON member; "scores.parquet" or
            "scores.csv": the column of that name in a local table with the sample keys in a column `key`
            ("scores.csv:other": another column); or a function of `__key__`, `__images__` (extension →
            width, height) and the members' bytes without images, which is found changed by its code, or a
            pair of it and a version. A tuple of names is for a function that returns as many. Unknown: NaN.
            Facts are kept beside the index (docs/guides/facts.md); tables are read when the loader is made.
        repeat: how often a sample is used in each pass of a training, in the mean: the name of a fact, or a
            function of the index entry, as `keep` gets it (or a pair of one and a version), that returns it.
            0.3: in three of ten passes, drawn by the seed anew in each; 2.5: twice or three times; 0: never;
            unknown: once. It has to be pure, like `keep`.
        join: a file of captions, labels or scores that were computed later, by sample key
            (docs/guides/samples.md): the path or URL of a .parquet, .npz, .csv or .jsonl, or a Join(…), which
            can name other keys, and some of the columns. "joined:caption" is the column `caption`, as
            "json:caption" is a field. Samples without a row are left out. The file is read when the loader is
            made, once for a node.
        leave_out: a file with samples whose places others take in training (docs/guides/time-machine.md): a
            key a line, or JSON with "key", "url" and "why". `loader.leave_out()` appends to it.
        storage_options: for fsspec: credentials, endpoint, anon; "headers" for http(s) and hf, by name, or by
            host and then by name: {"https://host": {"Authorization": "…"}}, or a function of the URL that
            returns them; "sign" for http(s): a function that returns the URL with a signature in its query.
            Both functions are called for each shard, and again when the server refuses what they returned
            (docs/guides/urls.md).
        on_error: "skip" counts and logs samples that can't be used; "raise" raises on the first one.
        max_bad_samples: the largest share of samples that can't be used; above it TooManyBadSamples ends the
            run: once bad samples of enough shards (at least ten) make that certain, or at the end of a pass,
            by the exact share of all ranks (three or more, or half of all). None: no limit, but a pass of
            which nothing could be used is an error.
        max_bad_shards: the largest share of shards that may be given up; above it TooManyBadShards ends the
            run, once at least three were given up and it is certain; at the end of an epoch also one or two
            if they are half of all. None: no limit.

    Raises:
        OptionError: a value that can't be used.
    """

    image_key: str | None = "jpg;png;jpeg;webp"
    text_key: str | None = "txt"
    text_key_probs: Sequence[float] | None = None
    label_key: str | None = None
    label_type: LabelType = "int"
    blank_captions: bool = True
    keep: Keep | str | Path | None = None
    keep_key: str = "json:uid"
    facts: Facts | None = None
    repeat: str | RateFunction | tuple[RateFunction, str] | None = None
    join: Join | str | os.PathLike[str] | None = None
    leave_out: str | os.PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    on_error: OnError = "skip"
    max_bad_samples: float | None = 0.1
    max_bad_shards: float | None = 0.1

    def __post_init__(self) -> None:
        keys = (("image_key", "jpg;png"), ("text_key", "txt;json:caption"), ("label_key", "cls"))
        for name, example in keys:
            value = getattr(self, name)
            if not (value is None or isinstance(value, str)):
                raise OptionError(f"{name}={value!r}; expected a string such as {example!r}, or None")
        if self.text_key_probs is not None:
            from streamload.batches.caption_choice import check_probs

            check_probs(self.text_key, self.text_key_probs)
        if self.join is not None:
            from streamload.join.options import Join

            Join.of(self.join)
        if not isinstance(self.leave_out, str | os.PathLike | None):
            raise OptionError(f"leave_out={self.leave_out!r:.100}; expected the path of a file, or None")
        parse_choice(self.label_type, get_args(LabelType), "label_type")
        parse_choice(self.on_error, get_args(OnError), "on_error")
        storage = self.storage_options or {}
        headers, sign = storage.get("headers"), storage.get("sign")
        if not (headers is None or isinstance(headers, Mapping) or callable(headers)):
            raise OptionError(  # without its value, which may be a secret
                f"storage_options['headers'] is {type(headers).__name__}; expected a mapping such as "
                '{"Authorization": "Bearer …"}, or a function of the URL that returns one'
            )
        if not (sign is None or callable(sign)):
            raise OptionError(
                f"storage_options['sign'] is {type(sign).__name__}; expected a function from a URL to "
                "that URL with a signature"
            )
        for name in ("max_bad_samples", "max_bad_shards"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value <= 1):
                raise OptionError(f"{name}={value!r}; expected a share from 0 to 1, or None for no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Images(Group):
    """Options of decoding and transforming images, beside `preprocess`.

    Args:
        dtype: "uint8" leaves a compiled transform's images as uint8, a quarter of the bytes; the training
            loop normalises them. (With `device` they are copied as uint8 anyway.)
        compile: False always runs `preprocess` as given.
        prepare: how images are stored once they are decoded (docs/guides/prepared-images.md). "raw": all of
            their pixels, so that batches stay as they are. "raw-256" or, for less disk space, "jpeg-256-q90":
            the short side was resized to this, and the training is on these images, prepared or not. The
            first epoch stores them where the cache has room for all; of what is stored only the random part
            of the transform runs. "auto": the cheapest form that leaves batches as they are, chosen by
            measuring.
        max_pixels: larger images are left out, counted as `too_large`, as are those that need as much memory
            or time as these to decode (docs/guides/samples.md). None: 20,000,000
            (STREAMLOAD_MAX_IMAGE_PIXELS).
        patches: make images into patches, each in its own aspect and resolution
            (docs/guides/variable-resolution.md). None: batches have images of one size.
        sizes: width and height of each size that images may have, as `streamload.aspects.image_sizes()` lists
            them: aspect-ratio buckets (docs/guides/image-sizes.md). Images are resized and cropped to the
            size of the nearest ratio; those of a cell, which are the rows of a `microbatch` or else of the
            batch, have one size. None: batches have images of one size.
        sizes_by: "cell": each cell has a size of its own. "step": all images of a step have one, on all
            ranks, for graphs that are compiled for a size.
        decode: where JPEGs become pixels (docs/guides/device-decoding.md). "host": in the workers. "device":
            on the batches' `device`, by its JPEG engine, ahead of the step; workers do everything else. The
            samples, their order and their random choices are the same, pixels nearly so. It needs
            `streamload[gpu]`, and a `preprocess` that is compiled whole. "auto": a training begins in the
            workers, and goes on on the device if it has an engine and the first 48 steps have waited for
            images; one choice for all ranks, part of the state. An evaluation stays in the workers.

    Raises:
        OptionError: a value that can't be used.
    """

    dtype: ImageDtype = "float32"
    compile: bool = True
    prepare: str | None = None
    max_pixels: int | None = None
    patches: Patches | None = None
    sizes: Sequence[tuple[int, int]] | None = None
    sizes_by: SizesBy = "cell"
    decode: Decode = "host"

    def __post_init__(self) -> None:
        parse_choice(self.dtype, ("float32", "uint8"), "dtype")
        parse_choice(self.decode, get_args(Decode), "decode")
        parse_choice(self.sizes_by, get_args(SizesBy), "sizes_by")
        if self.sizes is not None:
            from streamload.aspects.sizes import checked_sizes

            object.__setattr__(self, "sizes", checked_sizes(self.sizes))
        if self.prepare not in (None, "auto"):
            from streamload.derived.prepare.preparation import Preparation

            Preparation.parse(self.prepare)
        if self.patches is not None:
            from streamload.patches.options import Patches

            if not isinstance(self.patches, Patches):
                raise OptionError(f"patches={self.patches!r:.100}; expected a streamload.Patches(…), or None")
        _check_settings(self, "images")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Group):
    """The order of samples, the length of an epoch, and how ranks share both, beside `seed` and `shuffle`.

    Args:
        num_batches: batches of each rank in an epoch of training; it overrides num_samples.
        lanes: shards that are read side by side. None: 8 to 64, by the samples a node reads per step; fewer
            if the cache can't hold them.
        groups: the number of sequences that the shards are split into, each read by one node. None: the
            number of nodes. For a run that may grow, give the most nodes it will ever have.
        endless: a training epoch has no end: pass follows pass.
        upsampling_factors: mix the parts of `urls` between '::' by these factors: numbers, or OpenCLIP's
            "1::2.5". A part's weight is its factor times its samples, by sizes.json or estimated; times its
            shards if these are unknown.
        rank, world_size: of this process. None: from torch.distributed if it is initialised, else from the
            variables of torchrun, Slurm or MPI; read at first use (`len`, `num_batches`, a state, `iter`).
        mixing: who decides on the sources' weights during the run (docs/guides/mixing.md): Progress(…) or
            another policy, from the losses that `loader.report` got; a function of a Summary that returns
            {name: weight} or None, called every 200 steps; Replay(path), the weights of an earlier run. None:
            they stay as they are, until `set_weights`.
        decisions: a file to which each change of the sources' weights is written, on rank 0. A resumed run
            continues it; mixing=Replay(file) yields the run's batches again.
        objective: the sources' weights in the loss, by name (others keep their own), while those of sampling
            change: `loader.info.weight` of a row is the ratio of both. None: 1 for each row.
        strict: refuse a state whose rows were made by another `preprocess` or `tokenizer`, or by other
            versions of their libraries (docs/guides/resume.md). False: a resume logs what differs.
        journal: a folder, shared by the ranks, for a record of the run by which `loader.at(step)` and
            `streamload replay` make any of its batches again (docs/guides/time-machine.md).

    Raises:
        OptionError: a value that can't be used.
    """

    num_batches: int | None = None
    lanes: int | None = None
    groups: int | None = None
    endless: bool = False
    upsampling_factors: Factors | None = None
    rank: int | None = None
    world_size: int | None = None
    mixing: Policy | PlainFunction | Replay | None = None
    decisions: str | os.PathLike[str] | None = None
    objective: Mapping[str, float] | None = None
    strict: bool = False
    journal: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_flag(self.strict, "strict")
        at_least(1, num_batches=self.num_batches, lanes=self.lanes)
        at_least(1, groups=self.groups, world_size=self.world_size)
        at_least(0, rank=self.rank)
        if (self.rank is None) != (self.world_size is None):
            raise OptionError(
                f"give rank and world_size together, not rank={self.rank} world_size={self.world_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache(Group):
    """Options of the cache, beside `cache_dir` and `cache_size`.

    None: the variable, else the default.

    Args:
        {settings}
        shared_options: for the shared cache's file system, as storage_options.

    Raises:
        OptionError: a value that can't be used.
    """

    where: Where | None = None
    memory_size: str | int | None = None
    free_disk: str | int | None = None
    ahead: str | int | None = None
    revalidate: Revalidate | None = None
    copy: Copy | None = None
    shared: str | Path | None = field(default=None, repr=False)
    shared_options: Mapping[str, Any] | None = field(default=None, repr=False)
    write_back: bool | None = None
    shared_wait: float | None = None
    origin_wait: float | None = None

    def __post_init__(self) -> None:
        _check_settings(self, "cache")
        if self.shared:
            from streamload.cache.shared.objects import refuse_url

            refuse_url(str(self.shared), "shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Group):
    """Options of worker processes, beside `num_workers`.

    Args:
        map_sample: takes a raw sample (`__key__`, `__url__`, extension → bytes) and returns a dict of values,
            in place of image and caption. With preprocess= the sample has `image`, too: the image as a batch
            would have it, in the batch's memory (clone what you keep). A `__key__` or `__url__` that it
            returns is dropped: with_keys adds those of the samples.
        collate: takes the list of map_sample's results for a batch and returns the batch, a dict or a tuple,
            in the worker. None: values of one shape are stacked, others are a list.
        prefetch_factor: batches that each worker prefetches.
        memory: limits of what workers have made, or are making, and the training loop hasn't received:
            {"image": "4GB", "text": "64MB"}, one or both, over the workers of a rank. A step takes the most
            that its rows can have; workers begin steps in their order, as far as they fit. The limit of
            prefetch_factor stays. It needs images of a known size (a compiled preprocess=, or patches=) and a
            tokenizer. None: no limits.
        multiprocessing_context: "fork", "spawn" or "forkserver"; None: Python's default.

    Raises:
        OptionError: a value that can't be used.
    """

    map_sample: MapSample | None = None
    collate: Collate | None = None
    prefetch_factor: int = 2
    memory: Mapping[str, str | int] | None = None
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        at_least(1, prefetch_factor=self.prefetch_factor)
        if self.memory is not None:
            if not isinstance(self.memory, Mapping) or not self.memory or self.memory.keys() - _MODALITIES:
                raise OptionError(
                    f"memory={self.memory!r:.100}; expected sizes of {' and '.join(_MODALITIES)}: "
                    f'{{"image": "4GB", "text": "64MB"}}, one or both'
                )
            for name, value in self.memory.items():
                parse_size(value, f"memory[{name!r}]")
        if self.multiprocessing_context is not None:
            methods = tuple(multiprocessing.get_all_start_methods())
            parse_choice(self.multiprocessing_context, methods, "multiprocessing_context")
        if self.collate is not None and not callable(self.collate):
            raise OptionError(
                f"collate is a {type(self.collate).__name__}; expected a function from a list of dicts to a "
                f"dict or tuple"
            )
        if self.collate is not None and self.map_sample is None:
            raise OptionError(
                "collate= makes batches of the examples of map_sample=, which is missing; without it, images "
                "are written straight into the batch's memory"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches(Group):
    """Options of the rows and values of a batch, beside `batch_size` and `output`.

    Args:
        with_keys: add the samples' `__key__` and `__url__` lists: a dict as last element, or two entries.
        sources: "mixed": a batch has rows of each of several sources, by their shares. "step": all rows of a
            step are of one source; "rank": those of a rank are. Shares are then exact over steps, to the rows
            of one step or rank (docs/guides/mixing.md).
        text_padding: "max": all captions have the tokenizer's length. "longest": those of a batch are cut to
            its longest one (docs/guides/batches.md), and output="dict" has `text_valid` bool[N, L], False
            where an id is padding. The other ids are the same.
        text_pad_multiple: with "longest", the number of ids is rounded up to a multiple of this, up to the
            tokenizer's length: fewer shapes for torch.compile.
        text_columns: what output="hf" has of captions beside ids and mask. "labels": int64[N, L], the ids
            with -100 for padding, as models of transformers take them to predict a caption. "length":
            int64[N], how many ids aren't padding.
        bucketing: puts rows of about the same length together (docs/guides/batches.md). "step": within each
            step, whose rows stay the same, so that parts of it (microbatches) and ranks have alike ones. A
            number: within each block of about so many samples, up to 65,536, whose samples make its steps in
            a random order. None: in the order of the run.
        cost: of a sample, by which the rows of each rank cost about the same in each step: the name of a
            fact, a pure function of the index entry, as `keep` gets it, or two of these, of text and of
            images (docs/guides/equal-costs.md); with max_tokens= a third is what a sample takes,
            by which the cells of a step are alike. None: in the order of the run.
        microbatch: the rows of each part of `loader.microbatches(batch)`; None: all. "auto": as many as the
            device (CUDA, ROCm, or another of which torch tells the memory) has room for, found in the first
            steps by what parts take; the smallest size that is about as fast as the largest; the same on all
            ranks. A step may begin again where memory runs out all the same: `Microbatches.attempts`.
        sample_weight: the weight of each row in the loss, which comes with the batch as `weight` float32[N]
            (with output="tuple" the element after images, texts and labels) and changes nothing else:
            streamload.complexity(…), or a function of the index entry, as `keep` gets it, that returns a
            number from 0 (None: unknown, 1). It has to be pure (docs/guides/mixing.md).
        max_tokens: with cost=, what the samples of a cell cost at most, by the first of its costs. A cell is
            what goes through a device at once, and has as many samples as fit: `batch_size` counts cells
            (docs/guides/equal-costs.md). With bucketing=, of each part at most, ids and patches with
            their padding; it needs room for the longest row. None: any number.
        max_patches: the same by the second cost, beside max_tokens=.
        batch_policy: changes the batch size during a training (docs/guides/batches.md): an object such as
            ThroughputBalanced(least=64, most=512), or a function of what was measured that returns a size or
            None. None: it stays, but for set_batch_size.
        features: outputs of frozen modules for each sample, computed once, by name: `{"vit": module}`, or
            Features for more options. `module(batch)` is its output (docs/guides/compute-once.md).
        extensions: features of your own that add values to batches and keys to states
            (docs/guides/extensions.md).

    Raises:
        OptionError: a value that can't be used.
    """

    sources: SourcesName = "mixed"
    text_padding: TextPaddingName = "max"
    text_pad_multiple: int = 8
    text_columns: Sequence[str] = ()
    bucketing: Literal["step"] | int | None = None
    cost: str | RateFunction | Sequence[str | RateFunction] | None = None
    microbatch: int | Literal["auto"] | None = None
    max_tokens: int | None = None
    max_patches: int | None = None
    sample_weight: Complexity | RateFunction | None = None
    batch_policy: Any = None
    with_keys: bool = False
    features: Mapping[str, torch.nn.Module | Features] | None = None
    extensions: Sequence[Extension] = ()

    def __post_init__(self) -> None:
        if self.batch_policy is not None:
            from streamload.steering.batch_size import as_batch_policy

            object.__setattr__(self, "batch_policy", as_batch_policy(self.batch_policy))
        check_flag(self.with_keys, "with_keys")
        parse_choice(self.sources, get_args(SourcesName), "sources")
        parse_choice(self.text_padding, get_args(TextPaddingName), "text_padding")
        at_least(1, text_pad_multiple=self.text_pad_multiple)
        at_least(1, max_tokens=self.max_tokens, max_patches=self.max_patches)
        if isinstance(self.text_columns, str) or not set(self.text_columns) <= TEXT_COLUMNS.keys():
            raise OptionError(f"text_columns={self.text_columns!r}; expected some of {[*TEXT_COLUMNS]}")
        if self.max_patches is not None and (self.cost is None or self.max_tokens is None):
            raise OptionError("max_patches= needs cost=, of text and of images, and max_tokens=")
        if self.max_tokens is not None and self.bucketing is None and self.cost is None:
            raise OptionError(
                "max_tokens= needs cost=, by which cells are packed, or bucketing=, 'step' or a number of "
                "samples: by its plan all ranks have the same parts"
            )
        if self.sample_weight is not None:
            from streamload.weights.sample import read_sample_weight

            read_sample_weight(self.sample_weight)
        if self.microbatch != "auto":
            at_least(1, microbatch=self.microbatch)
        if self.bucketing != "step":
            at_least(1, bucketing=self.bucketing)
            if self.bucketing is not None and self.bucketing > LARGEST_BLOCK:
                raise OptionError(
                    f"bucketing={self.bucketing}; expected at most {LARGEST_BLOCK} samples, or 'step'"
                )

    @property
    def costs(self) -> tuple[str | RateFunction, ...]:
        """The costs of a sample: one, that of text and of images, or none."""
        if self.cost is None:
            return ()
        from streamload.batching.equal_costs import read_costs

        return read_costs(self.cost, most=2 if self.max_tokens is None else 3)


GROUPS: dict[str, type[Group]] = {
    "shards": Shards,
    "images": Images,
    "order": Order,
    "batches": Batches,
    "cache": Cache,
    "workers": Workers,
}
"""The classes of the groups by the names of make_loader's arguments."""


def _rows(group: str) -> dict[str, Option[Any]]:
    """The options of a group that variables can set, too, by the names of their fields."""
    return {
        row.argument.removeprefix(f"{group}."): row
        for row in options()
        if row.argument.startswith(f"{group}.")
    }


def _check_settings(group: Images | Cache, name: str) -> None:
    for field_name, row in _rows(name).items():
        value = getattr(group, field_name)
        if value is not None:
            row.parse(value, field_name)


def _described(row: Option[Any], name: str, indent: str) -> str:
    text = f"{name}: {row.help[0].lower()}{row.help[1:-1]} ({row.variable})."
    return textwrap.fill(text, 110, initial_indent=indent, subsequent_indent=f"{indent}    ")


if Cache.__doc__ is not None:  # python -OO drops it; from 3.13 on its indentation is gone
    Cache.__doc__ = re.sub(
        r"( *)\{settings\}",
        lambda place: "\n".join(_described(row, name, place[1]) for name, row in _rows("cache").items()),
        Cache.__doc__,
    )
