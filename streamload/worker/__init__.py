"""Work of a DataLoader worker: the loop over its batches, sampler, reader, and the messages to its rank."""

from streamload.worker.loop import StreamDataset
from streamload.worker.messages import (
    SEAT,
    Batch,
    Ended,
    EpochChange,
    EpochStart,
    Failed,
    Message,
    SkippedSample,
    SourceOrder,
    WorkerConfig,
    ready_counts,
)
from streamload.worker.stages import nothing_ready

__all__ = [
    "SEAT",
    "Batch",
    "Ended",
    "EpochChange",
    "EpochStart",
    "Failed",
    "Message",
    "SkippedSample",
    "SourceOrder",
    "StreamDataset",
    "WorkerConfig",
    "nothing_ready",
    "ready_counts",
]
