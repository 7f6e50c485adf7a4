"""How far rows are from what their module computes now, and how far rounding may take them.

A right row may differ from what is computed now: kernels for batches of other sizes add up in another order.
How much rounding does to a row is measured on that row: its input is moved by the epsilon of the arithmetic,
a few times, and the distances of the results are the scale of what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from streamload.derived.proof.builds import Generators
from streamload.torch_internals import tree_map

SEVERAL_ROWS = 8
"""Rows that are judged together: of whole numbers (codes, top-k) rounding turns one in many, and of coarse
arithmetic the mean of several rows shows what rounding hides in one."""
_COARSE = 2.0**-9
_MOVES = (4, 12)
"""Times that an input is moved; the second round only before rows are found to differ."""
_TIMES = 2.0
"""Allowed distance, in largest distances that moving the input makes."""
_FLOOR = 2.0**-10
"""Allowed distance of exact arithmetic, or the square root of its epsilon if that is less."""

Compute = Callable[[Any], Sequence[Any]]
"""Computes the leaves of a result from the arguments of a call: a tree with tensors and arrays."""


@dataclass(frozen=True)
class JudgedRows:
    """Rows that are judged: the arguments that they come from, and what they are compared with."""

    arguments: Any
    leaves: Sequence[Any]  # [N, …] each, or those of one whole result
    repeated: Callable[[int], Any] | None = None
    """The arguments with each row so many times; None: they are of one whole result."""


@dataclass(frozen=True)
class Difference:
    """More than rounding.

    Attributes:
        distance: of the rows from what is computed, as a share of their norm, or of the whole numbers.
        allowed: how large it may be, as measured on the rows.
    """

    distance: float
    allowed: float

    def __str__(self) -> str:
        if math.isinf(self.distance):
            return "another shape, dtype, or places that aren't finite"
        return f"a distance of {self.distance:.2g}, where rounding explains {self.allowed:.2g}"


class RowComparison:
    """Compares rows with what their module computes from the same inputs.

    Args:
        compute: a result's leaves; all random generators are as they were at each call.
        epsilon: of the arithmetic, see `arithmetic_epsilon`.
        call_rows: rows of the call in which rows are read: where inputs are no floats, a row is computed
            among as many.
        others: leaves of several rows of the call, from whose mean distances are taken; (): there are none.
    """

    def __init__(self, compute: Compute, epsilon: float, call_rows: int, others: Sequence[Any] = ()):
        self._compute, self._epsilon = compute, epsilon
        self._call_rows, self._others = call_rows, others
        self._generator = torch.Generator().manual_seed(0)  # no seed of the user's is touched

    @property
    def is_coarse(self) -> bool:
        """True if one row says little, as in bfloat16."""
        return self._epsilon > _COARSE

    def difference(self, samples: Sequence[JudgedRows]) -> Difference | None:
        """Return how far rows are from what is computed now; None: no further than rounding explains."""
        before = Generators()
        computed = []
        for sample in samples:
            computed.append(list(self._compute(sample.arguments)))
            before.restore()
        pairs = [(sample.leaves, leaves) for sample, leaves in zip(samples, computed, strict=True)]
        if not all(_are_alike(*pair) for pair in pairs):
            return Difference(math.inf, 0.0)
        allowed = self._floors(pairs)
        for moves in _MOVES:
            distances = self._distances(pairs)
            if all(distance <= most for distance, most in zip(distances, allowed, strict=True)):
                return None
            for _ in range(moves):
                moved = self._moved_results(samples, before)
                noise = self._distances(
                    [(leaves, other) for leaves, other in zip(moved, computed, strict=True)]
                )
                allowed = [max(most, _TIMES * part) for most, part in zip(allowed, noise, strict=True)]
        distances = self._distances(pairs)
        exceeded = [pair for pair in zip(distances, allowed, strict=True) if pair[0] > pair[1]]
        return Difference(*max(exceeded)) if exceeded else None

    def _floors(self, pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> list[float]:
        """The least allowed of each distance, in the order of `_distances`."""
        floors: list[float] = []
        for number, leaf in enumerate(pairs[0][0]):
            if _is_whole(leaf):
                floors.append(self._epsilon)
                continue
            epsilon = max(self._epsilon, _epsilon_of(leaf))
            floor = max(epsilon, min(math.sqrt(epsilon), _FLOOR))
            of_norm = min(floor, 2 * _FLOOR) * self._norm_by_scale(pairs, number)
            floors += [max(floor, of_norm), floor, max(floor, of_norm)]
        return floors

    def _norm_by_scale(self, pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]], number: int) -> float:
        """The norm of rows by that of the centered ones: large where the rows of a call are nearly alike."""
        rows = [_values(first[number]) for first, _ in pairs]
        norm = scale = 0.0
        for row in rows:
            finite = row.isfinite()
            norm += _square(row.where(finite, 0.0))
            scale += _square((row - _middle(row, self._center(number))).where(finite, 0.0))
        return math.sqrt(norm / scale) if scale else 1.0

    def _center(self, number: int) -> torch.Tensor | None:
        return _values(self._others[number]).mean(0) if self._others else None

    def _moved_results(self, samples: Sequence[JudgedRows], before: Generators) -> list[list[Any]]:
        """Results of inputs that are the same but for rounding."""
        results = []
        for sample in samples:
            moved, count = _moved(sample.arguments, self._epsilon, self._generator), 1
            if moved is None and sample.repeated is not None:  # no input is of floats
                count = max(2, self._call_rows)
                moved = sample.repeated(count)
            leaves = self._compute(sample.arguments if moved is None else moved)
            before.restore()
            results.append([leaf[: len(leaf) // count] if count > 1 else leaf for leaf in leaves])
        return results

    def _distances(self, pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> list[float]:
        """Distances of all rows together: three of each leaf of floats, one of each leaf of whole numbers.

        A leaf of floats has the norm of the difference, its part along the row and its mean over several
        rows. Rounding has no direction, so it hides a factor or a shift in the norm but not in the other two.
        """
        distances: list[float] = []
        for number in range(len(pairs[0][0])):
            leaves = [(_values(first[number]), _values(second[number])) for first, second in pairs]
            if _is_whole(pairs[0][0][number]):
                unequal = sum(int((first != second).sum()) for first, second in leaves)
                distances.append(unequal / max(1, sum(first.numel() for first, _ in leaves)))
                continue
            distances += _float_distances(leaves, self._center(number))
        return distances


def _float_distances(
    leaves: Sequence[tuple[torch.Tensor, torch.Tensor]], center: torch.Tensor | None
) -> list[float]:
    """Norms of a difference and of its mean, by the centered rows'; its part along the rows, by theirs."""
    squares = along = scale = norm = 0.0
    mean, rows = torch.zeros(()), 0
    for first, second in leaves:
        finite = first.isfinite()
        if not torch.equal(finite, second.isfinite()) or not _are_equal(first[~finite], second[~finite]):
            return [math.inf] * 3
        middle = _middle(first, center)
        row, centered = first.where(finite, 0.0), (first - middle).where(finite, 0.0)
        difference = second.where(finite, 0.0) - row
        squares += _square(difference)
        along += float((difference * row.conj()).sum().real)
        scale += _square(centered) or _square(row)  # a constant row has no other scale
        norm += _square(row)
        if difference.ndim > 1:
            mean, rows = mean + difference.sum(0), rows + len(difference)
    if not scale or not norm:
        return [math.inf if squares else 0.0] * 3
    of_mean = math.sqrt(_square(mean) / rows / scale) if rows > 1 else 0.0
    return [math.sqrt(squares / scale), abs(along) / norm, of_mean]


def _middle(row: torch.Tensor, center: torch.Tensor | None) -> torch.Tensor:
    """What distances are taken from: the mean of the rows of a call, or of the numbers of a single row."""
    if center is not None and center.shape == row.shape[1:]:
        return center
    numbers = row[row.isfinite()]
    return numbers.mean() if len(numbers) > 1 else torch.zeros(())


def _square(values: torch.Tensor) -> float:
    return float(values.abs().square().sum())


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(torch.equal(first.nan_to_num(nan=0.0), second.nan_to_num(nan=0.0)))


def _are_alike(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """True if leaves have the same dtypes and shapes."""
    return len(first) == len(second) and all(
        leaf.dtype == other.dtype and tuple(leaf.shape) == tuple(other.shape)
        for leaf, other in zip(first, second, strict=True)
    )


def _values(leaf: Any) -> torch.Tensor:
    """A leaf on the CPU, floats as float64."""
    values = leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else torch.as_tensor(np.asarray(leaf))
    if values.is_complex():
        return values.to(torch.complex128)
    return values.to(torch.float64) if values.is_floating_point() else values


def has_whole_numbers(leaves: Sequence[Any]) -> bool:
    """True if one of the leaves is of whole numbers or truths."""
    return any(map(_is_whole, leaves))


def _is_whole(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return not (leaf.is_floating_point() or leaf.is_complex())
    return leaf.dtype.kind not in "fc"


def _epsilon_of(leaf: Any) -> float:
    if _is_whole(leaf):
        return 0.0
    return float(torch.finfo(leaf.dtype).eps if isinstance(leaf, torch.Tensor) else np.finfo(leaf.dtype).eps)


def arithmetic_epsilon(
    module: torch.nn.Module, arguments: Any, settings: Sequence[Any], device: str
) -> float:
    """The epsilon of the coarsest arithmetic that a module may compute in.

    Args:
        arguments: of a call.
        settings: of torch, as `fingerprint.torch_settings` gives them.
        device: the type of the module's device.
    """
    values = [*module.parameters(), *module.buffers()]
    tree_map(values.append, arguments)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    epsilons = [float(torch.finfo(dtype).eps) for dtype in dtypes or {torch.get_default_dtype()}]
    _, autocast, precision, tf32, *_ = settings
    if autocast:
        epsilons.append(float(torch.finfo(getattr(torch, autocast.removeprefix("torch."))).eps))
    if (device != "cpu" and precision != "highest") or tf32:
        epsilons.append(2.0**-10)
    return max(epsilons)


def _moved(arguments: Any, epsilon: float, generator: torch.Generator) -> Any:
    """Arguments with each float moved up or down by a share of it; None: there are no floats."""
    is_moved = False

    def moved(value: Any) -> Any:
        nonlocal is_moved
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            return moved(torch.from_numpy(value)).numpy()
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        is_moved = True
        signs = torch.randint(0, 2, value.shape, generator=generator).mul_(2).sub_(1).to(value.device)
        wide = value.detach().to(torch.promote_types(value.dtype, torch.float32))
        return (wide * (1 + epsilon * signs)).to(value.dtype)

    result = tree_map(moved, arguments)
    return result if is_moved else None


def map_tensors(act: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A tree of lists, tuples, dicts and dataclasses, with each of its tensors replaced."""
    return tree_map(lambda leaf: act(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A tree with its floating tensors in a dtype; None: as it is."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
