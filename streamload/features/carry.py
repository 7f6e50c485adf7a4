"""Carry stored rows from shards to others with the same samples, as after re-packing: none is computed.

Both lists of shards are read once, for the checksums of their samples.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamload.columns.columns import FIRST, is_address, name_of
from streamload.derived.prepare.preparation import whole
from streamload.derived.store.keys import Naming, SampleKey
from streamload.derived.store.row_store import RowStore
from streamload.derived.store.sealed import seal
from streamload.origins.origin import open_origin
from streamload.shards.samples import Entry, ShardScanner

_AT_ONCE = 256


@dataclass(slots=True)
class Carried:
    """Counts of what was carried."""

    samples: int = 0  # of the new shards
    shared: int = 0  # of these, samples that the old shards have, too
    rows: int = 0  # of all fingerprints, that lie with the new shards now


def carry(
    old: Iterable[str],
    new: Iterable[str],
    store: RowStore,
    labels: Mapping[bytes, str],
    storage_options: Mapping[str, Any] | None = None,
    on_shard: Callable[[], object] = lambda: None,
) -> Carried:
    """Copy the rows of samples to the places that they have in other shards.

    Rows of texts and of variants stay where they are, and are computed again.

    Args:
        old, new: the URLs of shards.
        store: has the rows.
        labels: of the rows, by their fingerprints.
        on_shard: called after each shard.

    Raises:
        OriginError, ShardError: a shard can't be read.
    """
    places: dict[int, SampleKey] = {}
    for url in old:
        places.update((key.seed, key) for key in _keys_of(url, storage_options))
        on_shard()
    carried = Carried()
    for url in new:
        keys = _keys_of(url, storage_options)
        while batch := list(itertools.islice(keys, _AT_ONCE)):
            carried.samples += len(batch)
            pairs = [(places[key.seed], key) for key in batch if key.seed in places]
            carried.shared += len(pairs)
            for fingerprint, label in labels.items():
                carried.rows += _copy(pairs, store, Naming(fingerprint, b"", is_row=True), label)
        on_shard()
    return carried


def _copy(pairs: Sequence[tuple[SampleKey, SampleKey]], store: RowStore, naming: Naming, label: str) -> int:
    """Copy the rows of a fingerprint from the first to the second of each pair; return how many."""
    names = [(naming.name(old), naming.name(new)) for old, new in pairs]
    rows = store.read(list({old for old, _ in names}), label)
    placed = [(new, rows[old]) for old, new in names if old in rows and new not in rows]
    of_columns = [(name, row.layout, row.body) for name, row in placed if is_address(name)]
    of_calls = [
        (name, seal(name, row.layout, bytes(row.body), 0)) for name, row in placed if not is_address(name)
    ]
    if of_columns:
        store.write_columns(of_columns, label)
    if of_calls:
        store.write(of_calls, label)
    return sum(old in rows for old, _ in names)


def _keys_of(url: str, storage_options: Mapping[str, Any] | None) -> Iterator[SampleKey]:
    """The key of each sample's row."""
    with (
        contextlib.closing(open_origin(url, storage_options)) as origin,
        contextlib.closing(origin.open()) as stream,
    ):
        entries = _entries(whole(stream, url))
        first = list(itertools.islice(entries, FIRST))
        checksums = [entry.checksum for entry in first if entry.checksum is not None]
        name = name_of(checksums) if len(checksums) == FIRST else b""
        for entry in itertools.chain(first, entries):
            if entry.checksum is not None:
                yield SampleKey(entry.key, entry.checksum, name, entry.number if name else 0)


def _entries(chunks: Iterable[bytes]) -> Iterator[Entry]:
    scanner = ShardScanner()
    for chunk in chunks:
        if not scanner.ended:
            yield from scanner.feed(chunk)
    yield from scanner.finish()[0]
