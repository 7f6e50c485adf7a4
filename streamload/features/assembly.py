"""Features of a loader by its options: how workers make them, and what computes their rows in the rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from streamload.batches.images import ImageAssembly, by_workers
from streamload.batches.tokenize import adapt_tokenizer
from streamload.cache.selection import KeySpec
from streamload.derived.calls.features import BoundFeatures, Features
from streamload.derived.prepare.preparation import pixels_name
from streamload.derived.proof.code import Describer
from streamload.derived.store.row_store import RowPlace
from streamload.errors import FeatureNotCacheable
from streamload.features.columns import FeatureAssembly
from streamload.shards.samples import JOINED
from streamload.transforms.compile import plan_or_given
from streamload.transforms.plan import ImagePlan, clip_plan

_PROBES = ["a photo of a dog", "Zwei Männer, 3 \u2603 and 'quotes' — at 12:30!", "x" * 300]
"""Captions whose ids tell a tokenizer from others."""


def feature_assemblies(options: Any, images: ImageAssembly | None) -> tuple[FeatureAssembly, ...]:
    """Recipe by which the workers make the features of a loader.

    Args:
        options: of the loader, `LoaderOptions`.
        images: how it makes its own.

    Raises:
        FeatureNotCacheable: the images of a feature are random.
    """
    return tuple(_assembly(name, feature, images, options) for name, feature in options.features.items())


def _assembly(name: str, features: Features, images: ImageAssembly | None, options: Any) -> FeatureAssembly:
    if features.inputs == "text":
        images = None
    elif images is not None:
        preprocess = by_workers(images.preprocess)  # whose decoder is in the fingerprint of rows
        if features.preprocess is not None:
            preprocess = plan_or_given(features.preprocess, options.images.compile)
        elif options.preprocess is None and features.variants == 1:
            preprocess = clip_plan(train=False)
        if isinstance(preprocess, ImagePlan) and preprocess.is_random and features.variants == 1:
            raise FeatureNotCacheable(
                f"the images of the feature {name!r} are random, and a stored row would repeat one draw for "
                f"ever: give Features a preprocess= without random steps, or variants=K for rows of K draws"
            )
        images = replace(images, preprocess=preprocess, as_bytes=False)
    place = _place_of(features, options)
    if place is not None and place.mapped is not None:
        place = None  # only the rank reads it
    return FeatureAssembly(name, features.inputs, images, place, features.label, features.variants)


def _place_of(features: Features, options: Any) -> RowPlace | None:
    return features.place(options.settings().cache_dir, options.cache_size)


def bound_features(options: Any, assemblies: tuple[FeatureAssembly, ...]) -> dict[str, BoundFeatures]:
    """The features of a loader as the rank uses them, by name.

    Raises:
        FeatureNotCacheable: a transform can't be described.
    """
    device = options.settled_device or torch.device("cpu")
    bound: dict[str, BoundFeatures] = {}
    for assembly in assemblies:
        features = options.features[assembly.name]
        parts, place = _parts_of(assembly, options), _place_of(features, options)
        bound[assembly.name] = BoundFeatures(features, place, parts, device)
    return bound


def _parts_of(feature: FeatureAssembly, options: Any) -> dict[str, Any]:
    """Maker of the input of a feature, where a row is found by its sample."""
    images = feature.images
    if images is None:
        return {}  # rows are found by the input itself
    describer = Describer()
    parts: dict[str, Any] = {
        "image_key": options.shards.image_key,
        "prepared": "" if images.resizing is None else images.resizing.name,
        "pixels": pixels_name(),
        "transform": describer.value(images.preprocess, f"preprocess= of the feature {feature.name!r}"),
    }
    parts["patches of the transform"] = describer.patches()
    parts["code of the transform"] = describer.arranged_code
    if feature.inputs == "sample":
        tokenizer = adapt_tokenizer(options.tokenizer)
        ids = None if tokenizer is None else tokenizer(_PROBES, [0] * len(_PROBES)).ids
        parts["tokenizer"] = describer.value(ids, "the tokenizer's result")
        captions = options.captions
        several = captions is not None and len(captions.choices) > 1
        parts["text_key"] = [*captions.choices, *captions.probs] if several else options.shards.text_key
        if JOINED in KeySpec.parse(options.shards.text_key).extensions:
            parts["join"] = options.join.table.version
    return parts
