"""The circuit breaker of a shared tier: three failures open it, one success closes it."""

from __future__ import annotations

from streamload.cache.shared.breaker import CircuitBreaker


def test_it_opens_after_three_failures_in_a_row_and_one_more_opens_it_again():
    now = [100.0]
    breaker = CircuitBreaker(60.0, clock=lambda: now[0])
    assert [breaker.fail(), breaker.fail()] == [0.0, 0.0]
    assert not breaker.is_open
    assert breaker.fail() == 60.0
    assert breaker.is_open
    now[0] += 60.0
    assert not breaker.is_open
    assert breaker.fail() == 60.0
    assert breaker.is_open


def test_a_success_closes_it():
    breaker = CircuitBreaker(60.0, clock=lambda: 0.0)
    breaker.fail()
    breaker.fail()
    breaker.succeed()
    assert [breaker.fail(), breaker.fail()] == [0.0, 0.0]
    assert not breaker.is_open


def test_pauses_double_up_to_a_limit():
    breaker = CircuitBreaker(1.0, doublings=2, clock=lambda: 0.0)
    assert [breaker.fail() for _ in range(7)] == [0.0, 0.0, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert breaker.in_a_row == 7
