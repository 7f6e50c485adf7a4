"""A result as bytes: tensors, arrays, numbers and text in tuples, lists, dicts and dataclasses. No pickle.

A row is the layout as JSON and the bytes of its tensors, sealed (sealed.py). Of a layout only classes are
made again that are imported already, and that are plain records of fields.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streamload.derived.store.sealed import Row, StoredLeaf, leaves_in
from streamload.errors import CacheCorrupt, FeatureNotCacheable

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_MOST_LAYOUT_BYTES = 1 << 20
Bytes = NDArray[np.uint8]


Builder = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Layout of a result: its leaves in the order of their bytes, and how they become the result."""

    leaves: tuple[StoredLeaf, ...]
    body_bytes: int  # of all leaves
    build: Builder  # leaves → result


class Result:
    """A computed result, taken apart.

    Args:
        value: what a module returned.
        rows: of how many rows; every tensor has as many along dimension 0. None: a whole result.

    Raises:
        FeatureNotCacheable: there is something in it that can't be stored, or that is of no row.
    """

    def __init__(self, value: Any, rows: int | None):
        self.rows = rows
        self.leaves: list[Any] = []
        """The tensors and arrays, as they were returned."""
        tree = self._node(value, "the result")
        self.layout = json.dumps(tree, separators=(",", ":")).encode()
        if len(self.layout) > _MOST_LAYOUT_BYTES:
            raise FeatureNotCacheable(
                f"the layout of the result takes {len(self.layout):,} bytes; allowed: 1 MiB"
            )

    def bodies(self) -> list[bytes]:
        """The bytes of each row, or of the whole."""
        return [row.tobytes() for row in self.copied()()]

    def copied(self) -> Callable[[], Bytes]:
        """Copy the bytes of each row as they are now: uint8[rows, bytes of a row], when they have arrived."""
        rows = self.rows or 1
        copies = [copied(leaf) for leaf in self.leaves]

        def arrived() -> Bytes:
            arrays = [array.reshape(rows, len(array) // rows) for array in (copy() for copy in copies)]
            if len(arrays) == 1:
                return arrays[0]
            return np.concatenate(arrays, axis=1) if arrays else np.empty((rows, 0), np.uint8)

        return arrived

    def taken(self, rows: Sequence[int]) -> Result:
        """Some of the rows."""
        return Result(
            layout_of(self.layout).build([reordered(leaf, rows) for leaf in self.leaves]), len(rows)
        )

    @property
    def is_of_device(self) -> bool:
        """True if one of the tensors isn't on the CPU."""
        tensors = (leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))
        return any(tensor.device.type != "cpu" for tensor in tensors)

    @property
    def size_bytes(self) -> int:
        """Of the tensors and arrays."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def _node(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.ndarray):
            return self._array(value, where)
        if value is None or (self.rows is None and type(value) in (bool, int, str)):
            return ["v", value]
        if self.rows is None and type(value) is float:
            return ["f", value.hex()]
        if type(value) is torch.Size and self.rows is None:
            return ["s", list(value)]
        if type(value) in (list, tuple):
            kind = "l" if type(value) is list else "u"
            return [kind, [self._node(member, f"{where}[{number}]") for number, member in enumerate(value)]]
        if type(value) in (dict, collections.OrderedDict):
            kind = "d" if type(value) is dict else "o"
            return [
                kind,
                [
                    [_name(key, where), self._node(member, f"{where}[{key!r}]")]
                    for key, member in value.items()
                ],
            ]
        return self._record(value, where)

    def _record(self, value: Any, where: str) -> Any:
        cls = type(value)
        fields = _fields(cls)
        if fields is None or _class_named(_name_of(cls)) is not cls:
            advice = (
                "give such a call one key, not one a row" if type(value) in (bool, int, str, float) else ""
            )
            raise FeatureNotCacheable(
                f"{where} is a {cls.__module__}.{cls.__qualname__}, which can't be stored; allowed: tensors, "
                f"arrays, numbers, text and None in lists, tuples, dicts, NamedTuples and dataclasses "
                f"of modules{'; ' + advice if advice else ''}"
            )
        nodes = [[name, self._node(getattr(value, name), f"{where}.{name}")] for name in fields]
        return ["c", _name_of(cls), nodes]

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if tensor.layout is not torch.strided or str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
            raise FeatureNotCacheable(f"{where} is a {tensor.layout} tensor of {tensor.dtype}: make it dense")
        shape = self._shape(tensor, where)
        kind = "t" if tensor.device.type == "cpu" else "m"
        self.leaves.append(tensor.detach())
        return [kind, str(tensor.dtype).removeprefix("torch."), shape]

    def _array(self, array: np.ndarray[Any, Any], where: str) -> Any:
        if array.dtype.hasobject or array.dtype.names:
            raise FeatureNotCacheable(f"{where} is an array of {array.dtype}: only numbers can be stored")
        self.leaves.append(array)
        return ["n", array.dtype.str, self._shape(array, where)]

    def _shape(self, value: Any, where: str) -> list[int]:
        shape = list(value.shape)
        if self.rows is None:
            return shape
        if not shape or shape[0] != self.rows:
            raise FeatureNotCacheable(
                f"{where} has shape {shape} for {self.rows} keys: a tensor of rows has one for each along "
                f"dimension 0; return it so, or give the call one key"
            )
        return shape[1:]


def copied(value: torch.Tensor | NDArray[Any]) -> Callable[[], Bytes]:
    """Copy a tensor or array as it is now, without waiting for a GPU; what is returned waits when called."""
    if isinstance(value, np.ndarray):
        array = np.array(value, order="C").reshape(-1).view(np.uint8)
        return lambda: array
    tensor = value.detach()
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return lambda: np.empty(0, np.uint8)
    if flat.device.type != "cuda":
        host = flat.cpu()
        host = host.clone() if host.data_ptr() == tensor.data_ptr() else host
        data: Bytes = host.view(torch.uint8).numpy()
        return lambda: data
    pinned = flat.view(torch.uint8).to("cpu", non_blocking=True)
    event = torch.cuda.current_stream(flat.device).record_event()

    def arrived() -> Bytes:
        event.synchronize()
        on_host: Bytes = pinned.numpy()
        return on_host

    return arrived


@functools.lru_cache(maxsize=256)
def layout_of(text: bytes) -> ResultLayout:
    """Read a stored layout.

    Raises:
        CacheCorrupt: it can't be read, or names a class that isn't there.
    """
    try:
        leaves = leaves_in(text)
        if any(leaf.kind != "n" and leaf.dtype not in _DTYPES for leaf in leaves):
            raise ValueError("a tensor of a dtype that torch doesn't have here")
        build = _builder(json.loads(text), itertools.count())
    except Exception as exc:
        raise CacheCorrupt(f"a row's layout can't be read: {exc}") from exc
    return ResultLayout(leaves, leaves[-1].stop if leaves else 0, build)


def refuse_uncomputed(text: bytes) -> None:
    """Refuse a layout that no computed rows have: results made by it would fail in the training.

    Raises:
        CacheCorrupt: it can't be read, or a row made by it has another one.
    """
    layout, device = layout_of(text), torch.device("cpu")
    try:
        row = layout.build(join([Row(text, bytes(layout.body_bytes), 0)], device, is_row=True))
        is_same = Result(row, 1).layout == text.replace(b'["m",', b'["t",')  # of the device, and of the CPU
    except Exception as exc:  # whatever numpy and torch say of odd types and sizes
        raise CacheCorrupt(f"no row has the layout {text!r:.200}: {exc}") from exc
    if not is_same:
        raise CacheCorrupt(f"no computed row has the layout {text!r:.200}")


def _builder(node: Any, places: Iterator[int]) -> Builder:
    """Builder of a node's result from the leaves at these places; `leaves_in` has found it well-formed."""
    kind, content = node[0], node[1]
    if kind in ("t", "m", "n"):
        place = next(places)
        return lambda leaves: leaves[place]
    if kind in ("v", "f", "s"):
        value: Any = content
        if kind != "v":
            value = float.fromhex(content) if kind == "f" else torch.Size(int(size) for size in content)
        return lambda leaves: value
    if kind in ("l", "u"):
        inner = [_builder(part, places) for part in content]
        sequence: type = list if kind == "l" else tuple
        return lambda leaves: sequence([part(leaves) for part in inner])
    if kind in ("d", "o"):
        members = {_from_name(name): _builder(part, places) for name, part in content}
        mapping: type = dict if kind == "d" else collections.OrderedDict
        return lambda leaves: mapping([(name, part(leaves)) for name, part in members.items()])
    cls = _class_named(content)
    if kind != "c" or cls is None or _fields(cls) != [name for name, _ in node[2]]:
        raise ValueError(f"{content} isn't imported here, or has other fields")
    named = [(name, _builder(part, places)) for name, part in node[2]]
    return lambda leaves: cls(**{name: part(leaves) for name, part in named})


def result_of(row: Row, device: torch.device) -> Any:
    """The whole result that a row is, in memory of its own.

    Raises:
        CacheCorrupt: its layout can't be read here.
        TypeError, ValueError: by a class in it.
    """
    layout, body = layout_of(row.layout), row.body
    return layout.build(
        [_leaf(leaf, bytearray(body[leaf.start : leaf.stop]), leaf.shape, device) for leaf in layout.leaves]
    )


def join(rows: Sequence[Row], device: torch.device, *, is_row: bool) -> list[Any]:
    """The leaves of rows of one layout, each stacked along a new dimension 0; or those of one whole result.

    Raises:
        CacheCorrupt: the layout can't be read here.
    """
    layout = layout_of(rows[0].layout)
    bodies = [row.body for row in rows]
    leaves = []
    for leaf in layout.leaves:
        is_all = leaf.stop - leaf.start == layout.body_bytes
        parts = bodies if is_all else [memoryview(body)[leaf.start : leaf.stop] for body in bodies]
        shape = (len(bodies), *leaf.shape) if is_row else leaf.shape
        leaves.append(_leaf(leaf, bytearray().join(parts), shape, device))
    return leaves


def _leaf(leaf: StoredLeaf, data: bytearray, shape: tuple[int, ...], device: torch.device) -> Any:
    """A tensor or array in memory of its own."""
    array = np.ndarray(shape, leaf.stored, data)
    if leaf.kind == "n":
        return array
    tensor, dtype = torch.from_numpy(array), _DTYPES[leaf.dtype]
    tensor = tensor if tensor.dtype is dtype else tensor.view(dtype)  # of those that numpy lacks
    return tensor if leaf.kind == "t" or device.type == "cpu" else tensor.to(device)


def dtype_of(leaf: StoredLeaf) -> torch.dtype | None:
    """The dtype of a tensor; None: it is an array."""
    return None if leaf.kind == "n" else _DTYPES[leaf.dtype]


def is_whole_numbers(leaf: StoredLeaf) -> bool:
    """True if a leaf holds integers or truths."""
    dtype = dtype_of(leaf)
    if dtype is None:
        return leaf.stored.kind not in "fc"
    return not (dtype.is_floating_point or dtype.is_complex)


def _name(key: Any, where: str) -> Any:
    if type(key) is str:
        return key
    if type(key) in (int, bool, float, type(None)):
        return [type(key).__name__, key.hex() if type(key) is float else key]
    raise FeatureNotCacheable(f"{where} has a key of type {type(key).__name__}; allowed: text and numbers")


def _from_name(name: Any) -> Any:
    if isinstance(name, str):
        return name
    return float.fromhex(name[1]) if name[0] == "float" else name[1]


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _class_named(name: str) -> type | None:
    """A class of a module that is imported; nothing is imported for it."""
    module, _, qualname = name.partition(":")
    holder: Any = sys.modules.get(module)
    if holder is None and module in ("__main__", "__mp_main__"):
        holder = sys.modules.get("__main__")
    for step in qualname.split("."):
        holder = getattr(holder, step, None)
    return holder if isinstance(holder, type) else None


def _fields(cls: type) -> list[str] | None:
    """The fields of a record, by which it can be made again; None: it is no record."""
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return list(cls._fields)
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        return [field.name for field in fields] if all(field.init for field in fields) else None
    return None


def concatenated(first: Any, second: Any) -> Any:
    """Two leaves of one type, one after the other along dimension 0."""
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second])
    if not (first.numel() and second.numel()):
        return torch.cat([first, second])
    flat = [leaf.contiguous().reshape(-1).view(torch.uint8) for leaf in (first, second)]
    return torch.cat(flat).view(first.dtype).reshape(-1, *first.shape[1:])


def reordered(leaf: Any, places: Sequence[int]) -> Any:
    """The wanted rows of a leaf, in that order; of any type, as not all have an index."""
    if isinstance(leaf, np.ndarray):
        return leaf[list(places)]
    index = torch.as_tensor(places, device=leaf.device)
    if not leaf.numel():
        return leaf[index]
    rows = _bytes_of_rows(leaf)[index]
    return rows.view(leaf.dtype).reshape(len(places), *leaf.shape[1:])


def overwrite(leaf: Any, places: Sequence[int], rows: Any) -> None:
    """Put rows of a leaf of the same type into some places of a leaf."""
    if isinstance(leaf, np.ndarray):
        leaf[list(places)] = rows
    elif leaf.numel():
        _bytes_of_rows(leaf)[list(places)] = _bytes_of_rows(rows).to(leaf.device)


def _bytes_of_rows(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.contiguous().reshape(len(leaf), -1).view(torch.uint8)
