"""The names of Torch Module Cache 0.1, with streamload's cache behind them: change the import, nothing else.

    from streamload.integrations.torch_module_cache import cache_module, CacheLevel

What is stored differs: nothing is unpickled, rows of other weights, arguments or code are never returned, and
both memory and disk are bounded. Rows that Torch Module Cache stored aren't read.
"""

from __future__ import annotations

import functools
import sys

from streamload.derived.calls.module_cache import cache_module as _cache_module
from streamload.derived.calls.module_cache import places, switches
from streamload.derived.store.disk import DiskRows
from streamload.derived.store.row_store import CacheLevel, RowPlace, stores_at

__all__ = [
    "CacheLevel",
    "cache_module",
    "clear_cache",
    "clear_disk_caches",
    "clear_memory_caches",
    "disable_global_cache",
    "disable_inference_mode",
    "enable_global_cache",
    "enable_inference_mode",
    "get_cache_size",
    "is_global_cache_enabled",
    "is_inference_mode",
    "list_cache_entries",
]


cache_module = functools.partial(_cache_module, on_mismatch="recompute")
"""`streamload.cache_module`, but a row whose key comes with another input is computed again, and logged."""

for _name in ("decorator", "utils", "utils.cache_utils"):  # as the original's modules are imported
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]


def enable_global_cache() -> None:
    """Read and store rows again, after `disable_global_cache`."""
    switches.is_enabled = True


def disable_global_cache() -> None:
    """Compute always: cached modules of this process neither read nor store rows."""
    switches.is_enabled = False


def is_global_cache_enabled() -> bool:
    """True if rows are read and stored: neither disabled, nor in inference mode."""
    return switches.is_enabled and not switches.is_inference


def enable_inference_mode() -> None:
    """Compute always, and build modules when they are made."""
    switches.is_inference = True


def disable_inference_mode() -> None:
    """End inference mode; whether rows are read and stored is as it was before."""
    switches.is_inference = False


def is_inference_mode() -> bool:
    """True if inference mode is on."""
    return switches.is_inference


def clear_memory_caches(cache_name: str | None = None) -> None:
    """Forget the rows that this process has in memory; they are on disk still.

    Args:
        cache_name: only those of this name.
    """
    for place in places:
        for store in stores_at(place):
            store.clear_memory(cache_name)


def clear_disk_caches(cache_name: str | None = None) -> None:
    """Delete rows from disk and memory, of the default directory and of those that decorators here name.

    Args:
        cache_name: only those of this name.
    """
    for place in {*places, RowPlace("")}:
        _clear(place, cache_name)


def clear_cache(
    cache_path: str | None = None, cache_name: str | None = None, clear_memory: bool = True
) -> None:
    """Delete rows from a directory; files that aren't streamload's stay.

    Args:
        cache_path: the directory; None: the default.
        cache_name: only those of this name.
        clear_memory: forget those in memory, too.
    """
    _clear(RowPlace(cache_path or ""), cache_name, in_memory=clear_memory)


def get_cache_size(cache_path: str | None = None, cache_name: str | None = None) -> int:
    """Number of bytes that rows take on disk.

    Args:
        cache_path: the directory; None: the default.
        cache_name: only those of this name, without what the database takes beside them.
    """
    for rows in _rows_on_disk(cache_path):
        if cache_name is None:
            return rows.used_bytes
        return sum(entry.size_bytes for entry in rows.fingerprints() if entry.label == cache_name)
    return 0


def list_cache_entries(cache_path: str | None = None, cache_name: str | None = None) -> dict[str, list[str]]:
    """The rows of a directory by name, each as 64 hexadecimal digits: its fingerprint, and its key's digest.

    Args:
        cache_path: the directory; None: the default.
        cache_name: only those of this name.
    """
    return {
        label: [key.hex() for key in keys]
        for rows in _rows_on_disk(cache_path)
        for label, keys in rows.labels().items()
        if cache_name in (None, label)
    }


def _rows_on_disk(cache_path: str | None) -> list[DiskRows]:
    """The rows of a directory, once; none if there is no database."""
    stores = stores_at(RowPlace(cache_path or ""))
    return [store.disk for store in stores[:1] if isinstance(store.disk, DiskRows)]


def _clear(place: RowPlace, cache_name: str | None, *, in_memory: bool = True) -> None:
    for store in stores_at(place):
        if in_memory:
            store.clear_memory(cache_name)
        if isinstance(store.disk, DiskRows):
            store.disk.clear(cache_name)
