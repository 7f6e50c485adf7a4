"""Metrics: declared once in the registry, counted in one row per process, summed up in a Snapshot.

Each process is the only writer of its row, usually in shared memory, so processes share no lock; a snapshot
may be slightly out of date. Times are integer nanoseconds.
"""

from streamload.metrics.counters import Counters, Counts, Snapshot, format_bytes, total
from streamload.metrics.registry import CAUSES, COUNTERS, GIVEN, METRICS, ROWS, UNCOUNTED, WIDTH

__all__ = [
    "CAUSES",
    "COUNTERS",
    "GIVEN",
    "METRICS",
    "ROWS",
    "UNCOUNTED",
    "WIDTH",
    "Counters",
    "Counts",
    "Snapshot",
    "format_bytes",
    "total",
]
