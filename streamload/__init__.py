"""Train image-text models on WebDataset tar shards while they are still arriving.

`make_loader` is where to begin:

    loader = streamload.make_loader("https://example.org/{00000..00999}.tar", tokenizer)
    for images, ids in loader:
        ...

Options come in groups (`Shards`, `Images`, `Order`, `Batches`, `Cache`, `Workers`); errors are in
`streamload.errors`, policies in `streamload.mixing` and `streamload.batching`, lists of image sizes in
`streamload.aspects`, the contract of features of your own in `streamload.extension`, shards and servers for
tests in `streamload.testing`. Names are loaded when they are first used, so that `import streamload` is quick
and doesn't import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from streamload import errors
from streamload.errors import StreamloadError

if TYPE_CHECKING:
    from streamload import batching, mixing
    from streamload.derived.calls.features import Features
    from streamload.derived.calls.module_cache import CacheLevel, cache_info, cache_module
    from streamload.join.options import Join
    from streamload.loader import (
        Batches,
        Cache,
        Images,
        Loader,
        Order,
        Shards,
        Source,
        Workers,
        gather_state,
        make_loader,
    )
    from streamload.metrics import Snapshot
    from streamload.metrics.findings import Alert, Verdict
    from streamload.observe.shown import show
    from streamload.pack.writer import ShardWriter
    from streamload.patches.options import Patches
    from streamload.shards.samples import Entry
    from streamload.weights.sample import complexity


__all__ = [
    "Alert",
    "Batches",
    "Cache",
    "CacheLevel",
    "Entry",
    "Features",
    "Images",
    "Join",
    "Loader",
    "Order",
    "Patches",
    "ShardWriter",
    "Shards",
    "Snapshot",
    "Source",
    "StreamloadError",
    "Verdict",
    "Workers",
    "batching",
    "cache_info",
    "cache_module",
    "complexity",
    "errors",
    "gather_state",
    "make_loader",
    "mixing",
    "show",
]

_LATER = dict.fromkeys(["CacheLevel", "cache_info", "cache_module"], "streamload.derived.calls.module_cache")
_LATER |= dict.fromkeys(["Batches", "Cache", "Images", "Loader", "Order"], "streamload.loader")
_LATER |= dict.fromkeys(["Shards", "Source", "Workers"], "streamload.loader")
_LATER |= {"Features": "streamload.derived.calls.features", "Patches": "streamload.patches.options"}
_LATER |= dict.fromkeys(["gather_state", "make_loader"], "streamload.loader")
_LATER |= dict.fromkeys(["Snapshot"], "streamload.metrics")
_LATER |= dict.fromkeys(["Alert", "Verdict"], "streamload.metrics.findings")
_LATER |= dict.fromkeys(["Entry"], "streamload.shards.samples")
_LATER |= dict.fromkeys(["Join"], "streamload.join.options")
_LATER |= dict.fromkeys(["ShardWriter"], "streamload.pack.writer")
_LATER |= {"complexity": "streamload.weights.sample", "show": "streamload.observe.shown"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("streamload")
    if name in ("mixing", "batching"):
        return importlib.import_module(f"streamload.{name}")
    if name in _LATER:
        value = getattr(importlib.import_module(_LATER[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'streamload' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
