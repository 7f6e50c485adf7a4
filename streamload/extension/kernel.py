"""The kernel's classes that hooks of an extension get or return, as `streamload.extension` has them.

The kernel, which calls these hooks, lies above this room, and most of it needs torch: type checkers see the
classes, and a process imports one when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from streamload.batches.assembly import BatchAssembly
    from streamload.batches.images import ImageMaker, Preprocess
    from streamload.batches.in_progress import Allocate, Bounds
    from streamload.loader.options import LoaderOptions
    from streamload.loader.output import BatchInfo
    from streamload.loader.position import Position
    from streamload.loader.rank_run import Run
    from streamload.transforms.plan import ImagePlan
    from streamload.worker.extensions import BatchRows, ShardRows, StepsAhead, WorkerProcess
    from streamload.worker.messages import Batch, EpochStart, WorkerConfig
    from streamload.worker.reader import Reader
    from streamload.worker.sampler import RankStep, Sampler

    MakesImages: TypeAlias = ImagePlan | ImageMaker | Preprocess

__all__ = [
    "Allocate",
    "Batch",
    "BatchAssembly",
    "BatchInfo",
    "BatchRows",
    "Bounds",
    "EpochStart",
    "LoaderOptions",
    "MakesImages",
    "Position",
    "RankStep",
    "Reader",
    "Run",
    "Sampler",
    "ShardRows",
    "StepsAhead",
    "WorkerConfig",
    "WorkerProcess",
    "torch",
]

CLASSES = {
    "Batch": "streamload.worker.messages",
    "BatchAssembly": "streamload.batches.assembly",
    "BatchInfo": "streamload.loader.output",
    "BatchRows": "streamload.worker.extensions",
    "EpochStart": "streamload.worker.messages",
    "LoaderOptions": "streamload.loader.options",
    "Position": "streamload.loader.position",
    "RankStep": "streamload.worker.sampler",
    "Reader": "streamload.worker.reader",
    "Run": "streamload.loader.rank_run",
    "Sampler": "streamload.worker.sampler",
    "ShardRows": "streamload.worker.extensions",
    "StepsAhead": "streamload.worker.extensions",
    "WorkerConfig": "streamload.worker.messages",
    "WorkerProcess": "streamload.worker.extensions",
}
"""The modules of the classes that `streamload.extension` has."""
