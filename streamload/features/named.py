"""Features of a training by names, as on a command line, so that any process can make them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamload.derived.calls.features import Features
from streamload.errors import OptionError

NAME = "features"
"""The name that they have in a batch."""


@dataclass(frozen=True, slots=True)
class NamedFeatures:
    """Features of a training by the names of its parts, as on a command line; any process can make them.

    Attributes:
        module: package.module:name of a module or Features, or of what makes one when called.
        preprocess, tokenizer: package.module:name of the training's; None: it has none.
        image_key, text_key, prepare: as of the training.
        batch_size: samples that are computed together.
        device: where the module computes; None: where it is.
    """

    module: str
    preprocess: str | None = None
    tokenizer: str | None = None
    image_key: str = "jpg;png;jpeg;webp"
    text_key: str = "txt"
    prepare: str | None = None
    batch_size: int = 64
    device: str | None = None

    def features(self) -> Features:
        """The features, on their device; a module that a class makes is in eval mode.

        Raises:
            OptionError: nothing of that name is there, or can be features.
        """
        feature = named(self.module)
        if not isinstance(feature, torch.nn.Module | Features):
            if not callable(feature):
                raise OptionError(
                    f"--module {self.module}: expected a module, Features, or a class or function that "
                    f"makes one"
                )
            feature = feature()
            if isinstance(feature, torch.nn.Module):
                feature.eval()
        features = feature if isinstance(feature, Features) else Features(feature)
        if self.device is not None:
            features.module.to(self.device)
        return features


def named(name: str) -> Any:
    """The object that `package.module:name` names; packages in the working directory are found.

    Raises:
        OptionError: there is nothing of that name.
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value: Any = importlib.import_module(module)
        for step in attribute.split("."):
            value = getattr(value, step)
    except (ImportError, AttributeError, ValueError) as exc:
        raise OptionError(f"{name!r} can't be imported ({exc}); expected package.module:name") from exc
    return value
