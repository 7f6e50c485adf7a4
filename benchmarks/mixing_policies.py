"""How far policies that decide weights get, in simulated trainings whose best mix is known.

Question: of the way from equal shares to the best constant shares, by the held-out loss at equal steps, how
much does each policy go? 0: as equal shares, 1: as the best, below 0: worse than doing nothing. And how often
does it move the weights of sources that are all alike? There a move away from equal shares is a false one,
and one back isn't; both are counted.

Command: python -m benchmarks.mixing_policies

The worlds are those of benchmarks/worlds/: 3 to 8 sources whose loss falls by a power of their own
samples (by exponentials in "abrupt"), 20,000 steps of 1,024 rows, of each kind as many as there are seeds;
drawn again where equal shares lose less than 3 % of what is learned. "noise" is eight times as much of it;
"restarts" are of the learning rate. Rows' losses are noisy, and whole steps' are, too. No model is trained.

- "progress" is `streamload.mixing.Progress()`.
- "softmax of the loss": shares in proportion to exp(loss).
- "Exp3 (as in ODM)": weights exp(eta · the sum of the mean losses), mixed with equal shares, as in online
  data mixing (arXiv 2312.02406).
- "power law (as in ADO)": a power law fitted to each source's losses so far; shares in proportion to its
  slope and the root of the shares, mixed with the shares, as in adaptive data optimization
  (arXiv 2410.11820).
These three are our own short forms of the rules, not the authors' code; each is asked every 1,000 steps.

The constants of Progress were chosen in these worlds and in those of seeds 1,000 to 1,019; "other worlds" are
as many, from seed 4,000 on, that nothing was chosen by.

Result: results/mixing_policies.json
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import turns
from benchmarks.turns import Row
from benchmarks.worlds.simulate import Simulated, run
from benchmarks.worlds.world import KINDS, world
from streamload.steering import Decided, Policy, Summary
from streamload.steering.progress import Progress

WORLDS, OTHERS_FROM = 20, 4_000
AT_LEAST_MEAN, AT_LEAST_WORST, AT_MOST_MOVES = 0.6, -0.05, 1
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Rule:
    """A rule that returns shares for what was reported since the last decision, and all that was before."""

    name: str
    rule: Callable[[Array, list[list[list[float]]], Array], Array | None]
    every: int = 1_000

    def decide(self, summary: Summary, memory: Any) -> Decided:
        kept = memory or [[] for _ in summary.sources]
        for seen, source in zip(kept, summary.sources, strict=True):
            middle = source.total_samples - source.samples / 2
            if source.loss.mean is not None:
                seen.append([middle, source.loss.mean])
        if any(len(seen) < 2 for seen in kept):
            return Decided(None, kept)
        shares = np.array([source.share for source in summary.sources])
        samples = np.array([float(source.total_samples) for source in summary.sources])
        found = self.rule(shares, kept, samples)
        if found is None:
            return Decided(None, kept)
        named = zip((source.name for source in summary.sources), found.tolist(), strict=True)
        return Decided(dict(named), kept, self.name)


def softmax(shares: Array, kept: list[list[list[float]]], samples: Array) -> Array:
    last = np.array([seen[-1][1] for seen in kept])
    found = np.exp(last - last.max())
    return np.asarray(found / found.sum(), np.float64)


def exp3(shares: Array, kept: list[list[list[float]]], samples: Array) -> Array:
    many, turn = len(shares), min(len(seen) for seen in kept)
    explored = min(1 / many, np.sqrt(np.log(many) / (many * turn)))
    rewards = np.array([np.mean([loss for _, loss in seen]) for seen in kept]) * turn
    found = np.exp(explored * (rewards - rewards.max()))
    return np.asarray((1 - many * explored) * found / found.sum() + explored, np.float64)


def power_law(shares: Array, kept: list[list[list[float]]], samples: Array) -> Array | None:
    if min(len(seen) for seen in kept) < 4:
        return None
    slopes = np.array([_slope(np.array(seen), n) for seen, n in zip(kept, samples, strict=True)])
    wanted = np.maximum(slopes, 0) * np.sqrt(shares)
    if not wanted.sum():
        return None
    found = np.maximum(0.5 * wanted / wanted.sum() + 0.5 * shares, 0.01)
    return np.asarray(found / found.sum(), np.float64)


def _slope(seen: Array, samples: float) -> float:
    """The slope of floor + scale · n^-exponent, fitted by least squares over a grid of exponents."""
    x, y = seen.T
    best = (np.inf, 0.0)
    for exponent in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        basis = np.stack([np.ones_like(x), x**-exponent], 1)
        (_, scale), *_ = np.linalg.lstsq(basis, y, rcond=None)
        error = float(((basis[:, 1] * scale + (y - basis[:, 1] * scale).mean() - y) ** 2).sum())
        best = min(best, (error, float(scale * exponent * samples ** (-exponent - 1))))
    return best[1]


POLICIES: dict[str, Policy] = {
    "progress": Progress(),
    "softmax of the loss": Rule("softmax", softmax),
    "Exp3 (as in ODM)": Rule("exp3", exp3),
    "power law (as in ADO)": Rule("power law", power_law),
}


def main() -> None:
    given = turns.arguments(__doc__, rounds=1, names=list(POLICIES))
    many = 1 if given.quick else WORLDS
    kinds = ("plain", "nan", "unlearnable") if given.quick else KINDS
    rows: list[Row] = []
    picture: dict[str, Row] = {}
    for kind in (*kinds, "equal"):
        for seed in range(many * (3 if kind == "equal" and not given.quick else 1)):
            drawn = world(kind, seed)
            for name in given.contenders:
                done = run(drawn, POLICIES[name])
                row = {"label": f"{name}; {kind}", "round": seed, "moves": done.moves}
                more = {"false_moves": moves_away(done)} if kind == "equal" else {"score": done.score}
                rows.append({**row, **more})
                if seed == 1 and name == "progress" and kind in ("plain", "unlearnable", "memorised"):
                    picture[kind] = course(done)
        print(f"{kind} is done", file=sys.stderr, flush=True)
    others = [
        run(world(kind, OTHERS_FROM + seed), POLICIES["progress"]).score
        for kind in kinds
        for seed in range(many)
    ]
    turns.write(given, "mixing_policies", content(given, rows, picture, others))


def moves_away(done: Simulated) -> int:
    """The changes of shares after which they are further from equal ones."""
    apart = np.abs(done.shares - 1 / done.shares.shape[1]).sum(1)
    return int((np.diff(apart) > 1e-6).sum())


def course(done: Simulated) -> Row:
    """The shares of a run, for a picture."""
    kept = range(4, len(done.steps), 5)
    return {
        "steps": [done.steps[at] for at in kept],
        "shares": {
            name: [round(float(done.shares[at, place]), 4) for at in kept]
            for place, name in enumerate(done.world.names)
        },
        "best": dict(
            zip(done.world.names, (done.world.best() / done.world.total).round(4).tolist(), strict=True)
        ),
        "score": done.score,
    }


def content(given: Any, rows: list[Row], picture: dict[str, Row], others: list[float]) -> Row:
    def scores(name: str, kind: str | None = None) -> list[float]:
        return [
            row["score"]
            for row in rows
            if row["label"].split("; ")[0] == name and kind in (None, row["label"].split("; ")[1])
            if "score" in row
        ]

    kinds = list(dict.fromkeys(row["label"].split("; ")[1] for row in rows if "score" in row))
    table = {
        name: {
            **{kind: [statistics.mean(scores(name, kind)), min(scores(name, kind))] for kind in kinds},
            "all": [statistics.mean(scores(name)), min(scores(name))],
        }
        for name in given.contenders
    }
    moves = {
        measure: {
            name: [statistics.mean(found), max(found)]
            for name in given.contenders
            if (found := [row[measure] for row in rows if row["label"] == f"{name}; equal"])
        }
        for measure in ("moves", "false_moves")
    }
    ours = table.get("progress", {}).get("all", [None, None])
    return {
        "settings": {"worlds of each kind": len({row["round"] for row in rows if "score" in row})},
        "seeds": sorted({row["round"] for row in rows}),
        "rounds": rows,
        "medians": {name: {"mean": each["all"][0], "worst": each["all"][1]} for name, each in table.items()},
        "scores": table,
        "equal_moves": moves["moves"],
        "false_moves": moves["false_moves"],
        "courses": picture,
        "progress in other worlds": others,
        "targets": [
            turns.target("progress: mean over all worlds", ours[0], at_least=AT_LEAST_MEAN),
            turns.target("progress: the worst world", ours[1], at_least=AT_LEAST_WORST),
            turns.target("progress: mean over other worlds", statistics.mean(others), at_least=AT_LEAST_MEAN),
            turns.target("progress: the worst of the other worlds", min(others), at_least=AT_LEAST_WORST),
            turns.target(
                "progress, equal sources: most moves away from equal shares in a run",
                moves["false_moves"].get("progress", [None, None])[1],
                at_most=AT_MOST_MOVES,
            ),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
