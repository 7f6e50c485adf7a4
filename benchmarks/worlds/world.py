"""Simulated trainings for policies: sources whose loss falls by a known law, so that the best mix is known.

A world's held-out loss is the mean over its sources. What is *reported* differs from it as in real trainings:
noise, spikes, late or missing reports, a learning rate that falls. No model, no loader.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.errors import OptionError

Floats = NDArray[np.float64]

KINDS = (
    "plain",
    "noise",
    "spikes",
    "delays",
    "nan",
    "transfer",
    "memorised",
    "unlearnable",
    "decay",
    "restarts",
    "own_share",
    "abrupt",
)
"""Difficulties of worlds; "equal" is one more, in which every source is alike."""

REPEATS_WORTH = 15.0
"""Passes after which repeats teach 1/e of what new samples do (Muennighoff et al., arXiv 2305.16264)."""


@dataclass(frozen=True, slots=True)
class World:
    """A simulated training.

    A source's loss after n samples: `floor + scale · (1 + effective(n) / start) ** -exponent`.

    Attributes:
        kind: one of KINDS, or "equal".
        seed: of everything that is drawn.
        steps: of the run.
        rows: of a step.
        floor: what can't be learned, of each source.
        scale: the loss that can be learned.
        exponent: how fast.
        start: samples after which the loss begins to fall.
        sizes: samples of each source; inf: more than the run takes.
        transfer: [i, j]: how much a sample of source j teaches of source i.
        noise: standard deviation of a row's loss.
        common: standard deviation of what all sources of a step share.
        spike_rate: parts of which one in so many is a spike (0: none), of a size of 10 standard deviations.
        late: parts by which reports come late.
        missing: the share of parts without a usable report.
        rate_drop: what the end of the learning rate's schedule takes off every source's loss.
        cycles: of the learning rate; each but the first begins with the loss that the last one took off.
        own_share: how much of log(share) a source's reported loss has, as with negatives of one's own source.
    """

    kind: str
    seed: int
    steps: int
    rows: int
    floor: Floats
    scale: Floats
    exponent: Floats
    start: Floats
    sizes: Floats
    transfer: Floats
    noise: float = 1.0
    common: float = 0.05
    spike_rate: int = 0
    late: int = 0
    missing: float = 0.0
    rate_drop: float = 0.0
    cycles: int = 1
    own_share: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The sources' names."""
        return tuple(f"source {i}" for i in range(len(self.floor)))

    @property
    def total(self) -> float:
        """Samples of the whole run."""
        return float(self.steps * self.rows)

    def equal(self) -> Floats:
        """Return the samples of each source in a run of equal shares."""
        return np.full(len(self.floor), self.total / len(self.floor))

    def effective(self, samples: Floats) -> Floats:
        """Return samples that would teach as much: repeats count less, and other sources teach it, too."""
        repeated = np.where(np.isfinite(self.sizes), self.sizes, 0.0) * REPEATS_WORTH
        worth = repeated * (1 - np.exp(-self.repeats(samples) / REPEATS_WORTH))
        return np.asarray(self.transfer @ (np.minimum(samples, self.sizes) + worth), np.float64)

    def repeats(self, samples: Floats) -> Floats:
        """Return the passes over each source after the first."""
        return np.asarray((samples / self.sizes - 1).clip(0), np.float64)

    def losses(self, samples: Floats) -> Floats:
        """Return the held-out loss of each source."""
        losses: Floats = (
            self.floor + self.scale * (1 + self.effective(samples) / self.start) ** -self.exponent
        )
        return losses

    def loss(self, samples: Floats) -> float:
        """Return the held-out loss: the mean over the sources."""
        return float(self.losses(samples).mean())

    def gains(self, samples: Floats) -> Floats:
        """Return how much one more sample of each source lowers the sum of the held-out losses."""
        slope = (
            self.scale
            * self.exponent
            / self.start
            * (1 + self.effective(samples) / self.start) ** (-self.exponent - 1)
        )
        slopes: Floats = (self.transfer.T @ slope) * np.exp(-self.repeats(samples) / REPEATS_WORTH)
        return slopes

    def best(self) -> Floats:
        """Return the samples of each source with the least held-out loss (water-filling)."""
        shares = np.full(len(self.floor), 1 / len(self.floor))
        rate = 0.5
        for _ in range(400):
            gains = self.gains(shares * self.total)
            mean = float(shares @ gains)
            moved = shares * (gains / mean).clip(1e-3, 1e3) ** rate
            shares = (moved / moved.sum()).clip(1e-9)
            shares /= shares.sum()
        return shares * self.total

    def reported(
        self, samples: Floats, shares: Floats, time: float, rng: np.random.Generator, counts: Floats
    ) -> Floats:
        """Return the mean loss that a part of an interval would report of each source.

        Args:
            samples: of each source so far, in the middle of the part.
            shares: in effect.
            time: 0 to 1, how much of the run is over.
            rng: of the noise.
            counts: rows of each source in the part.
        """
        losses = self.losses(samples)
        losses = losses * np.exp(
            -0.25 * self.repeats(samples)
        )  # what is learned by heart: it doesn't help held-out samples
        phase = time * self.cycles % 1.0
        losses = losses - self.rate_drop * (1 - np.cos(np.pi * phase)) / 2
        losses = losses + self.own_share * np.log(np.maximum(shares * len(shares), 1e-6))
        losses = losses + self.noise / np.sqrt(np.maximum(counts, 1)) * rng.standard_normal(len(losses))
        losses = losses + self.common * np.sqrt(self.rows / counts.sum()) * rng.standard_normal()
        if self.spike_rate and rng.random() < 1 / self.spike_rate:
            size = 10 * self.noise / np.sqrt(np.maximum(counts, 1)) + 0.3
            losses = losses + size * (rng.random(len(losses)) < 0.5)
        return np.asarray(losses, np.float64)


def world(kind: str, seed: int) -> World:
    """Return a world of a kind, in which the mix matters: equal shares lose 3 % or more of what is learned.

    Raises:
        OptionError: an unknown kind.
    """
    if kind not in (*KINDS, "equal"):
        raise OptionError(f"no world is of the kind {kind!r}; there are: {', '.join((*KINDS, 'equal'))}")
    for attempt in range(1000):
        drawn = _draw(kind, seed, np.random.default_rng([seed, attempt, *kind.encode()]))
        if kind == "equal" or _matters(drawn):
            return drawn
    raise AssertionError("no world was found in which the mix matters")


def _matters(drawn: World) -> bool:
    equal, best = drawn.loss(drawn.equal()), drawn.loss(drawn.best())
    return equal - best >= 0.03 * (drawn.loss(0 * drawn.equal()) - best)


def _draw(kind: str, seed: int, rng: np.random.Generator) -> World:
    many = int(rng.integers(3, 9))
    steps, rows = 20_000, 1024
    total = float(steps * rows)
    drawn = World(
        kind=kind,
        seed=seed,
        steps=steps,
        rows=rows,
        floor=rng.uniform(0.5, 2.5, many),
        scale=rng.uniform(0.5, 3.0, many),
        exponent=rng.uniform(0.15, 0.8, many),
        start=total * 10 ** rng.uniform(-3, -0.5, many),
        sizes=np.full(many, np.inf),
        transfer=np.eye(many),
    )
    return _hardened(drawn, rng)


def _hardened(drawn: World, rng: np.random.Generator) -> World:
    many, total = len(drawn.floor), drawn.total
    changes: dict[str, Any] = {}
    if drawn.kind == "equal":
        changes = {
            name: np.full(many, getattr(drawn, name)[0]) for name in ("floor", "scale", "exponent", "start")
        }
    elif drawn.kind == "noise":
        changes = {"noise": 8.0, "common": 0.4}
    elif drawn.kind == "spikes":
        changes = {"spike_rate": 20}
    elif drawn.kind == "delays":
        changes = {"late": 6}
    elif drawn.kind == "nan":
        changes = {"missing": 0.3}
    elif drawn.kind == "transfer":
        changes = {"transfer": np.eye(many) + (1 - np.eye(many)) * rng.uniform(0, 0.3, (many, many))}
    elif drawn.kind == "memorised":
        small = rng.random(many) < 0.4
        small[int(rng.integers(many))] = True
        changes = {"sizes": np.where(small, total * 10 ** rng.uniform(-2.5, -1.5, many), np.inf)}
    elif drawn.kind == "unlearnable":
        scale = drawn.scale.copy()
        scale[int(rng.integers(many))] = 0.0
        changes = {"scale": scale}
    elif drawn.kind == "decay":
        changes = {"rate_drop": 0.4}
    elif drawn.kind == "restarts":
        changes = {"rate_drop": 0.3, "cycles": 3}
    elif drawn.kind == "own_share":
        changes = {"own_share": 0.3}
    elif drawn.kind == "abrupt":  # all but an exponential: it is learned, and then it is over
        start = 20 * total * 10 ** rng.uniform(-1.5, -0.3, many)
        changes = {"exponent": np.full(many, 20.0), "start": start}
    return replace(drawn, **changes)
