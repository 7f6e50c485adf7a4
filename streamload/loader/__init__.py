"""From options to batches in the training loop (steps A and K).

Making a loader touches neither disk nor network. The first `iter()` opens the tier and starts the workers,
which stay until `close()` and continue to fill between two epochs.

- made: `make_loader`, here, from `groups.py`, `sources.py` and `words.py`; `options.py` freezes them, and
  `refusals.py` refuses what can't be used together. `registered.py` knows the extensions.
- started: `loader.py` asks `schedule.py` (`order_spec.py`, `sizes.py`) for the epoch,
  `destination.py` for the device, and `pool.py` for workers, which get a `worker_config.py`.
- lasting from epoch to epoch: `rank_run.py`, which has schedule, process and extensions, and sets events.
- iterated: `epoch.py` has the batches in order, and `output.py` takes each: `rank_process.py` counts and
  `checks.py` checks it, `rank_run.py` passes it to extensions; then it gets its form.
- resumed: `position.py` follows the batches; `state.py` writes and reads it; `fingerprint.py` identifies what
  makes the rows (`described_code.py`: functions as given).
- for frameworks: `dataloader.py`; for commands: `feature_recipe.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from streamload.batches.tokenize import tokenizer_in
from streamload.loader.destination import read_device
from streamload.loader.groups import Batches, Cache, Images, Order, Shards, Workers
from streamload.loader.loader import Loader, gather_state
from streamload.loader.options import LoaderOptions, Output, whole_number
from streamload.loader.refusals import refuse_arguments, refuse_other_groups, refuse_unusable
from streamload.loader.registered import extensions_of
from streamload.loader.sources import Source, SourceOptions, read_sources
from streamload.options import read_settings
from streamload.shards.columns import LISTED
from streamload.urls import Urls

if TYPE_CHECKING:
    from streamload.batches.images import Preprocess
    from streamload.cache.selection import Repeat
    from streamload.derived.calls.features import Features
    from streamload.join import JoinedRows
    from streamload.shards.columns import Column
    from streamload.steering import Policy
    from streamload.steering.replay import Replay

__all__ = [
    "Batches",
    "Cache",
    "Images",
    "Loader",
    "LoaderOptions",
    "Order",
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
    num_workers: int | Literal["auto"] = 4,
    num_samples: int | None = None,
    seed: int = 0,
    shuffle: int | None = None,
    train: bool = True,
    output: Output = "tuple",
    device: str | torch.device | None = None,
    cache_dir: str | Path | None = None,
    cache_size: str | int | None = None,
    shards: Shards = _SHARDS,
    images: Images = _IMAGES,
    order: Order = _ORDER,
    batches: Batches = _BATCHES,
    cache: Cache = _CACHE,
    workers: Workers = _WORKERS,
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
            transformers, if that gives the same bits. Anything else runs as given; the log says which. The
            sample then seeds the global generators of random, numpy and torch, and those that the function
            has in attributes, lists, dicts, closures and globals (numpy's, torch's, `random.Random`; so those
            of Albumentations), and a warning names a function that still draws otherwise. None: open_clip's
            default for 224 pixels (in training a random resized crop, else resize and centre crop), compiled.
            With Images(patches=…) it is a function of max_seq_len= and patch_size= that returns such a
            transform.
        batch_size: samples in a batch of one rank. With Patches(steps=…) each step has its own; with cost=
            and max_tokens= it counts cells (docs/guides/equal-costs.md).
        num_workers: processes that decode; 0 does it in this process; "auto": as many as the rank has
            processors but one, by affinity, quota and the ranks of its node, as known now.
        num_samples: samples of an epoch over all ranks, rounded down to full batches in training. With it,
            each epoch continues where the last one stopped; without, an epoch is one pass over all samples.
            In evaluation it only says how many samples there are, for `len()`.
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
        device: the device that batches are on: "auto", this process's accelerator (the current device if one
            was set, else the one of the local rank), or host memory where there is none; or torch's name of
            one. They are copied ahead of their use, one batch at most. None: they stay in host memory, unless
            a framework that iterates the loader moves them to a device of its own, which is taken.
        cache_dir: the directory of the cache (STREAMLOAD_CACHE_DIR).
        cache_size: its limit: bytes, "500GB", or "80%" of the free space plus what it holds
            (STREAMLOAD_CACHE_SIZE).
        shards: which members of a sample are used, which samples, how shards are reached, and what happens
            with those that can't be used.
        images: how images are decoded and transformed, beside `preprocess`.
        order: the order of samples, the length of an epoch, how ranks share both, and how sources are mixed,
            beside `seed`, `shuffle` and `num_samples`.
        batches: the rows and values of a batch, beside `batch_size` and `output`: keys, padding, buckets,
            parts, weights, features, extensions of your own.
        cache: what the cache holds and where, beside `cache_dir` and `cache_size`.
        workers: what worker processes run, and how they are started.
        unknown: refused; the error names the group that has the argument, or what to use instead.

    Returns:
        A Loader; before it is iterated no process is started, and nothing is read but tables of facts and the
        file of join=.

    Raises:
        OptionError: an argument or a URL that can't be used.
    """
    refuse_other_groups(
        shards=shards, images=images, order=order, batches=batches, cache=cache, workers=workers
    )
    refuse_arguments(unknown, inspect.signature(make_loader).parameters)
    tokenizer = tokenizer_in(tokenizer)
    join: JoinedRows | None = None
    if shards.join is not None:
        from streamload.join import joined_rows

        join = joined_rows(
            *(shards.join, read_settings(cache_dir=cache_dir).cache_dir, shards.storage_options),
            keys=(shards.text_key, shards.label_key),
            is_strict=shards.on_error == "raise",
        )
    if num_workers == "auto":
        from streamload.loader.auto_workers import auto_workers

        num_workers = auto_workers(order)
    columns, repeat = _facts(shards, batches, tokenizer, join)
    if isinstance(shards.keep, str | Path):
        from streamload.facts.uids import listed_uids

        settings = read_settings(cache_dir=cache_dir, cache_size=cache_size)
        columns = {**columns, LISTED: listed_uids(shards.keep, shards.keep_key, settings, join)}
    sources = read_sources(urls, order.upsampling_factors, shards.storage_options)
    options = LoaderOptions(
        sources=sources,
        tokenizer=tokenizer,
        preprocess=preprocess,
        batch_size=batch_size,
        num_workers=num_workers,
        num_samples=num_samples,
        num_batches=order.num_batches,
        seed=whole_number("seed", seed),
        shuffle=shuffle,
        train=train,
        output=output,
        device=read_device(device),
        cache_dir=cache_dir,
        cache_size=cache_size,
        shards=shards,
        images=images,
        order=order,
        batches=batches,
        cache=cache,
        workers=workers,
        features=_features(batches),
        columns=columns,
        mixing=_mixing(order, sources),
        repeat=repeat,
        join=join,
        extensions=(),
    )
    options = options.with_extensions(extensions_of(options))
    refuse_unusable(options)
    return Loader(options)


# What a loader doesn't use isn't imported: neither here nor in its workers.


def _facts(
    shards: Shards, batches: Batches, tokenizer: Any, join: JoinedRows | None
) -> tuple[Mapping[str, Column], Repeat | None]:
    """The columns of facts that something may ask for, and how often samples are used."""
    asks = (shards.facts, shards.repeat, batches.sample_weight, batches.cost, batches.extensions or None)
    if all(value is None for value in asks) and (join is None or not join.own_facts):
        return {}, None
    from streamload.facts.recipes import joined_facts, read_facts, read_repeat

    facts = joined_facts(shards.facts, batches.extensions)
    if join is not None:
        facts = joined_facts(facts, [join])
    columns = read_facts(facts, shards.image_key, shards.text_key, tokenizer, shards.text_key_probs, join)
    return columns, read_repeat(shards.repeat, columns)


def _features(batches: Batches) -> Mapping[str, Features]:
    if batches.features is None:
        return {}
    from streamload.derived.calls.features import read_features

    return read_features(batches.features, _TAKEN)


def _mixing(order: Order, sources: Sequence[SourceOptions]) -> Policy | Replay | None:
    if order.mixing is None:
        return None
    from streamload.steering import as_policy
    from streamload.steering.replay import Replay

    if isinstance(order.mixing, Replay):
        return order.mixing
    return as_policy(order.mixing, [source.name for source in sources])
