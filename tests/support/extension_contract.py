"""The contract suite of streamload's own extensions, which a loader makes of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from streamload.extension import Extension
from streamload.loader.loader import Loader
from streamload.testing.extension import BATCH, ExtensionContract
from streamload.testing.resume import Layout
from tests.support import flat


def ids(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption), *caption.encode()[:3]] for caption in captions])


def pixels(image: Any) -> torch.Tensor:
    return torch.tensor([float(image.size[0])])


class FeatureContract(ExtensionContract):
    """What holds for an extension of streamload's own.

    Attributes:
        asked: the options by which a loader makes it.
        kinds: the classes of the extensions that a loader with these options has, and its run.
        options: of a loader with and without it, as those of `flat.make_loader`.
        tokenizer: of both.
    """

    extension = Extension()  # a loader makes them
    asked: Mapping[str, Any]
    kinds: tuple[type[Extension], ...]
    layout = Layout(1, 0)
    tokenizer = staticmethod(ids)

    def make(self, urls: Any, *, is_extended: bool = True, **layout: Any) -> Loader:
        defaults = {"num_workers": 0, "batch_size": BATCH, "preprocess": pixels, "cache_size": "1GB"}
        defaults |= {"output": "dict", "with_keys": True, "groups": 1}
        asked = self.asked if is_extended else {}
        return flat.make_loader(urls, self.tokenizer, **{**defaults, **self.options, **layout, **asked})

    def forms(self, folder: Path) -> Sequence[Extension]:
        """The extensions of a loader and of its run, which one without the options hasn't."""
        urls = self.write_data(folder / "shards")

        def extensions(is_extended: bool) -> list[Extension]:
            with self.make(urls, is_extended=is_extended, cache_dir=folder / "cache") as loader:
                next(iter(loader))
                return [*loader.options.extensions, *loader._pool.extensions]

        plain = set(map(type, extensions(False)))
        forms = [extension for extension in extensions(True) if type(extension) not in plain]
        assert set(map(type, forms)) == set(self.kinds)
        return forms
