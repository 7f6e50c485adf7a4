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

from streamload.derived.store.host_copy import Bytes, copied
from streamload.derived.store.sealed import Row, StoredLeaf, leaves_in
from streamload.errors import CacheCorrupt, FeatureNotCacheable

_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype) and not str(one).startswith(("torch.q", "torch.bits"))
}
_MOST_LAYOUT_BYTES = 1 << 20


class Leaf(StoredLeaf):
    """A tensor or array of a result: where its bytes are in a row's body."""

    __slots__ = ()

    @property
    def dtype_of_torch(self) -> torch.dtype | None:
        """Of a tensor; None: it is an array."""
        return None if self.kind == "n" else _DTYPES[self.dtype]

    def join(self, bodies: Sequence[bytes | memoryview], device: torch.device, *, is_row: bool) -> Any:
        """The leaf of several rows as one, in memory of its own; of one whole result, as it was."""
        shape = (len(bodies), *self.shape) if is_row else self.shape
        if self.start or self.stop != len(bodies[0]):
            bodies = [memoryview(body)[self.start : self.stop] for body in bodies]
        data = bytearray().join(bodies)
        if self.kind == "n":
            return np.frombuffer(data, np.dtype(self.dtype)).reshape(shape)
        if 0 in shape:
            joined = torch.empty(shape, dtype=_DTYPES[self.dtype])
        else:
            joined = torch.frombuffer(data, dtype=_DTYPES[self.dtype]).view(shape)
        return joined if self.kind == "t" or device.type == "cpu" else joined.to(device)


Builder = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a result: its leaves in the order of their bytes, and how they become the result.

    Attributes:
        body_bytes: of all leaves.
        build: leaves → result.
        has_device: whether a leaf is put on the module's device.
    """

    leaves: tuple[Leaf, ...]
    body_bytes: int
    build: Builder
    has_device: bool


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
        self._leaves: list[tuple[str, Any]] = []
        self._at = 0
        tree = self._node(value, "the result")
        self.layout = json.dumps(tree, separators=(",", ":")).encode()
        if len(self.layout) > _MOST_LAYOUT_BYTES:
            raise FeatureNotCacheable(
                f"the layout of the result takes {len(self.layout):,} bytes; allowed: 1 MiB"
            )

    @functools.cached_property
    def _arrays(self) -> list[np.ndarray[Any, Any]]:
        """The bytes of each leaf on the CPU: uint8[rows, bytes of a row]."""
        return [_as_bytes(leaf, self.rows or 1) for _, leaf in self._leaves]

    def bodies(self) -> list[bytes]:
        """The bytes of each row, or of the whole."""
        arrays = self._arrays
        if len(arrays) == 1:
            return [row.tobytes() for row in arrays[0]]
        return [b"".join([array[at].tobytes() for array in arrays]) for at in range(self.rows or 1)]

    def copied(self) -> Callable[[], Bytes]:
        """Copy the bytes of each row as they are now: uint8[rows, bytes of a row], when they have arrived."""
        rows = self.rows or 1
        copies = [copied(leaf) for _, leaf in self._leaves]

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
        return any(kind == "m" for kind, _ in self._leaves)

    @property
    def size_bytes(self) -> int:
        """Of the tensors and arrays."""
        return sum(leaf.nbytes for _, leaf in self._leaves)

    @property
    def leaves(self) -> list[Any]:
        """The tensors and arrays, as they were returned."""
        return [leaf for _, leaf in self._leaves]

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
            return [kind, [self._node(one, f"{where}[{at}]") for at, one in enumerate(value)]]
        if type(value) in (dict, collections.OrderedDict):
            kind = "d" if type(value) is dict else "o"
            return [
                kind,
                [[_name(key, where), self._node(one, f"{where}[{key!r}]")] for key, one in value.items()],
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
        self._leaves.append((kind, tensor.detach()))
        return [kind, str(tensor.dtype).removeprefix("torch."), shape]

    def _array(self, array: np.ndarray[Any, Any], where: str) -> Any:
        if array.dtype.hasobject or array.dtype.names:
            raise FeatureNotCacheable(f"{where} is an array of {array.dtype}: only numbers can be stored")
        self._leaves.append(("n", array))
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


def _as_bytes(leaf: Any, rows: int) -> np.ndarray[Any, Any]:
    if isinstance(leaf, torch.Tensor):
        if not leaf.numel():
            return np.empty((rows, 0), np.uint8)
        flat: np.ndarray[Any, Any] = leaf.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    return flat.reshape(rows, -1) if flat.size else np.empty((rows, 0), np.uint8)


@functools.lru_cache(maxsize=256)
def layout_of(text: bytes) -> Layout:
    """Read a stored layout.

    Raises:
        CacheCorrupt: it can't be read, or names a class that isn't there.
    """
    try:
        leaves = tuple(
            Leaf(*(getattr(leaf, field.name) for field in dataclasses.fields(leaf)))
            for leaf in leaves_in(text)
        )
        if any(leaf.kind != "n" and leaf.dtype not in _DTYPES for leaf in leaves):
            raise ValueError("a tensor of a dtype that torch doesn't have here")
        build = _builder(json.loads(text), itertools.count())
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as exc:
        raise CacheCorrupt(f"a row's layout can't be read: {exc}") from exc
    has_device = any(leaf.kind == "m" for leaf in leaves)
    return Layout(leaves, leaves[-1].stop if leaves else 0, build, has_device)


def _builder(node: Any, places: Iterator[int]) -> Builder:
    """Builder of the result from its leaves, which `leaves_in` has found well-formed.

    Args:
        node: of the layout.
        places: of its leaves.
    """
    kind, what = node[0], node[1]
    if kind in ("t", "m", "n"):
        place = next(places)
        return lambda made: made[place]
    if kind in ("v", "f", "s"):
        value: Any = what
        if kind != "v":
            value = float.fromhex(what) if kind == "f" else torch.Size(int(size) for size in what)
        return lambda made: value
    if kind in ("l", "u"):
        inner = [_builder(part, places) for part in what]
        sequence: type = list if kind == "l" else tuple
        return lambda made: sequence([part(made) for part in inner])
    if kind in ("d", "o"):
        pairs = [(_from_name(name), _builder(part, places)) for name, part in what]
        mapping: type = dict if kind == "d" else collections.OrderedDict
        return lambda made: mapping([(name, part(made)) for name, part in pairs])
    cls = _class_named(what)
    if kind != "c" or cls is None or _fields(cls) != [name for name, _ in node[2]]:
        raise ValueError(f"{what} isn't imported here, or has other fields")
    named = [(name, _builder(part, places)) for name, part in node[2]]
    return lambda made: cls(**{name: part(made) for name, part in named})


def join(rows: Sequence[Row], device: torch.device, *, is_row: bool) -> tuple[Layout, list[Any]]:
    """The leaves of rows of one layout, each stacked along a new dimension 0; or those of one whole result.

    Raises:
        CacheCorrupt: a body isn't as long as the layout says.
    """
    layout = layout_of(rows[0].layout)
    bodies = [row.body for row in rows]
    if {len(body) for body in bodies} != {layout.body_bytes}:
        raise CacheCorrupt("a row isn't as long as its layout says")
    return layout, [leaf.join(bodies, device, is_row=is_row) for leaf in layout.leaves]


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
    found: Any = sys.modules.get(module)
    if found is None and module in ("__main__", "__mp_main__"):
        found = sys.modules.get("__main__")
    for step in qualname.split("."):
        found = getattr(found, step, None)
    return found if isinstance(found, type) else None


def _fields(cls: type) -> list[str] | None:
    """The fields of a record, by which it can be made again; None: it is no record."""
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return list(cls._fields)
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        return [one.name for one in fields] if all(one.init for one in fields) else None
    return None


def leaves_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves_of(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from leaves_of(one)


def concatenated(one: Any, other: Any) -> Any:
    """Two leaves of one type, one after the other along dimension 0."""
    if isinstance(one, np.ndarray):
        return np.concatenate([one, other])
    if not (one.numel() and other.numel()):
        return torch.cat([one, other])
    flat = [leaf.contiguous().reshape(-1).view(torch.uint8) for leaf in (one, other)]
    return torch.cat(flat).view(one.dtype).reshape(-1, *one.shape[1:])


def reordered(leaf: Any, wanted: Sequence[int]) -> Any:
    """The wanted rows of a leaf, in that order; of any type, as not all have an index."""
    if isinstance(leaf, np.ndarray):
        return leaf[list(wanted)]
    index = torch.as_tensor(wanted, device=leaf.device)
    if not leaf.numel():
        return leaf[index]
    rows = leaf.contiguous().reshape(len(leaf), -1).view(torch.uint8)[index]
    return rows.view(leaf.dtype).reshape(len(wanted), *leaf.shape[1:])
