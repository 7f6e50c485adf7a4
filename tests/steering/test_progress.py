"""Progress: reports that are noise, missing, NaN or of samples seen before, and the bounds of shares."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.worlds.simulate import run
from benchmarks.worlds.world import KINDS, world
from streamload.errors import OptionError
from streamload.mixing import Progress
from streamload.steering import Signal, SourceSummary, Summary
from streamload.steering.limits import bounded, caps
from streamload.steering.progress import wanted_shares
from streamload.steering.trend import BINS, Gain, gain_at, joined, no_less_than_nothing, parts_of

STEPS = 4_000
ROWS = 100


def training(losses, policy, shares=None, floors=None, sizes=None, spoil=lambda step, parts: parts):
    """What a policy decides in a training whose losses are functions of each source's samples."""
    many = len(losses)
    shares = np.full(many, 1 / many) if shares is None else np.array(shares)
    floors, sizes = floors or [0.0] * many, sizes or [None] * many
    samples, memory, found = np.zeros(many), None, []
    for stop in range(policy.every, STEPS + 1, policy.every):
        taken = shares * policy.every * ROWS
        middles = samples + taken * (np.arange(8)[:, None] + 0.5) / 8
        samples = samples + taken
        sources = []
        for i in range(many):
            parts = [Signal(taken[i] / 8, *_sums(taken[i] / 8, losses[i](x))) for x in middles[:, i]]
            passes = None if sizes[i] is None else samples[i] / sizes[i]
            sources.append(
                SourceSummary(
                    "abcdefgh"[i], shares[i], shares[i], floors[i], round(taken[i]), round(samples[i]),
                    passes, tuple(spoil(stop, parts) if i == 0 else parts),
                )
            )  # fmt: skip
        decided = policy.decide(Summary(stop, None, tuple(sources)), memory)
        memory = json.loads(json.dumps(decided.memory))
        if decided.weights is not None:
            shares = np.array([decided.weights[source.name] for source in sources])
        found.append((decided, shares, samples))
    return found


def _sums(count, mean):
    return count * mean, count * (mean * mean + 1)


def power(scale, exponent, start=2_000):
    return lambda n: 1 + scale * (1 + n / start) ** -exponent


RNG = np.random.default_rng(7)


def noisy(loss, deviation=0.004):
    return lambda n: loss(n) + deviation * RNG.standard_normal()


def test_samples_go_to_the_source_whose_loss_falls_and_not_to_the_one_whose_loss_is_high():
    found = training([noisy(power(2, 0.4)), noisy(lambda n: 9.0), noisy(lambda n: 0.1)], Progress(every=50))
    assert found[-1][1][0] > 0.8
    assert "gains" in next(decided.reason for decided, _, _ in found if decided.weights is not None)


def test_nothing_moves_in_the_first_ten_intervals_and_then_by_a_twentieth_at_most():
    found = training([noisy(power(2, 0.4)), noisy(lambda n: 1.0)], Progress(every=50))
    for (_, before, _), (decided, after, _) in pairwise(found):
        assert np.abs(after - before).sum() / 2 <= 0.05 + 1e-9
        assert decided.weights is None or set(decided.weights) == {"a", "b"}
    assert all(decided.weights is None for decided, _, _ in found[:9])
    changes = [place * 50 + 50 for place, (decided, _, _) in enumerate(found) if decided.weights is not None]
    assert all(later - earlier >= 0.05 * earlier for earlier, later in pairwise(changes))


def test_a_share_comes_back_on_less_evidence_than_it_goes():
    given, moved = np.array([0.5, 0.5]), np.array([0.8, 0.2])
    gains = [Gain(1.0, 0.1), Gain(2.0, 0.4)]  # no more than 2.2 standard errors from their mean
    assert wanted_shares(given, given, gains)[0] is None
    assert wanted_shares(moved[::-1], given, gains)[0] is None
    wanted, _ = wanted_shares(moved, given, gains)
    assert 0.2 < wanted[1] < 0.5
    assert wanted_shares(moved, given, [Gain(1.0, 0.1), Gain(1.4, 0.4)])[0] is None


def test_a_loss_that_rises_steeply_does_not_hide_what_the_others_gain():
    shares = np.full(3, 1 / 3)
    gains = [Gain(1.0, 0.05), Gain(0.9, 0.05), Gain(-6.0, 1.6)]
    assert sum(gain.value for gain in gains) < 0
    wanted, _ = wanted_shares(shares, shares, gains)
    assert wanted[2] < 0.25
    assert wanted[0] == pytest.approx(wanted[1], rel=0.2)


@pytest.mark.parametrize("value", [-30.0, -2.0, -0.5, 0.0, 0.5, 2.0, 30.0])
def test_a_gain_no_less_than_nothing_has_the_moments_of_its_samples(value):
    samples = np.maximum(0.0, value + 1.5 * np.random.default_rng(1).standard_normal(400_000))
    found = no_less_than_nothing(Gain(value, 1.5))
    assert found.value == pytest.approx(samples.mean(), abs=0.01)
    assert found.error == pytest.approx(samples.std(), abs=0.01)
    assert no_less_than_nothing(Gain(value, 0.0)) == (max(0.0, value), 0.0)


@pytest.mark.parametrize(("kind", "seed"), [("abrupt", 1005), ("abrupt", 1015), ("unlearnable", 1011)])
def test_a_source_that_lost_its_share_gets_it_back_once_the_others_are_learned(kind, seed):
    assert run(world(kind, seed), Progress(every=500)).score >= 0.2


def test_noise_moves_nothing():
    found = training([noisy(lambda n: 3.0, 0.1)] * 3, Progress(every=50))
    assert all(decided.weights is None for decided, _, _ in found)


def test_a_source_without_reports_keeps_its_share():
    found = training(
        [power(1, 0.3), noisy(power(2, 0.4)), noisy(lambda n: 1.0)],
        Progress(every=50),
        spoil=lambda step, parts: [Signal()] * 8,
    )
    assert all(shares[0] == pytest.approx(1 / 3) for _, shares, _ in found)
    assert found[-1][1][1] > found[-1][1][2]


def test_nothing_moves_where_one_source_alone_reports():
    found = training(
        [noisy(power(2, 0.4)), power(1, 0.1)], Progress(every=50), spoil=lambda step, parts: [Signal()] * 8
    )
    assert {decided.reason for decided, _, _ in found} == {"not yet", "too few reports"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_sums_that_are_not_numbers_are_left_out(bad):
    def spoil(step, parts):
        return [replace_first(parts[0], bad), *parts[1:]] if step % 100 == 0 else parts

    def replace_first(part, value):
        return part._replace(total=value, squares=value)

    found = training([noisy(power(2, 0.4)), noisy(lambda n: 1.0)], Progress(every=50), spoil=spoil)
    assert found[-1][1][0] > 0.8


def test_spikes_change_little():
    def spoil(step, parts):
        return [*parts[:3], parts[3]._replace(total=parts[3].total + 5 * parts[3].count), *parts[4:]]

    found = training([noisy(power(2, 0.4)), noisy(lambda n: 1.0)], Progress(every=50), spoil=spoil)
    assert found[-1][1][0] > 0.8


def test_a_loss_that_rises_everywhere_moves_nothing():
    found = training([lambda n: 1 + n * 1e-6, lambda n: 1 + n * 3e-6], Progress(every=50))
    assert {decided.reason for decided, _, _ in found} == {"not yet", "no loss falls"}


def test_a_loss_that_falls_by_repeats_is_not_taken_for_progress():
    def by_heart(n):
        return 3.0 if n < 20_000 else 3.0 * 0.9 ** (n / 20_000 - 1)

    losses = [noisy(by_heart), noisy(lambda n: 1.0)]
    found = training(losses, Progress(every=50), sizes=[20_000, None])
    assert max(shares[0] for _, shares, _ in found) <= 0.5 + 1e-9


def test_only_reports_of_the_first_pass_count_where_the_pass_is_known():
    parts = (Signal(10, 20, 40),) * 8
    source = SourceSummary("a", 1, 1, samples=8_000, total_samples=30_000, passes=1.2, losses=parts)
    assert [x for x, _, _ in parts_of(source, first_pass_only=True)] == [22_500, 23_500, 24_500]
    assert len(parts_of(source, first_pass_only=False)) == 8
    assert len(parts_of(replace(source, passes=None), first_pass_only=True)) == 8


def test_a_source_is_not_repeated_more_often_than_allowed_unless_its_given_share_does():
    size = 60_000.0
    losses = [noisy(power(3, 0.5, 300_000)), noisy(lambda n: 1.0), noisy(lambda n: 1.0)]
    capped = training(losses, Progress(every=50, max_passes=3), sizes=[size, None, None])
    assert max(shares[0] for _, shares, _ in capped) > 1 / 3
    over = [samples[0] > 3 * size for _, shares, samples in capped if shares[0] > 1 / 3 + 1e-9]
    assert over
    assert not any(over)


def test_evaluations_take_the_place_of_losses():
    policy, memory, shares = Progress(signal="eval", every=50), None, np.array([0.5, 0.5])
    samples = np.zeros(2)
    for step in range(50, STEPS + 1, 50):
        samples += shares * 50 * ROWS
        rising = (Signal(100, 100 + step, 1e6),) * 8
        sources = tuple(
            SourceSummary(name, 1, shares[i], samples=2500, total_samples=int(samples[i]), losses=rising,
                          evaluation=noisy(loss, 1e-3)(samples[i]))
            for i, (name, loss) in enumerate([("a", power(2, 0.4)), ("b", lambda n: 2.0)])
        )  # fmt: skip
        weights, memory, *_ = policy.decide(Summary(step, None, sources), memory)
        shares = np.array([weights["a"], weights["b"]]) if weights else shares
    assert shares[0] > 0.8


def test_weights_that_the_user_changed_count_as_given_from_then_on():
    policy = Progress(every=10)
    decided = policy.decide(Summary(10, 100, (SourceSummary("a", 1, 0.5), SourceSummary("b", 1, 0.5))), None)
    sources = (SourceSummary("a", 9, 0.9), SourceSummary("b", 1, 0.1))
    assert policy.decide(Summary(20, 100, sources), decided.memory).memory["given"] == [0.9, 0.1]


def test_the_same_summary_and_memory_give_the_same_decision_and_neither_is_changed():
    policy, one = Progress(every=50), world("plain", 3)
    found = run(one, replace(policy, every=1000))
    again = run(one, replace(policy, every=1000))
    assert np.array_equal(found.shares, again.shares)
    summary = Summary(50, 1000, (SourceSummary("a", 1, 0.5, samples=9, total_samples=9),) * 2)
    memory = policy.decide(summary, None).memory
    before = json.dumps(memory)
    policy.decide(summary, memory)
    assert json.dumps(memory) == before


def test_what_it_remembers_stays_small():
    found = run(world("plain", 0), _Sized())
    assert len(found.world.names) == 8
    assert _Sized.most < 10_000


class _Sized:
    every = 200
    most = 0

    def decide(self, summary, memory):
        decided = Progress().decide(summary, memory)
        _Sized.most = max(_Sized.most, len(json.dumps(decided.memory)))
        return decided


@pytest.mark.parametrize(
    "wrong",
    [{"signal": "alignment"}, {"max_passes": 0}, {"max_passes": float("nan")}, {"floor": 2}, {"every": 0},
     {"every": 1.5}],
)  # fmt: skip
def test_options_that_make_no_sense_fail(wrong):
    with pytest.raises(OptionError, match="expected"):
        Progress(**wrong)


@pytest.mark.deep
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_floors_and_caps_hold_at_every_step(data):
    many = data.draw(st.integers(2, 5))
    number = st.floats(0.01, 5)
    curves = [
        power(data.draw(number), data.draw(number), 10 ** data.draw(st.floats(2, 6))) for _ in range(many)
    ]
    shares = np.array([data.draw(st.floats(0.05, 1)) for _ in range(many)])
    shares /= shares.sum()
    floors = [data.draw(st.sampled_from([0.0, 0.5, 1.0])) * share for share in shares]
    sizes = [data.draw(st.sampled_from([None, 1e3, 3e4, 2e5])) for _ in range(many)]
    policy = Progress(every=100, max_passes=data.draw(st.sampled_from([0.5, 4.0])))
    for _, after, samples in training(curves, policy, shares, floors, sizes):
        assert after.sum() == pytest.approx(1)
        for i in range(many):
            assert after[i] >= max(floors[i], min(0.02, shares[i] / 2)) - 1e-9
            if after[i] > shares[i] + 1e-9 and sizes[i] is not None:
                assert samples[i] <= policy.max_passes * sizes[i]


@given(st.lists(st.tuples(st.floats(0.001, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_bounds_hold_and_shares_add_up(drawn):
    wanted, least, room = (np.array(column) for column in zip(*drawn, strict=True))
    least = least / max(least.sum(), 1.0)
    most = least + room + max(0.0, 1 - (least + room).sum())
    found = bounded(wanted, least, most)
    assert found.sum() == pytest.approx(1)
    assert (found >= least - 1e-6).all()
    assert (found <= most + 1e-6).all()


def test_a_source_whose_size_is_unknown_has_no_cap():
    source = SourceSummary("a", 1, 0.5, samples=10, total_samples=10, passes=None)
    assert caps(Summary(10, None, (source,)), np.array([0.5]), 4.0).tolist() == [1.0]
    known = replace(source, passes=3.0)
    assert caps(Summary(10, None, (known,)), np.array([0.5]), 4.0).tolist() == [0.5]


def test_the_gain_is_that_of_the_curve():
    for exponent, start in [(0.2, 500.0), (0.5, 5_000.0), (0.9, 200_000.0), (20.0, 2e6)]:
        bins = [[x, 1 + (1 + x / start) ** -exponent, 100.0] for x in np.linspace(1_000, 100_000, 200)]
        kept = joined([], bins)
        assert len(kept) == BINS
        gain = gain_at(kept, 100_000)
        true = exponent / start * (1 + 100_000 / start) ** (-exponent - 1)
        assert gain.value == pytest.approx(true, rel=0.2)


def test_bins_that_are_too_few_or_too_close_have_no_gain():
    assert gain_at([[1_000.0 * i, 1.0, 5.0] for i in range(1, 8)], 8_000) is None
    assert gain_at([[1_000.0 + i, 1.0, 5.0] for i in range(20)], 1_020) is None
    assert gain_at([[1_000.0 * i, 1.0, 5.0] for i in range(1, 30)], 30_000).value == pytest.approx(
        0, abs=1e-12
    )


@pytest.mark.deep
def test_in_simulated_trainings_it_gets_most_of_the_way_from_equal_shares_to_the_best():
    scores = {kind: run(world(kind, 1), Progress(every=500)).score for kind in KINDS}
    assert np.mean(list(scores.values())) >= 0.6, scores
    assert min(scores.values()) >= -0.05, scores


def test_equal_sources_stay_equal():
    moves = [run(world("equal", seed), Progress(every=500)).moves for seed in range(4)]
    assert max(moves) <= 1
