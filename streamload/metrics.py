"""Counters: one row per process, and a Snapshot that sums the rows up.

Each process is the only writer of its row, usually in shared memory, so processes share no lock; a snapshot
may be slightly out of date. Times are integer nanoseconds.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import monotonic_ns
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# Why a sample was skipped or replaced.
CAUSES = {
    "missing": "it lacks a requested image, caption or label, has one of more than 64 MiB, or has a blank "
    "caption where these are skipped",
    "decode": "its image can't be decoded",
    "too_large": "its image would take more memory or time to decode than max_image_pixels allows",
    "caption": "its caption isn't text, or lacks the requested field",
    "label": "its label isn't an integer, or lacks the requested field",
}

# The order is the layout of a row. Names ending in _ns are times, which a Snapshot shows in seconds.
COUNTERS: dict[str, str] = {
    "origin_requests": "requests sent to origins, including retries",
    "origin_bytes": "bytes of shards received from origins",
    "origin_retries": "requests that were retried after a failure",
    "shared_requests": "requests sent to the shared cache",
    "shared_bytes": "bytes received from the shared cache, including indexes; not part of origin_bytes",
    "shared_hits": "fills whose shard was in the shared cache",
    "shared_misses": "fills whose shard was not in the shared cache",
    "shared_errors": "failures and checksum mismatches of the shared cache, after which the origin was used",
    "shared_stored": "shards that this loader stored in the shared cache",
    "shared_not_stored": "shards that it could not store: the shared cache refused them, or the run ended",
    "shared_waits": "fills that waited for another node's fill of the same shard",
    "shared_wait_ns": "total time of these waits, summed over concurrent fills",
    "tier_hits": "shards that were complete in the tier when a reader first needed them in a pass",
    "tier_misses": "shards that were not, and were filled or followed; hits + misses = shards started",
    "shards_published": "shards that this loader's fillers completed and published",
    "shards_complete": "distinct shards that this rank has seen complete in the tier, whoever filled them",
    "shards_taken_over": "fills that continued the part of a dead filler",
    "shards_evicted": "shards deleted from the tier to make room",
    "shards_revalidated": "cached shards that were compared with their origin's version",
    "shards_changed": "revalidated shards that had changed, and were fetched again",
    "shards_unverified": "shards used without revalidation, as their origin did not respond",
    "shards_given_up": "shards dropped after their origin failed or the tar was cut",
    "range_reads": "samples read from their origin, as the cache had no space for their shard",
    "checksum_failures": "cached samples that failed their checksum, and were fetched again",
    "samples_yielded": "samples in the batches that the training loop took",
    **{f"samples_skipped_{cause}": f"samples skipped because {why}" for cause, why in CAUSES.items()},
    **{f"samples_replaced_{cause}": f"samples replaced because {why}" for cause, why in CAUSES.items()},
    "feature_rows_read": "rows of features that were stored, and came with batches",
    "feature_rows_computed": "rows of features that weren't, and were computed in the training's process",
    "feature_rows_damaged": "rows of derived shards that failed their checksum, and were computed again",
    "feature_read_ns": "time that workers spent reading rows of features, summed over workers",
    "feature_compute_ns": "time that the training's process spent computing and storing rows of features",
    "batches_yielded": "batches that the training loop took",
    "fresh_tensors": "tensors allocated because all pooled buffers were still in use",
    "data_wait_ns": "time for which the training loop waited for a batch",
    "first_batch_ns": "time from the first iter() to the first batch",
    "bytes_wait_ns": "time for which workers waited for bytes to arrive, summed over workers",
    "transform_ns": "time that workers spent decoding, augmenting and tokenizing, summed over workers",
}

_PLACES = {name: place for place, name in enumerate(COUNTERS)}
WIDTH = len(COUNTERS)


class Counts(Protocol):
    """Counts events; thread-safe."""

    def add(self, name: str, n: int = 1, /) -> None:
        """Add `n` to a counter of COUNTERS."""
        ...


def total(rows: NDArray[np.int64], name: str) -> int:
    """Value of a counter over all processes; about 2 µs."""
    return int(rows[:, _PLACES[name]].sum())


class Counters:
    """One process's counters: a lock and a row of int64. Thread-safe; each process needs its own row.

    Args:
        row: int64[WIDTH], written in place; default: new memory.
    """

    def __init__(self, row: NDArray[np.int64] | None = None) -> None:
        self.row = np.zeros(WIDTH, np.int64) if row is None else row
        if self.row.shape != (WIDTH,) or self.row.dtype != np.int64:
            raise ValueError(
                f"a row of counters is int64[{WIDTH}], got {self.row.dtype}{list(self.row.shape)}"
            )
        self._lock = threading.Lock()

    def add(self, name: str, n: int = 1, /) -> None:
        """Add `n` to a counter of COUNTERS; about 0.3 µs."""
        place = _PLACES[name]
        with self._lock:
            self.row[place] += n

    def value(self, name: str) -> int:
        """Value of a counter in this row."""
        return int(self.row[_PLACES[name]])

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a counter in nanoseconds, also if it raises."""
        began = monotonic_ns()
        try:
            yield
        finally:
            self.add(name, monotonic_ns() - began)

    def snapshot(self) -> "Snapshot":
        """The snapshot of this row alone."""
        return Snapshot.of(self.row[None])


def _zeros() -> dict[str, int]:
    return dict.fromkeys(CAUSES, 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A loader's counters so far, over all its processes on this rank.

    COUNTERS and CAUSES describe the numbers.

    Attributes:
        samples_skipped: skipped samples by cause.
        samples_replaced: samples replaced by another of their shard, by cause.
        shared_wait_seconds: over all fills; near 0: no other node fetches the same shards at the same time.
        data_wait_seconds: near 0: data is never late; near the run's duration: the training only waits for
            data.
        seconds_to_first_batch: from the first iter() to the first batch; None before it.
        bytes_wait_seconds: near 0: bytes arrive before they are needed; near workers × duration: the origin
            is the bottleneck.
        transform_seconds: near workers × duration: the CPU is the bottleneck.
        feature_read_seconds: near workers × duration: the disk with the rows is the bottleneck.
        feature_compute_seconds: near the run's duration: the training mostly computes features; make them
            ahead.
        source_samples: samples that the training loop took, by source.
        source_wait_seconds: bytes_wait_seconds by source.
        shard_wait_seconds: data_wait_seconds by shard, for the shards with the longest waits, longest first.
            If one shard has nearly all of it, its server is slow.
    """

    origin_requests: int = 0
    origin_bytes: int = 0
    origin_retries: int = 0
    shared_requests: int = 0
    shared_bytes: int = 0
    shared_hits: int = 0
    shared_misses: int = 0
    shared_errors: int = 0
    shared_stored: int = 0
    shared_not_stored: int = 0
    shared_waits: int = 0
    tier_hits: int = 0
    tier_misses: int = 0
    shards_published: int = 0
    shards_complete: int = 0
    shards_taken_over: int = 0
    shards_evicted: int = 0
    shards_revalidated: int = 0
    shards_changed: int = 0
    shards_unverified: int = 0
    shards_given_up: int = 0
    range_reads: int = 0
    checksum_failures: int = 0
    feature_rows_read: int = 0
    feature_rows_computed: int = 0
    feature_rows_damaged: int = 0
    samples_yielded: int = 0
    samples_skipped: dict[str, int] = field(default_factory=_zeros)
    samples_replaced: dict[str, int] = field(default_factory=_zeros)
    batches_yielded: int = 0
    fresh_tensors: int = 0
    shared_wait_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    seconds_to_first_batch: float | None = None
    bytes_wait_seconds: float = 0.0
    transform_seconds: float = 0.0
    feature_read_seconds: float = 0.0
    feature_compute_seconds: float = 0.0
    source_samples: dict[str, int] = field(default_factory=dict)
    source_wait_seconds: dict[str, float] = field(default_factory=dict)
    shard_wait_seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: NDArray[np.int64],
        sources: Mapping[str, Sequence[int]] = MappingProxyType({}),
        shards: Mapping[str, int] = MappingProxyType({}),
    ) -> "Snapshot":
        """Sum up the rows of all processes.

        Args:
            rows: int64[N, WIDTH].
            sources: samples taken and nanoseconds of waiting for bytes, by name.
            shards: nanoseconds for which the training loop waited for a shard, by name.
        """
        total = dict(zip(COUNTERS, rows.sum(axis=0).tolist(), strict=True))
        plain = {f.name: total[f.name] for f in fields(cls) if f.name in total}
        return cls(
            **plain,
            samples_skipped={cause: total[f"samples_skipped_{cause}"] for cause in CAUSES},
            samples_replaced={cause: total[f"samples_replaced_{cause}"] for cause in CAUSES},
            shared_wait_seconds=total["shared_wait_ns"] / 1e9,
            data_wait_seconds=total["data_wait_ns"] / 1e9,
            seconds_to_first_batch=total["first_batch_ns"] / 1e9 or None,
            bytes_wait_seconds=total["bytes_wait_ns"] / 1e9,
            transform_seconds=total["transform_ns"] / 1e9,
            feature_read_seconds=total["feature_read_ns"] / 1e9,
            feature_compute_seconds=total["feature_compute_ns"] / 1e9,
            source_samples={name: int(samples) for name, (samples, _) in sources.items()},
            source_wait_seconds={name: int(waited_ns) / 1e9 for name, (_, waited_ns) in sources.items()},
            shard_wait_seconds={name: waited_ns / 1e9 for name, waited_ns in shards.items()},
        )

    def since(self, earlier: "Snapshot") -> "Snapshot":
        """The difference to an earlier snapshot; seconds_to_first_batch is copied."""
        parts: dict[str, Any] = {"seconds_to_first_batch": self.seconds_to_first_batch}
        for name in (f.name for f in fields(self) if f.name not in parts):
            now, before = getattr(self, name), getattr(earlier, name)
            if isinstance(now, dict):
                parts[name] = {cause: count - before.get(cause, 0) for cause, count in now.items()}
            else:
                parts[name] = now - before
        return Snapshot(**parts)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}

    def __str__(self) -> str:
        first = (
            "not yet" if self.seconds_to_first_batch is None else f"after {self.seconds_to_first_batch:.2f} s"
        )
        shared = (
            f"shared   {self.shared_hits:,} hits, {self.shared_misses:,} misses, "
            f"{format_bytes(self.shared_bytes)}, {self.shared_errors:,} errors, "
            f"{self.shared_stored:,} stored; {self.shared_waits:,} fills waited for other nodes, "
            f"{self.shared_wait_seconds:.2f} s\n"
        )
        longest = next(iter(self.shard_wait_seconds.items()), None)
        return (
            f"origin   {self.origin_requests:,} requests, {format_bytes(self.origin_bytes)}, "
            f"{self.origin_retries:,} retries\n"
            f"{shared if self.shared_requests else ''}"
            f"tier     {self.tier_hits:,} hits, {self.tier_misses:,} misses\n"
            f"shards   {self.shards_complete:,} complete ({self.shards_published:,} published here), "
            f"{self.shards_evicted:,} evicted, {self.shards_given_up:,} given up\n"
            f"samples  {self.samples_yielded:,} yielded, {_by_cause(self.samples_skipped)} skipped, "
            f"{_by_cause(self.samples_replaced)} replaced\n"
            f"batches  {self.batches_yielded:,} yielded, the first {first}; "
            f"{self.data_wait_seconds:.2f} s waited for data"
            f"{'' if longest is None else f', {longest[1]:.2f} s of it for {longest[0]}'}"
        )


def format_bytes(number: float) -> str:
    """Bytes in readable units of thousands: 1234567 is "1.2 MB"."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(number) < 999.95 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} B" if unit == "B" else f"{number:,.1f} {unit}"


def _by_cause(counts: dict[str, int]) -> str:
    named = ", ".join(f"{cause} {count:,}" for cause, count in counts.items() if count)
    return f"{sum(counts.values()):,}" + (f" ({named})" if named else "")
