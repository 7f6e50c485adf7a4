"""The recipe of derived shards with rows of features that are known by names, as a loader would make them."""

from __future__ import annotations

import functools
from typing import Any

from streamload.derived.calls.features import Features
from streamload.derived.prepare.preparation import AUTO
from streamload.errors import OptionError
from streamload.features.assembly import bound_features, feature_assemblies
from streamload.features.named import NAME, NamedFeatures, named
from streamload.features.recipe import FeatureRecipe
from streamload.loader import make_loader
from streamload.loader.groups import Batches, Images, Shards
from streamload.loader.worker_config import assembly_of


def loader_arguments(names: NamedFeatures, features: Features) -> dict[str, Any]:
    """The arguments of make_loader for a loader of named features, beside the URLs."""
    return {
        "tokenizer": None if names.tokenizer is None else named(names.tokenizer),
        "preprocess": None if names.preprocess is None else named(names.preprocess),
        "batch_size": names.batch_size,
        "train": False,
        "output": "dict",
        "shards": Shards(
            image_key=names.image_key,
            text_key=names.text_key if features.inputs != "image" else None,
            max_bad_samples=None,
        ),
        "images": Images(prepare=names.prepare),
        "batches": Batches(features={NAME: features}),
    }


def make_recipe(names: NamedFeatures, cache_dir: str | None = None) -> FeatureRecipe:
    """The recipe of these features, anew.

    Args:
        names: of the features.
        cache_dir: where this node keeps rows, too, as of make_loader; another process has its own.

    Raises:
        OptionError: they can't be found, or their rows can't be in derived shards.
        FeatureNotCacheable: what proves their rows can't be known.
    """
    features = names.features()
    if features.inputs == "text" or features.variants > 1:
        option = 'inputs="text"' if features.inputs == "text" else f"variants={features.variants}"
        raise OptionError(
            f"{names.module} has {option}: derived shards have one row for each sample's image; make "
            f"these rows without a shared cache, in the store of rows"
        )
    if names.prepare == AUTO:
        raise OptionError('--prepare auto is chosen by each training: name the recipe, such as "raw-256"')
    arguments = loader_arguments(names, features)
    options = make_loader("unread.tar", cache_dir=cache_dir, **arguments).options
    assembly, plain = assembly_of(options)
    (feature,) = feature_assemblies(options, plain.images)
    bound = bound_features(options, (feature,))[NAME]
    return FeatureRecipe(names, assembly, feature, bound, feature_recipe)


@functools.lru_cache(maxsize=8)
def feature_recipe(names: NamedFeatures, cache_dir: str | None = None) -> FeatureRecipe:
    """The recipe of these features; in one process always the same, as it has built the module."""
    return make_recipe(names, cache_dir)
