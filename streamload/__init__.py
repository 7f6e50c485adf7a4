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
    DecisionsError,
    DecodeError,
    FeatureError,
    FeatureMismatch,
    FeatureNotCacheable,
    ImageTooLarge,
    LabelError,
    LimitReached,
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
    PolicyError,
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
    from streamload.derived.calls.module_cache import CacheLevel, cache_info, cache_module
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
    from streamload.steering.batch_size import BatchPolicy, Measured, SizeDecided, ThroughputBalanced
    from streamload.steering.progress import Progress
    from streamload.steering.replay import Replay
    from streamload.steering.schedule import Schedule
    from streamload.steering.target import Target
    from streamload.steering.token_shares import TokenShares
    from streamload.weights.sample import complexity


__all__ = [
    "Alert",
    "BatchPolicy",
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
    "DecisionsError",
    "DecodeError",
    "Entry",
    "FeatureError",
    "FeatureMismatch",
    "FeatureNotCacheable",
    "Features",
    "ImageTooLarge",
    "Images",
    "LabelError",
    "LimitReached",
    "Loader",
    "LoaderClosed",
    "Measured",
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
    "PolicyError",
    "Progress",
    "RankFailed",
    "Replay",
    "SampleError",
    "Schedule",
    "ShardCut",
    "ShardError",
    "ShardFormatError",
    "Shards",
    "SharedTierDenied",
    "SharedTierError",
    "SizeDecided",
    "Snapshot",
    "Source",
    "SourceSummary",
    "StateMismatch",
    "StreamloadError",
    "Summary",
    "Target",
    "ThroughputBalanced",
    "TokenShares",
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
    "BatchPolicy": "streamload.steering.batch_size",
    "Batches": "streamload.loader",
    "Cache": "streamload.loader",
    "CacheLevel": "streamload.derived.calls.module_cache",
    "Decided": "streamload.steering",
    "Entry": "streamload.shards.samples",
    "Features": "streamload.loader",
    "Images": "streamload.loader",
    "Loader": "streamload.loader",
    "Measured": "streamload.steering.batch_size",
    "Order": "streamload.loader",
    "Patches": "streamload.loader",
    "Policy": "streamload.steering",
    "Progress": "streamload.steering.progress",
    "Replay": "streamload.steering.replay",
    "Schedule": "streamload.steering.schedule",
    "Shards": "streamload.loader",
    "SizeDecided": "streamload.steering.batch_size",
    "Snapshot": "streamload.metrics",
    "Source": "streamload.loader",
    "SourceSummary": "streamload.steering",
    "Summary": "streamload.steering",
    "Target": "streamload.steering.target",
    "TokenShares": "streamload.steering.token_shares",
    "ThroughputBalanced": "streamload.steering.batch_size",
    "Verdict": "streamload.metrics.verdict",
    "Workers": "streamload.loader",
    "cache_info": "streamload.derived.calls.module_cache",
    "cache_module": "streamload.derived.calls.module_cache",
    "complexity": "streamload.weights.sample",
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
