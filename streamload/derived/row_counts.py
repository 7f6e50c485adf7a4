"""What happened to the rows of a directory in one process: counts, which it adds to and others copy."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class RowCounts:
    """What happened to rows, in this process.

    Attributes:
        hits: rows that were read.
        misses: rows that were not there.
        stored: rows that were written.
        corrupt: rows or databases that failed a check, and count as not there.
        evicted: rows that were deleted to make room.
        refused: rows that were not written: no room, a read-only or full disk.
        mismatches: rows that were found to be of another input.
        builds: modules that were built.
        rows_computed: by modules, for want of a row.
        bytes_read: of rows.
        bytes_written: of rows.
        read_seconds: reading, checks included.
        compute_seconds: computing what was missing.
        store_seconds: writing, by a thread that does so while others compute.
        saved_seconds: that computing the rows that were read would have taken, by what a row of the module
            has taken in this process.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    corrupt: int = 0
    evicted: int = 0
    refused: int = 0
    mismatches: int = 0
    builds: int = 0
    rows_computed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    compute_seconds: float = 0.0
    store_seconds: float = 0.0
    saved_seconds: float = 0.0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __sub__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))
