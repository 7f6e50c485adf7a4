"""The weights of a batch's rows: what workers computed, divided by the mean over the run's first step (K).

So a sample's weight depends on the sample and on one number, which all ranks agree on and a state records:
it is the same on any layout, at any batch size after the first step, and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamload.errors import OptionError, StateMismatch
from streamload.extension import RankPart
from streamload.weights.sample import SampleWeight, scaled
from streamload.weights.worker import VALUE

if TYPE_CHECKING:
    from streamload.extension import BatchInfo, Run

Weights = npt.NDArray[np.float32]

_STATE = "mean_weight"
"""The key of the mean in a state, once it is known."""


class MeanWeight(NamedTuple):
    """The mean by which weights of samples are scaled, and of which weights it is."""

    definition: str
    value: float


class RankWeights(RankPart):
    """The rank's part.

    Args:
        sample_weight: what a sample weighs.
        run: in which the ranks agree on the mean.
    """

    def __init__(self, sample_weight: SampleWeight, run: Run):
        self._sample_weight, self._run = sample_weight, run
        self._mean: MeanWeight | None = None  # of the batches before, or of a state

    def yielded(self, part: bytes, values: Mapping[str, Any]) -> dict[str, Any]:
        """The weights of a batch's rows. Until the mean is known, all ranks call it for the same steps.

        Raises:
            OptionError: nothing joins the ranks, or a value of the batch has the name.
            RankFailed: a rank failed or ended.
        """
        if "weight" in values:
            raise OptionError(
                "with sample_weight=, batches have the rows' weights as 'weight': what map_sample or "
                "collate returns needs another name"
            )
        return {"row_weights": self._weights(np.frombuffer(part, VALUE))}

    def values(self, info: BatchInfo) -> dict[str, Any]:
        """The weights, multiplied by those of the rows' sources."""
        return {"weight": info.weight}

    def state(self, position: int) -> dict[str, Any]:
        """Its keys of the loader's state: JSON-able, alike on all ranks."""
        return {} if self._mean is None else {_STATE: list(self._mean)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue after a state of the loader, which may be of one without this extension."""
        self._mean = None if state.get(_STATE) is None else _mean_in(state[_STATE])

    def _weights(self, values: npt.NDArray[np.float64]) -> Weights:
        """The weights of rows of these values; they are 1 where values or their mean are unknown."""
        weight = self._sample_weight
        if not weight.is_relative:
            return np.where(np.isnan(values), 1.0, values).astype(np.float32)
        if weight.mean is not None:
            self._mean = MeanWeight(weight.definition, weight.mean)
        elif self._mean is None or self._mean.definition != weight.definition:
            mean = self._agreed_mean(values[~np.isnan(values)].tolist())
            self._mean = None if mean is None else MeanWeight(weight.definition, mean)
        if self._mean is None:
            return np.ones(len(values), np.float32)
        return scaled(values, self._mean.value).astype(np.float32)

    def _agreed_mean(self, values: list[float]) -> float | None:
        """The mean over the values of all ranks; None if there are none."""
        if not self._run.can_agree:
            raise OptionError(
                "sample_weight=complexity(…) is relative to the mean over the first step of all ranks: "
                "initialise torch.distributed first, or give complexity(…, mean=…)"
            )
        mean: float | None = self._run.agree("the mean of sample_weight=", values, _mean_of)
        return mean


def _mean_of(by_rank: list[list[float]]) -> float | None:
    values = [value for rank in by_rank for value in rank]
    total = math.fsum(values)  # exact: the same for any division of rows among ranks
    return total / len(values) if total else None


def _mean_in(saved: Any) -> MeanWeight:
    """The mean of a state.

    Raises:
        StateMismatch: it is none.
    """
    try:
        definition, mean = saved
        if isinstance(definition, str) and 0 < float(mean) < math.inf:
            return MeanWeight(definition, float(mean))
    except (TypeError, ValueError, OverflowError):
        pass
    raise StateMismatch(f"not a valid state of a loader: {saved!r:.100} as {_STATE}")
