"""From options to batches in the training loop (steps A and K).

Making a loader touches neither disk nor network. The first `iter()` opens the tier and starts the workers,
which stay until `close()` and continue to fill between two epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from streamload.batches.facts import read_facts, read_repeat
from streamload.batches.images import Preprocess
from streamload.batches.tokenize import tokenizer_in
from streamload.derived.calls.features import Features, read_features
from streamload.loader.destination import read_device
from streamload.loader.groups import Batches, Cache, Images, Order, Shards, Workers
from streamload.loader.loader import Loader, gather_state
from streamload.loader.options import (
    LoaderOptions,
    OnError,
    Output,
    sized_by_steps,
    whole_number,
)
from streamload.loader.patches import Patches
from streamload.loader.refusals import refuse_arguments, refuse_other_groups, refuse_unusable
from streamload.loader.registered import extensions_of
from streamload.loader.sources import Source, read_sources
from streamload.steering import Policy, as_policy
from streamload.steering.policy import PlainFunction
from streamload.steering.replay import Replay
from streamload.urls import Urls

__all__ = [
    "Batches",
    "Cache",
    "Features",
    "Images",
    "Loader",
    "LoaderOptions",
    "Order",
    "Patches",
    "Shards",
    "Source",
    "Workers",
    "gather_state",
    "make_loader",
]

_TAKEN = (
    "image",
    "text",
    "text_valid",
    "label",
    "weight",
    "pixel_values",
    "input_ids",
    "attention_mask",
    "labels",
    "length",
)
"""Names of other values of a batch."""
_SHARDS, _IMAGES, _ORDER, _BATCHES = Shards(), Images(), Order(), Batches()
_CACHE, _WORKERS = Cache(), Workers()


def make_loader(
    urls: Urls | Source | Sequence[Source],
    tokenizer: Any = None,
    *,
    preprocess: Preprocess | None = None,
    batch_size: int = 64,
    num_workers: int = 4,
    num_samples: int | None = None,
    num_batches: int | None = None,
    seed: int = 0,
    shuffle: int | None = None,
    train: bool = True,
    output: Output = "tuple",
    with_keys: bool = False,
    on_error: OnError = "skip",
    device: str | torch.device | None = None,
    cache_dir: str | Path | None = None,
    cache_size: str | int | None = None,
    shards: Shards = _SHARDS,
    images: Images = _IMAGES,
    order: Order = _ORDER,
    batches: Batches = _BATCHES,
    cache: Cache = _CACHE,
    workers: Workers = _WORKERS,
    features: Mapping[str, torch.nn.Module | Features] | None = None,
    mixing: Policy | PlainFunction | Replay | None = None,
    **unknown: NoReturn,
) -> Loader:
    """A loader of image-caption batches from tar shards, which are used while their bytes arrive.

    Args:
        urls: shards in the WebDataset convention: a string or path, or a list of them. Brace ranges
            (`{00000..01242}`), `::` between sources, `${X}` for the environment's WDS_X, `pipe:COMMAND`,
            `http(s)://`, `s3://` and all else that fsspec opens, or local files, folders (their `*.tar`) and
            globs, of which only compressed ones are copied. Or a list of Sources, mixed by weight.
        tokenizer: captions to ids, called with the list of a batch: open_clip's, a transformers tokenizer (or
            a processor that has one), or any `list[str] → int64[N, L]`. None leaves captions as strings.
        preprocess: PIL image to tensor. A chain of torchvision and open_clip transforms such as open_clip's
            `preprocess_train` and `preprocess_val` is compiled if every step is known
            (docs/guides/transforms.md has the list): a faster path to the same batch, to the bit if the
            package was built with a C compiler, else within one level of 255. So is an image processor of
            transformers, if that gives the same bits. Anything else runs as given, its random generators
            seeded by the sample; the log says which. None: open_clip's default for 224 pixels (in training a
            random resized crop, else resize and centre crop), compiled. With Images(patches=…) it is a
            function of max_seq_len= and patch_size= that returns such a transform.
        batch_size: samples in a batch of one rank. With Patches(steps=…) each step has its own.
        num_workers: processes that decode; 0 does it in this process.
        num_samples: samples of an epoch over all ranks, rounded down to full batches in training. With it,
            each epoch continues where the last one stopped; without, an epoch is one pass over all samples.
            In evaluation it only says how many samples there are, for `len()`.
        num_batches: the same for training, as batches of each rank; it overrides num_samples.
        seed: of the order and of the augmentation.
        shuffle: the shuffle window: how many positions a sample may move; 0: shards and samples as listed.
            None: 40 times the samples a node reads per step, between 10,000 and 100,000; less if the cache
            can't hold the shards that this keeps open (docs/guides/caching.md).
        train: False yields each sample exactly once, as listed, with a partial last batch and no
            augmentation: the whole set in every process that iterates, unless Order(rank=…, world_size=…) is
            given. With a sizes.json the shares of the ranks differ by one sample at most, else as if all
            shards had one size. Samples that can't be used are left out, and so are batches without any
            other: there may be fewer batches than `len()`.
        output: "tuple": (images float32[N, 3, H, W], texts, labels int64[N]), without those that have no key;
            "dict": {"image", "text", "label"}; "hf": {"pixel_values", "input_ids", "labels"} and all else
            that tokenizer and image processor return, such as an "attention_mask". With Images(patches=…)
            the images are a dict: {"patches", "patch_coord", "patch_valid", "seq_len"}.
        with_keys: add the samples' `__key__` and `__url__` lists: a dict as last element, or two entries.
        on_error: "skip" counts and logs samples that can't be used; "raise" raises on the first one.
        device: the device that batches are on: "auto", this process's accelerator (the current device if one
            was set, else the one of the local rank), or host memory where there is none; or torch's name of
            one. They are copied ahead of their use, one batch at most. None: they stay in host memory, unless
            a framework that iterates the loader moves them to a device of its own, which is taken.
        cache_dir: the directory of the cache (STREAMLOAD_CACHE_DIR).
        cache_size: its limit: bytes, "500GB", or "80%" of the free space plus what it holds
            (STREAMLOAD_CACHE_SIZE).
        shards: which members of a sample are used, which samples, and how shards are reached.
        images: how images are decoded and transformed, beside `preprocess`.
        order: the order of samples, and how ranks share them, beside `seed` and `shuffle`.
        batches: how the rows of a batch are padded, beside `batch_size`.
        cache: what the cache holds and where, beside `cache_dir` and `cache_size`.
        workers: what worker processes run, and how they are started.
        features: what frozen modules return for each sample, computed once, by name: `{"vit": module}`, or
            Features for more. `module(batch)` is its result for a batch (docs/guides/compute-once.md).
        mixing: who decides on the sources' weights during the run (docs/guides/mixing.md): Progress(…) or
            another policy, from what `loader.report` was told; a function of a Summary that returns
            {name: weight} or None, asked every 200 steps; Replay(path), the weights of an earlier run. None:
            they stay as given, until `set_weights`.
        unknown: refused; the error names the group that has the argument, or what to use instead.

    Returns:
        A Loader; nothing is read and no process is started before it is iterated.

    Raises:
        OptionError: an argument or a URL that can't be used.
    """
    given = dict(locals())
    refuse_arguments(given.pop("unknown"), given)
    refuse_other_groups(given)
    given |= sized_by_steps(given)
    given["tokenizer"] = tokenizer_in(tokenizer)
    given["features"] = read_features(features, _TAKEN)
    given["columns"] = read_facts(shards.facts, shards.image_key, shards.text_key, given["tokenizer"])
    given["repeat"] = read_repeat(shards.repeat, given["columns"])
    given["sources"] = read_sources(given.pop("urls"), order.upsampling_factors)
    given["device"] = read_device(device)
    given["seed"] = whole_number("seed", seed)
    if mixing is not None and not isinstance(mixing, Replay):
        given["mixing"] = as_policy(mixing, [source.name for source in given["sources"]])
    given["extensions"] = extensions_of(batches, order, given["mixing"])
    options = LoaderOptions(**given)
    refuse_unusable(options)
    return Loader(options)
