"""Rows in a mapping of a user's own, such as a dict or a `diskcache.Cache`, by the process that made it.

Keys are hexadecimal digits, values are sealed rows: bytes alone, so that nothing has to be pickled. What
isn't what was written is a miss, and so is whatever the mapping raises.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import MutableMapping, Sequence
from typing import Any

from streamload.derived.log_once import log_once
from streamload.derived.row_database import FINGERPRINT_BYTES
from streamload.derived.row_seal import Row, seal, unseal
from streamload.derived.rows import RowCounts, SealedRow, checked
from streamload.errors import CacheCorrupt, OptionError

_ROW, _LABEL = re.compile(r"[0-9a-f]{64}"), "label "


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
    """The rows of a mapping, which decides itself how many it keeps; as DiskRows."""

    def __init__(self, mapped: Mapped, counts: RowCounts):
        self._mapping = mapped.mapping
        self._counts = counts
        self._labelled: set[str] = set()

    @property
    def used_bytes(self) -> int:
        """What the rows take, without what the mapping takes beside them."""
        return sum(len(value) for key in self._names() if (value := self._get(key)) is not None)

    def read(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """See DiskRows."""
        pairs = ((key, self._get(key.hex())) for key in keys)
        return checked("the store", ((key, data) for key, data in pairs if data is not None), self._counts)

    def write(self, rows: Sequence[SealedRow], label: str) -> int:
        """See DiskRows."""
        stored = 0
        for key, data in rows:
            digest = key[:FINGERPRINT_BYTES].hex()
            if digest not in self._labelled and self._set(f"{_LABEL}{digest}", label.encode()):
                self._labelled.add(digest)
            stored += self._set(key.hex(), bytes(data))
        self._counts.refused += len(rows) - stored
        return stored

    def read_note(self, key: bytes) -> bytes | None:
        """See DiskRows."""
        data = self._get(f"note {key.hex()}")
        with contextlib.suppress(CacheCorrupt):
            return None if data is None else bytes(unseal(key, data).body)
        return None

    def write_note(self, key: bytes, text: bytes, label: str) -> None:
        """See DiskRows."""
        self._set(f"note {key.hex()}", seal(key, b"", text, 0))

    def delete(self, keys: Sequence[bytes]) -> None:
        """See DiskRows."""
        self._remove([key.hex() for key in keys])

    def labels(self) -> dict[str, list[bytes]]:
        """See DiskRows."""
        labels: dict[str, list[bytes]] = {}
        for name in self._names():
            label = self._get(f"{_LABEL}{name[: 2 * FINGERPRINT_BYTES]}") or b""
            labels.setdefault(label.decode("utf-8", "replace"), []).append(bytes.fromhex(name))
        return labels

    def bytes_of(self, label: str) -> int:
        """See DiskRows."""
        keys = self.labels().get(label, [])
        return sum(len(value) for key in keys if (value := self._get(key.hex())) is not None)

    def clear(self, label: str | None = None) -> int:
        """See DiskRows; what isn't ours stays."""
        keys = [key for of, keys in self.labels().items() if label in (None, of) for key in keys]
        self.delete(keys)
        self._labelled.clear()
        return len(keys)

    def flush(self) -> None:
        """See DiskRows: the mapping knows when it was read."""

    def close(self) -> None:
        """See DiskRows: the mapping is its owner's."""

    def _names(self) -> list[str]:
        try:
            return [key for key in list(self._mapping) if isinstance(key, str) and _ROW.fullmatch(key)]
        except Exception as exc:
            self._failed(exc)
            return []

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

    def _remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                del self._mapping[key]
            except KeyError:
                pass
            except Exception as exc:
                self._failed(exc)

    def _failed(self, error: Exception) -> None:
        log_once(f"rows can't be read or stored for now in store={type(self._mapping).__name__}: {error!r}")
