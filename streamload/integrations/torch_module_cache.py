"""The names of Torch Module Cache 0.1, with streamload's cache behind them: change the import, nothing else.

    from streamload.integrations.torch_module_cache import cache_module, CacheLevel

What is stored differs: nothing is unpickled, rows of other weights, arguments or code are never returned, and
both memory and disk are bounded. Rows that Torch Module Cache stored aren't read.
"""

from __future__ import annotations

import contextlib
import functools
import sys

from streamload.derived.calls.module_cache import cache_module as _cache_module
from streamload.derived.calls.module_cache import places, switches
from streamload.derived.store.catalog import Catalog, open_catalog
from streamload.derived.store.row_store import CacheLevel, RowPlace, stores_at
from streamload.errors import CacheError

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
    with _rows_at(cache_path) as catalog:
        if cache_name is None:
            return catalog.used_bytes
        return sum(entry.size_bytes for entry in catalog.fingerprints() if entry.label == cache_name)


def list_cache_entries(cache_path: str | None = None, cache_name: str | None = None) -> dict[str, list[str]]:
    """The rows of a directory by name, each as 64 or 72 hexadecimal digits (docs/reference/compute-once.md).

    Args:
        cache_path: the directory; None: the default.
        cache_name: only those of this name.
    """
    keys: dict[str, list[str]] = {}
    with _rows_at(cache_path) as catalog:
        for entry in catalog.fingerprints():
            if cache_name in (None, entry.label):
                rows = catalog.rows(entry)
                keys.setdefault(entry.label, []).extend(key.hex() for key, _ in rows)
    return keys


def _rows_at(cache_path: str | None) -> contextlib.AbstractContextManager[Catalog]:
    """The rows of a directory, with those that this process has stored so far."""
    place = RowPlace(cache_path or "")
    stores_at(place)
    return open_catalog(place.root)


def _clear(place: RowPlace, cache_name: str | None, *, in_memory: bool = True) -> None:
    stores = stores_at(place)
    with contextlib.suppress(CacheError), open_catalog(place.root, writable=True) as catalog:
        catalog.clear(cache_name)
    if in_memory:
        for store in stores:
            store.clear_memory(cache_name)
