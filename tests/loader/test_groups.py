"""The groups of make_loader: a misplaced argument is told its place, and what is wrong fails early."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import streamload
from streamload import Cache, Images, Order, Shards, Workers
from streamload.errors import OptionError
from streamload.loader.groups import GROUPS
from streamload.loader.words import WORDS
from streamload.options import Settings, options

IN_GROUPS = {
    "compile": "images=Images(compile=…)",
    "prepare": "images=Images(prepare=…)",
    "max_image_pixels": "images=Images(max_pixels=…)",
    "endless": "order=Order(endless=…)",
    "lanes": "order=Order(lanes=…)",
    "groups": "order=Order(groups=…)",
    "upsampling_factors": "order=Order(upsampling_factors=…)",
    "rank": "order=Order(rank=…)",
    "world_size": "order=Order(world_size=…)",
    "num_batches": "order=Order(num_batches=…)",
    "mixing": "order=Order(mixing=…)",
    "with_keys": "batches=Batches(with_keys=…)",
    "features": "batches=Batches(features=…)",
    "on_error": "shards=Shards(on_error=…)",
    "image_key": "shards=Shards(image_key=…)",
    "text_key": "shards=Shards(text_key=…)",
    "label_key": "shards=Shards(label_key=…)",
    "blank_captions": "shards=Shards(blank_captions=…)",
    "keep": "shards=Shards(keep=…)",
    "max_bad_samples": "shards=Shards(max_bad_samples=…)",
    "max_bad_shards": "shards=Shards(max_bad_shards=…)",
    "storage_options": "shards=Shards(storage_options=…)",
    "map_sample": "workers=Workers(map_sample=…)",
    "collate": "workers=Workers(collate=…)",
    "prefetch_factor": "workers=Workers(prefetch_factor=…)",
    "multiprocessing_context": "workers=Workers(multiprocessing_context=…)",
    "ahead": "cache=Cache(ahead=…)",
    "revalidate": "cache=Cache(revalidate=…)",
    "free_disk": "cache=Cache(free_disk=…)",
    "memory_size": "cache=Cache(memory_size=…)",
    "shared_cache": "cache=Cache(shared=…)",
    "shared_cache_options": "cache=Cache(shared_options=…)",
    "write_back": "cache=Cache(write_back=…)",
}


@pytest.mark.parametrize("name", IN_GROUPS)
def test_an_argument_that_belongs_into_a_group_is_told_which(name):
    with pytest.raises(OptionError) as refused:
        streamload.make_loader("a.tar", **{name: 1})
    assert f"make_loader has no argument {name}=: it is {IN_GROUPS[name]}" in str(refused.value)


def test_an_argument_that_is_nearly_one_of_a_group_is_told_which():
    with pytest.raises(OptionError, match=r"image_keys=: is shards=Shards\(image_key=…\) meant\?"):
        streamload.make_loader("a.tar", image_keys="png")


@pytest.mark.parametrize(
    ("group", "name", "instead"),
    [
        (Workers, "num_workers_", "see help"),
        (Images, "dtyp", r"is dtype= meant\?"),
        (Images, "lanes", r"it is order=Order\(lanes=…\)"),
        (Shards, "handler", 'on_error="skip"'),
    ],
)
def test_an_argument_that_a_group_does_not_have_is_told_what_to_use(group, name, instead):
    with pytest.raises(OptionError, match=f"{group.__name__} has no argument {name}=: .*{instead}"):
        group(**{name: 1})


_HELP = "see help(streamload.make_loader)"
_NAMES = {
    "anonymous": _HELP,
    "batched": "batch_size=",
    "batchsize": "batch_size=",
    "bf16": _HELP,
    "bs": _HELP,
    "bufsize": "shuffle=",
    "cache_size_gb": "cache_size=",
    "cachedir": "cache_dir=",
    "caption_key": "Shards(text_key=…)",
    "class_key": _HELP,
    "collate_fn": "Workers(collate=…)",
    "compression": _HELP,
    "data_dir": "urls=",
    "dataset_size": _HELP,
    "decoder": "Images(decode=…)",
    "device_ids": _HELP,
    "drop_last": "train=True",
    "evaluate": _HELP,
    "handler": 'Shards(on_error="skip")',
    "hf_token": _HELP,
    "image_size": "preprocess=",
    "img_size": "preprocess=",
    "keep_in_memory": _HELP,
    "label_keys": "Shards(label_key=…)",
    "max_length": "tokenizer=",
    "max_retries": _HELP,
    "max_samples": _HELP,
    "max_steps": _HELP,
    "mode": _HELP,
    "normalize": _HELP,
    "num_examples": _HELP,
    "num_samples_per_epoch": "num_samples=",
    "num_steps": _HELP,
    "num_threads": _HELP,
    "path": _HELP,
    "paths": "urls=",
    "persistent_workers": "close()",
    "pil": _HELP,
    "pin_memory": "device=",
    "predicate": _HELP,
    "prefetch_factor": "Workers(prefetch_factor=…)",
    "random_seed": _HELP,
    "rename": "Shards(image_key=…",
    "resampled": "each pass has every sample once",
    "return_keys": _HELP,
    "sampling_weights": _HELP,
    "select": "Shards(keep=…)",
    "shard": "shards=",
    "shardshuffle": "shuffle=",
    "shuffle_buffer": "shuffle=",
    "token": _HELP,
    "tokenize": "tokenizer=",
    "train_shards": _HELP,
    "url": "urls=",
    "with_epoch": "Order(num_batches=…)",
    "workers_per_gpu": _HELP,
    "world": _HELP,
}


@pytest.mark.parametrize(("name", "instead"), _NAMES.items())
def test_a_name_of_another_loader_gets_the_right_argument_or_no_guess(name, instead):
    with pytest.raises(OptionError, match=re.escape(f"no argument {name}=: ")) as refused:
        streamload.make_loader("a.tar", **{name: 1})
    assert instead in str(refused.value).partition("=: ")[2]


def test_words_of_other_libraries_are_told_what_to_use_and_the_guide_has_them_all():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "from-webdataset.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|`]+) \| (.*) \|$", guide, re.MULTILINE)
    assert {name: (of, instead.replace("`", "")) for name, of, instead in rows} == WORDS
    for name, word in WORDS.items():
        with pytest.raises(OptionError) as refused:
            streamload.make_loader("a.tar", **{name: 1})
        assert f"make_loader has no argument {name}=: {word.instead}" in str(refused.value)


@pytest.mark.parametrize(("name", "value"), [("cache", "memory"), ("order", {"lanes": 2}), ("shards", None)])
def test_a_value_in_place_of_a_group_fails_naming_the_class(name, value):
    group = GROUPS[name].__name__
    with pytest.raises(OptionError, match=rf"{name}=.*; expected a streamload.{group}\(…\)"):
        streamload.make_loader("a.tar", **{name: value})


@pytest.mark.parametrize(
    ("group", "given", "says"),
    [
        (Cache, {"where": "ram"}, "where='ram'; expected one of 'auto', 'disk', 'memory'"),
        (Cache, {"memory_size": "120%"}, "memory_size='120%' is not a share of the free memory"),
        (Cache, {"ahead": "far"}, "ahead='far' is not a size"),
        (Cache, {"origin_wait": -1}, "origin_wait=-1 is not a number of seconds"),
        (Cache, {"shared": "https://host/x?token=swordfish"}, "shared="),
        (Images, {"dtype": "int8"}, "dtype='int8'; expected one of 'float32', 'uint8'"),
        (Images, {"max_pixels": 0}, "max_pixels=0; expected a whole number of at least 1"),
        (Images, {"prepare": "raw-"}, "raw"),
        (Order, {"lanes": 0}, "lanes=0; expected a whole number of at least 1"),
        (Order, {"rank": 1}, "give rank and world_size together"),
        (Shards, {"image_key": 7}, "image_key=7"),
        (Shards, {"label_type": "long"}, "label_type='long'"),
        (Shards, {"max_bad_shards": 7}, "max_bad_shards=7; expected a share from 0 to 1"),
        (Workers, {"prefetch_factor": 0}, "prefetch_factor=0; expected a whole number of at least 1"),
        (Workers, {"multiprocessing_context": "threads"}, "multiprocessing_context='threads'"),
        (Workers, {"collate": list}, "collate= makes batches of the examples of map_sample="),
    ],
)
def test_a_value_that_can_not_be_used_fails_when_the_group_is_made(group, given, says):
    with pytest.raises(OptionError) as refused:
        group(**given)
    assert says in str(refused.value)
    assert "swordfish" not in str(refused.value)


def test_groups_are_frozen_and_show_no_secrets():
    cache = Cache(shared="s3://key:swordfish@bucket/x", shared_options={"secret": "swordfish"})
    shards = Shards(storage_options={"secret": "swordfish"})
    assert "swordfish" not in repr(cache) + repr(shards)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.where = "memory"


def test_each_option_that_has_a_variable_is_an_argument_and_described_where_it_is():
    for option in (one for one in options() if one.argument):
        group, _, field = option.argument.rpartition(".")
        place = GROUPS[group] if group else streamload.make_loader
        assert (field or option.argument) in inspect.signature(place).parameters
        assert option.variable in place.__doc__, option.name


def test_the_fields_of_the_groups_reach_the_settings(tmp_path):
    loader = streamload.make_loader(
        str(tmp_path / "a.tar"),
        cache_dir=tmp_path / "cache",
        cache_size="7GB",
        images=Images(max_pixels=99),
        cache=Cache(
            where="auto", ahead="2MB", shared=str(tmp_path / "shared"), write_back=True, origin_wait=3
        ),
    )
    settings = loader.options.settings()
    assert isinstance(settings, Settings)
    assert (settings.cache_dir, settings.cache_size.size_bytes) == (tmp_path / "cache", 7 * 10**9)
    assert (settings.max_image_pixels, settings.cache, settings.ahead) == (99, "auto", 2_000_000)
    assert (settings.shared_cache, settings.write_back) == (str(tmp_path / "shared"), True)
    assert settings.origin_wait == 3.0
    assert settings.sources["shared_wait"] == "default"


def test_make_loader_has_at_most_twenty_arguments():
    assert len(inspect.signature(streamload.make_loader).parameters.keys() - {"unknown"}) <= 20
    for group in GROUPS.values():
        assert len(dataclasses.fields(group)) <= 16
