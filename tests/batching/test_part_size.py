"""Sizes of parts over simulated devices: never more than there is, and nearly all that there is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from streamload.batching.part_size import PartSizer

LIMIT = 10_000_000_000


class OutOfMemory(Exception):
    """The simulated device's."""


@dataclass
class Device:
    """A device on which a training of any shape runs.

    Attributes:
        weights: bytes, of the weights; gradients take as much, the optimizer's state twice as much.
        fixed, linear, square: bytes of a part: + by rows and width; + by rows and width².
        noise: of what a part takes, as a share.
        overhead: seconds of a part beside those of its rows.
        usable: bytes of the memory; fragmentation takes the rest.
    """

    weights: int
    fixed: int
    linear: float
    square: float
    noise: float
    overhead: float
    seed: int
    usable: int = LIMIT
    allocated: int = 0
    peak: int = 0
    clock: float = 0.0
    numbers: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.numbers.seed(self.seed)
        self.allocated = self.weights

    def limit_bytes(self) -> int:
        return LIMIT

    def allocated_bytes(self) -> int:
        return self.allocated

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def seconds(self) -> float:
        return self.clock

    def free_unused(self) -> None:
        """What is free needs nothing."""

    def takes(self, rows: int, width: float) -> float:
        return self.fixed + rows * (self.linear * width + self.square * width**2)

    def compute(self, rows: int, width: float, is_first: bool) -> None:
        if is_first:
            self.allocated += self.weights  # gradients
        taken = self.takes(rows, width) * (1 + self.noise * self.numbers.random())
        self.peak = max(self.peak, int(self.allocated + taken))
        if self.peak > self.usable:
            raise OutOfMemory(f"{rows} rows of width {width:.2f}")
        self.clock += self.overhead + rows * width * 1e-3

    def update(self) -> None:
        self.allocated = 3 * self.weights  # with the optimizer's state, without gradients


def device(seed: int) -> Device:
    draw = random.Random(seed)
    row = LIMIT / 10 ** draw.uniform(0.7, 2.7)  # from 5 rows to 500 fit without weights
    share = draw.random()
    return Device(
        weights=int(LIMIT * draw.uniform(0.001, 0.15)), fixed=int(row * draw.uniform(0, 1)),
        linear=row * share, square=row * (1 - share), noise=draw.uniform(0, 0.03),
        overhead=draw.choice([0, 0.002, 0.05]), seed=seed,
    )  # fmt: skip


def fixed_costs(seed: int) -> Device:
    """A device on which a part's fixed cost is large: copies of the weights by autocast, and workspaces.

    The weights have up to a sixth of the memory, and are four times there (gradients and AdamW's state), half
    of them once more in 16 bits while a part is computed. There is room for at least one of the widest rows.
    """
    draw = random.Random(seed)
    weights = LIMIT * draw.uniform(0.01, 0.16)
    copies, workspace = draw.choice([0, 0.5]) * weights, draw.choice([0, 0, 0.02, 0.1]) * LIMIT
    usable = 0.985 * LIMIT
    room = usable - 4 * weights - copies - workspace
    row, share = room / draw.uniform(1.1, 200), draw.choice([0.0, 0.5, 1.0])
    return Device(
        weights=int(weights), fixed=int(copies + workspace), linear=row * share, square=row * (1 - share),
        noise=0, overhead=draw.choice([0, 0.05]), seed=seed, usable=int(usable),
    )  # fmt: skip


def widths(kind: str, draw: random.Random, steps: int, rows: int) -> list[list[float]]:
    """The width of each row of each step, as a share of the widest."""
    if kind == "full":
        return [[1.0] * rows] * steps
    if kind == "wide late":
        return [[0.25 if step < steps // 2 else 1.0] * rows for step in range(steps)]
    tail = [[min(1.0, max(0.05, draw.lognormvariate(-1.5, 0.6))) for _ in range(rows)] for _ in range(steps)]
    return tail if kind == "long tail" else [sorted(step) for step in tail]


@pytest.mark.parametrize("kind", ["full", "wide late", "long tail", "sorted"])
@pytest.mark.parametrize(
    "start", [pytest.param(start, marks=[pytest.mark.deep] * (start != 50)) for start in range(0, 325, 25)]
)
def test_no_part_goes_beyond_the_memory_whatever_it_takes_beside_its_rows(start: int, kind: str) -> None:
    for seed in range(start, start + 25):
        draw, device = random.Random(f"{seed} {kind}"), fixed_costs(seed)
        sizer, rows = PartSizer(device, lambda value: value), draw.choice([32, 128, 300])
        for step in widths(kind, draw, steps=12, rows=rows):
            first = 0
            while first < rows:
                stop = first + sizer.begin_part(rows - first)
                width = max(step[first:stop])
                device.compute(stop - first, width, is_first=first == 0)
                sizer.end_part(stop - first, width)
                first = stop
            device.update()
            sizer.end_step()


def train(
    devices: list[Device], samples: int, steps: int, seed: int, decoding_bytes: int = 0
) -> list[list[list[int]]]:
    """The rows of each part of each step by device; all are in lockstep."""
    draw = random.Random(seed)
    sizers = [PartSizer(one, lambda value: value, decoding_bytes) for one in devices]
    found: list[list[list[int]]] = [[] for _ in devices]

    def lockstep() -> None:
        left = samples
        parts: list[list[int]] = [[] for _ in devices]
        while left:
            rows = {sizer.begin_part(left) for sizer in sizers}
            assert len(rows) == 1, rows
            (count,) = rows
            for one, sizer, own in zip(devices, sizers, parts, strict=True):
                width = draw.uniform(0.1, 1) if draw.random() < 0.9 else 1.0
                one.compute(count, width, is_first=left == samples)
                sizer.end_part(count, width)
                own.append(count)
            left -= count
        for one, sizer, own, all_ in zip(devices, sizers, parts, found, strict=True):
            one.update()
            sizer.end_step()
            all_.append(own)

    for _ in range(steps):
        lockstep()
    return found


@pytest.mark.parametrize(
    "start", [pytest.param(start, marks=[pytest.mark.deep] * (start > 0)) for start in range(0, 200, 25)]
)
def test_no_part_is_too_large_and_nearly_all_room_is_used(start: int) -> None:
    shares = []
    for seed in range(start, start + 25):
        one = device(seed)
        (steps,) = train([one], samples=1024, steps=80, seed=seed)
        assert all(sum(step) == 1024 for step in steps)
        room = LIMIT - 4 * one.weights
        best = max(1, int((room - one.fixed) / (one.linear + one.square)))
        largest = max(max(step) for step in steps[2:4])
        expected = min(best, 1024)
        assert largest >= int(0.83 * expected), (seed, largest, expected)
        if expected > 4:  # of a part of two rows the fixed cost may be half, and counts as the rows'
            shares.append(largest / expected)
        if one.overhead == 0:  # then a quarter of the rows is as fast
            assert max(steps[-1]) <= max(1, -(-largest // 2))
    assert sum(shares) / len(shares) > 0.88


def test_room_is_left_for_decoding_the_images_of_the_next_step() -> None:
    def largest(decoding_bytes: int) -> int:
        one = Device(LIMIT // 50, 0, 0, LIMIT / 100, 0, 0.05, 3)  # a hundred rows, without weights
        (steps,) = train([one], 256, 6, 1, decoding_bytes)
        return max(map(max, steps))

    assert largest(0) - largest(LIMIT // 4) == pytest.approx(25, abs=2)


def test_a_part_of_one_row_that_is_too_large_is_not_tried_twice() -> None:
    one = Device(LIMIT // 10, 0, LIMIT, 0, 0, 0, 1)
    with pytest.raises(OutOfMemory, match="1 rows"):
        train([one], 8, 1, 1)


def test_sizes_stay_while_nothing_changes_and_give_way_to_what_another_takes() -> None:
    one = Device(LIMIT // 50, 0, LIMIT / 50, 0, 0, 0.05, 3)
    sizer = PartSizer(one, lambda value: value)

    def step() -> int:
        left, rows, largest = 256, 0, 0
        while left:
            rows = sizer.begin_part(left)
            one.compute(rows, 1.0, is_first=left == 256)
            sizer.end_part(rows, 1.0)
            left, largest = left - rows, max(largest, rows)
        one.update()
        sizer.end_step()
        return largest

    sizes = [step() for _ in range(100)]
    assert set(sizes[6:]) == {max(sizes[2:])}  # parts have overhead, so the largest size is the fastest
    one.weights += int(0.04 * LIMIT) // 4
    later = [step() for _ in range(70)]
    assert min(later) == max(sizes[6:]) * 3 // 4


def test_all_ranks_have_the_size_of_the_least() -> None:
    """Two ranks of different rooms, each asked with the other's values."""
    small, large = Device(10**8, 0, LIMIT / 20, 0, 0, 0, 1), Device(10**8, 0, LIMIT / 300, 0, 0, 0, 2)
    values: dict[int, list[float]] = {0: [], 1: []}
    # The small one runs first by itself; then the large one, which gets the least of both.
    alone = PartSizer(small, lambda value: values[0].append(value) or value)  # type: ignore[func-returns-value]

    def run(one: Device, sizer: PartSizer) -> list[int]:
        sizes = []
        for _ in range(3):
            left = 64
            while left:
                rows = sizer.begin_part(left)
                sizes.append(rows)
                one.compute(rows, 1.0, is_first=left == 64)
                sizer.end_part(rows, 1.0)
                left -= rows
            one.update()
            sizer.end_step()
        return sizes

    first = run(small, alone)
    told = iter(values[0])
    other = PartSizer(large, lambda value: min(value, next(told)))
    assert run(large, other) == first
    assert max(first) < 20
