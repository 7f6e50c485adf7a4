"""Checks of a module: that its rows can be kept at all, and that they are what is computed.

A result has to depend on its own input alone: not on chance, not on the other rows of a batch, not on the
weights of other processes. What can be told from the module is refused before it computes; the rest is found
by computing a few rows again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from streamload.derived.log_once import log_once, logger
from streamload.derived.proof.fingerprint import Fingerprint
from streamload.derived.proof.lazy import pending_of
from streamload.derived.proof.module_proof import description_of, label_of, proof_of, refuse_rows
from streamload.derived.proof.row_check import CannotCheck, RowCheck, Rows, RowVerdict, remade
from streamload.derived.store.results import Result
from streamload.derived.store.row_store import RowStore
from streamload.errors import FeatureMismatch, FeatureNotCacheable
from streamload.torch_internals import DropoutBase, InstanceNormBase, NormBase

_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-6, torch.complex128: 1e-6}
_TOLERANCE = 2e-3
"""Of other types: kernels for batches of another size add up in another order."""
_DEVICE_TOLERANCE = 2e-2
_UNEQUAL_SHARE = 0.02
"""Of whole numbers that a device computed: an argmax may be another where two scores are about the same."""
_NORMS = (NormBase,)  # of instances only where it keeps statistics
_DROPOUTS = (DropoutBase,)


def refuse_module(module: torch.nn.Module) -> None:
    """Refuse a built module whose results depend on more than an input.

    Raises:
        FeatureNotCacheable: it is sharded, or in train mode with dropout or batch norm.
    """
    name = type(module).__name__
    for prefix, child in module.named_modules():
        where = f"{name}.{prefix}" if prefix else name
        for tensor in child._parameters.values():
            if tensor is not None and (hasattr(tensor, "device_mesh") or tensor.device.type == "meta"):
                raise FeatureNotCacheable(
                    f"the weights of {where} are sharded, or not loaded: the whole module has to be in this "
                    f"process; keep it out of FSDP (ignored_modules)"
                )
        if type(child).__name__ in ("FullyShardedDataParallel", "FlatParameter"):
            raise FeatureNotCacheable(f"{where} is sharded: keep it out of FSDP (ignored_modules)")
        if not child.training:
            continue
        is_random = isinstance(child, _DROPOUTS) and child.p > 0
        is_random = is_random or _share_of(child, "drop_prob") > 0 or _share_of(child, "dropout") > 0
        if is_random or (isinstance(child, _NORMS) and not _is_per_row(child)):
            raise FeatureNotCacheable(
                f"{where} is a {type(child).__name__} in train mode: its results differ from call to call; "
                f"call .eval() on the module (a parent's .train() undoes it)"
            )


def _is_per_row(norm: NormBase) -> bool:
    is_of_instance = isinstance(norm, InstanceNormBase)
    return is_of_instance and not norm.track_running_stats


def _share_of(module: torch.nn.Module, name: str) -> float:
    value = vars(module).get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def is_close(first: Sequence[Any], second: Sequence[Any], *, is_of_device: bool = False) -> bool:
    """True if leaves of two results are the same but for how kernels round.

    Args:
        is_of_device: only one of the results is a CPU's: devices multiply in fewer bits (TF32), and add up in
            an order of their own. Then the distance of all elements together counts, as that of a few grows
            with the depth of a module.
    """
    near = _is_leaf_near if is_of_device else _is_leaf_close
    return len(first) == len(second) and all(map(near, first, second))


def _comparable(first_leaf: Any, second_leaf: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype] | None:
    """Two leaves on the CPU, floating ones in 64 bits, and their type; None: it or their shapes differ."""
    first, second = (
        leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(np.asarray(leaf))
        for leaf in (first_leaf, second_leaf)
    )
    if first.shape != second.shape or first.dtype != second.dtype:
        return None
    dtype, wide = first.dtype, torch.complex128 if first.dtype.is_complex else torch.float64
    if not (dtype.is_floating_point or dtype.is_complex):
        return first.cpu(), second.cpu(), dtype
    return first.cpu().to(wide), second.cpu().to(wide), dtype


def _is_leaf_close(leaf: Any, other: Any) -> bool:
    leaves = _comparable(leaf, other)
    if leaves is None:
        return False
    first, second, dtype = leaves
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.equal(first, second)
    tolerance = _TOLERANCES.get(dtype, _TOLERANCE if dtype.itemsize > 1 else 2e-1)
    scale = first[first.isfinite()].abs().max().item() if first.isfinite().any() else 0.0
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance * scale * 0.1 + 1e-12, equal_nan=True)


def _is_leaf_near(leaf: Any, other: Any) -> bool:
    leaves = _comparable(leaf, other)
    if leaves is None:
        return False
    first, second, dtype = leaves
    if not (dtype.is_floating_point or dtype.is_complex):  # a class may change at a tie
        return bool((first != second).double().sum() <= _UNEQUAL_SHARE * first.numel())
    if not torch.equal(first.isfinite(), second.isfinite()):
        return False
    first, second = first[first.isfinite()], second[second.isfinite()]
    distance = (first - second).abs()
    tolerance = max(_DEVICE_TOLERANCE, _TOLERANCES.get(dtype, 0.0))
    near = distance.square().sum().sqrt() <= tolerance * second.abs().square().sum().sqrt() + 1e-12
    return bool(near) and bool((distance <= 10 * tolerance * second.abs().max() + 1e-12).all())


def row_of(result: Result, number: int) -> list[Any]:
    """The leaves of one row of a result of rows, with dimension 0 kept."""
    return [leaf[number : number + 1] for leaf in result.leaves]


def check_elsewhere(module: Any, store: RowStore, fingerprint: Fingerprint, key: Any, rows: Rows) -> None:
    """Let another process compute some rows again of a module that isn't built; `key` is of the first."""
    proof, parts = proof_of(module), fingerprint.parts

    def at_exit(verdict: RowVerdict) -> None:
        if verdict.is_same is False and fingerprint.digest not in proof.refused:
            logger.error("%s", refuse_rows(module, store, fingerprint, key))

    try:
        remake = remade(
            module,
            pending_of(module),
            description_of(module).parts,
            parts["device"],
            tuple(parts["settings"]),
        )
        process, proof.process = proof.process, None
        proof.check = RowCheck(remake, rows, fingerprint.digest, process, at_exit)
        proof.checked = (fingerprint, key)
    except CannotCheck as exc:
        proof.checked = (fingerprint, key)
        _say_unchecked(module, str(exc))


def refuse_stale(module: Any, store: RowStore, fingerprint: Fingerprint, *, wait: bool = False) -> None:
    """Refuse rows of which a check has found that they aren't what is computed now.

    With `wait` a check that has begun is waited for, a while.

    Raises:
        FeatureMismatch: it has.
    """
    proof = proof_of(module)
    check = proof.check
    if check is not None:
        if wait:
            check.wait()
        if check.verdict is not None and proof.checked is not None:
            verdict, proof.check = check.verdict, None
            if verdict.is_same is False:
                raise refuse_rows(module, store, *proof.checked)
            if verdict.is_same is None:
                _say_unchecked(module, verdict.reason)
    if proof.refused and fingerprint.digest in proof.refused:
        raise FeatureMismatch(proof.refused[fingerprint.digest])


def _say_unchecked(module: Any, reason: str) -> None:
    log_once(
        f"rows of {label_of(module)} aren't checked in this run, as no other process could compute "
        f"them ({reason}); they are when the module is built next"
    )
