"""Validation of URLs before anything is opened (step A)."""

from __future__ import annotations

import importlib.util
import re
from urllib.parse import urlsplit

from streamload.errors import UrlError
from streamload.urls.identity import (
    DEFAULT_PORTS,
    ZSTD_MODULES,
    compression,
    is_local,
    local_path,
    scheme,
    zstd_module,
)
from streamload.urls.redaction import redact, redact_text

_HALF_SCHEME = re.compile(r"(https?|s3|gs|gcs|hf|az|abfs):", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ENDS = re.compile(r"[/?#]")
_HALF_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the others encode bytes that aren't UTF-8
_VERSION = re.compile("[A-Za-z0-9._~+/=-]{1,1024}")
_CHAINED = {"simplecache", "filecache", "blockcache", "zip", "tar"}
_USUAL = "http, https, s3, gs, az, abfs, hf, file and pipe"


def check(url: str, valid_places: set[str]) -> None:
    """Raise UrlError for a URL that can't be opened.

    Args:
        valid_places: schemes and hosts that are valid already; shared by the URLs of a list.
    """
    if not url.strip():
        raise UrlError("an empty URL in the list: look for a doubled or trailing '::'")
    if url.startswith("-"):
        raise UrlError(f"'{url[:2]}…' looks like an option, not a URL: write ./{url[:2]}… if it is a file")
    if _HALF_SURROGATE.search(url):
        raise UrlError(f"half of a surrogate pair in {redact_text(url)!r}: no file or URL can have this name")
    name = scheme(url)
    if name == "file" and not is_local(url.strip()):
        raise UrlError(f"blanks around {redact(url.strip())!r}: remove them")
    if name == "pipe":
        _check_command(url)
        return
    if _CONTROL.search(url):
        raise UrlError(f"a control character in {redact(url)!r}")
    if name == "file":
        _check_path(url)
    else:
        if name not in valid_places:
            _check_scheme(name, url)
            valid_places.add(name)
        _check_place(name, url, valid_places)
    _check_compression(url)


def _check_command(url: str) -> None:
    if not url.removeprefix("pipe:").strip():
        raise UrlError("'pipe:' without a command: write pipe:curl -fsSL https://host/shard.tar")
    if "\0" in url:
        raise UrlError(f"a NUL character in {redact(url)!r}")


def _check_path(url: str) -> None:
    if _HALF_SCHEME.match(url.lstrip()):
        meant = redact(re.sub(":/*", "://", url.lstrip(), count=1))
        raise UrlError(
            f"a scheme without '//': did you mean {meant!r}? Write https://host/path, s3://bucket/key"
        )
    if "://" in re.sub("^file://", "", url, flags=re.IGNORECASE):
        raise UrlError(f"a scheme within the path {redact_text(url)!r}: write the URL alone")
    if url in _CHAINED:
        raise UrlError(f"'{url}::' would chain file systems in fsspec; here '::' separates sources")
    local_path(url)


def _check_scheme(name: str, url: str) -> None:
    """Check that a scheme is ours or fsspec's, and that its package is installed."""
    if name in DEFAULT_PORTS or (name == "s3" and importlib.util.find_spec("botocore") is not None):
        return  # read without fsspec, which takes a tenth of a second to import
    from fsspec.registry import known_implementations, registry

    if name in registry:
        return
    entry = known_implementations.get(name)
    if entry is None:
        raise UrlError(
            f"unknown scheme {name!r} in {redact(url)!r}: use {_USUAL}, or another one of fsspec's"
        )
    module = entry["class"].partition(".")[0]
    if importlib.util.find_spec(module) is None:
        hint = entry.get("err") or f"install {module}"
        raise UrlError(f"{name}:// needs a package that is not installed ({redact(url)!r}): {hint}")


def _check_compression(url: str) -> None:
    if compression(url) == "zstd" and zstd_module() is None:
        raise UrlError(
            f"{redact(url)!r} is compressed by zstd, which needs Python 3.14 or one of the packages "
            f"{', '.join(ZSTD_MODULES[1:])}: install one, or convert the shards: zstd -d --rm *.zst"
        )


def _check_place(name: str, url: str, valid_places: set[str]) -> None:
    place = url.partition("://")[2]
    if place.startswith("-"):
        raise UrlError(f"{redact(url)!r} has an option after {name}://, not a host or bucket")
    if name in DEFAULT_PORTS and "#" in place:
        raise UrlError(
            f"{redact(url)!r} has a fragment, which no server gets: leave out '#' and what follows, or write "
            "%23 for a '#' in a name"
        )
    number = place.partition("?versionId=")
    if name == "s3" and number[1] and not _VERSION.fullmatch(number[2]):
        raise UrlError(
            f"{redact(url)!r} with ?versionId= and no version's number: write ?versionId=NUMBER alone"
        )
    if name not in DEFAULT_PORTS:
        if not place.strip("/"):
            raise UrlError(f"{redact(url)!r} names no object: write {name}://bucket/path/shard.tar")
        if name in {"s3", "gs"} and ":" in place.partition("@")[0] and "@" in place and place[:4] != "arn:":
            raise UrlError(
                f"keys within {redact(url)!r}: no store accepts them there; use storage_options, or the "
                f"environment variables of {name}"
            )
        return
    host_of = f"{name}://{_ENDS.split(place, maxsplit=1)[0]}"
    if host_of in valid_places:
        return
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port  # raises if the port is no number
    except ValueError:  # its message may contain a password with a slash
        raise UrlError(f"{redact(url)!r} is not a URL: check its host, port and password") from None
    if not host or " " in parts.netloc:
        raise UrlError(f"{redact(url)!r} has no host: write {name}://host/path/shard.tar")
    valid_places.add(host_of)
