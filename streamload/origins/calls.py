"""Calls of fsspec file systems: deadlines and cancellation, and what their exceptions mean (step F).

They run in the file system's event loop, or in a thread if it has none.
"""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from streamload import limits
from streamload.errors import (
    OptionError,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginTimeout,
    OriginUnavailable,
    StreamloadError,
)
from streamload.origins.protocol import ENDED, http_error, is_unreachable
from streamload.urls import redact_text

_WAKE_SECONDS = 0.1
_CODES = dict.fromkeys(ENDED, 403) | {
    "AccessDenied": 403,
    "ExpiredTokenException": 403,
    "InternalError": 500,
    "InvalidClientTokenId": 403,
    "InvalidIdentityToken": 403,
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
_CONFIGURATION = {"ConfigNotFound", "ConfigParseError", "InfiniteLoopConfigError", "InvalidConfigError"}
"""botocore's errors that the user's files cause: a ring of roles, a source_profile that doesn't exist."""
_NO_CREDENTIALS = {
    "CredentialRetrievalError",
    "CredentialUnavailableError",  # azure-identity's
    "DefaultCredentialsError",  # google-auth's, as RefreshError
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "RefreshError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
}

Future = concurrent.futures.Future[Any]


def begin(files: Any, method: str, *arguments: Any, **more: Any) -> Future:
    """Start calling a file system's method; `result` waits for what it returns or raises."""
    if files.async_impl:
        import asyncio  # which fsspec has imported; without it there is no loop

        return asyncio.run_coroutine_threadsafe(getattr(files, f"_{method}")(*arguments, **more), files.loop)
    return in_thread(functools.partial(getattr(files, method), *arguments, **more))


def in_thread(call: Callable[[], Any]) -> Future:
    """Start a call that can't be cancelled; `result` waits for what it returns or raises."""
    future: Future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_exception(exc)

    limits.start(threading.Thread(target=work, name="streamload-store", daemon=True))
    return future


def result(future: Future, files: Any, seconds: float, check: Callable[[], None]) -> Any:
    """Return what a call returns, or raise what it raises.

    After a timeout a call in an event loop is cancelled. In a thread it can't be: it keeps running with its
    file system. fsspec's instance cache is cleared then, so create a new file system.

    Args:
        files: None for a call that no file system makes.
        check: called ten times a second; may raise to end the wait.

    Raises:
        OriginTimeout: the call takes longer than `seconds`.
    """
    deadline = time.monotonic() + seconds
    try:
        while not future.done():
            concurrent.futures.wait([future], timeout=_WAKE_SECONDS)
            check()
            if not future.done() and time.monotonic() >= deadline:
                raise OriginTimeout(f"no answer for {seconds:g} s")
        return future.result()
    finally:
        if not future.cancel() and not future.done() and files is not None:
            type(files).clear_instance_cache()


def translate(url: str, exc: BaseException) -> StreamloadError:
    """Return our error for an exception of fsspec or of a library under it."""
    if isinstance(exc, StreamloadError):
        return exc
    name = type(exc).__name__
    message = f"{url}: {redact_text(str(exc)) or name}"
    if name in _CONFIGURATION:
        return OptionError(
            f"{message}: mend the AWS configuration (~/.aws/config, AWS_CONFIG_FILE, AWS_PROFILE)"
        )
    answer = _answer(exc)
    if answer is not None:
        error = http_error(message, *answer)
        if isinstance(error, OriginDenied):
            error.may_be_renewed = code_of(exc) in ENDED
        return error
    if isinstance(exc, FileNotFoundError | IsADirectoryError):
        return OriginNotFound(f"{message}: the store has no such object")
    is_read_only = isinstance(exc, OSError) and exc.errno == errno.EROFS
    if isinstance(exc, PermissionError) or is_read_only or lacks_credentials(exc):
        denied = OriginDenied(message)
        denied.may_be_renewed = lacks_credentials(exc)
        return denied
    if isinstance(exc, TimeoutError) or "Timeout" in name:
        return OriginTimeout(message)
    package = type(exc).__module__.partition(".")[0]
    if isinstance(exc, ConnectionError) or (package in _NETWORK_PACKAGES and name not in _NOT_NETWORK):
        unavailable = OriginUnavailable(message)
        # botocore's error wraps aiohttp's, which wraps the system's.
        facts = getattr(exc, "kwargs", None)
        cause = getattr(facts.get("error") if isinstance(facts, dict) else exc, "os_error", None)
        unavailable.is_unreachable = None if cause is None else is_unreachable(cause)
        return unavailable
    return OriginUnavailable(message) if isinstance(exc, OSError) else OriginError(f"{message} ({name})")


def lacks_credentials(exc: BaseException) -> bool:
    """Return whether a library has found no credentials, or couldn't refresh them."""
    return type(exc).__name__ in _NO_CREDENTIALS


def status_of_code(code: str | None, status: int) -> int:
    """Return the HTTP status that says best what an error code of S3 means."""
    return _CODES.get(str(code), status)


def status_of(exc: BaseException) -> int | None:
    """Return the HTTP status that caused an exception of fsspec, if any."""
    answer = _answer(exc)
    return None if answer is None else answer[0]


def code_of(exc: BaseException) -> str | None:
    """Return the error code of the answer of S3 that caused an exception; of a HEAD it is the status."""
    for candidate in (exc, exc.__cause__):
        response: Any = getattr(candidate, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
    return None


def _answer(exc: BaseException | None) -> tuple[int, str | None] | None:
    """Return status and Retry-After of the HTTP answer that caused an exception or its cause."""
    for candidate in (exc, exc.__cause__ if exc is not None else None):
        response: Any = getattr(candidate, "response", None)
        if isinstance(response, dict):  # botocore
            facts = response.get("ResponseMetadata", {})
            code = response.get("Error", {}).get("Code")
            status: Any = status_of_code(code, facts.get("HTTPStatusCode"))
            headers = facts.get("HTTPHeaders", {})
        else:  # requests, httpx; aiohttp's exception has the status
            status = getattr(response, "status_code", None) or getattr(candidate, "status", None)
            headers = getattr(response, "headers", None) or {}
        if isinstance(status, int) and status >= 400:
            return status, headers.get("retry-after")
    return None
