"""`open_origin`: a URL to where its shard lives, with retries around it (step F)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
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
    "open_origin",
]


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


def _plain_origin(url: str, storage_options: dict[str, Any], session: Session) -> Origin:
    """Each kind is imported when it is first needed: fsspec and urllib3 take a while."""
    match scheme(url):
        case "http" | "https":
            from streamload.origins.web import HttpOrigin

            return HttpOrigin(url, session, storage_options.get("headers"))
        case "pipe":
            from streamload.origins.pipe import PipeOrigin

            return PipeOrigin(url, session)
        case "file":
            from streamload.origins.local import LocalOrigin

            return LocalOrigin(url, session)
        case _:
            from streamload.origins.stores import open_store

            return open_store(url, storage_options, session)
