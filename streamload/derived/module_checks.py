"""Whether rows of a module can be kept at all, and whether they are what is computed.

A result has to depend on its own input alone: not on chance, not on the other rows of a batch, not on the
weights of other processes. What can be told from the module is refused before it computes; the rest is found
by computing a few rows again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from streamload.derived.row_format import Result
from streamload.errors import FeatureNotCacheable
from streamload.torch_internals import DropoutBase, InstanceNormBase, NormBase

_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-6, torch.complex128: 1e-6}
_TOLERANCE = 2e-3
"""Of other types: kernels for batches of another size add up in another order."""
_NORMS = (NormBase,)  # of instances only where it keeps statistics
_DROPOUTS = (DropoutBase,)


def refuse_module(module: torch.nn.Module) -> None:
    """Refuse a built module whose results depend on more than an input.

    Raises:
        FeatureNotCacheable: it is sharded, or in train mode with dropout or batch norm.
    """
    name = type(module).__name__
    for prefix, one in module.named_modules():
        where = f"{name}.{prefix}" if prefix else name
        for tensor in one._parameters.values():
            if tensor is not None and (hasattr(tensor, "device_mesh") or tensor.device.type == "meta"):
                raise FeatureNotCacheable(
                    f"the weights of {where} are sharded, or not loaded: the whole module has to be in this "
                    f"process; keep it out of FSDP (ignored_modules)"
                )
        if type(one).__name__ in ("FullyShardedDataParallel", "FlatParameter"):
            raise FeatureNotCacheable(f"{where} is sharded: keep it out of FSDP (ignored_modules)")
        if not one.training:
            continue
        is_random = isinstance(one, _DROPOUTS) and one.p > 0
        is_random = is_random or _share_of(one, "drop_prob") > 0 or _share_of(one, "dropout") > 0
        if is_random or (isinstance(one, _NORMS) and not _is_per_row(one)):
            raise FeatureNotCacheable(
                f"{where} is a {type(one).__name__} in train mode: its results differ from call to call; "
                f"call .eval() on the module (a parent's .train() undoes it)"
            )


def _is_per_row(norm: NormBase) -> bool:
    is_of_instance = isinstance(norm, InstanceNormBase)
    return is_of_instance and not norm.track_running_stats


def _share_of(module: torch.nn.Module, name: str) -> float:
    value = vars(module).get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


class Chance:
    """The random generators at a moment, to see whether a computation drew from them; about 20 µs."""

    def __init__(self, device: torch.device):
        self._device = device
        self._states = self._now()

    def was_used(self) -> bool:
        """Whether anything drew from them since."""
        return any(
            not torch.equal(one, other) if isinstance(one, torch.Tensor) else one != other
            for one, other in zip(self._now(), self._states, strict=True)
        )

    def _now(self) -> list[Any]:
        twister: Any = np.random.get_state(legacy=False)
        numpy_state = (twister["state"]["key"].tobytes(), twister["state"]["pos"])
        states: list[Any] = [random.getstate(), numpy_state, torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states


def is_close(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether leaves of two results are the same but for how kernels round."""
    return len(one) == len(other) and all(map(_is_leaf_close, one, other))


def _is_leaf_close(one: Any, other: Any) -> bool:
    first, second = (
        leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(np.asarray(leaf)) for leaf in (one, other)
    )
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not (first.dtype.is_floating_point or first.dtype.is_complex):
        return torch.equal(first.cpu(), second.cpu())
    tolerance = _TOLERANCES.get(first.dtype, _TOLERANCE if first.element_size() > 1 else 2e-1)
    wide = torch.complex128 if first.dtype.is_complex else torch.float64
    first, second = first.cpu().to(wide), second.cpu().to(wide)
    scale = first[first.isfinite()].abs().max().item() if first.isfinite().any() else 0.0
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance * scale * 0.1 + 1e-12, equal_nan=True)


def row_of(result: Result, at: int) -> list[Any]:
    """The leaves of one row of a result of rows, with dimension 0 kept."""
    return [leaf[at : at + 1] for leaf in result.leaves]
