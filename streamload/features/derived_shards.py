"""The derived shards of a process's features: fetched from the shared cache, and read from the tier (H).

Each node fetches one once, beside the shards themselves. This never makes one: rows that aren't found here
are looked up in the store of rows, then computed in the rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from streamload.cache.shard import Shard
from streamload.derived import log_once
from streamload.derived.store.results import refuse_uncomputed
from streamload.derived.store.sealed import Row
from streamload.derived.store.shard import RowShard, SampleKey, rows_form
from streamload.errors import CacheCorrupt, OriginNotFound
from streamload.origins.origin import Origin, Stream, Version
from streamload.prefetch.prefetcher import FillResult, Prefetcher, PrefetchOptions
from streamload.prefetch.scheduler import FillRequest
from streamload.shards.samples import Entry
from streamload.worker.reader import Reader

_FETCHES = 2
_LOOK_SECONDS = 1.0
"""Between two looks for a derived shard that isn't in the tier."""
_ASK_SECONDS = 30.0
"""Between two requests for a derived shard that the shared cache lacks."""
_PATIENCE_SECONDS = 5.0
"""The longest wait for a derived shard that is being fetched; after one in vain nothing is waited for."""
_POLL_SECONDS = 0.005


class DerivedShards:
    """The derived shards that a process reads. It lasts from epoch to epoch; for one thread.

    Args:
        names: of the features that have some.
        reader: of the process; its shared cache has derived shards.
    """

    def __init__(self, names: Sequence[str], reader: Reader):
        self._names = names
        self._shards, self._files, self._counts = reader.shards, reader.files, reader.counts
        self._backing = reader.fills.backing
        self._tier = reader.fills.tier
        self._fingerprints: dict[str, str] = {}  # by feature
        self._open: dict[tuple[str, int], RowShard] = {}  # by feature and shard
        self._look_at: dict[tuple[str, int], float] = {}
        self._wanted: dict[str, FillRequest] = {}  # those that are being fetched, by digest
        self._answered: set[str] = set()  # digests of those that were fetched, or can't be; by any thread
        self._is_patient = True
        self._prefetcher: Prefetcher | None = None
        if names and self._backing is not None:
            self._prefetcher = Prefetcher(
                self._tier,
                self._open_origin,
                PrefetchOptions(_FETCHES, tombstones=False, retry_seconds=_ASK_SECONDS),
                counts=self._counts,
                sink=self._settle,
            )

    def begin(self, fingerprints: Mapping[str, str]) -> None:
        """Begin an epoch: by these fingerprints rows are row_shard, by feature."""
        self.keep_open(())
        self._fingerprints = {name: fingerprints[name] for name in self._names}
        self._look_at.clear()
        self._answered.clear()
        self._is_patient = True

    def want(self, requests: Iterable[FillRequest]) -> None:
        """Fetch the rows of these shards, in order of need."""
        fills = [
            FillRequest(rows_form(request.shard, fingerprint), request.next_use)
            for request in requests
            for fingerprint in self._fingerprints.values()
            if fingerprint and request.shard.local is None
        ]
        self._request(fills)

    def has_all(self, shard: int, entry: Entry) -> bool:
        """True if derived shards have a sample's rows of all features, so that its bytes aren't needed."""
        key, row_shards = (entry.key, entry.checksum), [self._at(name, shard) for name in self._names]
        return all(row_shard is not None and key in row_shard for row_shard in row_shards)

    def rows(self, feature: str, shard: int, keys: Sequence[SampleKey]) -> list[Row | None]:
        """The rows of samples of a shard; None for those that no derived shard has.

        It waits while the derived shard is being fetched, but only for some seconds.
        """
        row_shard = self._at(feature, shard)
        if row_shard is None:
            return [None] * len(keys)
        damaged = row_shard.damaged
        rows = row_shard.read(keys)
        if row_shard.damaged > damaged:
            self._counts.add("feature_rows_damaged", row_shard.damaged - damaged)
        return rows

    def keep_open(self, shards: Collection[int]) -> None:
        """Close the derived shards of all other shards: they may be evicted."""
        for feature, shard in [key for key in self._open if key[1] not in shards]:
            row_shard = self._open.pop((feature, shard))
            self._files.forget(row_shard)
            row_shard.close()
            if row_shard.damaged and self._prefetcher is not None:  # to be fetched again
                self._tier.quarantine(row_shard.copy.path)

    def close(self) -> None:
        """Stop all transfers where they are, and close all that is open. Idempotent."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self.keep_open(())

    def _at(self, feature: str, shard: int) -> RowShard | None:
        """The derived shard of a feature and shard, opened if it isn't; None: there is none."""
        row_shard = self._open.get((feature, shard))
        if row_shard is None or row_shard.copy.is_closed:  # to make room for others
            row_shard = self._find(feature, shard)
        if row_shard is not None:
            self._files.use(row_shard)
        return row_shard

    def _find(self, feature: str, shard: int) -> RowShard | None:
        """Open a derived shard, if the tier has it by now."""
        key, fingerprint = (feature, shard), self._fingerprints.get(feature)
        if not fingerprint or time.monotonic() < self._look_at.get(key, 0.0):
            return None
        form = rows_form(self._shards[shard], fingerprint)
        if form.local is None and form.digest not in self._wanted:
            self._request([FillRequest(form, 0.0), *self._wanted.values()])
        self._await(form)
        row_shard = None
        try:
            with contextlib.suppress(OSError):
                row_shard = RowShard.open(self._tier.published(form.digest), form)
            if row_shard is not None and len(row_shard):
                refuse_uncomputed(row_shard.layout)  # the rank makes results by it
        except CacheCorrupt as exc:
            if row_shard is not None:
                row_shard.close()
            log_once(f"{form.name} isn't used, and its rows are computed: {exc}")
            self._counts.add("checksum_failures")
            self._tier.quarantine(self._tier.published(form.digest))
            row_shard = None
        if row_shard is None:
            self._look_at[key] = time.monotonic() + _LOOK_SECONDS
        else:
            self._open[key] = row_shard
            self._files.trim()
        return row_shard

    def _request(self, fills: Sequence[FillRequest]) -> None:
        if self._prefetcher is not None:
            self._wanted = {request.shard.digest: request for request in fills}
            self._prefetcher.want(fills)

    def _await(self, form: Shard) -> None:
        """Wait while a derived shard is being fetched."""
        path, began = self._tier.published(form.digest), time.monotonic()
        while self._is_patient and self._is_coming(form) and not path.exists():
            time.sleep(_POLL_SECONDS)
            self._is_patient = time.monotonic() - began < _PATIENCE_SECONDS

    def _is_coming(self, form: Shard) -> bool:
        return form.digest in self._wanted and form.digest not in self._answered

    def _settle(self, result: FillResult) -> None:
        """Note that a fetch has ended, whether it row_shard something or not; called by its thread."""
        self._answered.add(result.shard.digest)

    def _open_origin(self, form: Shard, stop: threading.Event) -> Origin:
        assert self._backing is not None
        origin = _NotMadeHere(form)
        return self._backing.through(form, origin, stop, single_flight=False, revalidates=False)


class _NotMadeHere(Origin):
    """In place of the origin of a derived shard: what the shared cache lacks isn't there."""

    def __init__(self, form: Shard):
        self.url = form.url
        self._name = form.name

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Raise OriginNotFound."""
        raise OriginNotFound(f"{self._name} isn't in the shared cache")

    def version(self) -> Version:
        """Raise OriginNotFound."""
        raise OriginNotFound(f"{self._name} isn't in the shared cache")

    def close(self) -> None:
        """Nothing is open."""
