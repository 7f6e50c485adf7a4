"""Rows of features on their way from a worker to the rank, where a batch stands for a call of the module.

Worker and rank name a row alike: by the fingerprint of the module and of what makes its input, by the
sample's key and the checksum of its bytes. So an edited sample gets a new row, and moved or re-sharded data
keeps its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from streamload.derived.proof.reads import ReadNames
from streamload.derived.store.keys import SampleKey
from streamload.derived.store.results import ResultLayout, dtype_of, layout_of
from streamload.derived.store.sealed import Row
from streamload.errors import FeatureNotCacheable

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


class FeatureStart(NamedTuple):
    """Plan of a feature for the workers of an epoch."""

    fingerprint: str  # under which rows are found, as hexadecimal digits; "": none are read
    is_checked: bool  # whether inputs of some stored rows are sent as well, to compute these again
    is_first: bool  # whether the first one's is: none has been checked
    hits_between: tuple[int, int] | None
    """Least and most stored rows from one whose input is sent to the next; None: only the first one's is."""
    is_watched: bool  # whether reads of making the first inputs are sent


class FeaturesRead(NamedTuple):
    """Rows that a worker has read for a batch."""

    fingerprint: str  # under which rows were looked for
    layout: bytes  # of the rows; empty if there are none
    missing: list[int]  # the places in the batch of those that aren't there
    keys: list[SampleKey]  # of the rows whose inputs came with the batch: the missing ones, then canaries
    places: list[int]  # of these in the batch
    samples: int  # of the batch
    read_ns: int  # the time it took to read rows
    reads: ReadNames | None = None  # of making the first inputs, if that was watched


def shown(key: SampleKey) -> Any:
    """The sample's key, or the text, in the key of a row: for messages."""
    content = key.key
    return content[1] if isinstance(content, tuple) and content[0] == "text" else content


def stacked(rows: Sequence[Row | None], allocate: Allocate) -> tuple[bytes, torch.Tensor | None]:
    """The bodies of rows of one layout: uint8[N, bytes]; where a row is None the memory is left as it is.

    Raises:
        FeatureNotCacheable: they are of several layouts.
    """
    stored = [row for row in rows if row is not None]
    if not stored:
        return b"", None
    text, size = stored[0].layout, layout_of(stored[0].layout).body_bytes
    bodies = allocate((len(rows), size), torch.uint8)
    memory = bodies.numpy()
    for place, row in enumerate(rows):
        if row is None:
            continue
        if row.layout != text:
            raise FeatureNotCacheable("rows of this batch have different shapes, so they can't be one batch")
        memory[place] = np.frombuffer(row.body, np.uint8)
    return text, bodies


def leaves_in(bodies: torch.Tensor, layout: ResultLayout) -> list[Any]:
    """The leaves of stacked rows, each [N, …]: tensors where the rows are, and arrays."""
    leaves: list[Any] = []
    for leaf in layout.leaves:
        part, dtype = bodies[:, leaf.start : leaf.stop].contiguous(), dtype_of(leaf)
        shape = len(bodies), *leaf.shape
        if dtype is None:
            leaves.append(part.cpu().numpy().view(leaf.dtype).reshape(shape))
        else:
            leaves.append(
                part.view(dtype).reshape(shape) if part.numel() else torch.empty(shape, dtype=dtype)
            )
    return leaves


class ModuleRows(ABC):
    """Rows of one module in a batch."""

    module: Any

    @abstractmethod
    def result(self) -> Any:
        """Results of the module for the samples of the batch."""


def rows_of(module: Any, batch: Any) -> ModuleRows | None:
    """The rows of a module in the batch that it is called with, if it is one."""
    for value in batch.values() if isinstance(batch, Mapping) else ():
        if isinstance(value, ModuleRows) and value.module is module:
            return value
    return None
