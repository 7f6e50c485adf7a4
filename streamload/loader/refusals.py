"""Refusals: arguments of make_loader that can't be used, or not together, and what to give instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from streamload.batches.tokenize import refuse_unknown_padding
from streamload.cache.selection import KeySpec
from streamload.errors import OptionError
from streamload.loader.groups import GROUPS
from streamload.loader.options import LoaderOptions
from streamload.shards.columns import TOKENS
from streamload.shards.samples import JOINED


def refuse_unusable(options: LoaderOptions) -> None:
    """Refuse options that can't be used together.

    Raises:
        OptionError: it says which, and what to give instead.
    """
    for extension in options.extensions:
        extension.refuse_unusable(options)
    _refuse_unused_keys(options)
    _refuse_counts_of_drawn(options)
    _refuse_training_options(options)
    if options.images.prepare is not None and options.workers.map_sample is not None:
        raise OptionError(
            "prepare= is for images that streamload decodes, and map_sample= gets their bytes: leave "
            "prepare= out, and where decoding takes too long, write the shards anew with smaller images"
        )
    if options.images.dtype == "uint8":
        _refuse_uint8_of_given(options)
    if options.batches.text_columns:
        _refuse_unusable_columns(options)


def _refuse_training_options(options: LoaderOptions) -> None:
    """Refuse options of training in an evaluation, and endless= with a length."""
    sized = options.num_batches is not None or options.num_samples is not None
    if not options.train and options.num_batches is not None:
        raise OptionError(
            "num_batches= is for training: an evaluation yields each sample once (num_samples= may say "
            "how many there are)"
        )
    if options.order.endless and (sized or not options.train):
        raise OptionError("endless= is for training, without num_samples= and num_batches=")
    if options.repeat is not None and not options.train:
        raise OptionError("repeat= is for training: an evaluation yields each sample once")
    if len(options.sources) > 1 and not options.train:
        raise OptionError(
            "sources are mixed in training; an evaluation yields each sample once: join URLs by '::'"
        )
    if options.order.groups is not None and not options.train:
        raise OptionError("groups= is for training: in an evaluation each rank has a group of its own")


def _refuse_unusable_columns(options: LoaderOptions) -> None:
    """Refuse columns of captions in other batches than a model's inputs, and where there are no ids."""
    columns = options.batches.text_columns
    if options.output != "hf":
        raise OptionError(f'text_columns={columns!r} is for output="hf"')
    if "labels" in columns and options.shards.label_key is not None:
        raise OptionError(
            "label_key= makes labels, too: leave it out, or leave 'labels' out of text_columns="
        )
    refuse_unknown_padding(f"text_columns={columns!r}", options.tokenizer, columns)


def _refuse_uint8_of_given(options: LoaderOptions) -> None:
    """Refuse a transform whose images can't be had as uint8: one that isn't compiled."""
    is_mapped = options.workers.map_sample is not None and options.preprocess is None
    if is_mapped or (options.preprocess is not None and not options.images.compile):
        raise OptionError(
            'Images(dtype="uint8") is for a compiled preprocess=, not for functions that run as given'
        )
    if options.preprocess is not None and not any(part.takes_preprocess for part in options.extensions):
        from streamload.transforms.compile import compile_transform
        from streamload.transforms.plan import NotRecognised

        try:
            compile_transform(options.preprocess)
        except NotRecognised as exc:
            raise OptionError(
                f'Images(dtype="uint8") is for a preprocess= that can be compiled: {exc}'
            ) from exc


def _refuse_unused_keys(options: LoaderOptions) -> None:
    """Refuse arguments for members that the keys don't select, and keys of a file that isn't joined."""
    for name in ("text_key", "label_key"):
        text = getattr(options.shards, name)
        if options.join is None and text is not None and JOINED in KeySpec.parse(text).extensions:
            raise OptionError(f"{name}={text!r} needs the file: Shards(join=…)")
    if options.workers.map_sample is not None:
        for name, value in (("tokenizer", options.tokenizer), ("label_key", options.shards.label_key)):
            if value is not None:
                raise OptionError(
                    f"map_sample= makes the whole example: {name}= can't be combined with it "
                    f"(preprocess= can: it decodes the sample's image)"
                )
    elif options.shards.image_key is None:
        raise OptionError(
            "image_key=None; expected a string such as 'jpg;png'. For samples without images give "
            "workers=Workers(map_sample=…), a function from the raw sample to a dict"
        )
    elif options.shards.text_key is None and options.tokenizer is not None:
        raise OptionError("text_key=None selects no captions: tokenizer= can't be combined with it")
    elif options.output == "hf" and options.tokenizer is None and options.shards.text_key is not None:
        raise OptionError(
            'output="hf" has input_ids: give a tokenizer, or text_key=None if there are no captions'
        )


def _refuse_counts_of_drawn(options: LoaderOptions) -> None:
    """Refuse extensions that go by the length of captions where captions are drawn."""
    if options.captions is not None and any(TOKENS in extension.facts for extension in options.extensions):
        options.captions.refuse_token_counts()


def refuse_arguments(unknown: Mapping[str, Any], arguments: Collection[str]) -> None:
    """Refuse arguments that make_loader doesn't have.

    Args:
        unknown: the arguments.
        arguments: the names of those that it has.

    Raises:
        OptionError: it names the group that has the argument, a similar name, or what to use instead of an
            argument of another library.
    """
    if unknown:
        from streamload.loader.words import instead_of
    for name in unknown:
        raise OptionError(f"make_loader has no argument {name}=: {instead_of(name, arguments, GROUPS)}")


def refuse_other_groups(**groups: object) -> None:
    """Refuse a value of another type as a group.

    Raises:
        OptionError: it names the group's class.
    """
    for name, group in groups.items():
        if not isinstance(group, GROUPS[name]):
            raise OptionError(f"{name}={group!r:.100}; expected a streamload.{GROUPS[name].__name__}(…)")
