"""`open_origin`: the origin of a URL, by its scheme, with retries (step F)."""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from streamload.metrics import Counts
from streamload.origins.access import granted
from streamload.origins.endpoints import Abilities, Endpoint, abilities
from streamload.origins.protocol import (
    KeptConnections,
    Named,
    Origin,
    OriginOptions,
    Recipe,
    Session,
    Stream,
    Unproven,
    Version,
)
from streamload.origins.retrying import RetryingOrigin
from streamload.urls import (
    UrlList,
    compression,
    origin_of,
    redact,
    request_of,
    scheme,
    scrubbed_errors,
    secrets_of,
)

__all__ = [
    "KeptConnections",
    "Origin",
    "OriginOptions",
    "Recipe",
    "Stream",
    "Unproven",
    "Version",
    "abilities_of",
    "has_ranges",
    "import_origins",
    "open_origin",
    "serves_ranges",
    "warn_of_compressed",
]

_logger = logging.getLogger("streamload")
_MODULES = {"http": "web", "https": "web", "pipe": "pipe", "file": "local", "s3": "s3"}
"""The modules that read without fsspec, by scheme; s3fs reads some of S3."""


def open_origin(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    options: OriginOptions | None = None,
    counters: Counts | None = None,
    stop: threading.Event | None = None,
    named: Named | None = None,
    kept: KeptConnections | None = None,
) -> Origin:
    """Return the origin of a shard. Sends no request before its open().

    Args:
        url: one URL, as returned by `expand_urls`.
        storage_options: of fsspec, for object stores; `headers` for http(s) and hf, `sign` for http(s) (see
            `WebCredentials`).
        options: timeouts, retries and sizes of requests.
        counters: count "origin_requests", "origin_bytes" and "origin_retries".
        stop: once set, every wait ends within about 0.1 s with OriginStopped.
        named: for a URL listed by a plan, the origins that the user named; None: the user listed it.
        kept: connections that are used for further shards; the caller closes them.

    Raises:
        OriginDenied: it may get no credentials, and can't be read without.
    """
    secrets = secrets_of(url, storage_options)
    session = Session(options or OriginOptions(), counters, stop or threading.Event(), named, secrets, kept)
    with scrubbed_errors(lambda: secrets):
        reopen = functools.partial(_plain_origin, url, granted(url, storage_options, named))
        origin = reopen(session)
    retrying = RetryingOrigin(origin, session, endpoint=Endpoint(origin.url, reopen, session.options.mounts))
    packed_by = compression(url)
    if packed_by is None:
        return retrying
    from streamload.origins.unpacked import UnpackedOrigin

    return UnpackedOrigin(retrying, packed_by)


def has_ranges(url: str) -> bool:
    """Return whether byte ranges of a shard's tar can be requested.

    A command always begins at the first byte, and so does a compressed shard.
    """
    return _opened_as(url) != "pipe" and compression(url) is None


def serves_ranges(url: str) -> bool:
    """Return whether its server answers a request for a range with that range, by all that is known."""
    return has_ranges(url) and abilities_of(url).ranges is not False


def abilities_of(url: str) -> Abilities:
    """Return what is known of the server of a shard, or of the URL that its command requests."""
    return abilities(_requested(url))


def import_origins(
    urls: Iterable[str], storage_options: Mapping[str, Any] | None = None, shared: str | None = None
) -> None:
    """Import the libraries that some URLs need, so that processes forked later needn't.

    A missing library is reported when a shard is opened, s3fs here.

    Args:
        storage_options: of the URLs.
        shared: the URL of a shared cache, whose small objects fsspec reads.

    Raises:
        OptionError: a URL needs s3fs, which isn't installed.
    """
    examples = {url.split(maxsplit=1)[0] if scheme(url) == "pipe" else scheme(url): url for url in urls}
    stores = {scheme(shared)} - {"file"} if shared is not None else set()
    for url in examples.values():
        name = _opened_as(url)
        if name not in _MODULES or (name == "s3" and not _is_read_directly(url, storage_options or {})):
            stores.add(name)
        else:
            importlib.import_module(f"streamload.origins.{_MODULES[name]}")
    if stores:
        from streamload.origins.stores import import_store

        for name in stores:
            import_store(name)


def warn_of_compressed(urls: UrlList) -> None:
    """Log what compressed shards cost, if a run reads any."""
    first = next((url for url in urls.kinds() if scheme(url) != "pipe" and compression(url)), None)
    if first is not None:
        _logger.warning(
            "compressed shards, such as %s, are unpacked into the cache, local files too. They have no byte "
            "ranges: an interrupted shard is fetched again from its first byte, and none is kept index-only "
            "where the cache is too small. Plain .tar shards don't cost this, and images hardly shrink",
            redact(first),
        )


def _opened_as(url: str) -> str:
    """Return the scheme of a URL, or of the URL that a curl or aws command requests."""
    return scheme(_requested(url))


def _requested(url: str) -> str:
    """Return a URL, or the one that a curl or aws command requests."""
    request = request_of(url) if scheme(url) == "pipe" else None
    return url if request is None else request.url


def _plain_origin(url: str, storage_options: dict[str, Any], session: Session) -> Origin:
    """Return the origin of a URL, importing it on first use: fsspec and urllib3 take a while."""
    match scheme(url):
        case "http" | "https":
            from streamload.origins.access import WebCredentials
            from streamload.origins.web import HttpOrigin
            from streamload.origins.web_client import HttpClient

            return HttpOrigin(HttpClient(url, session, WebCredentials(url, storage_options, session)))
        case "pipe":
            return _of_command(url, session)
        case "file":
            from streamload.origins.local import LocalOrigin

            return LocalOrigin(url, session)
        case "hf":
            from streamload.origins.hub import HubOrigin

            return HubOrigin(url, storage_options, session)
        case "s3":
            return _of_s3(url, storage_options, session)
    from streamload.origins.stores import StoreOrigin

    return StoreOrigin(url, storage_options, session)


def _of_command(url: str, session: Session) -> Origin:
    """Return the origin of a pipe: the URL of a curl or aws command that we support, otherwise the command.

    The user's storage options aren't used: they are not the command's.
    """
    from streamload.urls.commands import Opaque, parse_command

    request = parse_command(url.removeprefix("pipe:"))
    if isinstance(request, Opaque):
        _log_once(f"pipe: {request.program or 'other'} commands are run by bash: {request.reason}")
        from streamload.origins.pipe import PipeOrigin

        return PipeOrigin(url, session)
    _log_once(f"pipe: {request.program} commands are opened natively: all of their flags are supported")
    if request.program == "aws":
        return _of_s3(request.url, dict(request.storage_options), session)
    from streamload.origins.access import WebCredentials
    from streamload.origins.web import HttpOrigin
    from streamload.origins.web_client import HttpClient

    credentials = WebCredentials(request.url, {"headers": request.own_headers}, session)
    client = HttpClient(
        request.url, session, credentials, common_headers=request.headers, redirects=request.redirects
    )
    return HttpOrigin(client)


def _of_s3(url: str, storage_options: dict[str, Any], session: Session) -> Origin:
    """Return the origin of an S3 object: ours, or that of any store where it isn't ours to read."""
    if _is_read_directly(url, storage_options):
        from streamload.origins.s3 import S3Origin

        return S3Origin(url, storage_options, session)
    _log_once(f"{origin_of(url)}: s3fs reads it, for a storage option or a kind of bucket that only it knows")
    from streamload.origins.stores import StoreOrigin

    return StoreOrigin(url, storage_options, session)


def _is_read_directly(url: str, storage_options: Mapping[str, Any]) -> bool:
    """Return whether our requests read an S3 object; if not, s3fs is needed."""
    from streamload.origins.signing import check_s3fs, is_ours

    requested = _requested(url)
    if is_ours(requested, storage_options):
        return True
    check_s3fs(f"{redact(requested)}: a storage option, or this kind of bucket,")
    return False


@functools.lru_cache(maxsize=256)
def _log_once(line: str) -> None:
    """Log a line once per process, whatever the number of shards."""
    _logger.info("%s", line)
