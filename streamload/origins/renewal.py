"""Credentials of S3 that end in mid-run: which answers say so, and whether other ones can be found (step F).

A session of botocore keeps the credentials that it found first: a rewritten file is never read again, and a
token that was revoked before its time is sent to its end. So after a refusal they are looked up as if for the
first time: environment, files, credential_process, SSO, roles. Doesn't repeat requests, and keeps no secrets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamload.errors import OptionError, OriginDenied, OriginTimeout, StreamloadError
from streamload.options.storage import FileOptions
from streamload.origins import calls
from streamload.origins.access import REFUSALS, read_again
from streamload.origins.protocol import ENDED

LOOK_SECONDS = 1.0
"""Between two looks: each may run a command or ask a metadata service."""
_SOURCES = {
    "assume-role": "the role that the profile names",
    "assume-role-with-web-identity": "the role of the web identity token",
    "container-role": "the container's role",
    "custom-process": "the profile's credential_process",
    "env": "the environment of this process, whose AWS_… variables count before any file,",
    "iam-role": "the instance's role",
    "sso": "the SSO cache",
}
_FILES = {"shared-credentials-file": "credentials_file", "config-file": "config_file"}


@dataclass(frozen=True, slots=True)
class Lookup:
    """The outcome of looking for other credentials.

    Attributes:
        has_others: whether they differ from those that were refused.
        outcome: where they were looked for, and what was there.
    """

    has_others: bool
    outcome: str


KEYS_IN_OPTIONS = Lookup(False, "storage_options or fsspec's configuration have the keys themselves")


def is_refused(exc: BaseException) -> bool:
    """Return whether an exception of fsspec is a refusal that other credentials may change."""
    return calls.lacks_credentials(exc) or calls.status_of(exc) in REFUSALS


def denied(url: str, code: str, lookup: Lookup) -> OriginDenied:
    """Return the error for a code of S3 which says that the credentials have ended."""
    error = OriginDenied(f"{url}: {ENDED[code]} ({code}); {lookup.outcome}")
    error.may_be_renewed = error.have_ended = True
    return error


def read_file(url: str, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], Lookup | None]:
    """Return the storage options of an object as their file has them now.

    The outcome is None if they are of no file, or of one without keys that is still the same.
    """
    if not isinstance(options, FileOptions):
        return options, None
    try:
        fresh = read_again(url, options)
    except OptionError as exc:
        return options, Lookup(False, f"looking for others failed: {exc}")
    if fresh != options:
        return fresh, Lookup(True, f"{options.path} has other ones")
    return fresh, Lookup(False, f"{options.path} is still the same") if "key" in options else None


def failed(exc: Exception) -> Lookup:
    """Return the outcome of a look that raised: any provider may, and a file may be half written.

    Raises:
        StreamloadError: `exc` is one, and no timeout.
    """
    if isinstance(exc, StreamloadError) and not isinstance(exc, OriginTimeout):
        raise exc
    return Lookup(False, f"looking for others failed with {type(exc).__name__}")


def compared(session: Any, credentials: Any, has_others: bool) -> Lookup:
    """Return the outcome of a look that gave credentials, or None.

    Args:
        session: of botocore, in which they were looked up.
    """
    if credentials is None:
        return Lookup(False, "there are no others in the environment, in files or from a role")
    source = _source(session, credentials.method)
    return Lookup(has_others, f"{source} {'has other ones' if has_others else 'still has the same keys'}")


def _source(session: Any, method: str) -> str:
    name = _FILES.get(method)
    if name is None:
        return _SOURCES.get(method, method)
    path = None
    with contextlib.suppress(Exception):
        path = session.get_config_variable(name)
    return str(path or method)
