"""A stored row as bytes: a head with a checksum, the layout, the body; and what a layout says without torch.

The checksum covers the row's key, too, so that a row under another key is found out. results.py makes
results of layouts again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from streamload.errors import CacheCorrupt

KEY_BYTES, FINGERPRINT_BYTES = 32, 16
"""A row's key begins with its fingerprint. Keys of other lengths are those of notes."""
_HEAD = struct.Struct("<4sIQQ")
_MAGIC = b"SLr1"
_ODD, _64_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1
_IN_NUMPY = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")


@dataclass(slots=True)
class Row:
    """A stored row, checked: it is what was written, and as long as its layout says."""

    layout: bytes  # what it looks like, as it is stored
    body: bytes | memoryview  # the bytes of its leaves
    input_digest: int  # of the input that it was computed from; 0: unknown


def seal(key: bytes, layout: bytes, body: bytes, input_digest: int) -> bytes:
    """A row as it is stored under a key; `input_digest` is 0 where the input isn't known."""
    checksum = _checksum(key, len(layout), input_digest, layout + body)
    return _HEAD.pack(_MAGIC, len(layout), input_digest, checksum) + layout + body


def seal_rows(
    keys: Sequence[bytes], layout: bytes, bodies: np.ndarray[Any, Any], input_digests: Sequence[int]
) -> list[tuple[bytes, memoryview]]:
    """Rows of one layout as they are stored: each key, and what `seal` gives.

    Args:
        bodies: uint8[N, bytes].
    """
    head = np.frombuffer(_HEAD.pack(_MAGIC, len(layout), 0, 0) + layout, np.uint8)
    size = len(head) + bodies.shape[1]
    sealed = np.empty((len(keys), size), np.uint8)
    sealed[:, : len(head)] = head
    sealed[:, len(head) :] = bodies
    checksums = [
        _checksum(key, len(layout), digest, row)
        for key, digest, row in zip(keys, input_digests, sealed[:, _HEAD.size :], strict=True)
    ]
    numbers = np.array([input_digests, checksums], "<u8").T  # the last two of the head
    sealed[:, _HEAD.size - 16 : _HEAD.size] = np.ascontiguousarray(numbers).view(np.uint8)
    data = memoryview(sealed.reshape(-1).data)
    return [(key, data[number * size : (number + 1) * size]) for number, key in enumerate(keys)]


def unseal(key: bytes, data: bytes) -> Row:
    """Check and read what `seal` gave.

    Raises:
        CacheCorrupt: it is no row, or not the one of this key, or not what was written.
    """
    if len(data) < _HEAD.size:
        raise CacheCorrupt(f"the row {key.hex()} has no head")
    magic, layout_bytes, input_digest, checksum = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CacheCorrupt(f"the row {key.hex()} has no head")
    if checksum != _checksum(key, layout_bytes, input_digest, memoryview(data)[_HEAD.size :]):
        raise CacheCorrupt(f"the row {key.hex()} fails its checksum")
    head_bytes = _HEAD.size + layout_bytes
    return Row(data[_HEAD.size : head_bytes], memoryview(data)[head_bytes:], input_digest)


def _checksum(key: bytes, layout_bytes: int, input_digest: int, content: Any) -> int:
    seed = xxh3_64_intdigest(key, (input_digest + layout_bytes * _ODD) & _64_BITS)
    return int(xxh3_64_intdigest(content, seed))


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """Position of a tensor or array in the body of a row."""

    path: str  # in the result, such as "['tokens'][0]"; "": it is the result
    kind: str  # "t" for a tensor on the CPU, "m" for one on the module's device, "n" for an array
    dtype: str  # its name in torch, or numpy's text for an array
    stored: np.dtype[Any]  # the dtype by which numpy reads it: an unsigned integer where numpy lacks its own
    shape: tuple[int, ...]
    start: int
    stop: int


@functools.lru_cache(maxsize=256)
def leaves_in(layout: bytes) -> tuple[StoredLeaf, ...]:
    """The tensors and arrays of a layout, in the order of their bytes.

    Raises:
        CacheCorrupt: it can't be read.
    """
    leaves: list[StoredLeaf] = []
    try:
        for path, kind, dtype, shape in _leaves(json.loads(layout)):
            stored = np.dtype(dtype) if kind == "n" else _stored(dtype)
            if stored.hasobject:
                raise ValueError(f"an array of {dtype}")
            start = leaves[-1].stop if leaves else 0
            stop = start + stored.itemsize * math.prod(shape)
            leaves.append(StoredLeaf(path, kind, dtype, stored, shape, start, stop))
    except Exception as exc:  # parsers of dtypes raise SyntaxError, too
        raise CacheCorrupt(f"a row's layout can't be read: {exc}") from exc
    return tuple(leaves)


class LeafFiles(contextlib.ExitStack):
    """Rows of one layout, appended to a .npy file for each of their leaves. A context manager.

    Args:
        layout: of all rows.
        create: opens the file of a leaf by its number, to write.
    """

    def __init__(self, layout: bytes, create: Callable[[int], IO[bytes]]):
        super().__init__()
        self.rows = 0
        self.layout = layout
        self._leaves = leaves_in(layout)
        self.files = [self.enter_context(create(number)) for number in range(len(self._leaves))]
        self._write_heads()

    def add(self, body: bytes | memoryview) -> None:
        """Append a row."""
        for file, leaf in zip(self.files, self._leaves, strict=True):
            file.write(body[leaf.start : leaf.stop])
        self.rows += 1

    def finish(self) -> dict[str, Any]:
        """Complete the files; return what they hold, for JSON."""
        self._write_heads()
        leaves = [
            {"file": leaf_name(number), "path": leaf.path, "dtype": leaf.dtype, "shape": list(leaf.shape)}
            for number, leaf in enumerate(self._leaves)
        ]
        return {"rows": self.rows, "layout": json.loads(self.layout), "leaves": leaves}

    def _write_heads(self) -> None:
        """Write the heads, whose size doesn't depend on the number of rows."""
        for file, leaf in zip(self.files, self._leaves, strict=True):
            file.seek(0)
            file.write(npy_head(leaf.stored, (self.rows, *leaf.shape)))


def leaf_name(number: int) -> str:
    """The name of the file of a leaf."""
    return f"leaf-{number}.npy"


def npy_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The header of a .npy file; numpy leaves room in it for any number of rows."""
    head = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, about)
    return head.getvalue()


def class_in(layout: bytes) -> str | None:
    """The first class that a layout names, a NamedTuple or dataclass; None: it is of plain data.

    What others have stored makes no objects here but plain data.
    """
    nodes = (node for _, node in _nodes(json.loads(layout), ""))
    return next((str(node[1]) for node in nodes if node[0] == "c"), None)


def read_row(name: bytes, data: bytes) -> Row:
    """Check and read a stored row, and that it is as long as its layout says.

    Raises:
        CacheCorrupt: it isn't, or isn't what was written under this name.
    """
    row = unseal(name, data)
    leaves = leaves_in(row.layout)
    body_bytes = leaves[-1].stop if leaves else 0
    if len(row.body) != body_bytes:
        raise CacheCorrupt(
            f"the row {name.hex()} has {len(row.body):,} bytes where its layout says {body_bytes:,}"
        )
    return row


def _leaves(layout: Any) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    for path, node in _nodes(layout, ""):
        if node[0] in ("t", "m", "n"):
            shape = tuple(int(member) for member in node[2])
            if min(shape, default=0) < 0:
                raise ValueError(f"a tensor of shape {shape}")
            yield path, node[0], node[1], shape


def _nodes(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The nodes of a layout in the order of its leaves, each with its place in the result."""
    yield path, node
    kind, content = node[0], node[1]
    if kind in ("l", "u"):
        members = [(f"[{number}]", member) for number, member in enumerate(content)]
    elif kind in ("d", "o"):
        members = [(f"[{_key(name)}]", member) for name, member in content]
    elif kind == "c":
        members = [(f".{name}", member) for name, member in node[2]]
    elif kind in ("t", "m", "n", "v", "f", "s"):
        members = []
    else:
        raise ValueError(f"a node of kind {kind!r}")
    for step, member in members:
        yield from _nodes(member, f"{path}{step}")


def _key(name: Any) -> str:
    if isinstance(name, str):
        return repr(name)
    return repr(float.fromhex(name[1])) if name[0] == "float" else repr(name[1])


def _stored(dtype: str) -> np.dtype[Any]:
    if _IN_NUMPY.fullmatch(dtype):
        return np.dtype(dtype)
    bits = re.search(r"\d+", dtype)  # bfloat16, float8_e5m2, complex32; what is smaller than a byte takes one
    if bits is None:
        raise ValueError(f"a tensor of {dtype}")
    return np.dtype(f"uint{max(8, int(bits[0]))}")


NOTE = b"parts"
"""Before a fingerprint: the key of its note."""
SETTINGS = (
    *("torch", "autocast", "float32_matmul_precision", "allow_tf32", "default_dtype"),
    "deterministic_algorithms",
)
"""Values of `fingerprint.torch_settings`, in its order."""


def digest_of_parts(parts: Mapping[str, Any]) -> bytes:
    """The 16 bytes of the fingerprint that has these parts."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_parts(key: bytes, data: bytes) -> dict[str, Any]:
    """The parts that a stored note holds.

    Raises:
        CacheCorrupt: it isn't what was written, or isn't of the fingerprint in its key.
    """
    try:
        parts = json.loads(bytes(unseal(key, data).body))
    except (ValueError, RecursionError) as exc:
        raise CacheCorrupt(f"the note {key.hex()} can't be read: {exc}") from exc
    if not isinstance(parts, dict) or NOTE + digest_of_parts(parts) != key:
        raise CacheCorrupt(f"the note {key.hex()} is of another fingerprint")
    return parts


def kind_of(parts: Mapping[str, Any] | None) -> str:
    """Parts in which modules of one label may differ and be in use at once; "": the parts aren't known."""
    if parts is None:
        return ""
    return json.dumps({name: parts.get(name) for name in ("arguments", "inputs")}, sort_keys=True)


def flat(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The values of parts by name, such as "arguments.width", "code.Extractor.forward", "settings.torch"."""
    settings = parts.get("settings")
    if isinstance(settings, list) and len(settings) == len(SETTINGS):
        parts = {**parts, "settings": dict(zip(SETTINGS, settings, strict=True))}
    return dict(_flattened(parts, ()))


def _flattened(parts: Mapping[str, Any], inside: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, value in parts.items():
        path = (*inside, name) if name else inside  # "" is a module itself, among those in it
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, path)
        else:
            yield ".".join(path), value


def compared(first_parts: Mapping[str, Any], second_parts: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The parts in which two fingerprints differ, each with both values; None of what one hasn't."""
    first, second = flat(first_parts), flat(second_parts)
    both = ((name, first.get(name), second.get(name)) for name in sorted({*first, *second}))
    return [(name, before, after) for name, before, after in both if before != after]
