"""Access control (step F): which credentials a URL gets, and which addresses may be contacted at all.

Credentials go only to hosts, buckets and repositories that the user named, by URLs or, for a plan that is
followed, by `--origin`. Metadata services of clouds hand out credentials, so they are never contacted. A
host that only a plan names must have a public address: otherwise the author of a plan could read what only
this machine reaches.

Address and headers of a shard on a web server come from storage options: fixed headers, a function that
returns headers or signs the URL, or a file. They are made anew when the server refuses them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from streamload.errors import OptionError, OriginDenied, StreamloadError
from streamload.options.storage import FileOptions, copy_options
from streamload.origins.protocol import Named, Session
from streamload.urls import UrlList, origin_of, redact, scheme, secrets_of
from streamload.urls.identity import DEFAULT_PORTS, identity, is_signed_form
from streamload.urls.redaction import FOR_ALL_HOSTS

REFUSALS = frozenset({400, 401, 403})
"""Statuses of answers to credentials that have ended; stores answer 400 to a token in a signed URL."""

OF_WEB = frozenset({"headers", "sign"})
"""Storage options that are for web servers alone, whatever else is in a list."""

Authorize = Callable[[Mapping[str, Any]], Mapping[str, str]]
"""Returns headers that a store needs, from storage options."""

_logger = logging.getLogger("streamload")
_HEADED = frozenset({*DEFAULT_PORTS, "hf"})
_ANONYMOUS: dict[str, dict[str, Any]] = {
    "s3": {"anon": True},
    "gs": {"token": "anon"},
    "hf": {"token": False},
}
_ENDPOINTS = ("endpoint_url", "endpoint")
_OF_CLIENT = ("endpoint_url", "region_name")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA_ADDRESSES = frozenset(
    map(
        ipaddress.ip_address,
        # AWS (2), Google, Alibaba, Azure, Oracle; all others are link-local
        ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
_COMPATIBLE = ipaddress.ip_network("::/96")


def granted(url: str, storage_options: Mapping[str, Any] | None, named: Named | None) -> dict[str, Any]:
    """Return the storage options for one URL, without credentials if only a plan names its origin.

    Raises:
        OriginDenied: this scheme can't be read without credentials.
    """
    options = {} if storage_options is None else copy_options(storage_options)
    if named is None or named.has(url):
        return options
    name = scheme(url)
    if name in DEFAULT_PORTS:
        return {}
    if name not in _ANONYMOUS:
        raise OriginDenied(
            f"{redact(url)}: only a plan names this origin, so it gets no credentials, and {name}:// needs "
            f"some: if that is intended, name it with --origin {origin_of(url)}"
        )
    client = options.get("client_kwargs") or {}
    return {
        **{key: options[key] for key in _ENDPOINTS if key in options},
        **({"client_kwargs": kept} if (kept := {k: client[k] for k in _OF_CLIENT if k in client}) else {}),
        **_ANONYMOUS[name],
    }


def headers_for(url: str, headers: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the headers for the host of an http(s) URL.

    Args:
        headers: by name, for all hosts. A nested mapping is for the host that is its key:
            "https://host:port", "host:port", or "host" for any port.
    """
    by_name = headers or {}
    chosen = {name: value for name, value in by_name.items() if not isinstance(value, Mapping)}
    for host, of_host in by_name.items():
        if isinstance(of_host, Mapping) and _is_at(url, host):
            chosen = {
                k: v for k, v in chosen.items() if k.lower() not in {str(name).lower() for name in of_host}
            }
            chosen.update(of_host)
    return chosen


def warn_of_shared_headers(urls: UrlList, storage_options: Mapping[str, Any] | None) -> None:
    """Log a warning if a header that is given without a host goes to several hosts."""
    headers = (storage_options or {}).get("headers") or {}
    if not isinstance(headers, Mapping):  # a function decides by the URL
        return
    shared = [k for k, v in headers.items() if not isinstance(v, Mapping) and k.lower() not in FOR_ALL_HOSTS]
    if not shared:
        return
    requested = (url for url in urls.kinds() if scheme(url) in _HEADED)
    hosts = {"hf://" if scheme(url) == "hf" else origin_of(url) for url in requested}
    if len(hosts) > 1:
        first, *other_hosts = sorted(hosts)
        _logger.warning(
            "the header %s of storage_options goes to %s and %s: if not all of them should see it, give each "
            'its own, as in {"headers": {"%s": {"%s": "…"}}}',
            *(
                ", ".join(shared),
                first,
                other_hosts[0] if len(other_hosts) == 1 else f"{len(other_hosts)} other hosts",
            ),
            *(first, shared[0]),
        )


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


def refuse_address(host: str, port: int | None, address: str, named: Named | None) -> None:
    """Raise OriginDenied if shards may not be read from this address of a host.

    Args:
        host: as written in the URL.
        named: see `Named`.
    """
    ip = _meant(ipaddress.ip_address(address.partition("%")[0]))
    if ip.is_link_local or ip in _METADATA_ADDRESSES:
        raise OriginDenied(
            f"{host} is the link-local address {ip}: no shards are served there, but a cloud's credentials"
        )
    if named is None or _is_public(ip) or named.has_host(host, port):
        return
    raise OriginDenied(
        f"{host} is at {ip}, which is no public address, and only a plan names it: if that is intended, name "
        f"it with --origin http://{host}{'' if port is None else f':{port}'}"
    )


def refuse_host(host: str, port: int | None, named: Named | None) -> None:
    """Do the same for a host that is written as an address, in any notation; names aren't resolved."""
    bare = host.strip("[]").rstrip(".")
    with contextlib.suppress(OSError, UnicodeError):
        bare = socket.inet_ntoa(socket.inet_aton(bare))  # also "0xa9fea9fe"
    with contextlib.suppress(ValueError):  # a name, which is checked when connecting
        refuse_address(host, port, bare, named)


def refuse_behind_proxy(host: str, port: int | None, named: Named | None) -> None:
    """Do the same where a proxy connects, by the addresses that this machine resolves."""
    refuse_host(host, port, named)
    if named is None:
        return
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for *_, address in addresses:
        refuse_address(host, port, str(address[0]), named)


def _is_at(url: str, host: str) -> bool:
    if "://" in host:
        return origin_of(url) == origin_of(host)
    place = origin_of(url).partition("://")[2]
    named_host = host.lower().rstrip("/")
    return bool(place) and named_host in {place, urlsplit(f"//{place}").hostname}


def _meant(ip: _Address) -> _Address:
    """Return the IPv4 address that an IPv6 address embeds, if any."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    embedded = ip.ipv4_mapped or ip.sixtofour
    if embedded is not None:
        return embedded
    if ip in _NAT64 or (ip in _COMPATIBLE and int(ip) > 0xFFFF):
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip


def _is_public(ip: _Address) -> bool:
    if isinstance(ip, ipaddress.IPv6Address) and (
        ip.teredo is not None or ip.is_site_local or ip in _LOCAL_NAT64
    ):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)
