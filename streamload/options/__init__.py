"""Options: one row each, with its parser; settings from arguments and STREAMLOAD_* variables."""

from streamload.options.directories import FileSystem, default_cache_dir, file_system, nearest, own_directory
from streamload.options.settings import (
    DEFAULT_FREE_DISK,
    DEFAULT_MAX_IMAGE_PIXELS,
    DEFAULT_METRICS_LISTEN,
    DEFAULT_ORIGIN_WAIT_SECONDS,
    DEFAULT_SHARED_WAIT_SECONDS,
    Copy,
    Option,
    Revalidate,
    Settings,
    Where,
    options,
    read_settings,
)
from streamload.options.values import (
    CacheSize,
    FreeDisk,
    listen_at,
    parse_cache_size,
    parse_free_disk,
    parse_size,
)

__all__ = [
    "DEFAULT_FREE_DISK",
    "DEFAULT_MAX_IMAGE_PIXELS",
    "DEFAULT_METRICS_LISTEN",
    "DEFAULT_ORIGIN_WAIT_SECONDS",
    "DEFAULT_SHARED_WAIT_SECONDS",
    "CacheSize",
    "Copy",
    "FileSystem",
    "FreeDisk",
    "Option",
    "Revalidate",
    "Settings",
    "Where",
    "default_cache_dir",
    "file_system",
    "listen_at",
    "nearest",
    "options",
    "own_directory",
    "parse_cache_size",
    "parse_free_disk",
    "parse_size",
    "read_settings",
]
