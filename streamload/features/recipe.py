"""A recipe that makes derived shards of rows: what a daemon, `warm` or a Ray task computes from shards.

source shard → samples → inputs (batches/) → rows are read, others computed → tar (derived/store/shard.py)
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from streamload.batches.assembly import BatchAssembly
from streamload.batches.in_progress import BatchFactory
from streamload.derived.calls.features import BoundFeatures
from streamload.derived.prepare.preparation import DerivedOrigin, parts_of, whole
from streamload.derived.store.shard import RowShardWriter, SampleKey, rows_recipe
from streamload.errors import FeatureMismatch, OptionError, SampleError
from streamload.features.columns import FeatureAssembly
from streamload.features.named import NAME, NamedFeatures
from streamload.features.rank import take_features
from streamload.ipc import own_empty
from streamload.metrics import Counters
from streamload.origins.origin import Origin, Stream, Version
from streamload.shards.samples import Sample, ShardScanner
from streamload.transforms.plan import ImagePlan
from streamload.urls import redact


class FeatureRecipe:
    """Makes derived shards with rows of features; see Recipe. Pickles as the names of its parts.

    Thread-safe: inputs are made in the calling threads if their transform is compiled, and the module
    computes for one at a time.

    Args:
        assembly: of batches of a loader with the features.
        feature: how workers of the loader make their inputs.
        bound: the features as its rank uses them.
        remake: makes the recipe of named features in another process.

    Attributes:
        fingerprint: of the rows.
        counts: of rows that were read and computed.

    Raises:
        OptionError: their rows can't be in derived shards.
    """

    def __init__(
        self,
        named: NamedFeatures,
        assembly: BatchAssembly,
        feature: FeatureAssembly,
        bound: BoundFeatures,
        remake: Callable[[NamedFeatures], FeatureRecipe],
    ):
        assert feature.images is not None
        fingerprint = bound.fingerprint()
        if fingerprint is None:
            raise OptionError(f"{named.module} has no rows: give cache_module a cache_path that can be used")
        self.named = named
        self.fingerprint, self._parts = str(fingerprint), fingerprint.parts
        self.counts = Counters()
        self._assembly, self._feature, self._bound, self._remake = assembly, feature, bound, remake
        is_compiled = isinstance(feature.images.preprocess, ImagePlan)
        self._computing = threading.Lock()
        self._decoding = contextlib.nullcontext() if is_compiled else threading.Lock()

    def __repr__(self) -> str:
        return f"<FeatureRecipe {self.named.module}: {self.fingerprint}>"

    def __reduce__(self) -> tuple[Callable[[NamedFeatures], FeatureRecipe], tuple[NamedFeatures]]:
        return self._remake, (self.named,)

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
        """Nothing after each batch of rows, then the tar: so a fill can be stopped while rows are made."""
        is_prepared = self._assembly.preparation is not None
        chunks = stream.chunks() if is_prepared else whole(stream, url)
        samples = samples_of(chunks, url, is_prepared=is_prepared)
        begin = self._batches()
        with RowShardWriter() as writer:
            while batch := list(itertools.islice(samples, self.named.batch_size)):
                self._compute(begin, batch, writer)
                yield b""
            yield from writer.chunks(self._about(url, stream.version))

    def _batches(self) -> BatchFactory:
        """Makes empty batches, for one thread."""
        with self._computing:
            make = self._feature.batch_factory(self._bound.start(), None)
        return self._assembly.batch_factory(lambda size, allocate: [make(size, allocate)])

    def _compute(self, begin: BatchFactory, samples: list[Sample], writer: RowShardWriter) -> None:
        """Add the rows of samples to a derived shard; samples that can't be used get none.

        Raises:
            FeatureError: as by calls of a cached module with `cache_key`.
        """
        added: list[SampleKey] = []
        with self._decoding, contextlib.closing(begin(len(samples), own_empty)) as batch:
            parsed = []
            for sample in filter(self._is_usable, samples):
                with contextlib.suppress(SampleError):
                    parsed.append((sample, batch.parse(sample, 0)))
            for sample, parsed_sample in parsed:
                with contextlib.suppress(SampleError):
                    batch.add(parsed_sample)
                    assert sample.checksum is not None
                    added.append((sample.key, sample.checksum))
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
        writer.add(layout, added, bodies)

    def _about(self, url: str, version: Version) -> dict[str, Any]:
        """Header of a derived shard."""
        return {
            "format": 1,
            "fingerprint": self.fingerprint,
            "label": self._bound.features.label,
            "parts": self._parts,
            "features": asdict(self.named),
            "source": {"url": redact(url), **asdict(version)},
        }

    def _is_usable(self, sample: Sample) -> bool:
        assembly = self._assembly
        chosen = [assembly.image(sample.members)]
        chosen += [] if assembly.text is None else [assembly.text(sample.members)]
        return all(chosen)


def samples_of(chunks: Iterable[bytes], url: str, *, is_prepared: bool) -> Iterator[Sample]:
    """The samples of a tar; not those with links or of more than 64 MiB, whose rows a training computes.

    Raises:
        ShardError: not a tar, damaged or cut.
    """
    for entry, begin, data, _ in parts_of(chunks, ShardScanner(prepared=is_prepared), url):
        if entry is not None and entry.span is None:
            members = entry.payloads(memoryview(bytearray(data))[entry.start - begin :])
            prepared = entry.prepared[0] if entry.prepared is not None else ""
            yield Sample(entry.key, url, members, prepared, entry.checksum)
