"""TokenShares: weights of rows by which the sources' tokens have the given shares."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamload.errors import OptionError
from streamload.mixing import TokenShares
from streamload.steering import Signal, SourceSummary, Summary, as_policy

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6)


def asked(
    policy: TokenShares,
    shares: Any,
    tokens: list[float | None],
    memory: Any = None,
    floor: float = 0.0,
    rows: int = 1000,
) -> Any:
    """The decision where the rows of each source have so many tokens on average; None: it isn't reported."""
    sources = tuple(
        SourceSummary(f"s{at}", 1.0, float(share), floor, rows, rows,
                      tokens=Signal() if mean is None else Signal(rows, rows * mean, rows * mean**2))
        for at, (share, mean) in enumerate(zip(shares, tokens, strict=True))
    )  # fmt: skip
    return policy.decide(Summary(200, None, sources), json.loads(json.dumps(memory)))


def decided(answer: Any, otherwise: Any) -> Any:
    return otherwise if answer.weights is None else np.array(list(answer.weights.values()))


@given(WEIGHTS, st.data())
def test_tokens_have_the_shares_that_rows_were_given(weights: list[float], data: Any) -> None:
    shares = np.array(weights) / sum(weights)
    tokens = data.draw(st.lists(st.floats(1, 1000), min_size=len(weights), max_size=len(weights)))
    answer = asked(TokenShares(), shares, tokens)
    rows = decided(answer, shares)
    assert rows.sum() == pytest.approx(1)
    of_tokens = rows * tokens / (rows @ tokens)
    if answer.weights is None:  # it moves where it matters only
        wanted = shares / tokens / (shares / tokens).sum()
        assert np.abs(wanted - shares).sum() / 2 < 0.01
    else:
        np.testing.assert_allclose(of_tokens, shares, rtol=1e-6)
    again = asked(TokenShares(), rows, tokens, answer.memory)
    assert again.weights is None
    assert again.reason.startswith("as wanted")


@given(WEIGHTS, st.floats(0.01, 0.1), st.data())
def test_floors_hold(weights: list[float], floor: float, data: Any) -> None:
    shares = np.array(weights) / sum(weights)
    assume(shares.min() >= floor)
    tokens = data.draw(st.lists(st.floats(1, 1000), min_size=len(weights), max_size=len(weights)))
    rows = decided(asked(TokenShares(), shares, tokens, floor=floor), shares)
    assert rows.min() >= floor - 1e-9
    assert rows.sum() == pytest.approx(1)


def test_a_source_without_reports_keeps_its_share_of_the_rows() -> None:
    rows = decided(asked(TokenShares(), [0.5, 0.25, 0.25], [100.0, None, 300.0]), None)
    assert rows == pytest.approx([0.75 * 6 / 7, 0.25, 0.75 / 7])
    for tokens in ([100.0, None, None], [None] * 3, [0.0, 5.0, None], [float("nan"), 5.0, None]):
        assert asked(TokenShares(), [0.5, 0.25, 0.25], tokens).weights is None


def test_weights_that_the_training_sets_are_new_shares_of_tokens() -> None:
    policy = TokenShares()
    first = asked(policy, [0.5, 0.5], [100.0, 300.0])
    assert decided(first, None) == pytest.approx([0.75, 0.25])
    second = asked(policy, [0.9, 0.1], [100.0, 300.0], first.memory)
    assert decided(second, None) == pytest.approx([27 / 28, 1 / 28])


def test_rows_that_change_are_followed() -> None:
    policy, memory, rows = TokenShares(), None, np.array([0.5, 0.5])
    for _ in range(12):
        answer = asked(policy, rows, [100.0, 100.0], memory)
        rows, memory = decided(answer, rows), answer.memory
    assert rows == pytest.approx([0.5, 0.5])
    for _ in range(12):
        answer = asked(policy, rows, [100.0, 400.0], memory)
        rows, memory = decided(answer, rows), answer.memory
    assert rows == pytest.approx([0.8, 0.2], abs=0.01)


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    with pytest.raises(OptionError, match="TokenShares"):
        TokenShares(every)
    assert as_policy(TokenShares(5)).every == 5
