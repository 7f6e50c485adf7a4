"""The recipe of rows of features that are known by names, as a loader would make them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamload.derived.calls.features import Features
from streamload.derived.prepare.preparation import AUTO
from streamload.errors import OptionError
from streamload.features.assembly import bound_features, feature_assemblies
from streamload.features.named import NAME, NamedFeatures, named
from streamload.features.recipe import FeatureRecipe
from streamload.loader import make_loader
from streamload.loader.groups import Batches, Images, Shards
from streamload.loader.worker_config import assembly_of

if TYPE_CHECKING:
    from streamload.cache.shared.sharing import SharedOptions


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


def make_recipe(
    names: NamedFeatures, cache_dir: str | None = None, shared: SharedOptions | None = None
) -> FeatureRecipe:
    """The recipe of these features, anew.

    Args:
        names: of the features.
        cache_dir: where this node keeps rows, as of make_loader; another process has its own.
        shared: has the rows for other nodes; None: they are for this node.

    Raises:
        OptionError: they can't be found, or their rows can't be made ahead.
        FeatureNotCacheable: what proves their rows can't be known.
    """
    features = names.features()
    if features.inputs == "text" or features.variants > 1:
        option = 'inputs="text"' if features.inputs == "text" else f"variants={features.variants}"
        raise OptionError(
            f"{names.module} has {option}: other nodes read one row for each sample's image; make these rows "
            f"without a shared cache"
        )
    if names.prepare == AUTO:
        raise OptionError('--prepare auto is chosen by each training: name the recipe, such as "raw-256"')
    arguments = loader_arguments(names, features)
    options = make_loader("unread.tar", cache_dir=cache_dir, **arguments).options
    assembly, plain = assembly_of(options)
    (feature,) = feature_assemblies(options, plain.images)
    bound = bound_features(options, (feature,))[NAME]
    return FeatureRecipe(names, assembly, feature, bound, shared, feature_recipe)


def feature_recipe(
    names: NamedFeatures, cache_dir: str | None = None, shared: SharedOptions | None = None
) -> FeatureRecipe:
    """The recipe of these features; in one process always the same, as it has built the module."""
    which = names, cache_dir, None if shared is None else shared.url
    if which not in _recipes:
        _recipes[which] = make_recipe(names, cache_dir, shared)
    return _recipes[which]


_recipes: dict[tuple[NamedFeatures, str | None, str | None], FeatureRecipe] = {}
