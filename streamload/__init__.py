"""Train image-text models on WebDataset tar shards while they are still arriving.

The public names. Those that need more than the standard library are loaded when they are first used, so that
`import streamload` is quick and doesn't import torch. `make_loader` is where to begin.
"""

import importlib
from typing import TYPE_CHECKING, Any

from streamload.errors import (
    BlankCaption,
    CacheCorrupt,
    CacheError,
    CacheFull,
    CaptionError,
    ClusterError,
    DataError,
    DatasetChanged,
    DecodeError,
    FeatureError,
    FeatureMismatch,
    FeatureNotCacheable,
    ImageTooLarge,
    LabelError,
    LoaderClosed,
    NotSendable,
    NoValidSamples,
    OptionError,
    OrderDiverged,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginOutage,
    OriginStopped,
    OriginTimeout,
    OriginUnavailable,
    PlanError,
    RankFailed,
    SampleError,
    ShardCut,
    ShardError,
    ShardFormatError,
    SharedTierDenied,
    SharedTierError,
    StateMismatch,
    StreamloadError,
    TooManyBadSamples,
    TooManyBadShards,
    UrlError,
    WorkerDied,
)

if TYPE_CHECKING:
    from streamload.batches.sample_weights import complexity
    from streamload.derived.module_cache import CacheLevel, cache_info, cache_module
    from streamload.loader import (
        Batches,
        Cache,
        Features,
        Images,
        Loader,
        Order,
        Patches,
        Shards,
        Source,
        Workers,
        gather_state,
        make_loader,
    )
    from streamload.metrics import Snapshot
    from streamload.metrics.alerts import Alert
    from streamload.metrics.verdict import Verdict
    from streamload.shards.samples import Entry
    from streamload.steering import Decided, Policy, SourceSummary, Summary
    from streamload.steering.progress import Progress
    from streamload.steering.schedule import Schedule
    from streamload.steering.target import Target

__all__ = [
    "Alert",
    "Batches",
    "BlankCaption",
    "Cache",
    "CacheCorrupt",
    "CacheError",
    "CacheFull",
    "CacheLevel",
    "CaptionError",
    "ClusterError",
    "DataError",
    "DatasetChanged",
    "Decided",
    "DecodeError",
    "Entry",
    "FeatureError",
    "FeatureMismatch",
    "FeatureNotCacheable",
    "Features",
    "ImageTooLarge",
    "Images",
    "LabelError",
    "Loader",
    "LoaderClosed",
    "NoValidSamples",
    "NotSendable",
    "OptionError",
    "Order",
    "OrderDiverged",
    "OriginCut",
    "OriginDenied",
    "OriginError",
    "OriginNotFound",
    "OriginOutage",
    "OriginStopped",
    "OriginTimeout",
    "OriginUnavailable",
    "Patches",
    "PlanError",
    "Policy",
    "Progress",
    "RankFailed",
    "SampleError",
    "Schedule",
    "ShardCut",
    "ShardError",
    "ShardFormatError",
    "Shards",
    "SharedTierDenied",
    "SharedTierError",
    "Snapshot",
    "Source",
    "SourceSummary",
    "StateMismatch",
    "StreamloadError",
    "Summary",
    "Target",
    "TooManyBadSamples",
    "TooManyBadShards",
    "UrlError",
    "Verdict",
    "WorkerDied",
    "Workers",
    "cache_info",
    "cache_module",
    "complexity",
    "gather_state",
    "make_loader",
]

_LATER = {
    "Alert": "streamload.metrics.alerts",
    "Verdict": "streamload.metrics.verdict",
    "Batches": "streamload.loader",
    "Workers": "streamload.loader",
    "Shards": "streamload.loader",
    "Order": "streamload.loader",
    "Patches": "streamload.loader",
    "Images": "streamload.loader",
    "Cache": "streamload.loader",
    "CacheLevel": "streamload.derived.module_cache",
    "Features": "streamload.loader",
    "Entry": "streamload.shards.samples",
    "Loader": "streamload.loader",
    "Snapshot": "streamload.metrics",
    "Source": "streamload.loader",
    "cache_info": "streamload.derived.module_cache",
    "cache_module": "streamload.derived.module_cache",
    "complexity": "streamload.batches.sample_weights",
    "Decided": "streamload.steering",
    "Policy": "streamload.steering",
    "Progress": "streamload.steering.progress",
    "Schedule": "streamload.steering.schedule",
    "SourceSummary": "streamload.steering",
    "Summary": "streamload.steering",
    "Target": "streamload.steering.target",
    "gather_state": "streamload.loader",
    "make_loader": "streamload.loader",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("streamload")
    if name not in _LATER:
        raise AttributeError(f"module 'streamload' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
