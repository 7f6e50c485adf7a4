"""AlignmentBalanced: bounded, careful, and worth it where a source aligns no further."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.worlds.simulate import run
from benchmarks.worlds.world import KINDS, world
from streamload.errors import OptionError
from streamload.mixing import AlignmentBalanced
from streamload.steering import Decided, Signal, SourceSummary, Summary
from streamload.steering.policy import loss_weights_of


def follow(
    policy: AlignmentBalanced, seed: int, decisions: int = 60, noise: float = 0.01, levels: bool = False
) -> list[tuple[np.ndarray, np.ndarray, str]]:
    """The shares, the weights in the loss and the reason of each decision, of a training by a random world.

    Args:
        levels: alignments differ between the sources and don't rise.
    """
    numbers = random.Random(seed)
    many = numbers.randint(2, 5)
    curves = [(numbers.uniform(0, 1), numbers.uniform(0, 0.6), numbers.uniform(0.1, 1)) for _ in range(many)]
    parts = [numbers.uniform(0.05, 1) for _ in range(many)]
    shares = np.array(parts) / sum(parts)
    totals, learned, weights, memory, steps = np.zeros(many), np.zeros(many), np.ones(many), None, []
    for number in range(1, decisions + 1):
        taken = shares * 1000 * policy.every
        totals, learned = totals + taken, learned + taken * weights
        sources = []
        for place, (low, rise, power) in enumerate(curves):
            aligned = 0 if levels else rise * (1 - (1 + learned[place] / 3e4) ** -power)
            mean = low + aligned + numbers.gauss(0, noise)
            signal = Signal(taken[place], taken[place] * mean, taken[place] * (mean**2 + 0.01))
            is_missing = numbers.random() < 0.1
            sources.append(
                SourceSummary(
                    f"source {place}", 1.0, shares[place], samples=int(taken[place]),
                    total_samples=int(totals[place]), alignment=Signal() if is_missing else signal,
                    loss_weight=weights[place],
                )
            )  # fmt: skip
        summary = Summary(number * policy.every, None, tuple(sources))
        decided = policy.decide(summary, memory)
        assert decided == policy.decide(summary, memory)
        assert decided.weights is None  # samples stay as they are
        memory = json.loads(json.dumps(decided.memory))
        assert len(json.dumps(memory)) < 20_000
        weights = np.array(loss_weights_of(decided, summary) or weights)
        steps.append((shares, weights, decided.reason))
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_reported_weights_are_bounded_and_move_in_small_steps(seed: int) -> None:
    numbers = random.Random(seed)
    policy = AlignmentBalanced(
        least=numbers.choice([0.0, 0.25, 0.9, 1.0]), most=numbers.choice([1.0, 1.1, 4.0, 20.0])
    )
    steps = follow(policy, seed, noise=numbers.choice([0.0001, 0.01, 0.3]))
    before = np.ones(len(steps[0][0]))
    for number, (shares, weights, reason) in enumerate(steps, 1):
        assert (shares * weights).sum() == pytest.approx(1)
        assert weights.min() >= policy.least - 1e-6
        assert weights.max() <= policy.most + 1e-6
        assert reason
        assert np.abs(shares * (weights - before)).sum() / 2 <= 0.05 + 0.02  # 0.02 by the bounds
        if number < 20 or 1.0 == policy.least == policy.most:
            assert (weights == 1).all()
        before = weights


def test_levels_alone_and_noise_move_the_weights_of_one_training_in_twenty_at_most() -> None:
    moved = 0
    for seed in range(20):
        weights = np.array([weights for _, weights, _ in follow(AlignmentBalanced(), seed, 40, levels=True)])
        moved += bool((weights != 1).any())
        assert np.abs(weights - 1).max() < 0.25
    assert moved <= 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 6))])
def test_where_one_source_aligns_no_further_the_loss_weighs_it_less_and_the_rest_gains(seed: int) -> None:
    simulated = run(world("unlearnable", seed), AlignmentBalanced())
    assert simulated.loss_weights[simulated.world.scale == 0].max() < 0.6
    assert simulated.score > 0.5


@pytest.mark.parametrize("kind", ["noise", *(pytest.param(kind, marks=pytest.mark.deep) for kind in KINDS)])
def test_it_is_never_worse_than_fixed_weights_by_one_percent(kind: str) -> None:
    for seed in range(2):
        simulated = run(world(kind, seed), AlignmentBalanced())
        fixed = simulated.world.loss(simulated.world.equal())
        assert simulated.world.loss(simulated.samples) <= 1.01 * fixed


def test_held_out_values_take_the_place_of_alignments() -> None:
    policy = AlignmentBalanced(signal="eval")
    weights, memory = (1.0, 1.0), None
    for number in range(1, 80):
        samples = 1000 * number * np.array(weights)
        values = (1 - 0.5 * (1 - (1 + samples[0] / 3000) ** -0.5), 0.9)
        sources = tuple(
            SourceSummary(name, 1, 0.5, samples=1000, total_samples=1000 * number, evaluation=held_out,
                          alignment=Signal(9, number, 9.0), loss_weight=weight)
            for name, held_out, weight in zip("ab", values, weights, strict=True)
        )  # fmt: skip
        summary = Summary(200 * number, None, sources)
        decided = policy.decide(summary, memory)
        memory, weights = decided.memory, loss_weights_of(decided, summary) or weights
    assert weights[0] > 1.5
    assert weights[1] < 0.5


@pytest.mark.parametrize("shares", [[0.7, 0.1, 0.2], [0, 0.5, 0.5], [0, 0, 1], [0.98, 0.01, 0.01]])
def test_where_shares_are_set_anew_the_mean_weight_is_1_from_the_next_decision_on(
    shares: list[float],
) -> None:
    """Also where nothing is reported any more. Weights keep their proportions within their bounds."""
    weights = [2.0, 0.5, 0.4]
    weighed = zip("abc", shares, weights, strict=True)
    sources = tuple(SourceSummary(name, 1.0, share, loss_weight=weight) for name, share, weight in weighed)
    summary = Summary(4000, None, sources)
    again = loss_weights_of(AlignmentBalanced().decide(summary, None), summary)
    assert again is not None
    assert np.dot(shares, again) == pytest.approx(1)
    assert all(0.25 <= weight <= 4 for weight in again)
    if shares[0] == 0.7:
        assert np.divide(again, weights) == pytest.approx([again[0] / 2] * 3)


def test_a_name_comes_before_its_modality_and_what_is_not_named_keeps_its_weight() -> None:
    pair = SourceSummary("a", 1, 0.5, loss_weight=3.0)
    summary = Summary(1, None, (pair, replace(pair, name="b", modality="text"), replace(pair, name="c")))
    given = Decided(None, loss_weights={"text": 0.5, "c": 2})
    assert loss_weights_of(given, summary) == (3.0, 0.5, 2.0)
    assert loss_weights_of(Decided(None), summary) is None


@pytest.mark.parametrize(
    "options", [{"least": 1.5}, {"most": 0.5}, {"least": -1}, {"signal": "loss"}, {"every": 0}]
)
def test_options_that_can_not_be_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        AlignmentBalanced(**options)  # type: ignore[arg-type]
