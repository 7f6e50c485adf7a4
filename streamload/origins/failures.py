"""What foreign errors of origins mean: HTTP statuses, and what fsspec's file systems raise."""

from __future__ import annotations

import email.utils
import errno
import re
import socket
import time
from typing import Any

from streamload.errors import (
    DatasetChanged,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginTimeout,
    OriginUnavailable,
    StreamloadError,
)
from streamload.urls import redact_text

_CODES = {
    "AccessDenied": 403,
    "ExpiredToken": 403,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "PreconditionFailed": 412,
    "RequestTimeout": 408,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "TooManyRequests": 429,
}
_NETWORK_PACKAGES = {"aiohttp", "aiobotocore", "botocore", "httpcore", "httpx", "requests", "urllib3"}
_NOT_NETWORK = {"ParamValidationError", "InvalidURL", "UnknownSignatureVersionError", "InvalidRegionError"}
_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_NO_CREDENTIALS = {
    "CredentialRetrievalError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
}


def of_status(message: str, status: int, retry_after: str | None = None) -> StreamloadError:
    """Return the error that an HTTP status stands for."""
    if status in {404, 410}:
        return OriginNotFound(message)
    if status in {401, 402, 403, 407}:
        return OriginDenied(message)
    if status == 408:
        return OriginTimeout(message)
    if status == 412:
        return DatasetChanged(f"{message}: it was replaced while it was in use")
    if status in {425, 429} or (status >= 500 and status not in {501, 505}):
        error = OriginUnavailable(message)
        error.retry_after_seconds = _seconds(retry_after)
        return error
    return OriginError(message)


def of_store(url: str, exc: BaseException) -> StreamloadError:
    """Return the error that an exception of fsspec, or of what it stands on, means."""
    if isinstance(exc, StreamloadError):
        return exc
    name = type(exc).__name__
    message = f"{url}: {redact_text(str(exc)) or name}"
    answer = _answer(exc)
    if answer is not None:
        return of_status(message, *answer)
    if isinstance(exc, FileNotFoundError | IsADirectoryError):
        return OriginNotFound(f"{message}: the store has no such object")
    is_read_only = isinstance(exc, OSError) and exc.errno == errno.EROFS
    if isinstance(exc, PermissionError) or is_read_only or name in _NO_CREDENTIALS:
        return OriginDenied(message)
    if isinstance(exc, TimeoutError) or "Timeout" in name:
        return OriginTimeout(message)
    package = type(exc).__module__.partition(".")[0]
    if isinstance(exc, ConnectionError) or (package in _NETWORK_PACKAGES and name not in _NOT_NETWORK):
        error = OriginUnavailable(message)
        # botocore's has aiohttp's in it, and that the system's own.
        facts = getattr(exc, "kwargs", None)
        cause = getattr(facts.get("error") if isinstance(facts, dict) else exc, "os_error", None)
        error.is_unreachable = None if cause is None else is_nobody_there(cause)
        return error
    return OriginUnavailable(message) if isinstance(exc, OSError) else OriginError(f"{message} ({name})")


def is_nobody_there(error: BaseException) -> bool:
    """Whether no host has the name, or nothing listens at the port; else a connection may do next time."""
    is_unknown = isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME
    return is_unknown or isinstance(error, ConnectionRefusedError)


def status_of(exc: BaseException) -> int | None:
    """The HTTP status behind an exception of fsspec, if there is one."""
    answer = _answer(exc)
    return None if answer is None else answer[0]


def _answer(exc: BaseException | None) -> tuple[int, str | None] | None:
    """Status and Retry-After of the HTTP answer behind an exception, or behind its cause."""
    for candidate in (exc, exc.__cause__ if exc is not None else None):
        response: Any = getattr(candidate, "response", None)
        if isinstance(response, dict):  # botocore
            facts = response.get("ResponseMetadata", {})
            code = _CODES.get(str(response.get("Error", {}).get("Code")))
            status = code or facts.get("HTTPStatusCode")
            headers = facts.get("HTTPHeaders", {})
        else:  # requests, httpx; aiohttp has the status itself
            status = getattr(response, "status_code", None) or getattr(candidate, "status", None)
            headers = getattr(response, "headers", None) or {}
        if isinstance(status, int) and status >= 400:
            return status, headers.get("retry-after")
    return None


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After is a number of seconds or a date."""
    if not retry_after:
        return None
    if re.fullmatch("[0-9]{1,18}", retry_after.strip()):
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
