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
from streamload.loader.distributed import can_compare, gather
from streamload.loader.position import MeanWeight
from streamload.worker import VALUE

Weights = npt.NDArray[np.float32]


def weights_of(
    packed: bytes, weight: SampleWeight, mean: MeanWeight | None, world_size: int
) -> tuple[Weights, MeanWeight | None]:
    """The weights of a batch's rows.

    Until the mean is known, all ranks have to call it for their batches of the same steps.

    Args:
        packed: VALUE[N], as it came with the batch.
        weight: how rows are weighed.
        mean: by which the batches before were scaled, or that of a state; None: there is none.
        world_size: of the run.

    Returns:
        float32[N], and the mean from now on; None: it isn't known yet, or values aren't scaled.

    Raises:
        OptionError: the mean isn't known, and nothing joins the ranks.
    """
    values = np.frombuffer(packed, VALUE)
    if not weight.is_relative:
        return np.where(np.isnan(values), 1.0, values).astype(np.float32), None
    if weight.mean is not None:
        mean = MeanWeight(weight.definition, weight.mean)
    elif mean is None or mean.definition != weight.definition:
        mean = _mean_over_ranks(values, weight.definition, world_size)
    if mean is None:
        return np.ones(len(values), np.float32), None
    return scaled(values, mean.value).astype(np.float32), mean


def _mean_over_ranks(values: npt.NDArray[np.float64], definition: str, world_size: int) -> MeanWeight | None:
    """The mean over the ranks' rows of a step; None if nothing is known of them."""
    if world_size > 1 and not can_compare(world_size):
        raise OptionError(
            "sample_weight=complexity(…) is relative to the mean over the first step of all ranks: "
            "initialise torch.distributed first, or give complexity(…, mean=…)"
        )
    known = [one for own in gather(values[~np.isnan(values)].tolist(), world_size) for one in own]
    total = math.fsum(known)  # exact: the same for any division of rows among ranks
    return MeanWeight(definition, total / len(known)) if total else None
