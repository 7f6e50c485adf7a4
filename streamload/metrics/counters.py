"""One process's counters, a row of integers that only it writes; and a loader's: their sum."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from time import monotonic_ns
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamload.metrics.registry import BUCKET_NS, BUCKETS, CAUSES, COUNTERS, STAGES, WIDTH

_PLACES = {name: place for place, name in enumerate(COUNTERS)}
_FIRST_BUCKET = len(COUNTERS)
_BUCKET_BITS = BUCKET_NS.bit_length() - 1
_READY = ("ready_batches", "ready_image_bytes", "ready_text_bytes", "ready_other_bytes")
_GAUGES = ("seconds_to_first_batch", *_READY)
"""Fields that `since` copies."""


def _zeros() -> dict[str, int]:
    return dict.fromkeys(CAUSES, 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A loader's counters so far, over all its processes on this rank.

    COUNTERS and CAUSES describe the numbers; the registry says what their extremes mean.

    Attributes:
        samples_skipped: skipped samples by cause.
        samples_replaced: samples replaced by another of their shard, by cause.
        samples_left_out: samples that keep= or an extension leaves out, by "keep" or the extension's name:
            those before the loader's position, in all epochs of the run, also before a resume. Each is
            counted by one rank.
        seconds_to_first_batch: from the first iter() to the first batch; None before it.
        wait_buckets: the number of data waits below 16 µs, 33 µs, and so on, each bound twice the last; the
            last of the 24 buckets counts those of more than 69 s.
        source_samples: samples that the training loop took, by source.
        source_wait_seconds: bytes_wait_seconds and shuffle_wait_seconds by source.
        shard_wait_seconds: data_wait_seconds by shard, for the shards with the longest waits, longest first.
            If one shard has nearly all of it, its server is slow.
    """

    origin_requests: int = 0
    origin_bytes: int = 0
    origin_retries: int = 0
    origin_outages: int = 0
    shared_requests: int = 0
    shared_bytes: int = 0
    shared_hits: int = 0
    shared_misses: int = 0
    shared_errors: int = 0
    shared_stored: int = 0
    shared_not_stored: int = 0
    shared_waits: int = 0
    shared_overtakes: int = 0
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
    feature_rows_stored: int = 0
    feature_rows_refused: int = 0
    feature_bytes_read: int = 0
    feature_bytes_stored: int = 0
    feature_mismatches: int = 0
    feature_builds: int = 0
    samples_yielded: int = 0
    samples_unprepared: int = 0
    samples_skipped: dict[str, int] = field(default_factory=_zeros)
    samples_replaced: dict[str, int] = field(default_factory=_zeros)
    samples_left_out: dict[str, int] = field(default_factory=dict)
    samples_off_size: int = 0
    samples_of_unknown_size: int = 0
    batches_yielded: int = 0
    fresh_tensors: int = 0
    ready_batches: int = 0
    ready_image_bytes: int = 0
    ready_text_bytes: int = 0
    ready_other_bytes: int = 0
    text_tokens_real: int = 0
    text_tokens_padding: int = 0
    image_tokens_real: int = 0
    image_tokens_padding: int = 0
    shared_wait_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    blocked_wait_seconds: float = 0.0
    wait_buckets: tuple[int, ...] = (0,) * BUCKETS
    seconds_to_first_batch: float | None = None
    bytes_wait_seconds: float = 0.0
    shuffle_wait_seconds: float = 0.0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    resize_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    collate_seconds: float = 0.0
    hand_over_seconds: float = 0.0
    device_seconds: float = 0.0
    step_seconds: float = 0.0
    transform_seconds: float = 0.0
    feature_saved_seconds: float = 0.0
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
    ) -> Snapshot:
        """Sum up the rows of all processes.

        Args:
            rows: int64[N, WIDTH].
            sources: samples taken and nanoseconds of waiting for bytes, by name.
            shards: nanoseconds for which the training loop waited for a shard, by name.
        """
        sums: list[int] = rows.sum(axis=0).tolist()
        total = dict(zip(COUNTERS, sums, strict=False))
        plain: dict[str, Any] = {
            name: total[row] / 1e9 if row.endswith("_ns") else total[row]
            for name, row in _rows_of_fields().items()
        }
        plain |= {name: max(0, total[name]) for name in _READY}  # a worker that has just begun has no part
        return cls(
            **plain,
            samples_skipped={cause: total[f"samples_skipped_{cause}"] for cause in CAUSES},
            samples_replaced={cause: total[f"samples_replaced_{cause}"] for cause in CAUSES},
            seconds_to_first_batch=total["first_batch_ns"] / 1e9 or None,
            wait_buckets=tuple(sums[len(COUNTERS) :]),
            source_samples={name: int(samples) for name, (samples, _) in sources.items()},
            source_wait_seconds={name: int(waited_ns) / 1e9 for name, (_, waited_ns) in sources.items()},
            shard_wait_seconds={name: waited_ns / 1e9 for name, waited_ns in shards.items()},
        )

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, as the metric stage_seconds has them."""
        return {row.labels[0]: getattr(self, row.name.replace("_ns", "_seconds")) for row in STAGES}

    def since(self, earlier: Snapshot) -> Snapshot:
        """The difference to an earlier snapshot; seconds_to_first_batch and what is ready are copied."""
        parts: dict[str, Any] = {name: getattr(self, name) for name in _GAUGES}
        for name in (f.name for f in fields(self) if f.name not in parts):
            current, before = getattr(self, name), getattr(earlier, name)
            if isinstance(current, dict):
                parts[name] = {cause: count - before.get(cause, 0) for cause, count in current.items()}
            elif isinstance(current, tuple):
                parts[name] = tuple(n - m for n, m in zip(current, before, strict=True))
            else:
                parts[name] = current - before
        return Snapshot(**parts)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        from streamload.metrics.display import text_of

        return text_of(self)

    def _repr_html_(self) -> str:
        from streamload.metrics.display import card_of_stats

        return card_of_stats(self)


@functools.cache
def _rows_of_fields() -> dict[str, str]:
    """The counters that are a field, by its name."""
    rows = {row.replace("_ns", "_seconds"): row for row in COUNTERS}
    return {f.name: rows[f.name] for f in fields(Snapshot) if f.name in rows}


def format_bytes(number: float) -> str:
    """Bytes in readable units of thousands: 1234567 is "1.2 MB"."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(number) < 999.95 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} B" if unit == "B" else f"{number:,.1f} {unit}"


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

    def add_all(self, amounts: Mapping[str, int], times: int = 1) -> None:
        """Add to several counters of COUNTERS at once.

        Args:
            amounts: of each, by name.
            times: -1 to subtract them.
        """
        with self._lock:
            for name, n in amounts.items():
                self.row[_PLACES[name]] += times * n

    def set(self, name: str, n: int, /) -> None:
        """Set this process's part of a gauge that is in rows."""
        self.row[_PLACES[name]] = n

    def observe_wait(self, waited_ns: int) -> None:
        """Count a data wait in its bucket of the histogram."""
        bucket = min((waited_ns >> _BUCKET_BITS).bit_length(), BUCKETS - 1)
        with self._lock:
            self.row[_FIRST_BUCKET + bucket] += 1

    def value(self, name: str) -> int:
        """Value of a counter in this row."""
        return int(self.row[_PLACES[name]])

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a counter in nanoseconds, also if it raises."""
        start_ns = monotonic_ns()
        try:
            yield
        finally:
            self.add(name, monotonic_ns() - start_ns)

    def snapshot(self) -> Snapshot:
        """The snapshot of this row alone."""
        return Snapshot.of(self.row[None])
