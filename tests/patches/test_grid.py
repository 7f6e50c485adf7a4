"""Patches of an image's boxes, predicted from its size."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamload.patches.grid import PatchCrop, most_patches, patch_grid

SIDES = st.integers(1, 3000)


@given(
    SIDES,
    SIDES,
    st.integers(1, 1024),
    st.sampled_from([(16, 16), (14, 32)]),
    st.floats(0.1, 4),
    st.integers(),
)
def test_no_box_has_more_patches_than_its_image_may_have(
    height: int, width: int, seq_len: int, patch_size: tuple[int, int], max_ratio: float, seed: int
) -> None:
    (most,) = most_patches(np.array([float(height)]), np.array([float(width)]), patch_size, max_ratio)
    for crop in (PatchCrop(), PatchCrop((0.05, 1.0), (0.2, 5.0))):
        box = crop.draw(height, width, random.Random(seed))
        grid = patch_grid(box.height, box.width, seq_len, patch_size, max_ratio)
        assert grid.rows * grid.columns <= most
    whole = patch_grid(height, width, 1 << 30, patch_size, max_ratio)
    assert whole.rows * whole.columns == most


def test_an_unknown_size_stays_unknown() -> None:
    assert np.isnan(most_patches(np.array([np.nan]), np.array([30.0]), (16, 16), 1.0)).all()


def test_the_aspect_of_a_box_is_about_that_of_its_image() -> None:
    crop = PatchCrop((0.3, 0.8), (0.9, 1.1))
    boxes = [crop.draw(1000, 3000, random.Random(seed)) for seed in range(20)]
    assert all(2.6 < box.width / box.height < 3.4 for box in boxes)
