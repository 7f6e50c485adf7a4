"""Rows in a mapping of a user's own, such as a dict or a `diskcache.Cache`, by the process that made it.

Keys are hexadecimal digits, values are sealed rows: bytes alone, so that nothing has to be pickled. What
isn't what was written is a miss, and so is whatever the mapping raises. How many rows it keeps, and which, is
its owner's choice: nothing lists, bounds or clears them here.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from streamload.derived.log_once import log_once
from streamload.derived.store.disk import RowCounts, SealedRow, checked, note_in
from streamload.derived.store.sealed import Row, seal
from streamload.errors import OptionError


class Mapped:
    """A mapping, compared by identity, so that it can be part of a `Place`.

    Raises:
        OptionError: it is none.
    """

    def __init__(self, mapping: MutableMapping[str, bytes]):
        names = ("__getitem__", "__setitem__", "__delitem__", "__iter__", "get")
        if missing := [name for name in names if not hasattr(mapping, name)]:
            raise OptionError(
                f"store={type(mapping).__name__}: expected a mapping of str to bytes, such as a dict or a "
                f"diskcache.Cache; it lacks {', '.join(missing)}"
            )
        self.mapping = mapping


class MappingRows:
    """The rows of a mapping, with the methods of `DiskRows` by which a `RowStore` reads and writes."""

    used_bytes = 0  # of the node's directories

    def __init__(self, mapped: Mapped, counts: RowCounts):
        self._mapping = mapped.mapping
        self._counts = counts

    def read(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that are there and whole, of some keys."""
        pairs = ((key, self._get(key.hex())) for key in keys)
        return checked("the store", ((key, data) for key, data in pairs if data is not None), self._counts)

    def write(self, rows: Sequence[SealedRow], label: str) -> int:
        """Store sealed rows; returns how many the mapping took. The label is of no use here."""
        stored = sum(self._set(key.hex(), bytes(data)) for key, data in rows)
        self._counts.refused += len(rows) - stored
        return stored

    def read_note(self, key: bytes) -> bytes | None:
        """A note, checked; None: there is none."""
        return note_in(key, self._get(f"note {key.hex()}"))

    def write_note(self, key: bytes, text: bytes, label: str) -> None:
        """Store a note."""
        self._set(f"note {key.hex()}", seal(key, b"", text, 0))

    def close(self) -> None:
        """Leave the mapping to its owner."""

    def _get(self, key: str) -> bytes | None:
        try:
            data: Any = self._mapping[key]
        except KeyError:
            return None
        except Exception as exc:
            self._failed(exc)
            return None
        if isinstance(data, (bytes, bytearray, memoryview)):
            return bytes(data)
        self._failed(TypeError(f"a value is a {type(data).__name__}"))
        return None

    def _set(self, key: str, data: bytes) -> bool:
        try:
            self._mapping[key] = data
        except Exception as exc:
            self._failed(exc)
            return False
        return True

    def _failed(self, error: Exception) -> None:
        log_once(f"rows can't be read or stored for now in store={type(self._mapping).__name__}: {error!r}")
