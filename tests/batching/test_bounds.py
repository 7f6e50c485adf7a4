"""Widths of rows that all ranks have agreed on: what each of them leaves of its texts."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch

from streamload.batching.bounds import AgreedBounds
from streamload.batching.padding import RowWidths

LENGTH, MULTIPLE = 16, 4


class Room(NamedTuple):
    """Room for this many ids in each row of a step; in place of the widths of a block."""

    ids: int

    def at(self, position: int) -> np.ndarray:
        return np.array([[self.ids, 0]] * 2, np.int32)


@pytest.mark.parametrize(("pads_left", "columns"), [(True, slice(8, 16)), (False, slice(0, 8))])
def test_texts_keep_their_ids_and_as_many_columns_as_any_rank_needs(pads_left: bool, columns: slice) -> None:
    own = RowWidths(
        np.array([[3, 0], [5, 0]], np.int32), (LENGTH, 0), (True, False), ("text", "mask"), pads_left
    )
    agreed = AgreedBounds(MULTIPLE, lambda block: block)
    whole = torch.arange(2 * LENGTH).view(2, LENGTH)
    for block in (Room(6), None):  # it comes with the first step of a block
        values = {"text": whole.clone(), "mask": whole.clone()}
        widths = agreed.yielded(pickle.dumps((own, 0, block)), values)["widths"]
        assert widths.bounds[:, 0].tolist() == [6, 6]
        assert torch.equal(values["text"], whole[:, columns])
        assert torch.equal(values["mask"], whole[:, columns])
