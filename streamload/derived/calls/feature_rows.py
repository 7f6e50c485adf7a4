"""Features in a batch: the rows that came with it, and the inputs of those that are computed in the rank.

Worker and rank name a row alike: by the fingerprint of the module and of what makes its input, by the
sample's key and the checksum of its bytes. So an edited sample gets a new row, and moved or re-sharded data
keeps its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from streamload.derived.proof.module_checks import is_close
from streamload.derived.store.results import Result, ResultLayout, dtype_of, layout_of, reordered
from streamload.derived.store.sealed import Row, StoredLeaf
from streamload.errors import CacheCorrupt, FeatureMismatch, FeatureNotCacheable
from streamload.metrics import Counts

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
RowKey = tuple[Any, ...]


class FeatureStart(NamedTuple):
    """Plan of a feature for the workers of an epoch.

    Attributes:
        fingerprint: under which rows are found, as hexadecimal digits; "": none are read.
        canaries: of how many stored rows each worker sends the inputs as well, to be computed again.
    """

    fingerprint: str
    canaries: int


class FeaturesRead(NamedTuple):
    """Rows that a worker has read for a batch.

    Attributes:
        fingerprint: under which rows were looked for.
        layout: of the rows; empty if there are none.
        missing: the places in the batch of those that aren't there.
        keys: of the rows whose inputs came with the batch: the missing ones, then canaries.
        places: of these in the batch.
        samples: of the batch.
        read_ns: the time it took to read rows.
    """

    fingerprint: str
    layout: bytes
    missing: list[int]
    keys: list[RowKey]
    places: list[int]
    samples: int
    read_ns: int


def stacked(rows: Sequence[Row | None], allocate: Allocate) -> tuple[bytes, torch.Tensor | None]:
    """The bodies of rows of one layout: uint8[N, bytes]; where a row is None the memory is left as it is.

    Raises:
        FeatureNotCacheable: they are of several layouts.
        CacheCorrupt: a body isn't as long as the layout says.
    """
    stored = [row for row in rows if row is not None]
    if not stored:
        return b"", None
    text, size = stored[0].layout, layout_of(stored[0].layout).body_bytes
    bodies = allocate((len(rows), size), torch.uint8)
    memory = bodies.numpy()
    for place, row in enumerate(rows):
        if row is None:
            continue
        if row.layout != text:
            raise FeatureNotCacheable("rows of this batch have different shapes, so they can't be one batch")
        if len(row.body) != size:
            raise CacheCorrupt("a row isn't as long as its layout says")
        memory[place] = np.frombuffer(row.body, np.uint8)
    return text, bodies


def leaves_in(bodies: torch.Tensor, layout: ResultLayout) -> list[torch.Tensor]:
    """The tensors of stacked rows, each [N, …]; of arrays their bytes."""
    leaves = []
    for leaf in layout.leaves:
        part = bodies[:, leaf.start : leaf.stop]
        dtype = dtype_of(leaf)
        if dtype is None:
            leaves.append(part)
        elif not part.numel():
            leaves.append(torch.empty((len(bodies), *leaf.shape), dtype=dtype))
        else:
            typed = part.contiguous().view(dtype)
            leaves.append(typed.reshape(len(bodies), *leaf.shape))
    return leaves


class Computes(Protocol):
    """The module that computes rows of a feature (features.BoundFeatures).

    Attributes:
        module: that computes them.
    """

    module: Any

    def fingerprint(self) -> str:
        """Under which rows are found now."""
        ...

    def compute(self, inputs: Any, keys: Sequence[RowKey]) -> tuple[Any, str]:
        """Compute and store rows; returns them, and under which fingerprint."""
        ...

    def placed(self, value: Any) -> Any:
        """Results, on the device of the loader."""
        ...

    def note_compared(self, rows: int) -> None:
        """Note that so many canaries were as they should be."""
        ...

    def check(self, inputs: Any, keys: Sequence[RowKey], leaves: Sequence[Any]) -> bool:
        """Let another process compute stored rows again; False: the module is built, and has to."""
        ...

    def refuse(self, key: Any) -> FeatureMismatch:
        """Let no row be served any more; the error to raise."""
        ...

    def refuse_stale(self) -> None:
        """Raise what a check has found."""
        ...


class FeatureRows:
    """A feature of a batch, as it came from a worker; `result()` is what the module returns for the batch.

    Args:
        of: the feature of the loader.
        read: what the worker has found.
        bodies: uint8[N, bytes]: the rows, stacked; those that are missing are undefined. None: all are.
        inputs: of the missing rows and canaries, in the order of `read.keys`; None: there are none.
        counts: of the rank.
    """

    def __init__(
        self,
        of: Computes,
        read: FeaturesRead,
        bodies: torch.Tensor | None,
        inputs: Any,
        counts: Counts,
    ):
        self._of, self._read = of, read
        self._bodies, self._inputs = bodies, inputs
        self._counts = counts
        self._result: Any = None
        self._is_made = False

    def __repr__(self) -> str:
        return f"<FeatureRows {len(self)} samples, {len(self.missing)} missing>"

    def __len__(self) -> int:
        return self._read.samples

    @property
    def missing(self) -> tuple[int, ...]:
        """The places of the rows that weren't stored when the batch was made."""
        return tuple(self._read.missing)

    def belongs_to(self, module: Any) -> bool:
        """True if they are of this module."""
        return self._of.module is module

    def result(self) -> Any:
        """Results of the module for the batch: missing rows are computed and stored now. Once.

        Raises:
            FeatureError: as by calls of a cached module with `cache_key`.
        """
        if not self._is_made:
            self._result, self._is_made = self._made(), True
            self._bodies = self._inputs = None
        return self._result

    def bodies(self) -> tuple[bytes, list[bytes]]:
        """The layout of the rows and the bytes of each, as they are stored; missing ones are computed. Once.

        Raises:
            FeatureError: as by `result`.
        """
        read, bodies, layout = self._read, dict[int, bytes](), self._read.layout
        if read.keys:
            _, computed = self._computed()
            bodies, layout = dict(zip(read.places, computed.bodies(), strict=True)), computed.layout
        if self._bodies is not None:
            stored, missing = self._bodies.numpy(), set(read.missing)
            bodies.update(
                (place, stored[place].tobytes()) for place in range(len(self)) if place not in missing
            )
        return layout, [bodies[place] for place in range(len(self))]

    def _made(self) -> Any:
        read, feature = self._read, self._of
        feature.refuse_stale()
        if not read.keys or self._is_checked_elsewhere():
            self._refuse_if_other(feature.fingerprint())
            return _built(layout_of(read.layout), self._leaves(), len(self))
        value, computed = self._computed()
        if self._bodies is None:
            return feature.placed(value)
        return _built(layout_of(read.layout), self._filled(self._leaves(), computed), len(self))

    def _computed(self) -> tuple[Any, Result]:
        """Compute the rows whose inputs came with the batch: missing ones, and canaries to compare."""
        read, feature = self._read, self._of
        start_ns = time.monotonic_ns()
        value, fingerprint = feature.compute(self._inputs, read.keys)
        computed = Result(value, len(read.keys))
        self._counts.add("feature_compute_ns", time.monotonic_ns() - start_ns)
        self._counts.add("feature_rows_computed", len(read.missing))
        if self._bodies is not None:
            self._refuse_if_other(fingerprint)
            if computed.layout != read.layout:
                raise FeatureNotCacheable(
                    "rows of this batch have different shapes, so they can't be one batch"
                )
            self._refuse_unlike(computed)
        return value, computed

    def _leaves(self) -> list[torch.Tensor]:
        assert self._bodies is not None
        return leaves_in(self._bodies, layout_of(self._read.layout))

    def _is_checked_elsewhere(self) -> bool:
        """True if all rows are stored, and another process compares those whose inputs came with them."""
        read = self._read
        if read.missing:
            return False
        return self._of.check(self._inputs, read.keys, self._stored(read.places))

    def _stored(self, places: Sequence[int]) -> list[Any]:
        """The leaves of some of the stored rows."""
        leaves = zip(self._leaves(), layout_of(self._read.layout).leaves, strict=True)
        return [reordered(_typed(leaf, stored_leaf, len(self)), places) for leaf, stored_leaf in leaves]

    def _refuse_unlike(self, computed: Result) -> None:
        """Compare the canaries with what was computed for them: a derived shard may have them, or the store.

        Raises:
            FeatureMismatch: a row isn't what the module computes now.
        """
        read, missing = self._read, set(self._read.missing)
        numbers = [number for number, place in enumerate(read.places) if place not in missing]
        if not numbers:
            return
        stored = self._stored([read.places[number] for number in numbers])
        if not is_close([reordered(leaf, numbers) for leaf in computed.leaves], stored):
            raise self._of.refuse(read.keys[numbers[0]][0])
        self._of.note_compared(len(numbers))

    def _filled(self, leaves: list[torch.Tensor], computed: Result) -> list[torch.Tensor]:
        """The leaves of all rows: stored ones, and the computed ones in the places of the missing."""
        is_missing = set(self._read.missing)
        from_ = [number for number, place in enumerate(self._read.places) if place in is_missing]
        to = [place for place in self._read.places if place in is_missing]
        if not to:
            return leaves
        for leaf, computed_leaf in zip(leaves, computed.leaves, strict=True):
            if isinstance(computed_leaf, np.ndarray):
                computed_leaf = torch.from_numpy(
                    np.ascontiguousarray(computed_leaf).reshape(len(computed_leaf), -1).view(np.uint8)
                )
            if leaf.numel():
                flat = leaf.reshape(len(leaf), -1).view(torch.uint8)
                flat[to] = (
                    computed_leaf.reshape(len(computed_leaf), -1)
                    .contiguous()
                    .view(torch.uint8)[from_]
                    .to(leaf.device)
                )
        return leaves

    def _refuse_if_other(self, fingerprint: str) -> None:
        if fingerprint != self._read.fingerprint:
            raise FeatureMismatch(
                "the module of these features has changed since the epoch began, and the batch has rows of "
                "the one before: iterate the loader again"
            )


def _built(layout: ResultLayout, leaves: Sequence[torch.Tensor], samples: int) -> Any:
    return layout.build(
        [_typed(leaf, stored_leaf, samples) for leaf, stored_leaf in zip(leaves, layout.leaves, strict=True)]
    )


def _typed(leaf: torch.Tensor, stored_leaf: StoredLeaf, samples: int) -> Any:
    """A leaf as the module returned it: of an array there are only the bytes so far."""
    if dtype_of(stored_leaf) is not None:
        return leaf
    return leaf.cpu().contiguous().numpy().view(stored_leaf.dtype).reshape(samples, *stored_leaf.shape)


def rows_of(module: Any, args: Sequence[Any]) -> FeatureRows | None:
    """The rows of a module in the batch that it is called with, if it is one."""
    if len(args) == 1 and isinstance(args[0], Mapping):
        for value in args[0].values():
            if isinstance(value, FeatureRows) and value.belongs_to(module):
                return value
    return None
