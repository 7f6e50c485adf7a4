"""What is reported of rows, summed by source: compared with numpy's, for all forms of rows and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from streamload.errors import OptionError
from streamload.extension import Yielded
from streamload.loader.output import BatchInfo
from streamload.mixing.reports import ALIGNMENT, LOSS, Reported, Reports, bad_of, merged, signal_of

SOURCES = 3


def info_of(seats: list[int], device: str = "cpu") -> BatchInfo:
    packed = np.asarray(seats, np.int32).tobytes()
    return BatchInfo(Yielded(0, len(seats), (), None, ()), ("a", "b", "c"), packed, {}, torch.device(device))


def expected(seats: Any, values: Any) -> list[tuple[float, float, float]]:
    """The oracle: of each source the count, the sum and the sum of squares of what is finite."""
    seats, values = np.asarray(seats), np.asarray(values, np.float64)
    found = []
    for source in range(SOURCES):
        own = values[(seats == source) & np.isfinite(values)]
        found.append((len(own), own.sum(), (own**2).sum()))
    return found


def check(reports: Reports, line: int, seats: Any, values: Any) -> None:
    sums = reports.read()
    for source, wanted in enumerate(expected(seats, values)):
        assert tuple(signal_of(sums, line, source)) == pytest.approx(wanted, abs=1e-4, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_those_of_each_source(dtype: torch.dtype) -> None:
    generator, reports = np.random.default_rng(1), Reports(SOURCES)
    seats, values = [], []
    for _ in range(300):  # more than a buffer holds
        own = generator.integers(0, SOURCES, 50)
        loss = torch.from_numpy(generator.normal(2, 1, 50)).to(dtype).requires_grad_()
        reports.add(LOSS + 3, loss * 1, info_of(own.tolist()), None)
        seats += own.tolist()
        values += loss.detach().double().tolist()
    check(reports, LOSS + 3, seats, values)
    check(reports, ALIGNMENT, [], [])


SEATS = [0, 1, 2, 1, 0, 2, 2, 1]
VALUES = torch.arange(8) / 4 - 1


@pytest.mark.parametrize(
    "rows",
    [
        slice(2, 6),
        [5, 0, 3],
        np.array([7, 7, 1]),
        torch.tensor([1, 2]),
        torch.tensor([True, False] * 4),
        np.array([False, True] * 4),
        slice(0, 0),
        slice(None),
        None,
    ],
)
def test_any_rows_of_a_batch_can_be_reported(rows: Any) -> None:
    reports = Reports(SOURCES)
    picked = slice(None) if rows is None else np.asarray(rows) if not isinstance(rows, slice) else rows
    reports.add(ALIGNMENT, VALUES.numpy()[picked].tolist(), info_of(SEATS), rows)
    check(reports, ALIGNMENT, np.array(SEATS)[picked], VALUES.numpy()[picked])


def test_one_number_is_that_of_all_rows() -> None:
    for value in (0.75, torch.tensor(0.75), torch.tensor(0.75, dtype=torch.bfloat16), np.float64(0.75)):
        reports = Reports(SOURCES)
        reports.add(LOSS, value, info_of(SEATS), None)
        reports.add(LOSS, value, info_of(SEATS), slice(0, 2))
        check(reports, LOSS, [*SEATS, 0, 1], [0.75] * 10)


def test_a_column_is_one_number_for_each_row() -> None:
    reports = Reports(SOURCES)
    reports.add(LOSS, VALUES[:, None], info_of(SEATS), None)
    check(reports, LOSS, SEATS, VALUES)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    reports = Reports(SOURCES)
    values = torch.tensor([1, float("nan"), 2, float("inf"), 3, -float("inf"), 4, 1e39], dtype=torch.float64)
    reports.add(LOSS, values, info_of(SEATS), None)
    reports.add(ALIGNMENT, float("nan"), info_of([0, 0]), None)
    values[-1] = float("inf")  # too large for a float32
    check(reports, LOSS, SEATS, values)
    assert [bad_of(reports.read(), source) for source in range(SOURCES)] == [2, 3, 1]


def test_other_numbers_than_rows_are_refused() -> None:
    reports = Reports(SOURCES)
    for values, rows in [
        (VALUES[:5], None),
        (VALUES, slice(0, 3)),
        (torch.ones(2, 3), None),
        (torch.ones(8, dtype=torch.complex64), None),
    ]:
        with pytest.raises(OptionError, match="one number for each of the"):
            reports.add(LOSS, values, info_of(SEATS), rows)
    with pytest.raises(OptionError, match="of a batch of 8 rows"):
        reports.add(LOSS, [1.0], info_of(SEATS), [8])
    check(reports, LOSS, [], [])


def test_gradients_and_inference_mode_change_nothing() -> None:
    reports = Reports(SOURCES)
    weight = torch.ones(8, requires_grad=True)
    loss = weight * VALUES
    reports.add(LOSS, loss, info_of(SEATS), None)
    loss.sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        reports.add(LOSS, VALUES, info_of(SEATS), None)
    with torch.inference_mode():
        reports.add(LOSS, VALUES * 1, info_of(SEATS), None)
        reports.add(ALIGNMENT, VALUES * 1, info_of(SEATS), None)
    reports.add(LOSS, VALUES, info_of(SEATS), None)
    check(reports, LOSS, SEATS * 4, VALUES.tolist() * 4)
    with torch.inference_mode():
        check(reports, ALIGNMENT, SEATS, VALUES)


def test_a_tensor_that_changes_after_its_report_was_reported_as_it_was() -> None:
    reports, values = Reports(SOURCES), VALUES.clone()
    reports.add(LOSS, values, info_of(SEATS), None)
    values.zero_()
    check(reports, LOSS, SEATS, VALUES)


class Operations(TorchDispatchMode):
    """Counts what is called on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_report_is_one_copy_and_reads_nothing_from_the_device() -> None:
    """On "meta" there are no values: what would wait for some is an error."""
    reports, loss = Reports(SOURCES), torch.empty(8, device="meta")
    info = info_of(SEATS, "meta")
    reports.add(LOSS, loss, info, None)
    with Operations() as operations:
        reports.add(LOSS, loss, info, None)
    assert sorted(operations.names) == ["aten.copy_.default", "aten.detach.default", "aten.slice.Tensor"]
    mask = torch.empty(8, device="meta", dtype=torch.bool)
    for number in range(10_000):  # buffers are summed in between, on the device
        reports.add(LOSS + number % 8, loss, info, None)
        if number % 1000 == 0:
            reports.add(ALIGNMENT, loss[:3], info, torch.empty(3, device="meta", dtype=torch.int64))
            reports.add(ALIGNMENT, loss[:5], info, mask)
    with pytest.raises(NotImplementedError, match="meta"):
        reports.read()


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, SOURCES - 1), st.floats(-50, 50, width=32), st.integers(0, 3)), max_size=30
    )
)
def test_sums_are_the_same_whichever_rank_got_a_row(rows: list[tuple[int, float, int]]) -> None:
    """To the bit: what is decided from them doesn't depend on the number of ranks."""

    def reported(own: list[tuple[int, float, int]]) -> Reported:
        reports = Reports(SOURCES)
        for source, value, _ in own:
            reports.add(LOSS, torch.tensor([value]), info_of([source]), None)
        return Reported(reports.read())

    together = merged([reported(rows)], SOURCES).sums
    by_rank = [reported([row for row in rows if row[2] == rank]) for rank in range(4)]
    assert (merged(by_rank, SOURCES).sums == together).all()
    assert (merged(by_rank[::-1], SOURCES).sums == together).all()


def test_what_was_reported_goes_through_a_state_to_the_bit() -> None:
    reports = Reports(SOURCES)
    reports.add(LOSS, torch.rand(8), info_of(SEATS), None)
    reports.evaluations.update({0: torch.tensor(0.5), 1: float("nan"), 2: 1.25})
    before = Reported(reports.read(), reports.read_evaluations())
    after = Reported.from_json(before.to_json(), SOURCES)
    assert (after.sums == before.sums).all()
    assert after.evaluations == {"0": 0.5, "2": 1.25}
    assert (Reported.from_json(Reported(Reports(SOURCES).read()).to_json(), SOURCES).sums == 0).all()
    for broken in ({"sums": "AAAA"}, {"evaluations": {"3": 1.0}}, {"sums": 3}, {"evaluations": {"0": "x"}}):
        with pytest.raises((ValueError, TypeError)):
            Reported.from_json({**before.to_json(), **broken}, SOURCES)


def test_evaluations_of_several_ranks_are_their_mean() -> None:
    nothing = Reports(SOURCES).read()
    both = [Reported(nothing, {"0": 1.0, "1": 3.0}), Reported(nothing, {"0": 2.0})]
    assert merged(both, SOURCES).evaluations == {"0": 1.5, "1": 3.0}
