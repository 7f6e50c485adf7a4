"""What a DataLoader worker does: the loop over its batches, sampler, reader, and the messages to its rank."""

from streamload.worker.loop import StreamDataset
from streamload.worker.messages import Batch, Bucketing, EpochStart, SkippedSample, SourceOrder, WorkerConfig

__all__ = [
    "Batch",
    "Bucketing",
    "EpochStart",
    "SkippedSample",
    "SourceOrder",
    "StreamDataset",
    "WorkerConfig",
]
