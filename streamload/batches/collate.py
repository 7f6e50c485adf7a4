"""Values of samples → values of a batch (step J), where a function of the user makes them."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from streamload.batches.in_progress import Allocate

_STACKED = (torch.Tensor, np.ndarray, np.generic, bool, int, float)
"""Types that become a tensor if all values of a batch are alike."""
_CELL = "cell "
"""What the names of a cell's values begin with while a batch is on its way."""


def collate(samples: Sequence[Mapping[str, Any]], allocate: Allocate) -> dict[str, Any]:
    """Collate the values of each key.

    Tensors and arrays of one shape and dtype are stacked; numbers become a tensor with the dtypes of torch's
    default_collate (bool, int64, float64). All else (strings, dicts, tensors of several shapes) is a list.

    Args:
        samples: at least one; all with the same keys.
        allocate: returns memory for a tensor of a shape and dtype, which stacked values are copied into.

    Raises:
        ValueError: the keys differ.
    """
    keys = samples[0].keys()
    for sample in samples:
        if sample.keys() != keys:
            raise ValueError(
                f"a sample has the keys {sorted(sample)}, another one {sorted(keys)}; "
                f"expected the same keys in all samples of a batch"
            )
    return {key: _join([sample[key] for sample in samples], allocate) for key in keys}


def collate_images(
    values: list[Any],
    keys: Sequence[str],
    allocate: Allocate,
    *,
    name: str = "image",
    only_tensors: bool = False,
) -> Any:
    """Collate the results of `preprocess=` for a batch: as `collate`, but mistakes are errors.

    Lists or tuples of tensors become `Views` if all have the same length, else a list. Dicts become a dict.

    Args:
        values: at least one.
        keys: of their samples.
        allocate: as for `collate`.
        name: of these values.
        only_tensors: whether all but tensors are refused.

    Raises:
        ValueError: tensors or numbers of several shapes or dtypes.
        TypeError: mappings that are no dicts; or anything but a tensor, with `only_tensors`.
    """
    joined = _join(values, allocate)
    if isinstance(joined, torch.Tensor):
        return joined
    if not only_tensors and (parts := _parts(values)):
        collated = {
            part: collate_images(
                [value[part] for value in values], keys, allocate, name=part_name(name, part)
            )
            for part in parts
        }
        return collated if isinstance(values[0], dict) else Views(collated.values())
    forms = [_form(value) for value in values]
    form_name = "" if name == "image" else f"as {name} "
    returned = f"preprocess= returned {form_name}{forms[0]} for sample {keys[0]!r}"
    other = next((place for place, form in enumerate(forms) if form != forms[0]), None)
    if other is not None and any(isinstance(value, (*_STACKED, dict)) for value in values):
        raise ValueError(
            f"{returned}, and {forms[other]} for sample {keys[other]!r}; expected one shape and dtype: "
            f"resize to one size in preprocess=, or make lists on purpose with map_sample="
        )
    if isinstance(values[0], Mapping) and not isinstance(values[0], dict):
        raise TypeError(
            f"{returned}; expected a tensor: give an image processor of transformers itself as preprocess=, "
            f"or return a dict of tensors"
        )
    if only_tensors:
        raise TypeError(
            f'{returned}; output="hf" needs tensors: end preprocess= with ToTensor or the like, or give '
            f'output="tuple" or "dict", which return a list'
        )
    return joined


class Views(list[Any]):
    """The views of a batch's images: the stacked tensors of each."""


class Cells(list[torch.Tensor]):
    """The images of a batch by cell, each of as many consecutive rows: a tensor for each, of one size."""


def part_name(name: str, part: int | str) -> str:
    """The name of a view, or of a dict's value, while a batch is on its way."""
    return f"{name}[{part!r}]"


def in_parts(values: dict[str, Any]) -> dict[str, Any]:
    """A batch's values with views and dicts in parts, which are sent and copied like other tensors."""
    image = values.get("image")
    if not isinstance(image, Views | dict):
        return values
    parts = image.items() if isinstance(image, dict) else enumerate(image)
    return {part_name("image", part): value for part, value in parts} | {
        name: value for name, value in values.items() if name != "image"
    }


def joined_parts(values: dict[str, Any]) -> dict[str, Any]:
    """Undo `in_parts`."""
    parts = {name[6:-1]: value for name, value in values.items() if name.startswith("image[")}
    if not parts:
        return values
    image: Any = Views(parts.values())
    if not all(map(str.isdigit, parts)):
        image = {ast.literal_eval(name): value for name, value in parts.items()}
    return {"image": image} | {name: value for name, value in values.items() if name[:6] != "image["}


def named(result: Any) -> dict[str, Any]:
    """The result of `collate=` as a dict; the values of a tuple are named by position, for `unnamed`.

    Raises:
        TypeError: it is neither a dict nor a tuple.
    """
    if isinstance(result, tuple | list):
        return {f"[{place}]": value for place, value in enumerate(result)}
    if isinstance(result, Mapping):
        return dict(result)
    raise TypeError(f"collate= returned a {type(result).__name__}; expected a dict or a tuple of values")


def unnamed(values: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """The batch as `collate=` returned it, dict or tuple, with `extra` added to it or as last element."""
    if next(iter(values), "") != "[0]":
        return {**values, **extra}
    return (*values.values(), extra) if extra else tuple(values.values())


def in_cells(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of a batch that is collated by the cell, as `named` returned them, for `cells_of`."""
    return {cell_name(place, name): value for place, cell in enumerate(cells) for name, value in cell.items()}


def cell_name(cell: int, name: str) -> str:
    """The name of a cell's value while a batch is on its way."""
    return f"{_CELL}{cell}.{name}"


def cells_of(
    values: Mapping[str, Any], origins: Mapping[str, Sequence[str]], rows: Sequence[int]
) -> list[Any]:
    """Undo `in_cells`: a list of what `collate=` returned, each with its part of `origins`.

    Args:
        values: of the batch.
        origins: lists with an element for each row.
        rows: of each cell.
    """
    cells: list[dict[str, Any]] = [{} for _ in rows]
    for name, value in values.items():
        place, _, own = name.removeprefix(_CELL).partition(".")
        cells[int(place)][own] = value
    stops = list(itertools.accumulate(rows, initial=0))
    of_cells = [
        {name: origin[first:stop] for name, origin in origins.items()}
        for first, stop in itertools.pairwise(stops)
    ]
    return [unnamed(cell, extra) for cell, extra in zip(cells, of_cells, strict=True)]


def _form(value: Any) -> str:
    """A description of dtype and shape, or of the type; values with the same one can be stacked."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        kind = "" if isinstance(value, torch.Tensor) else "an array "
        return f"{kind}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(repr, value))}"
    return f"a value of type {type(value).__name__}"


def _parts(values: list[Any]) -> Sequence[Any]:
    """The positions or names of what is stacked in all values; empty: they aren't views or dicts."""
    first = values[0]
    if isinstance(first, dict):
        is_alike = all(isinstance(value, dict) and value.keys() == first.keys() for value in values)
        return list(first) if is_alike and all(isinstance(name, str) for name in first) else ()
    if not isinstance(first, list | tuple) or not isinstance(
        next(iter(first), None), torch.Tensor | np.ndarray
    ):
        return ()
    is_alike = all(isinstance(value, list | tuple) and len(value) == len(first) for value in values)
    return (
        range(len(first))
        if is_alike and all(isinstance(view, _STACKED) for value in values for view in value)
        else ()
    )


def _join(values: list[Any], allocate: Allocate) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return _stack_tensors(values, allocate)
    if isinstance(first, (np.ndarray, np.generic)):
        return _stack_arrays(values, allocate)
    if isinstance(first, (bool, int, float)):
        return _numbers(values, allocate)
    return values


def _stack_tensors(values: list[Any], allocate: Allocate) -> Any:
    first = values[0]
    same = all(
        isinstance(value, torch.Tensor)
        and (value.shape, value.dtype, value.device, value.layout)
        == (first.shape, first.dtype, first.device, first.layout)
        for value in values
    )
    if not same or first.layout != torch.strided:
        return values
    if first.device.type != "cpu":
        return torch.stack([value.detach() for value in values])
    batch = allocate((len(values), *first.shape), first.dtype)
    return torch.stack([value.detach() for value in values], out=batch)


def _stack_arrays(values: list[Any], allocate: Allocate) -> Any:
    first = values[0]
    same = all(
        isinstance(value, (np.ndarray, np.generic))
        and (value.shape, value.dtype) == (first.shape, first.dtype)
        for value in values
    )
    dtype = _torch_dtype(first.dtype)
    if not same or dtype is None:
        return values
    batch = allocate((len(values), *first.shape), dtype)
    np.stack(values, out=batch.numpy())
    return batch


def _numbers(values: list[Any], allocate: Allocate) -> Any:
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        dtype = torch.bool
    elif kinds == {int}:
        dtype = torch.int64
    elif kinds <= {int, float}:
        dtype = torch.float64
    else:
        return values
    try:
        numbers = torch.tensor(values, dtype=dtype, device="cpu")
    except (OverflowError, RuntimeError, ValueError):  # an int of more than 64 bits
        return values
    batch = allocate(numbers.shape, dtype)
    return batch.copy_(numbers)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # strings, objects; the other byte order
        return None
