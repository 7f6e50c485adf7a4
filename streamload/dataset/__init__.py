"""The data set as a DataLoader iterates it: the journey of a sample, and what is said on the way."""

from streamload.dataset.loop import StreamDataset
from streamload.dataset.messages import Batch, EpochStart, SkippedSample, SourceOrder, WorkerConfig

__all__ = ["Batch", "EpochStart", "SkippedSample", "SourceOrder", "StreamDataset", "WorkerConfig"]
