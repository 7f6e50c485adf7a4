"""What a DataLoader worker does: the loop over its batches, sampler, reader, and the messages to its rank."""

from streamload.worker.loop import StreamDataset
from streamload.worker.messages import (
    SEAT,
    Batch,
    Bucketing,
    EpochStart,
    SkippedSample,
    SourceOrder,
    WorkerConfig,
)

__all__ = [
    "SEAT",
    "Batch",
    "Bucketing",
    "EpochStart",
    "SkippedSample",
    "SourceOrder",
    "StreamDataset",
    "WorkerConfig",
]
