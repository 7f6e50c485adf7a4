"""`open_origin`: a URL to where its shard lives, with retries around it (step F)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from streamload.origins.protocol import (
    Counts,
    Origin,
    OriginOptions,
    Session,
    Stream,
    Version,
)
from streamload.origins.retrying import RetryingOrigin
from streamload.urls import scheme

__all__ = [
    "Counts",
    "Origin",
    "OriginOptions",
    "Stream",
    "Version",
    "import_origins",
    "open_origin",
]


_OWN = frozenset({"http", "https", "pipe", "file"})


def open_origin(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    options: OriginOptions | None = None,
    counters: Counts | None = None,
    stop: threading.Event | None = None,
) -> Origin:
    """Return the origin of a shard; nothing is asked of it before its open().

    Args:
        url: one URL, as `expand_urls` gives them.
        storage_options: of fsspec, for object stores; `headers` for http(s) and hf.
        options: how patient to be.
        counters: get "origin_requests", "origin_bytes" and "origin_retries".
        stop: once set, every wait ends in about a tenth of a second with OriginStopped.
    """
    session = Session(options or OriginOptions(), counters, stop or threading.Event())
    return RetryingOrigin(_plain_origin(url, dict(storage_options or {}), session), session)


def import_origins(urls: Iterable[str]) -> None:
    """Import what the origins of some URLs need, so that processes forked later needn't; opens nothing.

    A library that isn't there is complained of when a shard is opened.
    """
    for name in {scheme(url) for url in urls}:
        if name in _OWN:
            _kind(name)
        else:
            from streamload.origins.stores import import_store

            import_store(name)


def _plain_origin(url: str, storage_options: dict[str, Any], session: Session) -> Origin:
    return _kind(scheme(url))(url, storage_options, session)


def _kind(name: str) -> Callable[[str, dict[str, Any], Session], Origin]:
    """Each kind is imported when it is first needed: fsspec and urllib3 take a while."""
    match name:
        case "http" | "https":
            from streamload.origins.web import HttpOrigin

            return lambda url, storage, session: HttpOrigin(url, session, storage.get("headers"))
        case "pipe":
            from streamload.origins.pipe import PipeOrigin

            return lambda url, _, session: PipeOrigin(url, session)
        case "file":
            from streamload.origins.local import LocalOrigin

            return lambda url, _, session: LocalOrigin(url, session)
        case _:
            from streamload.origins.stores import open_store

            return open_store
