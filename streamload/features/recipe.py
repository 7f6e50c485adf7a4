"""A recipe that makes the rows of features: what a daemon, `warm` or a Ray task computes from shards.

source shard → samples → inputs (batches/) → rows are read, others computed → columns, here and shared

Rows lie in the columns of the node, and in blocks of the shared cache. What the recipe derives of a shard is
a receipt: a tar that says which rows were shard_rows, so that several makers split the shards.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from streamload.batches.assembly import BatchAssembly
from streamload.batches.in_progress import BatchFactory
from streamload.columns.blocks import block_rows
from streamload.columns.columns import FIRST, name_of
from streamload.derived.calls.features import BoundFeatures
from streamload.derived.prepare.preparation import DerivedOrigin, parts_of, whole
from streamload.derived.store.sealed import class_in
from streamload.errors import FeatureMismatch, FeatureNotCacheable, OptionError, SampleError
from streamload.features.columns import FeatureAssembly
from streamload.features.named import NAME, NamedFeatures
from streamload.features.rank import take_features
from streamload.features.sharing import fetch_rows, store_note, store_rows
from streamload.ipc import own_empty
from streamload.metrics import Counters
from streamload.origins.origin import Origin, Stream, Version
from streamload.shards.samples import Entry, Sample, ShardScanner
from streamload.shards.tar import BLOCK_BYTES
from streamload.transforms.plan import ImagePlan
from streamload.urls import redact

if TYPE_CHECKING:
    from streamload.cache.shared.sharing import SharedOptions
    from streamload.cache.shared.tier import SharedTier

MakeRecipe = Callable[[NamedFeatures, "str | None", "SharedOptions | None"], "FeatureRecipe"]
"""Makes the recipe of named features, given the cache directory and the shared cache."""


def rows_recipe(fingerprint: str) -> str:
    """The recipe (`Shard.recipe`) of the receipts for rows of a fingerprint."""
    return f"rows-{fingerprint}"


@dataclass(slots=True)
class _MadeRows:
    """The rows of a shard that aren't stored for other nodes yet."""

    name: bytes  # of the shard's columns
    store: Callable[[bytes, list[tuple[int, int, bytes]], int], None]
    """Stores rows of a layout: place, checksum of the sample and bytes of each; and from which place on."""
    layout: bytes = b""
    count: int = 0
    stored: int = 0  # the place after the last that is stored
    rows: list[tuple[int, int, bytes]] = field(default_factory=list)

    def add(self, layout: bytes, samples: Iterable[Sample], bodies: Iterable[bytes]) -> None:
        """Add rows.

        Raises:
            FeatureNotCacheable: they have another layout than the rows before, or a class in it.
        """
        if not self.layout and (named := class_in(layout)) is not None:
            raise FeatureNotCacheable(
                f"the results have a {named} in them: other nodes read tensors, arrays, numbers and text in "
                f"lists, tuples and dicts; let the module return one of these"
            )
        if self.layout not in (b"", layout):
            raise FeatureNotCacheable(
                "rows of this shard have different shapes, so other nodes can't read them: make them without "
                "a shared cache"
            )
        self.layout = layout
        for sample, body in zip(samples, bodies, strict=True):
            assert sample.checksum is not None
            self.rows.append((sample.number, sample.checksum, body))
            self.count += 1
        if self.rows and self.rows[-1][0] - self.rows[0][0] >= block_rows(max(1, len(self.rows[0][2]))):
            self.flush()

    def flush(self) -> None:
        """Store all rows."""
        if self.name and self.rows:
            self.store(self.layout, self.rows, self.stored)
            self.stored = self.rows[-1][0] + 1
        self.rows = []


class FeatureRecipe:
    """Makes rows of features, and a receipt for those of each shard; see Recipe. Pickles as names.

    Thread-safe: inputs are made in the calling threads if their transform is compiled, and the module
    computes for one at a time.

    Args:
        assembly: of batches of a loader with the features.
        feature: how workers of the loader make their inputs.
        bound: the features as its rank uses them.
        shared: has the rows for other nodes; None: they are for this node.
        remake: makes the recipe of named features in another process.

    Attributes:
        fingerprint: of the rows.
        counts: of rows that were read and computed.

    Raises:
        OptionError: their rows can't be made ahead.
    """

    def __init__(
        self,
        named: NamedFeatures,
        assembly: BatchAssembly,
        feature: FeatureAssembly,
        bound: BoundFeatures,
        shared: SharedOptions | None,
        remake: MakeRecipe,
    ):
        assert feature.images is not None
        fingerprint = bound.fingerprint()
        if fingerprint is None:
            raise OptionError(f"{named.module} has no rows: give cache_module a cache_path that can be used")
        self.named = named
        self.fingerprint, self._parts = str(fingerprint), fingerprint.parts
        self.counts = Counters()
        self._assembly, self._feature, self._bound, self._remake = assembly, feature, bound, remake
        self._shared = shared
        self._tier: SharedTier | None = None if shared is None else shared.open_tier(self.counts)
        self._is_noted = False
        is_compiled = isinstance(feature.images.preprocess, ImagePlan)
        self._computing = threading.Lock()
        self._decoding = contextlib.nullcontext() if is_compiled else threading.Lock()

    def __repr__(self) -> str:
        return f"<FeatureRecipe {self.named.module}: {self.fingerprint}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._remake, (self.named, None, self._shared)

    @property
    def name(self) -> str:
        """A name for all that the result depends on beside the shard (`Shard.recipe`)."""
        return rows_recipe(self.fingerprint)

    def derive(self, origin: Origin) -> Origin:
        """The derived shard of an origin's shard, under that shard's version.

        It is never continued: rows that are computed again may be rounded otherwise.
        """
        preparation = self._assembly.preparation
        source = origin if preparation is None else preparation.derive(origin)
        return DerivedOrigin(source, self._rows_of, is_repeatable=False)

    def _rows_of(self, stream: Stream, url: str) -> Iterator[bytes]:
        """Nothing after each batch of rows, then the receipt: so a fill can be stopped meanwhile."""
        is_prepared = self._assembly.preparation is not None
        chunks = stream.chunks() if is_prepared else whole(stream, url)
        entries = entries_of(chunks, url, is_prepared=is_prepared)
        first = list(itertools.islice(entries, FIRST))
        name = b""
        if len(first) == FIRST:
            name = name_of([entry.checksum or 0 for entry, _ in first])
        begin = self._batches(name)
        shard_rows = _MadeRows(name, lambda *made: self._share(name, *made))
        if name:
            self._fetch(name)
        samples = (sample for _, sample in itertools.chain(first, entries) if sample is not None)
        while batch := list(itertools.islice(samples, self.named.batch_size)):
            self._compute(begin, batch, shard_rows)
            yield b""
        shard_rows.flush()
        with self._computing:
            self._bound.count(self.counts, at_end=True)
        yield from _receipt(self._about(url, stream.version, shard_rows))

    def _fetch(self, name: bytes) -> None:
        """Take the rows that other makers have stored."""
        columns = self._bound.columns
        if self._tier is not None and columns is not None:
            fetch_rows(self._tier.column, columns, bytes.fromhex(self.fingerprint), name)

    def _share(self, name: bytes, layout: bytes, rows: list[tuple[int, int, bytes]], start: int) -> None:
        """Store rows for other nodes."""
        if self._tier is None:
            return
        fingerprint = bytes.fromhex(self.fingerprint)
        if not self._is_noted:
            store_note(self._tier, fingerprint, self._bound.features.label, self._parts)
            self._is_noted = True
        store_rows(self._tier, fingerprint, name, layout, rows, start)

    def _batches(self, name: bytes) -> BatchFactory:
        """Makes empty batches of a shard whose columns have a name, for one thread."""
        with self._computing:
            make = self._feature.batch_factory(self._bound.start(), lambda _: name)
        return self._assembly.batch_factory(lambda size, allocate: [make(size, allocate)])

    def _compute(self, begin: BatchFactory, samples: list[Sample], shard_rows: _MadeRows) -> None:
        """Make the rows of samples; those that can't be used get none.

        Raises:
            FeatureError: as by calls of a cached module with `cache_key`.
        """
        added: list[Sample] = []
        with self._decoding, contextlib.closing(begin(len(samples), own_empty)) as batch:
            parsed = []
            for sample in filter(self._is_usable, samples):
                with contextlib.suppress(SampleError):
                    parsed.append((sample, batch.parse(sample, 0)))
            for sample, parsed_sample in parsed:
                with contextlib.suppress(SampleError):
                    batch.add(parsed_sample)
                    added.append(sample)
            values = batch.finish() if added else {}
        if not added:
            return
        with self._computing:
            layout, bodies = take_features(values, {NAME: self._bound}, self.counts)[NAME].bodies()
            fingerprint = str(self._bound.fingerprint() or "")
        if fingerprint != self.fingerprint:
            raise FeatureMismatch(
                f"{self.named.module} has another fingerprint after it computed its first rows, as computing "
                f"changes it: start again"
            )
        shard_rows.add(layout, added, bodies)

    def _about(self, url: str, version: Version, shard_rows: _MadeRows) -> dict[str, Any]:
        """Content of a receipt."""
        return {
            "format": 2,
            "fingerprint": self.fingerprint,
            "label": self._bound.features.label,
            "features": asdict(self.named),
            "source": {"url": redact(url), **asdict(version)},
            "columns": shard_rows.name.hex(),
            "rows": shard_rows.count,
        }

    def _is_usable(self, sample: Sample) -> bool:
        assembly = self._assembly
        chosen = [assembly.image(sample.members)]
        chosen += [] if assembly.text is None else [assembly.text(sample.members)]
        return all(chosen)


def entries_of(
    chunks: Iterable[bytes], url: str, *, is_prepared: bool
) -> Iterator[tuple[Entry, Sample | None]]:
    """The entries of a tar with their samples; None for those with links or of more than 64 MiB.

    A training computes the rows of these.

    Raises:
        ShardError: not a tar, damaged or cut.
    """
    for entry, begin, data, _ in parts_of(chunks, ShardScanner(prepared=is_prepared), url):
        if entry is None:
            continue
        sample = None
        if entry.span is None:
            members = entry.payloads(memoryview(bytearray(data))[entry.start - begin :])
            prepared = entry.prepared[0] if entry.prepared is not None else ""
            sample = Sample(entry.key, url, members, prepared, entry.checksum, number=entry.number)
        yield entry, sample


def _receipt(about: dict[str, Any]) -> Iterator[bytes]:
    """The bytes of a tar with one JSON file."""
    data = json.dumps(about, indent=1).encode()
    info = tarfile.TarInfo("rows.json")
    info.size, info.mode = len(data), 0o644
    yield info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % BLOCK_BYTES) + bytes(2 * BLOCK_BYTES)
