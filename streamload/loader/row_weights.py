"""The weights of a batch's rows: what workers computed, divided by the mean over the run's first step (K).

So a sample's weight depends on the sample and on one number, which all ranks agree on and a state records:
it is the same on any layout, at any batch size after the first step, and after a resume.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from streamload.batches.sample_weights import SampleWeight, scaled
from streamload.errors import OptionError
from streamload.loader.agreement import Agreement
from streamload.loader.distributed import can_compare
from streamload.loader.position import MeanWeight
from streamload.worker import VALUE

Weights = npt.NDArray[np.float32]


class FirstMean:
    """The mean over the ranks' rows of a step, which all ranks have to ask for at the same steps.

    Args:
        world_size: of the run.
    """

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._agreement: Agreement | None = None

    def of(self, known: list[float]) -> float | None:
        """The mean of the known values of all ranks; None if there are none.

        Args:
            known: this rank's.

        Raises:
            OptionError: nothing joins the ranks.
            RankFailed: a rank failed or ended.
        """
        if self._agreement is None:
            if self._world_size > 1 and not can_compare(self._world_size):
                raise OptionError(
                    "sample_weight=complexity(…) is relative to the mean over the first step of all ranks: "
                    "initialise torch.distributed first, or give complexity(…, mean=…)"
                )
            self._agreement = Agreement(self._world_size)
        found: float | None = self._agreement.decide("the mean of sample_weight=", known, _mean_of)
        return found


def weights_of(
    packed: bytes, weight: SampleWeight, mean: MeanWeight | None, first: FirstMean
) -> tuple[Weights, MeanWeight | None]:
    """The weights of a batch's rows.

    Until the mean is known, all ranks have to call it for their batches of the same steps.

    Args:
        packed: VALUE[N], as it came with the batch.
        weight: how rows are weighed.
        mean: by which the batches before were scaled, or that of a state; None: there is none.
        first: finds the mean.

    Returns:
        float32[N], and the mean from now on; None: it isn't known yet, or values aren't scaled.

    Raises:
        OptionError, RankFailed: see `FirstMean.of`.
    """
    values = np.frombuffer(packed, VALUE)
    if not weight.is_relative:
        return np.where(np.isnan(values), 1.0, values).astype(np.float32), None
    if weight.mean is not None:
        mean = MeanWeight(weight.definition, weight.mean)
    elif mean is None or mean.definition != weight.definition:
        found = first.of(values[~np.isnan(values)].tolist())
        mean = None if found is None else MeanWeight(weight.definition, found)
    if mean is None:
        return np.ones(len(values), np.float32), None
    return scaled(values, mean.value).astype(np.float32), mean


def _mean_of(by_rank: list[list[float]]) -> float | None:
    known = [value for own in by_rank for value in own]
    total = math.fsum(known)  # exact: the same for any division of rows among ranks
    return total / len(known) if total else None
