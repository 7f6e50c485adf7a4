"""Names of arguments that make_loader or one of its groups doesn't have: what to give instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import NamedTuple


class Word(NamedTuple):
    """A name of another library.

    Attributes:
        library: that has it.
        instead: what a loader has in its place.
    """

    library: str
    instead: str


_URLS = "give the shards as urls="
_NO_DRAWS = "each pass has every sample once, and shards are never drawn with replacement"
_FOUND = "ranks and workers are found, and share every pass"
_LENGTH = "Order(num_batches=…) in batches of a rank, num_samples= in samples of all ranks"
_SELECTED = "Shards(keep=…) selects samples"
_SIZE = "preprocess= makes images of its own size"
_RETRIED = "transfers are retried by themselves; Cache(origin_wait=…) limits outages"

WORDS = {
    "batch": Word("other loaders", "it is batch_size="),
    "batch_sampler": Word("torch", "batch_size=, shuffle= and seed= decide how batches are made"),
    "batched": Word("webdataset", "it is batch_size="),
    "buffer_size": Word("datasets", "it is shuffle="),
    "bufsize": Word("webdataset", "it is shuffle="),
    "cache_limit": Word("MosaicML Streaming", "it is cache_size="),
    "cache_size_gb": Word("other loaders", 'it is cache_size=, such as "100GB"'),
    "caption_key": Word("other loaders", "it is Shards(text_key=…)"),
    "collate_fn": Word(
        "torch", "Workers(map_sample=…) makes examples of any form, Workers(collate=…) batches of them"
    ),
    "context_length": Word("open_clip", "ids have the length of tokenizer=, which is made with it"),
    "data_dir": Word("datasets", _URLS),
    "data_files": Word("datasets", _URLS),
    "dataset": Word("torch", _URLS),
    "dataset_resampled": Word("open_clip", _NO_DRAWS),
    "detshuffle": Word("webdataset", "the order always follows seed= and the epoch"),
    "download_retry": Word("MosaicML Streaming", _RETRIED),
    "download_timeout": Word("MosaicML Streaming", _RETRIED),
    "drop_last": Word(
        "torch", "training has only full batches (train=True), evaluation has the last one, too"
    ),
    "empty_check": Word("webdataset", "a pass in which nothing can be used is an error"),
    "epoch_length": Word("other loaders", _LENGTH),
    "epoch_size": Word("MosaicML Streaming", "it is num_samples="),
    "epochs": Word("webdataset", "iterate the loader once for each epoch; Order(endless=True) never ends"),
    "filter": Word("datasets", _SELECTED),
    "generator": Word("torch", "seed= seeds all random choices"),
    "handler": Word(
        "webdataset", 'Shards(on_error="skip") counts samples that can\'t be used, "raise" stops at the first'
    ),
    "image_column": Word("transformers", "it is Shards(image_key=…)"),
    "image_size": Word("open_clip", _SIZE),
    "img_size": Word("timm", _SIZE),
    "in_order": Word("torch", "batches always come in the order of the seed"),
    "input_dir": Word("LitData", _URLS),
    "is_train": Word("open_clip", "it is train="),
    "local": Word("MosaicML Streaming", "it is cache_dir="),
    "map": Word("webdataset", "it is Workers(map_sample=…), from the raw sample to a dict"),
    "max_cache_size": Word("LitData", "it is cache_size="),
    "max_length": Word(
        "transformers",
        "ids have the length of tokenizer=: give its model_max_length, or a function that calls it",
    ),
    "nodesplitter": Word("webdataset", _FOUND),
    "num_canonical_nodes": Word("MosaicML Streaming", "Order(groups=…): the most nodes that a run will have"),
    "num_proc": Word("datasets", "it is num_workers="),
    "num_samples_per_epoch": Word("other loaders", "it is num_samples="),
    "paths": Word("other loaders", _URLS),
    "persistent_workers": Word("torch", "workers stay until close()"),
    "pin_memory": Word("torch", "with device= batches are copied from pinned memory, ahead of their use"),
    "pin_memory_device": Word("torch", "device= says where batches are put"),
    "predownload": Word("MosaicML Streaming", "shards are filled ahead by themselves, within cache_size="),
    "proportion": Word("MosaicML Streaming", "give a list of Source as urls=, with Source(weight=…)"),
    "remote": Word("MosaicML Streaming", _URLS),
    "rename": Word(
        "webdataset",
        "Shards(image_key=…, text_key=…, label_key=…) name the members; output= names the values",
    ),
    "resampled": Word("webdataset", _NO_DRAWS),
    "sampler": Word(
        "torch", "shuffle=, seed=, Shards(keep=…), Source(weight=…) decide which samples come, in which order"
    ),
    "sampling_method": Word("MosaicML Streaming", _NO_DRAWS),
    "select": Word("webdataset", _SELECTED),
    "shardshuffle": Word("webdataset", "shuffle= mixes shards and samples"),
    "shuffle_algo": Word("MosaicML Streaming", "shuffle= is the window of samples that are mixed"),
    "shuffle_block_size": Word("MosaicML Streaming", "it is shuffle="),
    "shuffle_buffer": Word("other loaders", "it is shuffle="),
    "shuffle_seed": Word("MosaicML Streaming", "it is seed="),
    "split": Word("datasets", "give the shards of the split as urls=; train=False evaluates"),
    "steps_per_epoch": Word("other loaders", _LENGTH),
    "streaming": Word("datasets", "shards always stream, and what came is kept in cache_dir="),
    "streams": Word("MosaicML Streaming", "give a list of Source as urls="),
    "subsample": Word("LitData", _SELECTED),
    "timeout": Word("torch", "long waits for a batch are logged; Cache(origin_wait=…) limits outages"),
    "train_data": Word("open_clip", _URLS),
    "train_data_upsampling_factors": Word("open_clip", "it is Order(upsampling_factors=…)"),
    "train_num_samples": Word("open_clip", "it is num_samples="),
    "transform": Word("LitData", "preprocess= gets the image, Workers(map_sample=…) the raw sample"),
    "transforms": Word("LitData", "preprocess= gets the image, Workers(map_sample=…) the raw sample"),
    "url": Word("other loaders", _URLS),
    "validate_hash": Word("MosaicML Streaming", "all bytes are checked by checksums"),
    "with_epoch": Word("webdataset", _LENGTH),
    "worker_init_fn": Word(
        "torch", "workers have the environment of this process, and seed= seeds all random choices"
    ),
    "workersplitter": Word("webdataset", _FOUND),
}
"""Arguments of libraries that people come from; docs/guides/from-webdataset.md has the same table."""

_RENAMED = {
    "max_image_pixels": "images=Images(max_pixels=…)",
    "shared_cache": "cache=Cache(shared=…)",
    "shared_cache_options": "cache=Cache(shared_options=…)",
}
"""Arguments of commands and integrations that a group has under another name."""


def instead_of(name: str, arguments: Collection[str], groups: Mapping[str, type]) -> str:
    """Hint at the argument to give in place of an unknown one.

    Args:
        name: as it was given.
        arguments: those that there are.
        groups: the classes of the groups by the names of make_loader's arguments.
    """
    if name in WORDS:
        return WORDS[name].instead
    in_groups = {
        entry.name: f"{argument}={group.__name__}({entry.name}=…)"
        for argument, group in groups.items()
        for entry in fields(group)
    } | _RENAMED
    if name in in_groups and name not in arguments:
        return f"it is {in_groups[name]}"
    near = next((match for names in (arguments, in_groups) for match in _spelt_like(name, names)), None)
    if near is None:
        return "see help(streamload.make_loader)"
    return f"is {f'{near}=' if near in arguments else in_groups[near]} meant?"


def _spelt_like(name: str, names: Collection[str]) -> list[str]:
    """Return the names that another one is a slip of: one letter more, less, other, or in another place."""
    return [other for other in names if _short_of_a_letter(name) & _short_of_a_letter(other)]


def _short_of_a_letter(name: str) -> set[str]:
    return {name, *(name[:at] + name[at + 1 :] for at in range(len(name)))}
