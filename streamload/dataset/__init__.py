"""The data set as a DataLoader iterates it: the journey of a sample, and what is said on the way."""

from streamload.dataset.journey import StreamDataset
from streamload.dataset.messages import Batch, Recipe, SourceOrder, Start, Trouble

__all__ = ["Batch", "Recipe", "SourceOrder", "Start", "StreamDataset", "Trouble"]
