"""What happened, as numbers: one row of counters for each process, and a Snapshot that adds the rows up.

Each process owns a row (usually of shared memory, given from outside) and is its only writer, so nothing
is locked between processes; a snapshot may be a moment behind. Times are kept as whole nanoseconds.
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

# Why a sample was left out or replaced.
CAUSES = {
    "missing": "it has no image, caption or label where they were asked for, or one of more than 64 MiB, or "
    "a blank caption where these are left out",
    "decode": "its image can't be decoded",
    "too_large": "its image would take more memory or time to decode than max_image_pixels allows",
    "caption": "its caption can't be read as text, or lacks the field asked for",
    "label": "its label isn't a whole number, or lacks the field asked for",
}

# The order is the layout of a row. Names that end in _ns are times; a Snapshot shows them as seconds.
COUNTERS: dict[str, str] = {
    "origin_requests": "requests sent to origins, retries among them",
    "origin_bytes": "bytes of shards received from origins",
    "origin_retries": "requests that had to be sent again after a failure",
    "shared_requests": "requests sent to the shared cache",
    "shared_bytes": "bytes received from the shared cache, indexes among them; none of origin_bytes",
    "shared_hits": "fills that the shared cache had the shard for",
    "shared_misses": "fills for which it was asked and hadn't",
    "shared_errors": "times that it failed, or gave what its checksums refuse; the origin was asked instead",
    "shared_stored": "shards that this loader has stored in it",
    "shared_not_stored": "shards that were to be stored and weren't: it refused them, or the run ended",
    "shared_waits": "fills that waited for another node, which was fetching the same shard",
    "shared_wait_ns": "time for which they waited, added over fills that wait side by side",
    "tier_hits": "shards that were whole in the tier when a reader first needed them in a pass",
    "tier_misses": "shards that were not, and had to be filled or followed; hits + misses = shards begun",
    "shards_published": "shards that this loader's own fillers finished and published",
    "shards_complete": "different shards that this rank has seen whole in the tier, whoever filled them",
    "shards_taken_over": "fills that were carried on from a part which its filler had left",
    "shards_evicted": "shards deleted from the tier to make room",
    "shards_revalidated": "shards in the tier whose origin was asked whether they have changed",
    "shards_changed": "those that had: the old copy was taken away, and the shard fetched anew",
    "shards_unverified": "those that were used unasked, as their origin gave no answer",
    "shards_given_up": "shards left out for good after their origin failed or ended early",
    "range_reads": "samples read from their origin, as the cache had no room for their shard",
    "checksum_failures": "samples whose bytes in the tier failed their checksum, and were fetched again",
    "samples_yielded": "samples in the batches that the training loop took",
    **{f"samples_skipped_{cause}": f"samples left out because {why}" for cause, why in CAUSES.items()},
    **{
        f"samples_replaced_{cause}": f"samples for which another stands because {why}"
        for cause, why in CAUSES.items()
    },
    "batches_yielded": "batches that the training loop took",
    "fresh_tensors": "tensors in memory of their own, as the training loop still has all that is used again",
    "data_wait_ns": "time for which the training loop waited for a batch",
    "first_batch_ns": "time from the first iter() to the first batch",
    "bytes_wait_ns": "time for which workers waited for bytes that had not arrived, added over workers",
    "transform_ns": "time that workers spent on decode, augment and tokenize, added over workers",
}

_PLACES = {name: place for place, name in enumerate(COUNTERS)}
WIDTH = len(COUNTERS)


class Counts(Protocol):
    """Where events are counted; safe among threads."""

    def add(self, name: str, n: int = 1, /) -> None:
        """Add `n` to a counter of COUNTERS."""
        ...


def total(rows: NDArray[np.int64], name: str) -> int:
    """What a counter of COUNTERS has come to over all processes; about 2 µs."""
    return int(rows[:, _PLACES[name]].sum())


class Counters:
    """One process's counters: a lock and a row of int64.

    Safe among the threads of the process that made it; another process makes its own on its own row.

    Args:
        row: int64[WIDTH], written in place; fresh memory by default.
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
        """What this row says of a counter of COUNTERS."""
        return int(self.row[_PLACES[name]])

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to a counter in nanoseconds, also when it raises."""
        began = monotonic_ns()
        try:
            yield
        finally:
            self.add(name, monotonic_ns() - began)

    def snapshot(self) -> "Snapshot":
        """What this row alone says."""
        return Snapshot.of(self.row[None])


def _zeros() -> dict[str, int]:
    return dict.fromkeys(CAUSES, 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a loader has done so far, over all its processes on this rank.

    COUNTERS and CAUSES say what each number means.

    Attributes:
        samples_skipped: by cause: samples left out.
        samples_replaced: by cause: samples for which another of their shard stands.
        shared_wait_seconds: over all fills; near 0: no other node fetches the same shards at the same time.
        data_wait_seconds: near 0 of the run's time: the data is never late; near all of it: training only
            waits for data.
        seconds_to_first_batch: from the first iter() to the first batch; None before it.
        bytes_wait_seconds: near 0: the bytes are there before they are needed; near workers × time: the
            origin is the limit.
        transform_seconds: near workers × time: the CPU is the limit.
        source_samples: by source: samples in the batches that the training loop took.
        source_wait_seconds: by source: what bytes_wait_seconds adds up.
        shard_wait_seconds: of the shards for which the training loop waited longest, most first: how much of
            data_wait_seconds was for the bytes of each. One near all of it: that shard's server is slow.
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
        """Add up the rows of all processes.

        Args:
            rows: int64[N, WIDTH].
            sources: of each by its name: samples taken, nanoseconds waited for bytes.
            shards: of some by their names: nanoseconds that the training loop waited for each.
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
            source_samples={name: int(samples) for name, (samples, _) in sources.items()},
            source_wait_seconds={name: int(waited_ns) / 1e9 for name, (_, waited_ns) in sources.items()},
            shard_wait_seconds={name: waited_ns / 1e9 for name, waited_ns in shards.items()},
        )

    def since(self, earlier: "Snapshot") -> "Snapshot":
        """What happened after `earlier`; the time to the first batch stays as it is."""
        parts: dict[str, Any] = {"seconds_to_first_batch": self.seconds_to_first_batch}
        for name in (f.name for f in fields(self) if f.name not in parts):
            now, before = getattr(self, name), getattr(earlier, name)
            if isinstance(now, dict):
                parts[name] = {cause: count - before.get(cause, 0) for cause, count in now.items()}
            else:
                parts[name] = now - before
        return Snapshot(**parts)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON."""
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
    """Bytes as people read them, in thousands: 1234567 is "1.2 MB"."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(number) < 999.95 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} B" if unit == "B" else f"{number:,.1f} {unit}"


def _by_cause(counts: dict[str, int]) -> str:
    named = ", ".join(f"{cause} {count:,}" for cause, count in counts.items() if count)
    return f"{sum(counts.values()):,}" + (f" ({named})" if named else "")
