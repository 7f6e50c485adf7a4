"""From options to batches in the training loop (steps A and K).

A loader is made without touching disk or network. The first `iter()` opens the tier and starts the workers,
which stay until `close()`: what they fill between two epochs is there for the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from streamload.batches.assembly import Collate, MapSample, Preprocess
from streamload.cache.selection import Keep
from streamload.loader.loader import Loader, gather_state
from streamload.loader.options import (
    ImageDtype,
    LoaderOptions,
    OnError,
    Output,
    read_device,
    refuse_arguments,
    whole_number,
)
from streamload.loader.sources import Factors, Source, read_sources
from streamload.settings import Eviction, Revalidate, Where
from streamload.urls import Urls

__all__ = ["Loader", "LoaderOptions", "Source", "gather_state", "make_loader"]


def make_loader(
    urls: Urls | Source | Sequence[Source],
    tokenizer: Any = None,
    *,
    preprocess: Preprocess | None = None,
    compile: bool = True,  # noqa: A002
    image_dtype: ImageDtype = "float32",
    prepare: str | None = None,
    max_image_pixels: int | None = None,
    batch_size: int = 64,
    num_workers: int = 4,
    num_samples: int | None = None,
    num_batches: int | None = None,
    endless: bool = False,
    seed: int = 0,
    shuffle: int | None = None,
    lanes: int | None = None,
    groups: int | None = None,
    upsampling_factors: Factors | None = None,
    train: bool = True,
    output: Output = "tuple",
    with_keys: bool = False,
    image_key: str = "jpg;png;jpeg;webp",
    text_key: str | None = "txt",
    label_key: str | None = None,
    blank_captions: bool = True,
    keep: Keep | None = None,
    map_sample: MapSample | None = None,
    collate: Collate | None = None,
    on_error: OnError = "skip",
    max_bad_samples: float | None = 0.1,
    max_bad_shards: float | None = 0.1,
    device: str | torch.device | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    cache_dir: str | Path | None = None,
    cache_size: str | int | None = None,
    ahead: str | int | None = None,
    revalidate: Revalidate | None = None,
    eviction: Eviction | None = None,
    free_disk: str | int | None = None,
    cache: Where | None = None,
    memory_size: str | int | None = None,
    shared_cache: str | Path | None = None,
    shared_cache_options: Mapping[str, Any] | None = None,
    write_back: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    prefetch_factor: int = 2,
    multiprocessing_context: str | None = None,
    **unknown: NoReturn,
) -> Loader:
    """A loader of image-caption batches from tar shards, used from the moment their bytes arrive.

    Args:
        urls: shards in the WebDataset convention: a string or path, or a list of them. Brace ranges
            (`{00000..01242}`), `::` between sources, `${X}` for the environment's WDS_X, `pipe:COMMAND`,
            `http(s)://`, `s3://` and whatever else fsspec opens, or local files, folders (their `*.tar`) and
            globs, which are never copied. Or a list of Sources, which are mixed by weight.
        tokenizer: captions to ids, called with the list of a batch: open_clip's, a transformers tokenizer, or
            any `list[str] → int64[N, L]`. None leaves captions as strings.
        preprocess: PIL image to tensor. A chain of torchvision and open_clip transforms such as open_clip's
            `preprocess_train` and `preprocess_val` is compiled if every step is known (docs/transforms.md has
            the list): a faster path to the same batch, to the bit where the package was built with a C
            compiler, else within one level of 255. So is an image processor of transformers, where that gives
            the same bits. Anything else runs as given, its random generators seeded by the sample; the log
            says which. None: open_clip's default for 224 pixels (in training a random
            resized crop, else resize and centre crop), compiled.
        compile: False runs `preprocess` as given in any case.
        image_dtype: "uint8" leaves a compiled transform's images as levels, a quarter of the bytes, to be
            normalised by the training. (With `device` they travel as uint8 anyway.)
        prepare: train on images whose short side has been resized to this, "raw-256" or, for less room,
            "jpeg-256-q90". Where the cache has prepared shards (`streamload warm --prepare`) they are read,
            and nothing but the random part is done; else each image is prepared when it is used. The pixels
            are the same either way, but not those of the original images (docs/prepared.md).
        max_image_pixels: larger images are left out, counted as `too_large`, as are those that need as much
            memory or time as these to decode (docs/transforms.md). None: 20,000,000
            (STREAMLOAD_MAX_IMAGE_PIXELS).
        batch_size: samples in a batch of one rank.
        num_workers: processes that decode; 0 does it in this process.
        num_samples: samples of an epoch over all ranks, rounded down to full batches in training. An epoch of
            a given length continues where the last one stopped; without one an epoch is one pass over all.
            In evaluation it only says how many samples there are, for `len()`.
        num_batches: the same for training, as batches of each rank; it wins over num_samples.
        endless: a training epoch has no end: pass follows pass.
        seed: of the order and of the augmentation.
        shuffle: the shuffle window: how many positions a sample may move; 0: shards and samples as listed.
            None: 40 times the samples a node reads per step, between 10,000 and 100,000; less where the
            cache can't hold the shards that this keeps open (docs/cache.md).
        lanes: shards that are read side by side. None: 8 to 64, by the samples a node reads per step; fewer
            where the cache can't hold them.
        groups: the number of sequences that the shards are split into, each read by one node. None: the
            number of nodes. For a run that may grow, give the most nodes it will ever have.
        upsampling_factors: mix the parts of `urls` between '::', a shard of each drawn as often as its factor
            says: numbers, or OpenCLIP's "1::2.5". A part's weight is its factor times its samples, by
            sizes.json, or times its shards where these aren't known.
        train: False gives each sample exactly once, as listed, with a partial last batch and no
            augmentation: the whole set in every process that iterates, unless rank and world_size are given.
            Their shares are equal to one sample by a sizes.json, else as if all shards were of one size.
            Samples that can't be used are left out of their batch, and a batch of nothing else isn't given:
            there may be fewer than `len()`.
        output: "tuple": (images float32[N, 3, H, W], texts, labels int64[N]), of these what there are keys
            for; "dict": {"image", "text", "label"}; "hf": {"pixel_values", "input_ids", "labels"} and
            whatever else tokenizer and image processor give: an "attention_mask", say.
        with_keys: add the samples' `__key__` and `__url__` lists: a dict as third element, or two entries.
        image_key: extensions that hold the image, in order of preference.
        text_key: the same for the caption; `json:caption` is a field of a JSON member. None: there are no
            captions, and batches have none.
        label_key: the same for a label, a whole number: `cls`, `json:label`. None: there are no labels.
        blank_captions: False leaves out samples whose caption is empty or only white space, like those that
            have none.
        keep: takes the index entry of a sample (key, sizes, width, height, caption_bytes); False leaves it
            out.
        map_sample: takes a raw sample (`__key__`, `__url__`, extension → bytes) and returns a dict of values,
            in place of image and caption. With preprocess= the sample has `image`, too: the image as a batch
            would have it, in the batch's memory (clone what you keep). A `__key__` or `__url__` that it
            returns is left out: those of the samples come by with_keys.
        collate: takes the list of what map_sample returned for a batch and returns the batch, a dict or a
            tuple, in the worker. None: values of one shape are stacked, others are a list.
        on_error: "skip" counts and logs what can't be used and continues; "raise" stops at the first.
        max_bad_samples: the largest share of samples that can't be used; above it TooManyBadSamples ends the
            run, once bad samples of enough shards (ten at least) make that certain. None: there is no limit.
        max_bad_shards: the largest share of shards that may be given up; above it TooManyBadShards ends the
            run, once three were and it is certain. None: there is no limit.
        device: where batches are put, as torch names it. None: they stay in the memory of this process.
        rank, world_size: this process among all. None: from torch.distributed, torchrun, Slurm or MPI.
        cache_dir: the directory of the cache (STREAMLOAD_CACHE_DIR).
        cache_size: the most it may hold: bytes, "500GB", or "80%" of what is free plus what it holds
            (STREAMLOAD_CACHE_SIZE).
        ahead: how many bytes to prefetch ahead of the readers (STREAMLOAD_AHEAD).
        revalidate: when the origin of a shard in the cache is asked whether it has changed: "never",
            before its first use in a run ("start"), or in each epoch ("always") (STREAMLOAD_REVALIDATE).
        eviction: which shard is evicted first: the one whose next use is farthest ("plan"), or the least
            recently used ("lru") (STREAMLOAD_EVICTION).
        free_disk: space that the cache leaves free on its disk: bytes, "20GB", or "5%" of the disk
            (STREAMLOAD_FREE_DISK).
        cache: where it is: "disk" (the default), "memory" (a tmpfs), or "auto": in memory if the data is
            known to fit there or no disk can be used, else on disk (STREAMLOAD_CACHE).
        memory_size: the most that a cache in memory may hold: bytes, "20GB", or "50%" of what is free
            (STREAMLOAD_MEMORY_SIZE).
        shared_cache: a folder for many nodes, in an object store or on a network, that is asked for a shard
            before its origin: "s3://bucket/folder", "/mnt/nfs/folder" (STREAMLOAD_SHARED_CACHE). If it fails
            in any way, the origin is asked.
        shared_cache_options: for its file system, as storage_options.
        write_back: store shards fetched from origins there, in the background
            (STREAMLOAD_SHARED_WRITE_BACK).
        storage_options: for fsspec: credentials, endpoint, anon; "headers" for http(s) and hf, by name, or by
            host and then by name: {"https://host": {"Authorization": "…"}}.
        prefetch_factor: batches that each worker makes in advance.
        multiprocessing_context: "fork", "spawn" or "forkserver"; None: Python's default.
        unknown: refused; for an argument of torch's DataLoader the error names the equivalent.

    Returns:
        A Loader; nothing is read and no process is started before it is iterated.

    Raises:
        OptionError: an argument or a URL that can't be used.
    """
    given = dict(locals())
    refuse_arguments(given.pop("unknown"), given)
    given["sources"] = read_sources(given.pop("urls"), given.pop("upsampling_factors"))
    given["device"] = None if device is None else read_device(device)
    given["seed"] = whole_number("seed", seed)
    return Loader(LoaderOptions(**given))
