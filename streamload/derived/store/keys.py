"""Keys of a call's rows, and the inputs of each row."""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from streamload.columns.columns import Address
from streamload.derived.store.results import copied
from streamload.errors import OptionError

Digests = Callable[[], list[int]]

_OF_NUMPY = (torch.float32, torch.uint8, torch.int64, torch.float16)
"""Dtypes whose bytes numpy returns in half the time."""
_RUN_BYTES, _MOST_RUNS = 64, 128
"""To tell inputs apart, at most so many runs of bytes are hashed, spread over a row: a cache line each."""


def keys_of(cache_key: Any, inputs: Any) -> list[Any] | None:
    """The keys of the rows, one each; None: a single key for the whole call.

    A list, array or 1-D tensor has a key for each row; a tuple only if it is as long as the batch.

    Args:
        inputs: of the call; the first tensor, array or list has the batch size.

    Raises:
        OptionError: an array of more than one dimension.
    """
    if isinstance(cache_key, (list, range)):
        return list(cache_key)
    if isinstance(cache_key, (torch.Tensor, np.ndarray)) and cache_key.ndim:
        if cache_key.ndim > 1:
            raise OptionError(f"cache_key has shape {list(cache_key.shape)}; expected one key a row: [N]")
        return list(cache_key.tolist())
    if type(cache_key) is tuple and len(cache_key) == batch_size(inputs):
        return list(cache_key)
    return None


def batch_size(inputs: Any) -> int | None:
    """Number of rows of the first tensor, array or list of inputs; None: there is none."""
    for value in inputs:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return int(value.shape[0]) if value.ndim else None
        if type(value) is list:
            return len(value)
        if type(value) is dict and (inner := batch_size(value.values())) is not None:
            return inner
    return None


def key_bytes(key: Any) -> bytes:
    """Encode a key so that type and value both count: 1, "1", True and (1,) all differ.

    Raises:
        OptionError: a type without a stable encoding.
    """
    if type(key) is str:
        return b"s" + key.encode("utf-8", "surrogatepass")
    if type(key) is int:
        return b"i%d" % key
    if isinstance(key, tuple):
        return b"(" + b"".join([b"%d:%b" % (len(part), part) for part in map(key_bytes, key)])
    if isinstance(key, (bool, np.bool_)):
        return b"b1" if key else b"b0"
    if isinstance(key, (int, np.integer)):
        return b"i%d" % int(key)
    if isinstance(key, (float, np.floating)):
        return b"f" + float(key).hex().encode()
    if isinstance(key, bytes):
        return b"y" + key
    if isinstance(key, str):
        return b"s" + str(key).encode("utf-8", "surrogatepass")
    if isinstance(key, (torch.Tensor, np.ndarray)) and key.ndim == 0:
        return key_bytes(key.item())
    if isinstance(key, os.PathLike):
        return b"p" + os.fsencode(key)
    if isinstance(key, uuid.UUID):
        return b"u" + key.bytes
    if isinstance(key, (datetime.datetime, datetime.date)):
        return b"d" + key.isoformat().encode()
    if key is None:
        return b"n"
    raise OptionError(f"cache_key has a {type(key).__name__} in it; expected text, numbers, bytes or paths")


class SampleKey(NamedTuple):
    """The key of a sample's row in a loader."""

    key: Any  # of the sample; of a text, ("text", it) or ("ids", their dtype, their digest)
    seed: int  # the checksum of the sample's bytes, or of these and the variant; of a text, its digest
    name: bytes  # of its shard's columns; b"": the row lies among those of calls
    place: int  # in the column; -1: its name isn't known yet, so the row is stored among those of calls
    slot_seed: int | None = None  # of a text, the digest of its sample's key


class Naming:
    """Names of stored rows: an address in a column, or 32 bytes of fingerprint and digest.

    Args:
        fingerprint: 16 bytes.
        context: the arguments that all rows share.
        is_row: whether a key names one row or a whole result.
    """

    def __init__(self, fingerprint: bytes, context: bytes, *, is_row: bool):
        self._fingerprint = fingerprint
        self._is_plain = not context
        self._prefix = hashlib.blake2b(b"%c%d:%b" % (b"wr"[is_row], len(context), context), digest_size=16)

    def name(self, key: Any) -> bytes:
        """The name of a key's row, about 1 µs."""
        if type(key) is SampleKey:
            if key.name and self._is_plain:
                return Address(self._fingerprint, *key[2:4], key.seed, key.slot_seed).pack()
            key = key[:2] if key.slot_seed is None else key.key
        digest = self._prefix.copy()
        digest.update(b"s" + key.encode("utf-8", "surrogatepass") if type(key) is str else key_bytes(key))
        return self._fingerprint + digest.digest()


class Inputs:
    """The arguments of a call: inputs with a row for each key, and the context that all rows share.

    In a call with a single key, the first argument and all tensors and arrays are inputs.

    Args:
        rows: number of keys; None: a single key for the whole call.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None):
        self.args = args
        self.kwargs = kwargs
        self.rows = rows
        self.leaves: list[Any] = []
        """Inputs: tensors, arrays and lists with a row for each key, or any values under a single key."""
        self.context: list[Any] = []
        """Arguments that become part of every key."""
        for name, value in (*enumerate(args), *sorted(kwargs.items())):
            if rows is None and name == 0 and type(value) not in (dict, tuple):
                self.leaves.append(value)
            else:
                self._sort(name, value)

    def _sort(self, name: Any, value: Any) -> None:
        if value is None:
            return
        if self._is_row_wise(value):
            self.leaves.append(value)
        elif type(value) is dict:
            for key, inner in value.items():
                self._sort((name, key), inner)
        elif type(value) is tuple or (type(value) is list and any(map(_is_array, value))):
            for number, inner in enumerate(value):
                self._sort((name, number), inner)
        else:
            self.context.append((name, value))

    def _is_row_wise(self, value: Any) -> bool:
        if _is_array(value):
            return self.rows is None or (value.ndim > 0 and value.shape[0] == self.rows)
        return self.rows is not None and type(value) is list and len(value) == self.rows

    def of(self, places: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call for some of the rows, in the given order."""
        if self.rows is None or list(places) == list(range(self.rows)):
            return self.args, self.kwargs
        return (
            tuple(self._taken(value, places) for value in self.args),
            {name: self._taken(value, places) for name, value in self.kwargs.items()},
        )

    def _taken(self, value: Any, places: Sequence[int]) -> Any:
        if self._is_row_wise(value):
            if isinstance(value, torch.Tensor):
                return value[torch.as_tensor(places, dtype=torch.long, device=value.device)]
            return (
                value[list(places)] if isinstance(value, np.ndarray) else [value[place] for place in places]
            )
        if type(value) is dict:
            return {key: self._taken(inner, places) for key, inner in value.items()}
        if type(value) is tuple:
            return tuple(self._taken(inner, places) for inner in value)
        if type(value) is list and any(map(_is_array, value)):
            return [self._taken(inner, places) for inner in value]
        return value

    def digests(self, places: Sequence[int]) -> list[int]:
        """Digests that tell the inputs of these rows apart; 0 where an input can't be read."""
        return self.digests_later(places)()

    def digests_later(self, places: Sequence[int]) -> Digests:
        """As `digests`, for the input as it is now; the returned function waits for the device."""
        if not places:
            return list
        digests = [_digests(leaf, places, whole=self.rows is None) for leaf in self.leaves]
        return lambda: _combined([of_leaf() for of_leaf in digests], len(places))

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors among the leaves."""
        return (leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _combined(of_leaves: Sequence[Sequence[int]], count: int) -> list[int]:
    """One digest per row over all its leaves; 0 where none can be read."""
    combined = [0] * count
    for digests in of_leaves:
        combined = [
            digest if not before or not digest else _digest(digest.to_bytes(8, "little"), before)
            for before, digest in zip(combined, digests, strict=True)
        ]
    return combined


def _digests(leaf: Any, places: Sequence[int], *, whole: bool) -> Digests:
    """Digests of the rows of one leaf."""
    if not _is_array(leaf):
        rows = [leaf] if whole else [leaf[place] for place in places]
        digests = [digest_of(row) for row in rows]
        return lambda: digests
    plain = _plain(leaf)
    if plain is None:
        return lambda: [0] * len(places)
    if not whole and len(places) == 1:
        plain = plain[places[0] : places[0] + 1]
    elif not whole and len(places) != plain.shape[0]:
        plain = plain[torch.as_tensor(places, dtype=torch.long, device=plain.device)]
    return _digests_of_rows(plain, whole=whole)


def digest_of(value: Any, seed: int = 0) -> int:
    """Digest of one input; the seed itself if the input can't be read."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        plain = _plain(value)
        digest = 0 if plain is None else _digests_of_rows(plain, whole=True)()[0]
        return _combined([[seed], [digest]], 1)[0] if seed and digest else digest or seed
    if isinstance(value, str):
        return _digest(b"s" + value.encode("utf-8", "surrogatepass"), seed)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _digest(value, _digest(b"y", seed))
    if isinstance(value, (int, float)):
        return _digest(repr(value).encode(), seed)
    if isinstance(value, PIL.Image.Image) and not getattr(value, "tile", None):  # else it isn't decoded yet
        return _digest(value.tobytes(), _digest(f"{value.mode}{value.size}".encode(), seed))
    if type(value) in (list, tuple):
        for member in value:
            seed = digest_of(member, seed)
    return seed


def _plain(value: Any) -> torch.Tensor | None:
    """An array or tensor as a tensor with readable bytes; None: its bytes can't be read."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc" or not value.size:
            return torch.empty(value.shape) if not value.size else None
        data = np.ascontiguousarray(value)
        data = data if data.flags.writeable else data.copy()
        return torch.from_numpy(data.view(np.uint8).reshape(*value.shape, -1))
    plain = value.detach()
    return plain if plain.layout is torch.strided and not plain.is_quantized else None


def _digests_of_rows(rows: torch.Tensor, *, whole: bool) -> Digests:
    """Digests of the rows of a tensor, or of all of it as one row."""
    count, shape = (1, rows.shape) if whole else (rows.shape[0], rows.shape[1:])
    head = _digest_of_type(rows.dtype, shape)
    if not rows.numel():
        digests = [head] * count
        return lambda: digests
    if not rows.is_cuda:
        computed = _digests_of_bytes(_runs(_bytes_of_rows(rows, count)), head)
        return lambda: computed
    data = rows.reshape(count, -1).contiguous().view(torch.uint8)
    arrived = copied(_runs(data))
    return lambda: _digests_of_bytes(arrived().reshape(count, -1), head)


def _bytes_of_rows(rows: torch.Tensor, count: int) -> Any:
    """The bytes of rows that aren't on a GPU: uint8[N, bytes]."""
    if rows.dtype in _OF_NUMPY and rows.is_cpu and not rows.is_neg():
        return np.ascontiguousarray(rows.numpy()).reshape(count, -1).view(np.uint8)
    return rows.reshape(count, -1).contiguous().view(torch.uint8).cpu().numpy()


@functools.lru_cache(maxsize=256)
def _digest_of_type(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return _digest(f"{dtype}{list(shape)}".encode(), 0)


def _runs(data: Any) -> Any:
    """The bytes of uint8[N, bytes] that are hashed."""
    runs = data.shape[1] // _RUN_BYTES
    if runs <= _MOST_RUNS:
        return data
    step = -(-runs // _MOST_RUNS) | 1
    parts = data[:, : runs * _RUN_BYTES].reshape(len(data), runs, _RUN_BYTES)[:, ::step]
    return parts.reshape(len(data), -1)


def _digests_of_bytes(rows: NDArray[Any], head: int) -> list[int]:
    return [_digest(row, head) for row in np.ascontiguousarray(rows)]


def _digest(data: Any, seed: int) -> int:
    return int(xxh3_64_intdigest(data, seed)) or 1
