"""Properties of a URL: scheme, origin, file name, and the identity of its shard in a tier (step A)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from streamload.errors import UrlError
from streamload.urls.redaction import redact, redact_text

if TYPE_CHECKING:
    from streamload.urls.commands import CommandRequest

DEFAULT_PORTS = {"http": 80, "https": 443}

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ENDPOINT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s'\"?#]+")
_ALIASES = {"s3a": "s3", "gcs": "gs", "local": "file"}
# Anchored at the start of a word: otherwise a long token takes quadratic time.
_TAR_NAME = re.compile(r"(?<![^/\s'\"=])([^/\s'\"=]+\.tar(?:\.\w+)?)(?=[\s'\"?#;|&<>)]|$)")

Compression: TypeAlias = Literal["gzip", "zstd"]
_COMPRESSED: dict[str, Compression] = {
    ".tar.gz": "gzip",
    ".tgz": "gzip",
    ".tar.zst": "zstd",
    ".tzst": "zstd",
}
_WORD_END = re.compile(r"[\s'\"?#;|&<>)]")
ZSTD_MODULES = ("compression.zstd", "backports.zstd", "pyzstd", "zstandard")
"""Modules that unpack zstd, of which the first installed one is taken; Python has its own from 3.14 on."""

_AMAZON = re.compile(r"https?://s3([.-][a-z0-9-]+)?\.amazonaws\.com")
_ENDPOINT_OPTIONS = ("endpoint_url", "endpoint", "account_url", "account_host", "account_name", "host")
_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "hf": ("HF_ENDPOINT",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME",),
    "abfs": ("AZURE_STORAGE_ACCOUNT_NAME",),
}

# Parameters that sign a URL, by the one that identifies the kind of signature. They are dropped only
# together with it, because `?st=3` alone may select another shard.
_SIGNATURES = {
    "x-amz-signature": re.compile(r"x-amz-.*"),
    "x-goog-signature": re.compile(r"x-goog-.*"),
    "signature": re.compile(r"signature|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid|x-amz-.*"),
    "sig": re.compile(r"sig|se|sp|sv|sr|st|spr|sip|skoid|sktid|skt|ske|sks|skv|saoid|suoid|scid|ses"),
    "hdnts": re.compile("hdnts"),
    "hdnea": re.compile("hdnea"),
}
_TOKENS = frozenset({"token", "access_token", "api_key"})
"""Parameters that are credentials in any URL: with a renewed token it is the same shard."""
_PLAIN_HOST = re.compile(r"(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_HUB_KINDS = ("datasets", "spaces", "buckets")


def scheme(url: str) -> str:
    """Return what opens a URL: ``"pipe"``, ``"file"`` (also for plain paths), ``"http"``, ``"s3"``, …"""
    if url.startswith("pipe:"):
        return "pipe"
    match = SCHEME.match(url)
    name = match.group(1).lower() if match else "file"
    return _ALIASES.get(name, name)


def endpoint(url: str) -> str:
    """Return the server of a shard: scheme and host; for a command also its program; "" for a local file."""
    place = _ENDPOINT.search(url)
    if url.startswith("pipe:"):
        return " ".join([*url.split(maxsplit=1)[:1], *([place[0]] if place else [])])
    return place[0] if place else ""


def origin_of(url: str) -> str:
    """Return what credentials belong to: web server, bucket or repository, as ``https://host``, ``s3://bucket``.

    A web server is scheme, host and port. Empty for commands, local files, and URLs that two parsers might
    read differently.
    """
    name = scheme(url)
    if name in {"pipe", "file"}:
        return ""
    if name in DEFAULT_PORTS:
        try:
            host = _host(urlsplit(url))
        except ValueError:
            return ""
        host = re.sub(r"\.(?=:|$)", "", host)  # "host." is "host"
        return f"{name}://{host}" if _PLAIN_HOST.fullmatch(host) else ""
    place, *path = _without_password(url.partition("://")[2].partition("?")[0]).split("/")
    if name == "hf":
        path = [place, *path][: 3 if place in _HUB_KINDS else 2]
        path[-1] = path[-1].partition("@")[0]
        place = "/".join(path)
    return f"{name}://{place}" if place else ""


def is_local(url: str) -> bool:
    """Return whether a URL is a local file: a path or ``file:``."""
    return scheme(url) == "file"


def local_path(url: str) -> Path:
    """Return the path of a local URL (``~`` is the home directory).

    Raises:
        UrlError: the URL isn't local, or names another host.
    """
    if not is_local(url):
        raise UrlError(f"not a local file: {redact_text(url)!r}; a local file is a path or file:///path")
    match = SCHEME.match(url)
    path = url[match.end() :] if match else url.removeprefix("file:")
    if match and not path.startswith("/"):
        host, _, key = path.partition("/")
        if host != "localhost":
            place = host.rpartition("@")[2]
            raise UrlError(
                f"file://{place}/… names the host {place!r}: a local file is a path or file:///path"
            )
        path = "/" + key
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise UrlError(f"{path.partition('/')[0]!r} in {path!r} is no home directory: {exc}") from exc


def folder_of(url: str, folders: Sequence[str]) -> str | None:
    """Return the first of some folders that has a local file, at any depth; None if none has."""
    if not folders or not is_local(url):
        return None
    path = f"{os.path.abspath(local_path(url))}/"  # noqa: PTH100  (resolve() would follow links)
    return next((folder for folder in folders if path.startswith(f"{folder.rstrip('/')}/")), None)


def basename(url: str) -> str:
    """Return the last part of a shard's path, as in ``sizes.json``; for a pipe, its command's first tar."""
    kind = scheme(url)
    if kind == "pipe":
        name = _TAR_NAME.search(url)
        return name.group(1) if name else "pipe"
    if kind == "file":
        return local_path(url).name
    path = urlsplit(url).path if kind in DEFAULT_PORTS else redact(url)
    return path.rsplit("/", 1)[-1]


def compression(url: str) -> Compression | None:
    """Return how the tar of a shard is compressed, by its file name; None: it isn't.

    The output of a command that we don't open natively may be unpacked already: look at its first bytes.
    """
    lowered = url.lower()
    if "gz" not in lowered and "zst" not in lowered:  # quick: a list may have a million
        return None
    kind = scheme(url)
    if kind == "pipe":
        request = request_of(url)
        if request is not None:
            return compression(request.url)
        names = _WORD_END.split(url)
    else:
        names = [urlsplit(url).path if kind in DEFAULT_PORTS else url.partition("?")[0]]
    compressions = (how for name in names for end, how in _COMPRESSED.items() if name.lower().endswith(end))
    return next(compressions, None)


def request_of(url: str) -> CommandRequest | None:
    """Return the request of a pipe's command, if it is a curl or aws command that we support; else None."""
    from streamload.urls.commands import Opaque, parse_command

    request = parse_command(url.removeprefix("pipe:"))
    return None if isinstance(request, Opaque) else request


def zstd_module() -> str | None:
    """Return the module that unpacks zstd here; None: no such package is installed."""
    for name in ZSTD_MODULES:
        with contextlib.suppress(ImportError):
            if importlib.util.find_spec(name) is not None:
                return name
    return None


def identity(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the identity of a shard: endpoint, scheme, host, path, and query without signatures.

    A signed URL keeps its identity when it is signed again. User, password, ``token``, ``access_token`` and
    ``api_key`` are never part of it. The identity of a pipe is its whole command; for a supported curl or aws
    command, that of its URL if the URL identifies the bytes. For comparing and hashing only: use ``redact``
    for display.
    """
    name = scheme(url)
    if name == "pipe":
        request = request_of(url)
        if request is not None and request.named_by_url:
            return identity(request.url, request.storage_options)
        return url
    if name == "file":
        return f"file://{os.path.abspath(local_path(url))}"  # noqa: PTH100  (resolve() would follow links)
    if name in DEFAULT_PORTS:
        parts = urlsplit(url)
        place, query = f"{name}://{_host(parts)}{parts.path or '/'}", parts.query
    else:
        location, _, query = url.partition("://")[2].partition("?")
        place = f"{_endpoint(name, storage_options)}{name}://{_without_password(location)}"
    query = _without_signature(query)
    return f"{place}?{query}" if query else place


def is_signed_form(url: str, signed: str) -> bool:
    """Return whether two http(s) URLs differ only by user, signature and what the second adds to the query.

    The second may have characters of its path quoted.
    """
    try:
        listed, other = urlsplit(url), urlsplit(signed)
    except ValueError:
        return False
    places = [(p.scheme.lower(), _host(p), unquote(p.path) or "/") for p in (listed, other)]
    kept = set(filter(None, _without_signature(listed.query).split("&")))
    return places[0] == places[1] and kept <= set(other.query.split("&"))


def digest(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the name of a shard in a tier: 32 hex characters, a hash of its ``identity``."""
    return _digest_of(identity(url, storage_options))


def former_digest(
    url: str, moved: Mapping[str, str], storage_options: Mapping[str, Any] | None = None
) -> str | None:
    """Return the ``digest`` of a shard before it was moved; None if it wasn't.

    Args:
        moved: old → new prefix of its URL, or of its store's endpoint. In the command of a pipe, anywhere.
        storage_options: of its file system; may contain the endpoint.
    """
    for old, new in moved.items():
        if url.startswith(new) or (url.startswith("pipe:") and new in url):
            return digest(url.replace(new, old, 1), storage_options)
    name = identity(url, storage_options)
    for old, new in moved.items():
        if name.startswith(new):
            return _digest_of(name.replace(new, old, 1))
    return None


def _digest_of(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _endpoint(name: str, storage_options: Mapping[str, Any] | None) -> str:
    """Return the service of a bucket, followed by a blank; empty for the scheme's default."""
    options = storage_options or {}
    inner = options.get("client_kwargs") or {}
    candidates = [options.get(key) for key in _ENDPOINT_OPTIONS] + [inner.get("endpoint_url")]
    account = re.search(r"AccountName=([^;]+)", str(options.get("connection_string", "")))
    candidates.append(account and account.group(1))
    candidates += [os.environ.get(variable) for variable in _ENDPOINT_VARIABLES.get(name, ())]
    endpoint = str(next((value for value in candidates if value), "")).rstrip("/")
    parts = urlsplit(endpoint)
    if parts.netloc:
        endpoint = f"{parts.scheme.lower()}://{_host(parts)}{parts.path}"
    if not endpoint or (name == "s3" and _AMAZON.fullmatch(endpoint)):
        return ""
    return endpoint + " "


def _host(parts: SplitResult) -> str:
    """Return host and port of a URL in lower case, without user and default port."""
    host = parts.netloc.rpartition("@")[2].lower()
    return host.removesuffix(f":{DEFAULT_PORTS.get(parts.scheme.lower())}").removesuffix(":")


def _without_password(location: str) -> str:
    """Turn ``user:password@host/path`` into ``host/path``; keep ``container@account/path``."""
    host, slash, path = location.partition("/")
    user, _, bare = host.rpartition("@")
    return bare + slash + path if ":" in user else location


def _without_signature(query: str) -> str:
    parts = [(part.partition("=")[0].lower(), part) for part in query.split("&") if part]
    signed_by = [pattern for mark, pattern in _SIGNATURES.items() if any(key == mark for key, _ in parts)]
    unsigned = (part for key, part in parts if not any(p.fullmatch(key) for p in signed_by))
    return "&".join(part for part in unsigned if part.partition("=")[0].lower() not in _TOKENS)
