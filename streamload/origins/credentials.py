"""Address and headers of a shard on a web server, made anew when the server refuses them (step F).

They come from storage options: fixed headers, a function that returns headers or signs the URL, or a file
that is read again. Repeats no requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from streamload.errors import OptionError, OriginDenied, StreamloadError
from streamload.options.storage import FileOptions
from streamload.origins.access import headers_for
from streamload.origins.protocol import Session
from streamload.urls import redact, secrets_of
from streamload.urls.identity import DEFAULT_PORTS, identity, is_signed_form, scheme

REFUSALS = frozenset({400, 401, 403})
"""Statuses of answers to credentials that have ended; stores answer 400 to a token in a signed URL."""

OF_WEB = frozenset({"headers", "sign"})
"""Storage options that are for web servers alone, whatever else is in a list."""

Authorize = Callable[[Mapping[str, Any]], Mapping[str, str]]
"""Returns headers that a store needs, from storage options."""


class Access(NamedTuple):
    """Credentials and headers of requests for a shard.

    Attributes:
        url: may contain a signature, user and password.
        headers: for the URL's own host.
    """

    url: str
    headers: dict[str, str]


def read_again(url: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the storage options as their file has them now; those of no file stay as they are.

    Raises:
        OptionError: the file can't be read, or would change the identity of a shard.
    """
    if not isinstance(options, FileOptions):
        return options
    fresh = options.read_again()
    if identity(url, fresh) != identity(url, options):
        raise OptionError(f"{options.path} names another endpoint now, where shards are other ones")
    return fresh


class WebCredentials:
    """The credentials of one shard. Thread-safe.

    Args:
        url: as listed; functions get it.
        storage_options: `headers` and `sign`, as granted to this URL.
        session: no message shows what its `secrets` have; those of each access are added.
        address: the URL to request; None: `url`.
        authorize: returns further headers, below the user's.
        is_looked_up: whether it looks for credentials outside of storage options.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any],
        session: Session,
        *,
        address: str | None = None,
        authorize: Authorize | None = None,
        is_looked_up: bool = False,
    ) -> None:
        self._url, self._options, self._session = url, storage_options, session
        self._address = address or url
        self._authorize, self._is_looked_up = authorize, is_looked_up
        self._signs = address is None and scheme(url) in DEFAULT_PORTS
        self._access: Access | None = None
        self._outcome = ""
        self._lock = threading.Lock()

    @property
    def can_change(self) -> bool:
        """True if others may come: from a function, a file or a store's own library."""
        is_made = callable(self._options.get("headers")) or (self._signs and "sign" in self._options)
        return is_made or self._is_looked_up or isinstance(self._options, FileOptions)

    def access(self) -> Access:
        """Return the current access, made at the first call.

        Raises:
            OriginDenied: a function failed.
            OptionError: a function returned something that can't be used.
        """
        with self._lock:
            if self._access is None:
                self._access = self._made(self._options)
            return self._access

    def renews(self, refused: Access) -> bool:
        """Make the access anew after a refusal; return whether it is another one now."""
        if not self.can_change:
            return False
        with self._lock:
            if self._access is not refused:  # another thread has renewed it
                return True
            try:
                options = read_again(self._url, self._options)
                access = self._made(options)
            except StreamloadError as exc:
                self._outcome = f"looking for other credentials failed: {exc}"
                return False
            if access == refused:
                self._outcome = f"{self._source} still has the same credentials"
                return False
            self._access, self._options = access, options
            self._outcome = f"these are the latest of {self._source}"
            return True

    def denied(self, error: OriginDenied) -> OriginDenied:
        """Return the error for a refusal, with the outcome of looking for other credentials."""
        if not self.can_change:
            return error
        renewable = OriginDenied(f"{error}; {self._outcome}" if self._outcome else str(error))
        renewable.may_pass, renewable.have_ended = error.may_pass, error.have_ended
        renewable.may_be_renewed = True
        return renewable

    @property
    def _source(self) -> str:
        if isinstance(self._options, FileOptions):
            return self._options.path
        names = [name for name in ("headers", "sign") if callable(self._options.get(name))]
        return " and ".join(f"storage_options[{name!r}]" for name in names) or "the environment or token file"

    def _made(self, options: Mapping[str, Any]) -> Access:
        url, headers, sign = self._address, options.get("headers"), options.get("sign")
        if callable(headers):
            headers = self._called("headers", headers)
        if self._signs and sign is not None:
            if not callable(sign):
                raise OptionError(f"storage_options['sign'] is {type(sign).__name__}: expected a function")
            url = self._called("sign", sign)
            if not isinstance(url, str) or not is_signed_form(self._url, url):
                returned = redact(url) if isinstance(url, str) else type(url).__name__
                raise OptionError(
                    f"storage_options['sign'] returned {returned} for {redact(self._url)}: expected the "
                    "same URL with a signature in its query"
                )
        if not isinstance(headers, Mapping | None):
            raise OptionError(
                f"storage_options['headers'] returned {type(headers).__name__} for {redact(self._url)}: "
                'expected a mapping such as {"Authorization": "Bearer …"}'
            )
        user_headers = headers_for(self._address, headers)
        sent = {**(self._authorize(options) if self._authorize else {}), **user_headers}
        access = Access(url, {str(name): str(value) for name, value in sent.items()})
        self._session.hide(secrets_of(access.url, {"headers": access.headers}))
        return access

    def _called(self, name: str, function: Callable[[str], Any]) -> Any:
        try:
            return function(self._url)
        except Exception as exc:
            error = OriginDenied(
                f"{redact(self._url)}: storage_options[{name!r}] failed with {type(exc).__name__}"
            )
            error.may_be_renewed = True
            raise error from exc
