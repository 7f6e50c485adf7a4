"""Sizes by aspect ratio, and the cells of a block: held to an oracle of fractions and logarithms."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

import streamload
from streamload.aspects import image_sizes
from streamload.aspects.cells import sized_cells
from streamload.aspects.sizes import Sizes, checked_sizes, losses, ratios
from streamload.errors import OptionError

NINE = [(1024, 1024), *((1152, 896), (896, 1152), (1216, 832), (832, 1216)), (1344, 768), (768, 1344)]
NINE += [(1536, 640), (640, 1536)]
SHORT_SIDES = {  # of SDXL's sizes, by the short side: the long ones (arXiv 2307.01952, appendix I)
    512: (1856, 1920, 1984, 2048), 576: (1664, 1728, 1792), 640: (1536, 1600), 704: (1344, 1408, 1472),
    768: (1280, 1344), 832: (1152, 1216), 896: (1088, 1152), 960: (1024, 1088), 1024: (1024,),
}  # fmt: skip


def photographs(count: int, seed: int = 0) -> np.ndarray:
    """Ratios of photographs: peaks at those of cameras, and a lognormal of the rest."""
    numbers = np.random.default_rng(seed)
    peaks, shares = (
        np.log([1.5, 4 / 3, 1, 16 / 9, 2 / 3, 3 / 4, 9 / 16]),
        [0.2, 0.2, 0.15, 0.08, 0.1, 0.12, 0.05],
    )
    is_of_camera = numbers.random(count) < sum(shares)
    cameras = numbers.choice(peaks, count, p=np.array(shares) / sum(shares)) + numbers.normal(0, 0.004, count)
    return np.exp(np.where(is_of_camera, cameras, numbers.normal(0.1, 0.45, count)))


def nearest(ratio: float, sizes: Sizes) -> int:
    return min(range(len(sizes)), key=lambda n: abs(math.log(ratio * sizes[n][1] / sizes[n][0])))


def cells_by_share(best: list[int], sizes: int, rows: int) -> Counter[int]:
    """Whole cells of each size, by largest remainders."""
    counts = Counter(best)
    quotas = {number: Fraction(counts[number], rows) for number in range(sizes)}
    cells = Counter({number: math.floor(quota) for number, quota in quotas.items()})
    left = sorted(quotas, key=lambda number: (math.floor(quotas[number]) - quotas[number], number))
    cells.update(left[: len(best) // rows - sum(cells.values())])
    return +cells


def planned(of_images: np.ndarray, sizes: Sizes, rows: int, key: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return sized_cells(losses(of_images, sizes), np.isnan(of_images), rows, key)


def test_random_blocks_have_each_row_once_in_whole_cells_of_one_size_by_share() -> None:
    numbers = random.Random(1)
    for attempt in range(150):
        rows, count = numbers.randint(1, 9), numbers.randint(1, 60)
        sizes = checked_sizes(image_sizes(256, 2, numbers.choice([1.5, 2.5])))
        sizes = tuple(numbers.sample(sizes, numbers.randint(1, len(sizes))))
        of_images = photographs(rows * count, attempt)
        cells, given = planned(of_images, sizes, rows, attempt)
        assert sorted(cells.ravel().tolist()) == list(range(rows * count))
        assert all(len(set(given[cell].tolist())) == 1 for cell in cells)
        best = [nearest(ratio, sizes) for ratio in of_images.tolist()]
        assert Counter(given[cells[:, 0]].tolist()) == cells_by_share(best, len(sizes), rows)
        room = Counter(given.tolist())
        more = sum(max(0, many - room[number]) for number, many in Counter(best).items())
        assert sum(a != b for a, b in zip(given.tolist(), best, strict=True)) == more  # no row needlessly


def test_rows_that_go_elsewhere_lose_least_and_go_to_the_nearest_size_with_room() -> None:
    sizes = ((10, 10), (14, 10), (20, 10), (10, 20))
    of_images = np.array([1.0, 1.1, 1.18, 1.02, 2.1, 2.0, 0.5, 0.5])  # 4, 0, 2 and 2 of each size
    cells, given = planned(of_images, sizes, 4)
    assert given.tolist() == [0, 0, 0, 0, 2, 2, 2, 2]  # of two equal remainders the first counts
    of_images = np.array([1.0, 1.0, 1.1, 1.15, 1.0, 1.4, 1.4, 1.41])
    _, given = planned(of_images, sizes, 4)
    assert given.tolist() == [0, 0, 0, 1, 0, 1, 1, 1]
    assert len(cells) == 2


def test_cells_come_in_an_order_of_the_key_and_rows_in_that_of_the_run() -> None:
    of_images = photographs(800)
    sizes = tuple(NINE)
    orders = [planned(of_images, sizes, 8, key)[0] for key in (1, 1, 2)]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert {tuple(cell) for cell in orders[0].tolist()} == {tuple(cell) for cell in orders[2].tolist()}
    assert all(np.array_equal(cell, np.sort(cell)) for cell in orders[0])


@pytest.mark.parametrize(("sizes", "most"), [(NINE, 0.003), (image_sizes(), 0.01)])
def test_few_of_a_thousand_cells_of_photographs_are_off_their_best_size(
    sizes: list[tuple[int, int]], most: float
) -> None:
    sizes = checked_sizes(sizes)
    for seed in range(4):
        of_images = photographs(8 * 1024, seed)
        _, given = planned(of_images, sizes, 8)
        assert 0 < np.mean(given != losses(of_images, sizes).argmin(1)) < most


def test_unknown_sizes_count_as_the_commonest_and_leave_room_first() -> None:
    sizes = ((10, 10), (20, 10))
    of_images = np.array([np.nan, 1, 1.05, 1.3, 2, 2, 2, np.nan])
    assert planned(of_images, sizes, 4)[1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert set(planned(np.full(8, np.nan), sizes, 4)[1].tolist()) == {0}
    facts = {"width": np.array([4.0, 0, np.nan, 3]), "height": np.array([2.0, 5, 1, 0])}
    measured = ratios(facts)
    assert measured[0] == 2
    assert np.isnan(measured[1:]).all()


def test_the_default_sizes_are_those_of_sdxl() -> None:
    expected = {(short, long) for short, longs in SHORT_SIDES.items() for long in longs}
    assert set(image_sizes()) == expected | {(long, short) for short, long in expected}
    assert len(image_sizes()) == 41
    for pixels, step, longest in [(512**2, 32, 2.0), (256, 4, 1.5), (1000 * 900, 100, 1.2), (1 << 22, 64, 3)]:
        for width, height in image_sizes(pixels, step, longest):
            assert width % step == height % step == 0
            assert 0.9 * pixels <= width * height <= pixels
            assert max(width, height) <= longest * min(width, height)


@pytest.mark.parametrize(
    ("says", "option"),
    [
        (r"expected \(width, height\) of each", []),
        (r"sizes=1024; expected", 1024),
        (r"sizes=\[1024, 1024\]; expected", [1024, 1024]),
        (r"expected \(width, height\) of each", [(1, 2, 3)]),
        (r"sizes=\[\(8, 0\)\]; expected", [(8, 0)]),
        (r"expected \(width, height\) of each", [(8.5, 8)]),
        ("an aspect ratio twice", [(512, 512), (256, 512), (1024, 1024)]),
    ],
)
def test_other_values_are_refused(says: str, option: object) -> None:
    with pytest.raises(OptionError, match=says):
        streamload.Images(sizes=option)


def test_no_size_of_so_many_pixels_is_refused() -> None:
    with pytest.raises(OptionError, match="give a smaller step="):
        image_sizes(1000, step=20)
    with pytest.raises(OptionError, match="step=0"):
        image_sizes(step=0)
