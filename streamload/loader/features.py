"""Features of a loader: how workers make them, and how a batch's values become FeatureRows in the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from streamload.batches.features import INPUTS, READ, ROWS, FeatureAssembly
from streamload.batches.images import ImageAssembly
from streamload.batches.tokenize import adapt_tokenizer
from streamload.derived.calls.feature_rows import FeatureRows, FeaturesRead
from streamload.derived.calls.features import BoundFeatures, Features
from streamload.derived.prepare.preparation import pixels_name
from streamload.derived.proof.code import Describer
from streamload.errors import FeatureNotCacheable, OptionError
from streamload.loader.options import LoaderOptions
from streamload.metrics import Counts
from streamload.transforms.compile import plan_or_given
from streamload.transforms.plan import ImagePlan, clip_plan

_PROBES = ["a photo of a dog", "Zwei Männer, 3 \u2603 and 'quotes' — at 12:30!", "x" * 300]
"""Captions whose ids tell a tokenizer from others."""


def feature_assemblies(options: LoaderOptions, images: ImageAssembly | None) -> tuple[FeatureAssembly, ...]:
    """Recipe by which the workers make the features of a loader.

    Args:
        options: of the loader.
        images: how it makes its own images.

    Raises:
        FeatureNotCacheable: the images of a feature are random.
    """
    for features in options.features.values():
        features.keep_rows_in(options.settings().cache_dir, options.cache_size)
    return tuple(_assembly(name, feature, images, options) for name, feature in options.features.items())


def _assembly(
    name: str, features: Features, images: ImageAssembly | None, options: LoaderOptions
) -> FeatureAssembly:
    if features.inputs == "text":
        images = None
    elif images is not None:
        preprocess = images.preprocess
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
    place, label = features.options.place, features.label
    if place is not None and place.mapped is not None:
        place = None  # only the rank reads it
    return FeatureAssembly(name, features.inputs, images, place, label, features.variants)


def bound_features(
    options: LoaderOptions, assemblies: tuple[FeatureAssembly, ...]
) -> dict[str, BoundFeatures]:
    """The features of a loader as the rank uses them, by name.

    Raises:
        FeatureNotCacheable: a transform can't be described.
    """
    device = options.settled_device or torch.device("cpu")
    return {
        assembly.name: BoundFeatures(options.features[assembly.name], _parts_of(assembly, options), device)
        for assembly in assemblies
    }


def _parts_of(feature: FeatureAssembly, options: LoaderOptions) -> dict[str, Any]:
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
        parts["text_key"] = options.shards.text_key
    return parts


def end_epoch(features: Mapping[str, BoundFeatures], counts: Counts) -> None:
    """Store the rows that are on their way, and count them; wait for what is being checked.

    Raises:
        FeatureMismatch: rows of the epoch aren't what their module computes.
    """
    for feature in features.values():
        feature.count(counts, at_end=True)
        feature.refuse_stale(wait=True)


def take_features(
    values: dict[str, Any], features: Mapping[str, BoundFeatures], counts: Counts
) -> dict[str, FeatureRows]:
    """Take what belongs to features out of a batch's values, and put it together, by name.

    Raises:
        OptionError: the batch has a value of a feature's name.
    """
    rows: dict[str, FeatureRows] = {}
    for name, feature in features.items():
        if name in values:
            raise OptionError(
                f"features={{{name!r}: …}}: the batch has a {name!r} already; give another name"
            )
        read: FeaturesRead = values.pop(f"{name}{READ}")
        bodies, inputs = values.pop(f"{name}{ROWS}", None), values.pop(f"{name}{INPUTS}", None)
        if feature.features.inputs == "sample" and inputs is not None:
            inputs = {"image": inputs, "text": values.pop(f"{name}{INPUTS} text")}
        stored = read.samples - len(read.missing)
        counts.add("feature_rows_read", stored)
        counts.add("feature_bytes_read", 0 if bodies is None else stored * bodies.shape[1])
        feature.count(counts, stored)
        counts.add("feature_read_ns", read.read_ns)
        rows[name] = FeatureRows(feature, read, bodies, inputs, counts)
    return rows
